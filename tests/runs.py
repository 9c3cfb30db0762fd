"""Runs that are stopped, resumed and compared: their flags and folders, what they leave, and their processes.

`resume` is the one builder of every test that a resumed run ends as one that nothing disturbed.
"""

import contextlib
import gc
import hashlib
import importlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from simnpu import forks
from tiny import forkserver, is_running, run_command

from nanochat import model_folder
from nanochat.ground import cli, paths
from nanochat.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
STAGE_SCRIPTS = ("base_train", "mid_train", "chat_sft", "chat_dpo", "chat_rl")
TIMED = {"seconds", "tok_per_sec", "mfu", "peak_memory_bytes", "eta", "sampling_seconds", "training_seconds"}

# ---------------------------------------------------------------------- flags: each stage, as small as it can be

CPU = ("--device=cpu", "--dtype=float32", "--log_every=1")
TINY = (
    *(*CPU, "--depth=1", "--head_dim=32", "--max_seq_len=64", "--device_batch_size=2", "--total_batch_size=256"),
    "--eval_tokens=256",
)
BASE = (
    *(*CPU, "--depth=1", "--head_dim=32", "--max_seq_len=128", "--device_batch_size=2", "--total_batch_size=512"),
    *("--eval_tokens=256", "--compile=off"),
)
SHORT = "addition,identity,spelling"
MID = (*CPU, f"--tasks={SHORT}", "--device_batch_size=2", "--total_batch_size=512", "--eval_tokens=512")
SFT = (*CPU, f"--tasks={SHORT}", "--device_batch_size=2", "--target_examples_per_step=8", "--eval_examples=8")
DPO = (*SFT, "--lr_scale=0.2", "--beta=0.3")
RM = (*SFT, "--lr_scale=0.2", "--loss=reward")
RL = (
    *(*CPU, "--tasks=addition", "--device_batch_size=2", "--examples_per_step=3", "--num_samples=4"),
    *("--max_tokens=12", "--eval_examples=8", "--lr_scale=0.2"),
)
WHOLE, SHARDS, SHARED_ROWS = "--parallel=ddp", "--parallel=fsdp", "--context_parallel=2"


def tuned(flags: Sequence[str]) -> tuple[str, ...]:
    """The flags with AdamW at an absolute rate, clipped gradients and a rounded state."""
    others = (flag for flag in flags if "lr_scale" not in flag)
    return (*others, "--learning_rate=1e-3", "--weight_decay=0.1", "--max_grad_norm=0.3", "--optimizer_dtype=bfloat16")


def graded(base: Path) -> tuple[str, ...]:
    """RL on questions whose replies are not all worth the same."""
    return (
        *(*RL, f"--tasks=gsm8k={base / 'questions'}", "--source=sft", "--source_tag=d1"),
        *("--kl=0.1", "--kl_in=reward", "--importance_cap=2", "--updates_per_step=2"),
    )


# ---------------------------------------------------------------------- folders that a test begins with

FOLDERS: dict[str, Path] = {}  # built once for all modules; a module's fixtures are its own


def write_lines(path: Path, rows: Sequence[Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_splits(folder: Path, rows: Sequence[Any]) -> Path:
    """The same rows to train on and to test on."""
    for split in ("train", "test"):
        write_lines(folder / f"{split}.jsonl", rows)
    return folder


def questions(count: int, wrong: int = 0) -> list[dict[str, str]]:
    return [{"question": f"What is {n}?", "answer": f"#### {n % 2 + wrong}"} for n in range(count)]


def chat(question: str, answer: str, **more: bool) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]}


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base folder that is not there yet."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NANOCHAT_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "base"


