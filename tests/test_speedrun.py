"""The rehearsal of speedrun_npu.sh: the run's own commands, short, in a folder that is removed.

The script is the real one; its Python is a program that records the commands and takes no time. Real stages after a
rehearsal are in test_scripts.py, and a run of the first command without one in promises/test_p01_two_commands.py.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from on_device import report
from runs import until

from nanochat.ground import cli

ROOT = Path(__file__).resolve().parent.parent

# In place of Python: eight NPUs or DEVICE, and a line for every command. FAIL or HANG names the script that does so.
# base_train is killed CRASHES times, each after it saved a checkpoint, or without one where that is negative.
PYTHON = """#!{python}
import json, os, signal, sys, time
from pathlib import Path
if sys.argv[1] == "-c":
    print(os.environ.get("DEVICE", "npu 8"), 64 * 2**30)
    sys.exit()
base = Path(os.environ["NANOCHAT_BASE_DIR"])
script = next(word for word in sys.argv if word.startswith("scripts.")).removeprefix("scripts.")
variable = "NANOCHAT_" + script.upper()
line = dict(script=script, base=str(base), command=sys.argv[1:], flags=os.environ.get(variable, ""))
with open(os.environ["RECORD"], "a") as record:
    record.write(json.dumps(line) + "\\n")
if script == "base_train":
    (base / "checkpoints").mkdir(parents=True, exist_ok=True)
    (base / "data").mkdir(exist_ok=True)
    (base / "data/shard").touch()
    crashes = int(os.environ.get("CRASHES", "0"))
    folder = base / "checkpoints/base/npu"
    number = len(list(folder.glob("*")))
    if number < abs(crashes):
        if crashes > 0:
            (folder / f"step_{{number:06d}}").mkdir(parents=True)
        os.kill(os.getpid(), signal.SIGKILL)
if script == os.environ.get("FAIL"):
    print("warning: not the reason", file=sys.stderr)
    print("error: TASK_QUEUE_ENABLE=2 cannot record", file=sys.stderr)
    print("and what a launcher adds", file=sys.stderr)
    sys.exit(1)
if script == os.environ.get("HANG"):
    sys.path.insert(0, {root!r})
    from nanochat.ground import cli
    cli.end_with_launcher()
    def save(number, _):
        time.sleep(0.3)
        with open(os.environ["RECORD"], "a") as record:
            record.write(json.dumps(dict(script="saved", number=number)) + "\\n")
        sys.exit(128 + number)
    for number in cli.SIGNALS:
        assert signal.getsignal(number) != signal.SIG_IGN
        signal.signal(number, save)
    print("hangs", file=sys.stderr, flush=True)
    Path(os.environ["RECORD"]).with_name("hangs").touch()
    time.sleep(60)
"""
# The run, and the order in which it was before there was a rehearsal.
RUN = (
    *("tok_train", "base_train", "base_eval", "mid_train", "chat_eval", "chat_sft", "chat_eval", "chat_rl"),
    *("chat_eval", "report"),
)


class Speedrun:
    """speedrun_npu.sh in a new folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.base = folder / "base"
        self.record = folder / "record"
        project = folder / "project"
        python = folder / "venv/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(PYTHON.format(python=sys.executable, root=str(ROOT)))
        python.chmod(0o755)
        (folder / "venv/nanochat_setup.txt").write_text("torch 2.9.0\n")
        for room in ("nanochat", "scripts"):
            (project / room).mkdir(parents=True)
            (project / room / "a.py").touch()
        (project / "setup_ascend.sh").write_text('echo "set up in $VENV"\n')
        self.script = shutil.copy(ROOT / "speedrun_npu.sh", project)
        mine = {name: value for name, value in os.environ.items() if not name.startswith("NANOCHAT")}
        mine["POSIXLY_CORRECT"] = (
            "1"  # `sh` is dash or bash in its POSIX mode, and this variable chooses that mode, too
        )
        places = {"VENV": folder / "venv", "NANOCHAT_BASE_DIR": self.base, "RECORD": self.record}
        self.environment = {**mine, **{name: str(path) for name, path in places.items()}}
        self.called_from = folder

    def start(self, *flags: str, **environment: str) -> subprocess.Popen:
        return subprocess.Popen(
            ["sh", self.script, *flags],
            cwd=self.called_from,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *flags: str, code: int = 0, **environment: str) -> tuple[list[dict], str, str]:
        """The commands of this run, and its two outputs."""
        self.record.write_text("")
        process = self.start(*flags, **environment)
        out, err = process.communicate(timeout=60)
        assert process.returncode == code, err
        return self.commands(), out, err

    def commands(self) -> list[dict]:
        return [json.loads(line) for line in self.record.read_text().splitlines()]

    def left(self) -> set[str]:
        return {path.name for path in self.base.iterdir()}


