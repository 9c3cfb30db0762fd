"""Stands for Python where a test writes it as a program (`forks.write_python`): the process of forks.py forks what it
is to run, and is killed with it.

python tests/simnpu/forked_python.py FILE_HANDLE -m scripts.base_train --depth=1
"""

import json
import os
import socket
import sys
from pathlib import Path

ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
request = {"command": sys.argv[2:], "ranks": 1, "cwd": str(Path.cwd()), "env": dict(os.environ)}
server = socket.socket(fileno=int(sys.argv[1]))
socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2, theirs.fileno()])
theirs.close()
ours.recv(64)  # its process group
sys.exit(int(ours.recv(64) or 1) % 256)
