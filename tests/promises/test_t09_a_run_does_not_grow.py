"""T9. Long runs don't leak.

The resident memory and the open files of a run are noted at every save: from a tenth of it on the memory grows by a few
percent at most, and the files are as many as at the beginning.
"""

import shutil
import subprocess
import sys

import pytest
from runs import ROOT, environment
from test_endings import RUN

NOTED = """
import os, sys
sys.argv = ["base_train", *sys.argv[1:]]
from nanochat.ground import cli
from nanochat.run import saver
from scripts import base_train

prepare = saver.prepare
def noted(folder, step, *arguments, **options):
    write = prepare(folder, step, *arguments, **options)
    resident = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    print("held", step, resident, len(os.listdir("/proc/self/fd")), flush=True)
    return write

saver.prepare = noted
cli.run(base_train.main, base_train.Config)
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "saves", "most"), [(400, 8, 0.04), pytest.param(5000, 20, 0.02, marks=pytest.mark.soak)]
)
def test_a_run_does_not_grow(home, tmp_path, steps, saves, most):
    base = shutil.copytree(home, tmp_path / "base")
    often = [f"--{name}={steps // saves}" for name in ("save_every", "eval_every")]
    run = subprocess.run(
        [sys.executable, "-c", NOTED, *RUN, f"--num_iterations={steps}", "--eval_tokens=1024", *often],
        cwd=ROOT, env=environment(base), capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("False\n"), "nothing was compiled, and importing the compiler takes half of a start"
    held = [tuple(map(int, line.split()[1:])) for line in run.stdout.splitlines() if line.startswith("held ")]
    assert [step for step, _, _ in held] == list(range(steps // saves, steps + 1, steps // saves))
    early = max(size for step, size, _ in held if step <= max(steps // 10, steps // saves))
    print(f"{steps} steps, {saves} saves: {early / 2**20:.1f} -> {held[-1][1] / 2**20:.1f} MiB")
    assert held[-1][1] / early - 1 < most and len({files for _, _, files in held}) == 1
