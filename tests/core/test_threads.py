"""The waiting of torch's threads on a CPU is set before torch is imported, wherever a program begins."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Ends the process at the first import of torch, and prints what the process has set by then.
HOOK = """
import os, runpy, sys
def hear(event, arguments):
    if event == "import" and arguments[0] == "torch":
        os.write(1, f"torch: {os.environ.get('GOMP_SPINCOUNT')}".encode())
        os._exit(0)
sys.addaudithook(hear)
sys.argv = ["program", *sys.argv[1:]]
"""
PROGRAMS = {
    "script": "runpy.run_module('scripts.base_train', run_name='__main__')",
    "launcher": "runpy.run_module('nanochat.run.launch', run_name='__main__')",
    "notebook": "from nanochat.checkpoint_manager import load_model",
    "gunicorn": "import scripts.chat_web; scripts.chat_web.app",
}


def spin_count(program: str, **environment: str) -> str:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    run = subprocess.run(
        [sys.executable, "-c", HOOK + PROGRAMS[program]], cwd=ROOT, env={**clean, **environment}, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    return run.stdout.rpartition("torch: ")[2] if "torch: " in run.stdout else run.stderr


CASES = [*((program, {}, "10000") for program in PROGRAMS), ("script", {"GOMP_SPINCOUNT": "5"}, "5")]
CASES += [("launcher", {"OMP_WAIT_POLICY": "active"}, "None")]


@pytest.mark.parametrize(("program", "environment", "expected"), CASES)
def test_threads_wait_for_a_short_time_before_they_sleep(program, environment, expected):
    assert spin_count(program, **environment) == expected
