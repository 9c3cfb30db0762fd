"""As `torchrun --standalone --nproc_per_node=N SCRIPT ...`, with ranks that are forked from one process that has
imported torch_npu and the code: each import by itself takes seconds.

python tests/simnpu/ranks.py N SCRIPT [ARGUMENT ...]
"""

import importlib
import os
import runpy
import signal
import socket
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

import tiny  # noqa: E402


def fork(ranks: int) -> None:
    """Returns in each rank; the first process leaves, with code 1 as soon as one rank has failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]))
    os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    running = []
    for rank in range(ranks):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        pid = os.fork()
        if pid == 0:
            return
        running.append(pid)
    failed = False
    while running:
        pid, status = os.wait()
        running.remove(pid)
        if status and not failed:
            failed = True
            for other in running:
                os.kill(other, signal.SIGKILL)
    sys.exit(int(failed))


if __name__ == "__main__":
    for name in tiny.PRELOADED:
        importlib.import_module(name)
    ranks, script, sys.argv = int(sys.argv[1]), sys.argv[2], sys.argv[2:]
    fork(ranks)
    runpy.run_path(script, run_name="__main__")
