"""P1. Two commands: one makes a model from a clean clone, the other one passes the tests.

`bash speedrun_npu.sh` sets up and runs the whole pipeline, `bash tests/run.sh` sets up and passes the tests. Here both
scripts run with programs that only record what they are to do, and the first one downloads nothing on a CPU. The soak
clones the project and runs both for real. test_setup.py has the set-up, test_speedrun.py rehearsals and signals,
test_scripts.py a real run in its smallest profile that is killed and started again.
"""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT, call
from test_speedrun import RUN, Speedrun

NODE = "tests/core/test_gpt.py::test_cache"


def test_the_first_command_sets_up_and_runs_every_stage(tmp_path: Path):
    speedrun = Speedrun(tmp_path)
    commands, out, err = speedrun.run(DEVICE="cpu 1")
    stages = ["fetch", *RUN]
    stages.remove("chat_eval")  # after mid-training
    assert [one["script"] for one in commands if not one["command"][-1].startswith("stories,new_stories")] == stages
    assert {one["base"] for one in commands[1:]} == {str(speedrun.base)} and err == ""
    assert out.index(f"set up in {tmp_path}/venv") < out.index("== tokenizer") < out.index("report.html")
    data = [one["command"][one["command"].index("--data") + 1] for one in commands if "--data" in one["command"]]
    assert set(data) == {"demo"} and len(data) == 4


def test_the_first_command_downloads_nothing_on_a_cpu(tmp_path: Path, base_folder: Path, monkeypatch):
    """The set-up takes locked packages (test_setup.py); then `fetch` looks for all data that the stages will read."""

    def refuse(*_):
        raise AssertionError("a connection")

    commands, *_ = Speedrun(tmp_path / "recorded").run(DEVICE="cpu 1")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    script, *flags = commands[0]["command"][1:]
    monkeypatch.chdir(ROOT)
    call(script.removeprefix("scripts."), *flags)


# What pytest ends with, run after run; the exit code of tests/run.sh; what it prints.
ENDS = [
    (["0"], 0, []),
    (["1", "0", "0", "0", "0"], 0, ["flaky", NODE]),
    (["1", "0", "0", "1", "0"], 1, ["flaky", NODE]),
    (["1", "1"], 1, ["once more"]),
    (["2"], 2, []),  # pytest could not collect: nothing is run twice
]


@pytest.mark.parametrize(("ends", "code", "words"), ENDS)
def test_the_second_command_sets_up_and_its_exit_code_is_that_of_the_tests(tmp_path, ends, code, words):
    """The real script over a pytest that ends as given, and keeps its list of failures as pytest does."""
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests/run.sh", tmp_path / "tests")
    (tmp_path / "setup_ascend.sh").write_text('echo "set up: $*"\n')
    (tmp_path / "ends").write_text("\n".join(ends) + "\n")
    pytest_program = f"""
        [[ $1 == -c ]] && exec {sys.executable} "$@"
        code=$(head -1 ends) && sed -i 1d ends
        mkdir -p .pytest_cache/v/cache && cd .pytest_cache/v/cache
        [[ $code == 1 ]] && echo '{{"{NODE}": true}}' > lastfailed || rm -f lastfailed
        exit $code"""
    bin_folder = tmp_path / ".venv/bin"
    bin_folder.mkdir(parents=True)
    programs = dict.fromkeys(("ruff", "pyright"), 'echo "$(basename "$0") $*"')
    for name, script in {**programs, "chromium": "", "nproc": "echo 2", "python": pytest_program}.items():
        (bin_folder / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (bin_folder / name).chmod(0o755)
    environment = {**os.environ, "VENV": str(tmp_path / ".venv"), "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    result = subprocess.run(["bash", "tests/run.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == code, result.stdout + result.stderr
    for word in ("set up: --extras dev", "ruff check .", "ruff format --check .", "pyright --pythonpath", *words):
        assert word in result.stdout
    assert not (tmp_path / "ends").read_text()


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_both_commands_in_a_clean_clone(tmp_path: Path):
    """An hour: a new environment, the CPU's whole pipeline, all tests. A hub would not answer."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    ours = ("NANOCHAT", "VENV", "PYTHONPATH", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment |= {"NANOCHAT_BASE_DIR": str(tmp_path / "base"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    for script in ("speedrun_npu.sh", "tests/run.sh"):
        assert subprocess.run(["bash", script], cwd=clone, env=environment).returncode == 0, script
    assert list((tmp_path / "base/runs/report").glob("*/report.html"))
