"""A run of real processes, whose ranks wait for each other's saves. tests/promises has the runs that are stopped (T5),
killed (T7) and long (T9).
"""

import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from runs import CPU, command, home, lasting, running, sha256, wait_for, workers_of  # noqa: F401 (home is a fixture)

from nanochat import model_folder

STEPS = {"base": 30, "sft": 18, "dpo": 16, "rl": 6}
MIDWAY = "step_000018"
RUN = (
    *(*CPU, "--depth=1", "--head_dim=32", "--max_seq_len=64", "--device_batch_size=2", "--total_batch_size=256"),
    *("--eval_tokens=8192", "--eval_every=8", "--save_every=9", "--compile=off", f"--num_iterations={STEPS['base']}"),
)


def result(base: Path) -> tuple[str, list[dict[str, Any]]]:
    """The sha256 of the final weights, and what was logged that does not depend on time."""
    return sha256(base, "base", STEPS["base"]), lasting(base, "base")


SLOW = """
import os, sys, time
sys.argv = ["base_train", *sys.argv[1:]]
from nanochat.ground import cli, storage
from scripts import base_train

write_file = storage.write_file
def slowly(*arguments):
    time.sleep(2)
    return write_file(*arguments)

if os.environ["RANK"] == "0":
    storage.write_file = slowly
cli.run(base_train.main, base_train.Config)
"""


@pytest.mark.slow
def test_no_rank_leaves_while_another_saves(home, tmp_path):  # noqa: F811
    """Rank 0 writes for longer than a silent rank, or torchrun's patience with those that have not left, is allowed.
    One run ends, one is stopped; they mostly sleep, so both at once."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW)

    def arguments(steps: int) -> list[str]:
        flags = (*RUN, "--save_every=0", "--eval_every=0", "--hang_seconds=6", f"--num_iterations={steps}")
        return command(str(script), flags, 2, "--shutdown_timeout=3", launcher="standalone")

    bases = [shutil.copytree(home, tmp_path / name) for name in ("ends", "stopped")]
    with running(bases[0], arguments(4)) as ends, running(bases[1], arguments(100_000)) as stopped:
        wait_for(stopped[1], "^base +3/", stopped[0])
        os.kill(workers_of(stopped[0])[1], signal.SIGTERM)
        statuses = [process.wait(timeout=300) for process, _ in (ends, stopped)]
    assert statuses == [0, 1]
    for base in bases:
        text = base.with_suffix(".txt").read_text()
        assert not re.search("silent|hangs|did not answer|SIGKILL|given up", text), text
        folder = base / "checkpoints/base/d1"
        (step,) = model_folder.steps(folder)
        meta = model_folder.verify(folder / f"step_{step:06d}")
        assert meta["world_size"] == 2 and not list(folder.glob("*.tmp"))
        line = f"stopped by SIGTERM: saved {folder / f'step_{step:06d}'}; continue with --resume"
        assert (line in text) == (base.name == "stopped") and (step == 4 or line in text)
