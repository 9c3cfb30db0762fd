"""Run several scripts one behind the other in one process, as their command lines would; each argument is a command.

python tests/simnpu/chain.py "base_train --depth 1" "chat_cli -p hello"
"""

import importlib
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch.distributed as dist  # noqa: E402

from nanochat import device  # noqa: E402
from nanochat.ground import cli  # noqa: E402

leave = device.shutdown
for place, command in enumerate(sys.argv[1:], start=2):
    print(f"== {command}", flush=True)
    script, *arguments = shlex.split(command)
    module = importlib.import_module(f"scripts.{script}")
    # torchrun's store keeps what an earlier process group said, so that one group must do for all commands
    device.shutdown = leave if place == len(sys.argv) else lambda found: found.world_size > 1 and dist.barrier()
    commands, sys.argv = sys.argv, [script, *arguments]
    cli.run(module.main, module.Config)
    sys.argv = commands