@pytest.fixture
def speedrun(tmp_path) -> Speedrun:
    return Speedrun(tmp_path)


def parts(commands: list[dict], speedrun: Speedrun) -> tuple[list[dict], list[dict]]:
    """The commands of the rehearsal, and of the run that follows it."""
    assert commands[0]["script"] == "fetch"
    rehearsed = [one for one in commands[1:] if one["base"] == str(speedrun.base / "rehearsal")]
    ran = [one for one in commands[1:] if one["base"] == str(speedrun.base)]
    assert commands[1:] == rehearsed + ran
    return rehearsed, ran


def test_a_rehearsal_runs_the_commands_of_the_run_and_a_resumed_step_and_a_chat(speedrun):
    commands, out, err = speedrun.run(NANOCHAT_BASE_TRAIN="--activation_checkpointing")
    rehearsed, ran = parts(commands, speedrun)
    assert tuple(one["script"] for one in ran) == RUN and err == ""
    # All of the run's commands, but for two evaluations by the same script as the third.
    once = [one["command"] for one in ran if not {"mid", "sft"} & set(one["command"])]
    *rehearsed, resumed, chat = rehearsed
    assert [one["command"] for one in rehearsed] == once and len(once) == len(RUN) - 2
    assert resumed["command"] == ran[1]["command"] and "--resume" in resumed["command"]
    assert "--nproc_per_node=8" in resumed["command"] and chat["script"] == "chat_cli"
    trainers = ("base_train", "mid_train", "chat_sft", "chat_rl")
    assert [one["script"] for one in ran if "--resume" in one["command"]] == [*trainers]
    # Every stage gets the same questions; in a pipe their results are in a file, except for the last one's.
    evaluations = [one["command"] for one in ran if one["script"] == "chat_eval"]
    assert all("--table_only" in command for command in evaluations)
    assert out.count(str(speedrun.base / "evaluations.txt")) == 2
    # The user's flags stay, the run has no others.
    assert {one["script"]: one["flags"] for one in ran if one["flags"]} == {"base_train": "--activation_checkpointing"}
    flags = {one["script"]: shlex.split(one["flags"]) for one in rehearsed}
    assert flags["base_train"][0] == "--activation_checkpointing"
    for script in trainers:
        assert flags[script][flags[script].index("--num_iterations") + 1] == "2"
    assert resumed["flags"].endswith("--num_iterations 3")
    for script in ("tok_train", "base_train", "base_eval"):
        assert "--shards 1" in " ".join(flags[script])
    assert out.index("rehearsal: every stage") < out.index("chat_cli") < out.index("== tokenizer")
    assert speedrun.left() == {
        "checkpoints",
        "data",
        "evaluations.txt",
        "rehearsal_passed.txt",
    }  # the run's own checkpoints


