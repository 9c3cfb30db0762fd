"""Real runs that end before their end, by signals and kills, go on to the bytes of a run that nothing disturbed; and a
long one does not grow.

`NANOCHAT_TRIALS=20 pytest -m soak tests/test_endings.py -k signal` is the long form.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from runs import ROOT, environment, kill, lasting, running, sha256, until_gone, wait_for, workers_of
from test_stages import DPO, RL, SFT, pretrained, tutored  # noqa: F401 (fixtures)
from tiny import run_command

from nanochat import model_folder
from nanochat.tokenizer import Tokenizer

STEPS = {"base": 40, "sft": 24, "dpo": 16, "rl": 8}
MIDWAY = "step_000024"
RUN = (
    *("--depth=1", "--head_dim=32", "--max_seq_len=64", "--device_batch_size=2", "--total_batch_size=256"),
    *("--eval_tokens=8192", "--eval_every=8", "--save_every=12", "--log_every=1"),
    *("--dtype=float32", "--device=cpu", "--compile=off", f"--num_iterations={STEPS['base']}"),
)
CHAT_RUNS = {
    "sft": (*SFT, "--source=base", "--eval_examples=160", "--eval_every=5", "--save_every=6"),
    "dpo": (*DPO, "--source=sft", "--eval_examples=100", "--eval_every=5", "--save_every=6"),
    "rl": (*RL, "--source=sft", "--eval_examples=100", "--eval_every=3", "--save_every=4"),
}


def flags_of(stage: str, begin: Path) -> tuple[str, ...]:
    if stage == "base":
        return RUN
    # for RL questions to which some of the replies are right
    tasks = (f"--tasks=gsm8k={begin / 'questions'}",) if stage == "rl" else ()
    run = (*CHAT_RUNS[stage], "--source_tag=d1", "--model_tag=run", f"--num_iterations={STEPS[stage]}")
    return (*run, "--parallel=fsdp", *tasks)


def script_of(stage: str) -> str:
    return "base_train" if stage == "base" else f"chat_{stage}"


LAUNCHERS = {"launch": ["nanochat.run.launch"], "standalone": ["torch.distributed.run", "--standalone"]}


def command(ranks: int, stage: str, *flags: str, torchrun: tuple[str, ...] = (), launcher: str = "launch") -> list[str]:
    script = ["-m", f"scripts.{script_of(stage)}"]
    if ranks > 1:
        script = ["-m", *LAUNCHERS[launcher], f"--nproc_per_node={ranks}", *torchrun, *script, "--"]
    return [sys.executable, *script, *flags]


def undisturbed(base: Path, ranks: int, stage: str, *flags: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(base))
        run_command(script_of(stage), *flags, ranks=ranks)


TAGS = {"base": "d1", "sft": "run", "dpo": "run", "rl": "run"}


def result(base: Path, stage: str = "base") -> tuple[str, list[dict[str, Any]]]:
    """The sha256 of the final weights, and what was logged that does not depend on time."""
    tag = TAGS[stage]
    return sha256(base, stage, STEPS[stage], tag), lasting(base, stage, tag)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A base folder with a tokenizer, to be copied."""
    folder = tmp_path_factory.mktemp("home")
    texts = [f"{word} {number}. Once upon a time " for number in range(300) for word in ("The boat", "A small fish")]
    Tokenizer.train(texts, 320).save(folder / "tokenizer")
    return folder


def hears_signals(pids: list[int]) -> bool:
    """Whether these processes have a handler for SIGTERM, as Python itself has not."""
    masks = [re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE) for pid in pids]
    return bool(masks) and all(mask and int(mask[1], 16) >> (signal.SIGTERM - 1) & 1 for mask in masks)


