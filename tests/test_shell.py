"""The shell scripts run on the bash 3.2 of macOS, and in a checkout made on Windows.

test_speedrun.py and test_setup.py start them by `sh` and in bash's POSIX mode. A bash older than 4.4 is not to be had
here, so what it cannot read is looked for in the text. Each pattern has a line that it must find.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["setup_ascend.sh", "speedrun_npu.sh", "speedrun.sh", "tests/run.sh", ".ci/run"]

# What bash 3.2 does not know -> an example. Sources: bash's CHANGES for 4.0 to 5.2.
NEWER = {
    r"\$\{\w+(\[[^]]*\])?(,,?|\^\^?)": 'echo "${name,,}"',
    r"\$\{\w+@[A-Za-z]\}": 'echo "${name@Q}"',
    r"\$\{\w+\[-\d": 'echo "${names[-1]}"',
    r"\$\{\w+:[^}]*: *-": 'echo "${name:0:-1}"',
    r"\b(declare|local|typeset|export) +-\w*[Angl]": "declare -A table=()",
    r"\b(mapfile|readarray|coproc)\b": "mapfile -t lines <file",
    r"&>>|\|&|;&|;;&": "make |& tee log",
    r"\[\[ ([^]]* )?-[vR] ": "if [[ -v name ]]; then",
    r"\bwait +-n\b": "wait -n",
    r"\bshopt .*\b(globstar|lastpipe|inherit_errexit)\b": "shopt -s globstar",
    r"%\([^)]*\)T": "printf '%(%F)T'",
    r"\b(BASHPID|EPOCHSECONDS|EPOCHREALTIME|SRANDOM)\b": "echo $EPOCHSECONDS",
    r"\{\w+\}[<>]": "exec {log}>file",
    r"\bread +(-\w+ +)*-\w*[iN]": "read -N 1 key",
}


def code(script: str) -> str:
    """The text of a script without comments and without what it gives to Python."""
    text = (ROOT / script).read_text()
    text = re.sub(r"<<'PYTHON'.*?^PYTHON$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(?m)(^|\s)#.*$", "", text)


def newer(text: str) -> list[str]:
    return [line for line in text.splitlines() if any(re.search(pattern, line) for pattern in NEWER)]


def unguarded(text: str) -> list[str]:
    """Expansions of arrays that begin empty, which bash 3.2 calls unbound under `set -u`."""
    empty = set(re.findall(r"\b(\w+)=\( *\)", text))
    text = re.sub(r'\$\{(\w+)\[@\]\+"\$\{\1\[@\]\}"\}', "", text)  # the form that is right in every bash
    return [name for name in re.findall(r"\$\{(\w+)\[[@*]\]\}", text) if name in empty]


def test_bash_3_2_reads_the_scripts():
    for script in SCRIPTS:
        assert newer(code(script)) == [] and unguarded(code(script)) == [], script
    for pattern, example in NEWER.items():
        assert re.search(pattern, example), pattern
    assert unguarded('names=()\nrun "${names[@]}"\n') == ["names"]
    assert unguarded('names=(a)\nrun "${names[@]}"\n') == []
    assert unguarded('names=()\nrun ${names[@]+"${names[@]}"}\n') == []


@pytest.mark.parametrize("script", ["tests/run.sh", "speedrun.sh", "speedrun_npu.sh", "setup_ascend.sh"])
def test_help_of_a_shell_script_does_nothing(script: str, tmp_path: Path):
    """Only sed and dirname are there to be run; no folder may be made."""
    for program in ("sed", "dirname"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    bash = shutil.which("bash") or "/bin/bash"
    environment = {"PATH": str(tmp_path), "VENV": str(tmp_path / "venv")}
    result = subprocess.run([bash, script, "--help"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert f"bash {script}" in result.stdout or "speedrun.sh is the same script" in result.stdout
    assert len(result.stdout.splitlines()) > 4 and "set -e" not in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dirname", "sed"]


def test_every_text_has_unix_line_ends():
    """A checkout on Windows would otherwise give bash a CR at the end of every line."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    names = ["setup_ascend.sh", "tests/first_questions.jsonl", "nanochat/gpt.py", "docs/images/chat.png"]
    command = ["git", "check-attr", "eol", "text", "--", *names]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert answer.stdout.count(": eol: lf") == answer.stdout.count(": text: auto") == len(names)
    files = subprocess.run(["git", "ls-files", "--eol"], cwd=ROOT, capture_output=True, text=True).stdout
    assert [line for line in files.splitlines() if line.startswith(("i/crlf", "i/mixed"))] == []