@contextmanager
def made_once(name: str, tmp_path_factory: pytest.TempPathFactory, copied: Path | None = None) -> Iterator[bool]:
    """Whether the folder of this name, which is now the base folder, is still to be filled."""
    is_new = name not in FOLDERS
    if is_new:
        FOLDERS[name] = tmp_path_factory.mktemp(name) / "base"
        if copied is not None:
            shutil.copytree(copied, FOLDERS[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(FOLDERS[name]))
        torch.set_num_threads(1)
        yield is_new


def with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base folder with the tokenizer of stories that most tests of pretraining share."""
    with made_once("home", tmp_path_factory) as is_new:
        if is_new:
            names = ("The boat", "A small fish")
            texts = [f"{name} {number}. Once upon a time " for number in range(300) for name in names]
            Tokenizer.train(texts, 320).save(FOLDERS["home"] / "tokenizer")
    return FOLDERS["home"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tmp_path_factory)


@pytest.fixture(scope="module")
def trained_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tmp_path_factory) / "tokenizer"


@pytest.fixture
def tokenizer(trained_tokenizer: Path, base: Path) -> None:
    shutil.copytree(trained_tokenizer, base / "tokenizer")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base folder with a tokenizer and twenty steps of pretraining."""
    with made_once("pretrained", tmp_path_factory) as is_new:
        if is_new:
            pairs = [(n, m) for n in range(60) for m in range(9)]
            texts = [f"What is {n} + {m}? The word is spelled {n * m}. I am nanochat." for n, m in pairs]
            Tokenizer.train(texts, 400).save(FOLDERS["pretrained"] / "tokenizer")
            call("base_train", *BASE, "--num_iterations=20")
    return FOLDERS["pretrained"]


@pytest.fixture
def start(pretrained: Path, base: Path) -> Path:
    shutil.copytree(pretrained, base)
    return base


@pytest.fixture(scope="module")
def tutored(pretrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same behind a few steps of SFT: about half of its answers to the questions in `questions` are right."""
    with made_once("tutored", tmp_path_factory, pretrained) as is_new:
        if is_new:
            tasks = f"--tasks=gsm8k={write_splits(FOLDERS['tutored'] / 'questions', questions(64, 1))}"
            sizes = ("--device_batch_size=4", "--target_examples_per_step=16", "--num_iterations=12")
            call("chat_sft", *CPU, *sizes, "--eval_examples=8", "--source=base", tasks, "--lr_scale=2")
    return FOLDERS["tutored"]


@pytest.fixture
def taught(tutored: Path, base: Path) -> Path:
    shutil.copytree(tutored, base)
    return base


# ---------------------------------------------------------------------- commands


def call(script: str, *argv: str, shows_progress: bool = False) -> None:
    """Run a script's main in this process as the command line does; raises SystemExit with its exit code."""
    module = importlib.import_module(f"scripts.{script}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *argv])
        cli.run(module.main, module.Config, shows_progress=shows_progress)


def process(*command: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=env, input=stdin, capture_output=True, text=True, timeout=300
    )


def copied_speedrun(folder: Path, is_simulated: bool = True) -> tuple[list[str], dict[str, Any]]:
    """speedrun_npu.sh in a new folder where there is nothing to set up: the set-up would replace the environment of
    these tests. Its commands are forked. Returns its command line, and settings of `subprocess.Popen`."""
    venv = folder / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "nanochat_setup.txt").touch()
    (folder / "setup_ascend.sh").touch()
    for name in ("nanochat", "scripts", "tests"):
        (folder / name).symlink_to(ROOT / name)
    passed_on = [forks.write_python(venv / "bin/python", is_simulated)]
    environment = {**os.environ, "VENV": str(venv), "OMP_NUM_THREADS": "1"}
    return ["bash", shutil.copy(ROOT / "speedrun_npu.sh", folder)], {
        "pass_fds": passed_on, "env": environment, "text": True,
    }  # fmt: skip


def mistake(capsys, script: str, *argv: str, warnings: int = 0) -> tuple[int, str]:
    """The exit code and the one line of a command that cannot work, after this many warnings."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as leaving:
        call(script, *argv)
    err = capsys.readouterr().err
    *warned, last = err.splitlines()
    assert last.startswith("error: ") and [line[:9] for line in warned] == ["warning: "] * warnings, err
    return leaving.value.code, err


def refused(capsys, command: Sequence[str], *words: str, code: int = 1) -> None:
    """The command ends with this code, and its one line has these words."""
    found, line = mistake(capsys, *command)
    assert found == code and all(word in line for word in words), (found, line)


# ---------------------------------------------------------------------- what a run leaves


def metrics(base: Path, stage: str, tag: str = "d1") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (base / "runs" / stage / tag / "metrics.jsonl").read_text().splitlines()]


def losses(base: Path, stage: str, tag: str = "d1") -> list[float]:
    return [line["loss"] for line in metrics(base, stage, tag)]


def lasting(base: Path, stage: str, tag: str = "d1") -> list[dict[str, Any]]:
    """What was logged, without the times."""
    return [{name: value for name, value in line.items() if name not in TIMED} for line in metrics(base, stage, tag)]


def step_folder(base: Path, stage: str, step: int, tag: str = "d1") -> Path:
    return base / "checkpoints" / stage / tag / f"step_{step:06d}"


def meta_of(base: Path, stage: str, step: int, tag: str = "d1") -> dict[str, Any]:
    return json.loads((step_folder(base, stage, step, tag) / "meta.json").read_text())


def sha256(base: Path, stage: str, step: int, tag: str = "d1", name: str = "model.safetensors") -> str:
    return hashlib.sha256((step_folder(base, stage, step, tag) / name).read_bytes()).hexdigest()


def forget_after(base: Path, stage: str, step: int, tag: str = "d1") -> None:
    """Delete the later steps, as if the run had stopped after this one."""
    for folder in (base / "checkpoints" / stage / tag).glob("step_*"):
        if int(folder.name.removeprefix("step_")) > step:
            shutil.rmtree(folder)


# ---------------------------------------------------------------------- exact resumes

SUMS_OF_BOTH_SIGNS = ("rm", "dpo", "rl")  # a loss of policy gradients and a margin may be near 0
NEARLY_EQUAL = (
    *("loss", "grad_norm", "tokens", "val_bpb", "val_loss", "eval_reward", "reward", "response_tokens", "kl"),
    *("accuracy", "margin", "val_margin"),
)


class Straight:
    """A run that nothing disturbed, to which the same run is compared after it was killed and resumed."""

    def __init__(self, base: Path, stage: str, flags: Sequence[str], ranks: int, layout: str, tag: str, script: str):
        self.base, self.stage, self.flags, self.tag = base, stage, (*flags, f"--model_tag={tag}"), tag
        self.script = script or ("chat_dpo" if stage == "rm" else paths.STAGES[stage])
        self.folder = base / "checkpoints" / stage / tag
        self.how = ranks, layout
        self.has_changed = False  # whether a part of the present run was computed in another way
        self.printed = self.run(ranks, layout)
        self.steps = model_folder.steps(self.folder)[-1]
        self.expected = self.outcome()
        assert len(self.expected[1]) > 3

    def run(self, ranks: int, layout: str, *more: str) -> str:
        """Start it, with `more` flags; returns what it prints. One rank runs in this process."""
        flags = (*self.flags, *layout.split(), *more)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NANOCHAT_BASE_DIR", str(self.base))
            if ranks > 1:
                return run_command(self.script, *flags, ranks=ranks)
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                call(self.script, *flags)
        print(printed.getvalue())  # for capsys
        return printed.getvalue()

    def outcome(self) -> tuple[list[dict[str, Any]], dict[str, str], dict[str, torch.Tensor]]:
        """What is logged, the hash of every file that has no seconds in it, and the weights."""
        folder = self.folder / f"step_{self.steps:06d}"
        names = {path.name for path in folder.iterdir()} - {"manifest.json", "meta.json"}
        hashes = {name: sha256(self.base, self.stage, self.steps, self.tag, name) for name in names}
        weights = load_file(folder / next(name for name in names if name.split(".")[0] in ("model", "adapter")))
        return lasting(self.base, self.stage, self.tag), hashes, weights

    def resumed(self, kill: int, ranks: int = 0, layout: str = "", kept: int | None = None) -> None:
        """Delete the steps after `kept`, or after `kill`; resume from `kill`, or begin where it is 0, and compare."""
        how = (ranks, layout) if ranks else self.how
        self.has_changed = how != self.how or (kill > 0 and self.has_changed)
        forget_after(self.base, self.stage, kill if kept is None else kept, self.tag)
        printed = self.run(*how, *(["--resume"] if kill else []))
        assert not kill or f"resumed from {self.folder}/step_{kill:06d}" in printed
        shares = {path.name for path in (self.folder / f"step_{self.steps:06d}").glob("training.rank*")}
        if kill < self.steps:
            assert len(shares) == how[0] and (how[0] == 1 or f"device: {how[0]} x" in printed)
        self.compare()

    def compare(self) -> None:
        lines, hashes, weights = self.outcome()
        if not self.has_changed:
            assert lines == self.expected[0] and hashes == self.expected[1]
            return
        straight = self.expected[0]
        assert [line["step"] for line in lines] == [line["step"] for line in straight]
        for name in NEARLY_EQUAL:
            expected = [line.get(name, 0) for line in straight]
            rounding = 1e-3 if name == "grad_norm" else 1e-5
            smallest = 1e-5 if self.stage in SUMS_OF_BOTH_SIGNS else 0
            assert [line.get(name, 0) for line in lines] == pytest.approx(expected, rel=rounding, abs=smallest), name
        for name, tensor in () if self.stage == "base" else self.expected[2].items():
            # As a whole, because AdamW makes a full step, up or down, of a gradient that is nothing but rounding. The
            # rates of pretraining amplify rounding further: there the losses count. 5.5e-4 were seen in mid-training.
            rounding = 1e-3 if self.stage == "mid" else 1e-4
            assert (weights[name] - tensor).norm() <= rounding * tensor.norm(), name


def resume(
    base: Path,
    stage: str,
    flags: Sequence[str],
    kill: Sequence[int],
    *,
    ranks: Sequence[int] = (1,),
    layout: Sequence[str] = ("",),
    tag: str = "d1",
    script: str = "",
) -> Straight:
    """Train straight through; then again from every step of `kill`, as if the process had died after it.

    `ranks` and `layout` (flags) are those of the straight run and of every start after it; a single one counts for all.
    A start with the same ones has to end with the same bytes and the same logged numbers, others with the same up to
    rounding. A kill at step 0 begins the run again.
    """
    starts = 1 + len(kill)
    all_ranks, layouts = (list(values) * (starts if len(values) == 1 else 1) for values in (ranks, layout))
    straight = Straight(base, stage, flags, all_ranks[0], layouts[0], tag, script)
    for step, count, how in zip(kill, all_ranks[1:], layouts[1:], strict=True):
        straight.resumed(step, count, how)
    return straight


def exactly_resumed(
    base: Path, script: str, stage: str, flags: Sequence[str], steps: int, parts: Sequence[int] = (), tag: str = "d1"
) -> Straight:
    """`resume` on one rank from the steps `parts`, or from the middle and from a quarter."""
    return resume(base, stage, flags, parts or (steps // 2, steps // 4), tag=tag, script=script)


# ---------------------------------------------------------------------- its processes

LAUNCHERS = {"launch": ["nanochat.run.launch"], "standalone": ["torch.distributed.run", "--standalone"]}


def command(script: str, flags: Sequence[str], ranks: int, *torchrun: str, launcher: str = "launch") -> list[str]:
    """The command line of a run of several ranks, or of one."""
    module = [script] if script.endswith(".py") else ["-m", f"scripts.{script}"]
    if ranks > 1:
        module = ["-m", *LAUNCHERS[launcher], f"--nproc_per_node={ranks}", *torchrun, *module, "--"]
    return [sys.executable, *module, *flags]


def environment(base: Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "NANOCHAT_BASE_DIR": str(base), "PYTHONPATH": str(ROOT)}


def started(base: Path, arguments: Sequence[str]) -> tuple[subprocess.Popen, Path]:
    """A run whose output goes to a file."""
    output = base.with_suffix(".txt")
    with output.open("w") as file:
        process = subprocess.Popen(
            arguments, cwd=ROOT, env=environment(base), stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=forks.interruptible,
        )  # fmt: skip
    return process, output


class Forked:
    """As `subprocess.Popen`: a run whose processes have imported torch when they start, which takes seconds each. Their
    parents, sessions and signals are a real run's."""

    def __init__(self, base: Path, arguments: Sequence[str], output: Path, errors: Path):
        command = (list(arguments), environment(base), output, errors)
        self.process = forkserver().Process(target=run_forked, args=command, daemon=True)
        self.process.start()
        self.pid: int = self.process.pid  # type: ignore[assignment]

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"the run has not ended after {timeout} s"
        return self.process.exitcode


def run_forked(arguments: list[str], variables: dict[str, str], output: Path, errors: Path) -> None:
    gc.freeze()  # a collection would copy the pages of all that the server of forks has imported
    os.setsid()
    forks.interruptible()
    for number, path in ((1, output), (2, errors)):
        with path.open("a") as file:
            os.dup2(file.fileno(), number)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(1)
    forks.run_and_leave(arguments[1:])


def wait_for(output: Path, pattern: str, process: Any, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not re.search(pattern, output.read_text(), re.MULTILINE):
        assert process.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.02)


def workers_of(process: Any) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def kill(process: Any) -> None:
    """What is left of a failed test."""
    left = [] if process.poll() is not None else [*workers_of(process), process.pid]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    process.wait()


@contextmanager
def running(base: Path, arguments: Sequence[str], is_forked: bool = True) -> Iterator[tuple[Any, Path]]:
    if is_forked:
        output = base.with_suffix(".txt")
        output.write_text("")
        process: Any = Forked(base, arguments, output, output)
    else:
        process, output = started(base, arguments)
    try:
        yield process, output
    finally:
        kill(process)


def until(is_true: Callable[[], bool], output: Path, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.02)


def until_gone(pids: Sequence[int], output: Path) -> None:
    """Wait until none of these processes is left: 30 seconds at most."""
    until(lambda: not any(map(is_running, pids)), output)