@pytest.fixture(scope="module")
def straight(home, tutored) -> Any:  # noqa: F811
    """(ranks, stage) -> result and seconds of a run that nothing disturbs, and the folder that such a run begins in."""
    known: dict[tuple[int, str], tuple[Any, float]] = {}

    def run(ranks: int, stage: str = "base") -> tuple[Any, float, Path]:
        begin = home if stage == "base" else tutored
        if (ranks, stage) not in known:
            base = home.with_name(f"straight-{stage}{ranks}")
            shutil.copytree(begin, base)
            began = time.monotonic()
            undisturbed(base, ranks, stage, *flags_of(stage, begin))
            known[ranks, stage] = result(base, stage), time.monotonic() - began
        return *known[ranks, stage], begin

    return run


def trial(
    base: Path, straight: Any, ranks: int, chance: random.Random, stage: str = "base", early: bool = False
) -> str:
    """One signal at one moment, `early` before the first step is over; returns what it met."""
    expected, seconds, begin = straight(ranks, stage)
    shutil.copytree(begin, base)
    flags = flags_of(stage, begin)
    number = chance.choice((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    with running(base, command(ranks, stage, *flags)) as (process, output):
        if early:
            wait_for(output, "^horizon: ", process)
            deadline = time.monotonic() + 60
            while not hears_signals(workers_of(process) if ranks > 1 else [process.pid]):
                assert process.poll() is None and time.monotonic() < deadline, output.read_text()
                time.sleep(0.01)
        else:
            wait_for(output, f"^{stage} +0/", process)
            lines, reached = base / f"runs/{stage}/{TAGS[stage]}/metrics.jsonl", chance.randrange(STEPS[stage] * 2 // 3)
            while process.poll() is None and lines.read_text().count("\n") <= reached:
                time.sleep(0.005)
            time.sleep(chance.uniform(0, seconds / STEPS[stage]))
        workers = workers_of(process) if ranks > 1 else []
        to = chance.choice([process.pid, *workers])
        sent = time.monotonic()
        assert process.poll() is None, output.read_text()
        os.kill(to, number)
        status = process.wait(timeout=30)
        took = time.monotonic() - sent
    text = output.read_text()
    stopped = re.search(r"^stopped by (SIG\w+): saved (\S+); continue with --resume$", text, re.MULTILINE)
    assert stopped and stopped[1] == number.name, text
    folder = Path(stopped[2])
    meta = model_folder.verify(folder)
    assert took < 10, f"{took:.1f} s\n{text}"
    assert folder == base / f"checkpoints/{stage}/{TAGS[stage]}/step_{meta['step']:06d}"
    assert model_folder.steps(folder.parent)[-1] == meta["step"]
    assert not early or meta["step"] == 0
    assert not list(folder.parent.glob("*.tmp"))
    assert status == (128 + number if ranks == 1 else 1)  # torchrun's own status says only that workers failed
    if ranks > 1 and to != process.pid:
        assert re.search(rf"exitcode\s*: {128 + number} ", text)

    undisturbed(base, ranks, stage, *flags, "--resume")
    assert result(base, stage) == expected
    at = "evaluation" if meta["progress"]["pending"] else "sampling" if early else "training"
    who = "all" if to == process.pid else f"worker {to}"
    return f"{stage} on {ranks} ranks, {number.name} to {who} at step {meta['step']} ({at}): {took:.1f} s"


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "seed"), [(1, 0), (2, 2)])
def test_a_signal_at_any_moment_costs_nothing(straight, tmp_path, ranks, seed):
    print(trial(tmp_path / "base", straight, ranks, random.Random(seed)))


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "ranks"), [("sft", 1), ("rl", 2)])  # the soak has DPO, too
def test_a_signal_in_later_stages_costs_nothing(straight, tmp_path, stage, ranks):
    print(trial(tmp_path / "base", straight, ranks, random.Random(ranks), stage))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_signal_while_the_first_replies_are_sampled_costs_nothing(straight, tmp_path, ranks):
    print(trial(tmp_path / "base", straight, ranks, random.Random(ranks), "rl", early=True))


@pytest.mark.slow
def test_a_run_of_nohup_outlives_its_terminal(home, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(home, base)
    with running(base, ["nohup", *command(2, "base", *RUN)]) as (process, output):
        wait_for(output, "^base +3/", process)
        for pid in [process.pid, *workers_of(process)]:
            os.kill(pid, signal.SIGHUP)
        assert process.wait(timeout=300) == 0, output.read_text()
    assert model_folder.steps(base / "checkpoints/base/d1")[-1] == STEPS["base"]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "ranks", "interrupted"), [("base", 2, True), ("rl", 1, True), ("sft", 1, False)])