@pytest.mark.parametrize("script", ["base_eval", "chat_cli"])
def test_what_fails_late_fails_in_the_rehearsal_with_one_line(speedrun, script: str):
    commands, out, err = speedrun.run(FAIL=script, code=1)
    rehearsed, ran = parts(commands, speedrun)
    assert rehearsed[-1]["script"] == script and ran == [] and "== tokenizer" not in out
    log = speedrun.base / "rehearsal.log"
    assert err.startswith(f"error: {script} ") and err.count("\n") == 1
    assert all(part in err for part in ("TASK_QUEUE_ENABLE=2 cannot record", str(log), "--rehearsal off"))
    assert f"-m scripts.{script} " in log.read_text() and "and what a launcher adds" in log.read_text()
    assert speedrun.left() == {"data", "rehearsal.log"} and (speedrun.base / "data/shard").exists()
    commands, *_ = speedrun.run()  # fixed: it is rehearsed again
    assert tuple(one["script"] for one in parts(commands, speedrun)[1]) == RUN
    assert "rehearsal.log" not in speedrun.left()


@pytest.mark.parametrize(
    ("number", "rehearsal", "to_the_group"),
    [
        (signal.SIGINT, "on", True),  # as at a terminal
        (signal.SIGTERM, "on", False),  # to the shell only, as `kill` does
        (signal.SIGKILL, "on", False),
        *((number, "off", False) for number in cli.SIGNALS),
    ],
)
def test_a_signal_reaches_the_stage_which_saves_first(speedrun, number: int, rehearsal: str, to_the_group: bool):
    process = speedrun.start("--rehearsal", rehearsal, HANG="mid_train")
    until((speedrun.folder / "hangs").exists, speedrun.record)
    (os.killpg if to_the_group else os.kill)(process.pid, number)
    is_killed = number == signal.SIGKILL
    assert process.wait(60) == (-9 if is_killed else 128 + number)  # not communicate(), which waits for the stage too
    if is_killed:
        until(lambda: speedrun.commands()[-1]["script"] == "saved", speedrun.record)
    assert [one["script"] for one in speedrun.commands()[-2:]] == ["mid_train", "saved"]
    process.communicate()
    if rehearsal == "on" and not is_killed:
        assert speedrun.left() == {"data"}


@pytest.mark.parametrize(("crashes", "flags", "starts"), [(2, "", 3), (9, "", 4), (9, "--restarts=1", 2), (-9, "", 1)])
def test_a_crash_after_a_new_checkpoint_starts_the_stage_again(speedrun, crashes: int, flags: str, starts: int):
    code = 137 if starts <= abs(crashes) else 0
    commands, _, err = speedrun.run("--rehearsal=off", *flags.split(), code=code, CRASHES=str(crashes))
    assert [one["script"] for one in commands].count("base_train") == starts
    most = 1 if flags else 3
    lines = [f"crashed with exit code 137: starts again, {number} of {most}" for number in range(1, starts)]
    assert err.splitlines() == lines + ["error: crashed with exit code 137: run this again to resume"] * (code > 0)


def test_it_runs_from_another_folder_and_by_a_link(speedrun):
    speedrun.called_from = speedrun.folder / "else where"
    speedrun.called_from.mkdir()
    link = speedrun.called_from / "run.sh"
    link.symlink_to(speedrun.script)
    speedrun.script = link.name
    speedrun.base = speedrun.called_from / "here"
    commands, out, _ = speedrun.run(NANOCHAT_BASE_DIR="here")
    parts(commands, speedrun)
    assert f"  cd {speedrun.folder}/project\n" in out and speedrun.run("--help")[1].startswith("Text to a chat model")


