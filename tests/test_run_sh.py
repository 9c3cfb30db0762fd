"""tests/run.sh itself: its exit code is what a merge depends on."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
NODE = "tests/core/test_gpt.py::test_cache"


@pytest.mark.parametrize(
    ("runs", "code", "says"),
    [
        (["0"], 0, []),
        (["1", "0", "0", "0", "0"], 0, ["flaky", NODE]),
        (["1", "0", "0", "1", "0"], 1, ["flaky", NODE]),
        (["1", "1"], 1, ["once more"]),
        (["2"], 2, []),  # pytest could not collect: nothing is run twice
    ],
)
def test_its_exit_code_is_that_of_the_tests(tmp_path, runs, code, says):
    """The real script over a pytest that ends as `runs` says, and keeps its list of failures as pytest does."""
    (tmp_path / "tests").mkdir()
    shutil.copy(REPO / "tests/run.sh", tmp_path / "tests")
    (tmp_path / "setup_ascend.sh").write_text("exit 0\n")
    (tmp_path / "runs").write_text("\n".join(runs) + "\n")
    tools = {
        "ruff": "exit 0",
        "pyright": "exit 0",
        "chromium": "exit 0",
        "nproc": "echo 2",
        "python": f"""
            [[ $1 == -c ]] && exec {sys.executable} "$@"
            code=$(head -1 runs) && sed -i 1d runs
            mkdir -p .pytest_cache/v/cache && cd .pytest_cache/v/cache
            [[ $code == 1 ]] && echo '{{"{NODE}": true}}' > lastfailed || rm -f lastfailed
            exit $code""",
    }
    for name, script in tools.items():
        file = tmp_path / ".venv/bin" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/usr/bin/env bash\n{script}\n")
        file.chmod(0o755)
    path = f"{tmp_path}/.venv/bin:{os.environ['PATH']}"
    environment = {**os.environ, "VENV": str(tmp_path / ".venv"), "PATH": path}
    result = subprocess.run(["bash", "tests/run.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == code, result.stdout + result.stderr
    assert all(word in result.stdout for word in says)
    assert not (tmp_path / "runs").read_text()


def test_a_worker_that_dies_costs_one_test_and_the_rest_runs(tmp_path):
    """Its other tests run elsewhere, and nothing waits: xdist's own scheduler hands out files that have ended."""
    body = "import os, pytest\n@pytest.mark.parametrize('i', range(4))\ndef test_one(i):\n    "
    for name, line in {"a": "pass", "b": "i != 2 or os._exit(1)", "c": "pass", "d": "pass"}.items():
        (tmp_path / f"test_{name}.py").write_text(body + line)
    environment = {**os.environ, "PYTHONPATH": str(REPO / "tests")}
    command = [
        "pytest",
        "-p",
        "whole_files",
        "-n2",
        "--dist=loadfile",
        "--no-loadscope-reorder",
        "-p",
        "no:cacheprovider",
    ]
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert "1 failed, 15 passed" in result.stdout, result.stdout + result.stderr
    assert "crashed while running 'test_b.py::test_one[2]'" in result.stdout