def test_a_run_whose_reader_is_gone_saves(home, tutored, tmp_path, stage, ranks, interrupted):  # noqa: F811
    """`... | tee log` after a Ctrl-C, of which tee dies first, or `... 2>&1 | head`."""
    begin, base = home if stage == "base" else tutored, tmp_path / "base"
    shutil.copytree(begin, base)
    arguments = command(ranks, stage, *flags_of(stage, begin), "--log_every=1", "--num_iterations=100000")
    errors = tmp_path / "errors"
    with errors.open("w") as file:
        process = subprocess.Popen(
            arguments, cwd=ROOT, env=environment(base), stdout=subprocess.PIPE, text=True, start_new_session=True,
            stderr=file if interrupted else subprocess.STDOUT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
    assert process.stdout is not None
    try:
        shown = []
        while not (shown and re.match(f"{stage} +2/", shown[-1])):
            shown.append(process.stdout.readline())
            assert shown[-1], (shown, errors.read_text())
        process.stdout.close()
        if interrupted:
            os.killpg(process.pid, signal.SIGINT)
        status = process.wait(timeout=60)
    finally:
        kill(process)
    text = errors.read_text()
    assert status in (1 if ranks > 1 else 128 + signal.SIGINT, 128 + signal.SIGPIPE), text
    assert ranks > 1 or "Traceback" not in text, text  # torchrun has its own
    folder = base / f"checkpoints/{stage}/{TAGS[stage]}"
    newest = model_folder.steps(folder)[-1]
    assert newest > 2 and model_folder.verify(folder / f"step_{newest:06d}")["step"] == newest
    assert not interrupted or re.search(rf"^stopped by SIG\w+: saved \S*step_{newest:06d}; ", text, re.MULTILINE), text


@pytest.mark.soak
@pytest.mark.parametrize("stage", ["base", "sft", "dpo", "rl"])
def test_many_signals_at_any_moment_cost_nothing(straight, tmp_path, stage):
    chance = random.Random(int(os.environ.get("NANOCHAT_SEED", "0")))
    for index in range(int(os.environ.get("NANOCHAT_TRIALS", "20"))):
        print(trial(tmp_path / f"base{index}", straight, 1 + index % 2, chance, stage), flush=True)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["launch", pytest.param("standalone", marks=pytest.mark.soak)])