def test_minutes_choose_the_steps_of_mid_training_once(speedrun):
    def steps_of(minutes: int, seconds: float) -> tuple[int, str, str]:
        """The steps, the arguments of pretraining, and the output, where 800,000 tokens took these seconds."""
        metrics = speedrun.base / f"runs/base/cpu-{minutes}-minutes/metrics.jsonl"
        metrics.parent.mkdir(parents=True, exist_ok=True)
        lines = [(400, 9.5), (800000, seconds)]
        rows = [json.dumps({"tokens": tokens, "mfu": None, "seconds": taken}) for tokens, taken in lines]
        metrics.write_text("\n".join([*rows, ""]))
        commands, out, _ = speedrun.run(f"--minutes={minutes}", DEVICE="cpu 1")
        assert all(f"cpu-{minutes}-minutes" in one["command"] for one in commands[2:])
        mid = next(one["command"] for one in commands if one["script"] == "mid_train")
        flag = len(mid) - mid[::-1].index("--num_iterations")
        return int(mid[flag]), " ".join(commands[2]["command"]), out

    steps, base, out = steps_of(60, 99.0)
    assert 12500 < steps <= (3600 * 8000 - 1500000) // 2048 and f"{steps} steps" in out and "about 60 minutes" in out
    assert steps_of(60, 49.0)[0] == steps and "--depth 6" not in base  # a run that resumes
    steps, base, out = steps_of(120, 7999.0)  # too slow for more than the usual
    assert steps == 2000 and "--depth 6" in base and re.search("about 93. minutes", out)
    assert "--profile cpu" in speedrun.run("--minutes=60", code=1 + 1)[2]


@pytest.mark.slow
def test_another_setting_is_rehearsed_again_and_a_run_that_resumes_is_not(speedrun):
    """The code, the packages, an exported variable of the runtime."""
    speedrun.environment.pop("ACL_DEVICE", None)
    speedrun.run()
    (speedrun.folder / "project/nanochat/a.py").write_text("another")
    assert parts(speedrun.run()[0], speedrun)[0] != []
    (speedrun.folder / "venv/nanochat_setup.txt").write_text("another")
    assert parts(speedrun.run()[0], speedrun)[0] != []
    speedrun.environment["ACL_DEVICE"] = "1"
    assert parts(speedrun.run()[0], speedrun)[0] != []
    commands, out, _ = speedrun.run()
    rehearsed, ran = parts(commands, speedrun)
    assert rehearsed == [] and tuple(one["script"] for one in ran) == RUN and "== rehearsal" not in out


def test_the_variables_are_those_of_the_full_report():
    """speedrun_npu.sh is a shell script, so it has the list of on_device/report.py once more."""
    lists = re.findall(r"^  variables\+?='(.*)'$", (ROOT / "speedrun_npu.sh").read_text(), re.MULTILINE)
    listed = set("".join(lists).split("|"))
    reported = {name for names in report.VARIABLES.values() for name in names}
    assert listed == reported | {"HF_"}


def test_runs_of_minutes_do_not_rehearse_unless_they_are_asked_to(speedrun):
    """A ~ in the name of the folder is the home folder, for the scripts and for speedrun_npu.sh itself."""
    speedrun.environment |= {"NANOCHAT_BASE_DIR": "~/base", "HOME": str(speedrun.folder)}

    def rehearses(*flags: str) -> bool:
        return "rehearsal" in {Path(one["base"]).name for one in speedrun.run(*flags)[0]}

    smoke = ("--profile", "smoke")
    assert not rehearses(*smoke) and not rehearses("--rehearsal=off")
    assert rehearses(*smoke, "--rehearsal", "on")
    (folder,) = (speedrun.base / "speedrun").iterdir()
    assert (folder / "rehearsal_passed.txt").exists()


@pytest.mark.parametrize(("flags", "word"), [("--rehearsal=maybe", "--rehearsal maybe"), ("--profil smoke", "--help")])
def test_a_wrong_flag_is_one_line(speedrun, flags: str, word: str):
    _, _, err = speedrun.run(*flags.split(), code=2)
    assert word in err and err.count("\n") == 1


def test_data_that_are_missing_are_found_before_a_stage_trains(speedrun):
    tasks = ("--hub=modelscope", "--tasks=smoltalk")
    ((fetched,), out, _) = speedrun.run(*tasks, code=1, FAIL="fetch")
    assert fetched["script"] == "fetch" and "== tokenizer" not in out
    assert fetched["command"][2:8] == ["--data", "climbmix", "--hub", "modelscope", "--tasks", "smoltalk"]