def test_a_killed_rank_is_started_again_and_nothing_is_lost(launcher, home, straight, tmp_path):
    expected, _, _ = straight(2)
    base = tmp_path / "base"
    shutil.copytree(home, base)
    arguments = command(2, "base", *RUN, "--resume", torchrun=("--max-restarts=3",), launcher=launcher)
    with running(base, arguments) as (process, output):
        wait_for(output, f"^saved .*{MIDWAY}", process)
        ranks = workers_of(process)
        os.kill(ranks[1], signal.SIGKILL)
        gone = until_gone(ranks, output)
        assert process.wait(timeout=300) == 0, output.read_text()
    print(f"all ranks gone after {gone:.1f} s")
    assert "resumed from" in output.read_text()
    assert result(base) == expected


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [pytest.param("launch", marks=pytest.mark.soak), "standalone"])
def test_a_killed_torchrun_leaves_no_orphans_and_nothing_is_lost(launcher, home, straight, tmp_path):
    expected, _, _ = straight(2)
    base = tmp_path / "base"
    shutil.copytree(home, base)
    arguments = command(2, "base", *RUN, "--hang_seconds=100", launcher=launcher)
    with running(base, arguments) as (process, output):
        wait_for(output, "^base +3/", process)
        ranks = workers_of(process)
        os.kill(process.pid, signal.SIGKILL)
        until_gone(ranks, output)
    text = output.read_text()
    (step,) = model_folder.steps(base / "checkpoints/base/d1")
    assert f"step_{step:06d}; continue with --resume" in text and step < STEPS["base"], text
    undisturbed(base, 2, "base", *RUN, "--resume")
    assert result(base) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "seconds"),
    [
        *(("launch", 0), ("standalone", 2)),
        *(pytest.param("launch", seconds, marks=pytest.mark.soak) for seconds in (0.5, 2, 4)),
        *(pytest.param("standalone", seconds, marks=pytest.mark.soak) for seconds in (0, 0.5, 4)),
    ],
)
def test_a_torchrun_that_is_killed_before_the_first_step_leaves_no_orphans(launcher, seconds, home, tmp_path):
    """At moments from the start of its ranks to their first collectives; at most of them torch is being loaded."""
    base = tmp_path / "base"
    shutil.copytree(home, base)
    with running(base, command(2, "base", *RUN, "--num_iterations=100000", launcher=launcher)) as (process, output):
        deadline = time.monotonic() + 60
        while not workers_of(process):
            assert process.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(seconds)
        ranks = workers_of(process)
        os.kill(process.pid, signal.SIGKILL)
        until_gone(ranks, output)
    assert ranks and "Traceback" not in output.read_text()


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
def test_no_rank_leaves_while_another_saves(home, tmp_path):
    """Rank 0 writes for longer than a silent rank, or torchrun's patience with those that have not left, is allowed.
    One run ends, one is stopped; they mostly sleep, so both at once."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW)

    def arguments(steps: int) -> list[str]:
        torchrun = ["-m", *LAUNCHERS["standalone"], "--nproc_per_node=2", "--shutdown_timeout=3", str(script), "--"]
        flags = ["--save_every=0", "--eval_every=0", "--hang_seconds=6", f"--num_iterations={steps}"]
        return [sys.executable, *torchrun, *RUN, *flags]

    bases = [tmp_path / name for name in ("ends", "stopped")]
    for base in bases:
        shutil.copytree(home, base)
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


# ---------------------------------------------------------------------- long runs do not grow

LEAK = """
import os, sys
sys.argv = ["base_train", *sys.argv[1:]]
from nanochat.ground import cli
from nanochat.run import saver
from scripts import base_train

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

save = saver.save
def saved(folder, step, *arguments, **options):
    final = save(folder, step, *arguments, **options)
    print("held", step, resident(), len(os.listdir("/proc/self/fd")), flush=True)
    return final

saver.save = saved
cli.run(base_train.main, base_train.Config)
print("torch._dynamo" in sys.modules)
"""


def growth(home: Path, base: Path, steps: int, saves: int) -> tuple[float, set[int]]:
    """How much the resident memory grows from a tenth of a run to its end, as a fraction; and counts of open files."""
    shutil.copytree(home, base)
    flags = (*RUN[:-1], f"--num_iterations={steps}", f"--save_every={steps // saves}", f"--eval_every={steps // saves}")
    run = subprocess.run(
        [sys.executable, "-c", LEAK, *flags], cwd=ROOT, env=environment(base), capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("False\n"), "nothing was compiled, and importing the compiler takes half of a start"
    held = [tuple(map(int, line.split()[1:])) for line in run.stdout.splitlines() if line.startswith("held ")]
    assert [step for step, _, _ in held] == list(range(steps // saves, steps + 1, steps // saves))
    early = max(size for step, size, _ in held if step <= max(steps // 10, steps // saves))
    print(f"{steps} steps, {saves} saves: {early / 2**20:.1f} -> {held[-1][1] / 2**20:.1f} MiB")
    return held[-1][1] / early - 1, {files for _, _, files in held}


@pytest.mark.slow
def test_a_run_does_not_grow(home, tmp_path):
    more, files = growth(home, tmp_path / "base", 600, 6)
    assert more < 0.04 and len(files) == 1


@pytest.mark.soak
def test_a_long_run_does_not_grow(home, tmp_path):
    more, files = growth(home, tmp_path / "base", 5000, 20)
    assert more < 0.02 and len(files) == 1
