"""Breaks one public function of the story's files after another, and says which changes no training run and no reply.

python tests/promises/story_worker.py DEVICE COMMANDS FILE ...     # COMMANDS: tok,base,sft or all

LEFT_OUT in the environment names functions that are left out.

Commands of every stage run in this process, small. First each runs once, watched: which functions does it call? Then
for every function copies of this process run commands that call it, with the function broken: it returns another
result, or where that has no effect, does nothing. A line of JSON for each function: its name, and what became of them:

    changes        the weights, metrics or replies of a command are others
    fails          none of that, and a command ends with an error
    nothing        none of these: the function has no part in any command
    is not called  no command calls it
"""

import contextlib
import functools
import hashlib
import importlib
import inspect
import io
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from nanochat.chat import Chat
from nanochat.checkpoint_manager import load_model
from nanochat.device import init as device_of
from nanochat.engine import Engine
from nanochat.ground import cli
from nanochat.sampling import SamplingParams

# What the commands import, here once.
MODULES = [f"scripts.{name}" for name in ("tok_train", "base_train", "mid_train", "chat_sft", "chat_dpo", "chat_rl")]
MODULES += ["scripts.chat_eval", "scripts.chat_cli", "scripts.chat_batch", "nanochat.rollout", "nanochat.mixture"]
MODULES += ["nanochat.optim", "nanochat.losses", "nanochat.run.loop", "nanochat.chat", "nanochat.kernels.cpu"]
TASKS = "--tasks=identity,addition"
TASK = "--tasks=addition"
SIZES = ("--device_batch_size=2", "--num_iterations=2", "--log_every=1", "--seed=1")
EXAMPLES = (*SIZES, TASKS, "--target_examples_per_step=4", "--eval_examples=4")
BASE = ("--depth=2", "--head_dim=16", "--max_seq_len=64", "--total_batch_size=256", "--eval_tokens=256")
RL = ("--examples_per_step=2", "--num_samples=2", "--max_tokens=8", "--eval_examples=2", "--source=sft")
# Two steps each, most stages from the one before.
COMMANDS: dict[str, tuple[str, ...]] = {
    "tok": ("tok_train", "--data=demo", "--vocab_size=300", "--max_chars=100000"),
    "base": ("base_train", *BASE, *SIZES),
    "resume": ("base_train", *BASE, *SIZES, "--num_iterations=3", "--resume"),
    "mid": ("mid_train", TASKS, "--total_batch_size=128", "--eval_tokens=128", *SIZES),
    "long": (
        *("base_train", *BASE, *SIZES, "--max_seq_len=320", "--total_batch_size=640", "--eval_tokens=640"),
        *("--document_mask=off", "--optimizer=adamw", "--model_tag=long"),
    ),
    "dry run": ("base_train", "--depth=2", "--head_dim=16", "--max_seq_len=64", "--dry_run", "--model_tag=dry"),
    "longer": (
        *("mid_train", "--data=demo", "--max_seq_len=128", "--rope_scaling=yarn", "--source=base", "--source_tag=d2"),
        *(*SIZES, "--total_batch_size=256", "--eval_tokens=256"),
    ),
    "sft": ("chat_sft", *EXAMPLES, "--source=mid"),
    "dpo": ("chat_dpo", *EXAMPLES, "--source=sft"),
    "rm": ("chat_dpo", *EXAMPLES, "--source=sft", "--loss=reward"),
    "rl": ("chat_rl", TASK, "--reward=task:0.5,reward.py:long", *SIZES, *RL),
    "kl": ("chat_rl", "--tasks=guess.py:Guess", *SIZES, *RL, "--kl=0.1", "--kl_in=reward"),
    "kl in loss": ("chat_rl", TASK, "--reward=reward.py:long", *SIZES, *RL, "--kl=0.1"),
    "eval": ("chat_eval", TASK, "--max_examples=2", "--max_tokens=8", "--source=sft"),
    "chat": ("chat_cli", "Hello", "--max_tokens=12", "--temperature=0.8", "--source=sft"),
    "batch": ("chat_batch", "--in=lines.jsonl", "--out=replies.jsonl", "--max_tokens=8", "--source=sft", "--slots=2"),
    "fp32": ("api", "float32"),
    "bf16": ("api", "bfloat16"),
}  # fmt: skip
FILES = {
    "reward.py": "def long(episodes):\n    return [len(one.reply) % 7 / 7 for one in episodes]\n",
    "guess.py": """
from nanochat.task import Environment, Step

class Guess(Environment):
    def __init__(self, rng):
        self.number = rng.randint(1, 9)

    def start(self):
        return [{"role": "user", "content": f"Guess {self.number}."}]

    def step(self, reply):
        self.number += 10
        if self.number > 20:
            return Step(reward=self.number % 7 / 7)
        return Step([{"role": "user", "content": "Again."}])
""",
    "lines.jsonl": '{"prompt": "Hi"}\n{"messages": [{"role": "user", "content": "Hello"}]}\n{"prompt": "A story"}\n',
}
NOISE = ("tok_per_sec", "mfu", "seconds", "peak_memory_bytes", "sampling_seconds", "training_seconds", "trained_at")


def outcome(device: str, name: str) -> str:
    """A digest of what a command prints and leaves behind: weights, metrics, replies. Raises SystemExit: as it does."""
    base = Path(os.environ["NANOCHAT_BASE_DIR"])
    before = {path for path in base.rglob("*") if path.is_file()}
    script, *flags = COMMANDS[name]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if script == "api":
            print(replies(device, *flags))
        else:
            module = importlib.import_module(f"scripts.{script}")
            on_device = [] if script == "tok_train" else [f"--device={device}", "--dtype=float32"]
            sys.argv = [script, *flags, *on_device]
            cli.run(module.main, module.Config)
            if script == "chat_batch":
                print(Path("replies.jsonl").read_text())
                Path("replies.jsonl").unlink()
    # Seconds and bytes differ from run to run; a table has its seconds at the end of a line.
    measured = r"[\d.,]+ ?(s|ms|min|tok/s|tokens/s|[KMG]i?B|%)\b|\d+\.\d$"
    text = re.sub(measured, "", printed.getvalue().replace(str(base), ""), flags=re.MULTILINE)
    digest = hashlib.sha256(text.encode())
    for path in sorted(path for path in base.rglob("*") if path.is_file() and path not in before):
        if path.suffix == ".safetensors":
            digest.update(path.read_bytes())
        elif path.name in ("metrics.jsonl", "meta.json", "tokenizer.json"):
            for line in [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines():
                record = json.dumps(without_noise(json.loads(line)), sort_keys=True)
                digest.update(record.replace(str(base), "").encode())
    return digest.hexdigest()


def replies(device: str, dtype: str) -> list[Any]:
    """What the Python interface generates, and each token's logprob to its last digit."""
    found = device_of(device, dtype)
    model, tokenizer, _ = load_model("sft", device=found)
    engine = Engine(model, tokenizer, found)
    tokens = tokenizer.encode("hello", prepend=tokenizer.get_bos_token_id())
    generated = engine.generate_batch(tokens, num_samples=2, max_tokens=8, temperature=0.7)
    prompts = [tokens, [*tokens, engine.call_start, *tokenizer.encode("2+3")]]
    sampling = SamplingParams(temperature=0.7, top_p=0.9, seed=1, repetition_penalty=1.1)
    streamed = engine.stream(prompts, max_tokens=8, sampling=sampling, logprobs=2)
    said = Chat("sft", device=device).say("Hello", temperature=0.0)
    return [generated, [(new.id, new.kind, new.logprobs) for new in streamed], said]


def without_noise(record: Any) -> Any:
    if isinstance(record, dict):
        return {key: without_noise(value) for key, value in record.items() if key not in NOISE}
    return record


# ---------------------------------------------------------------------- the functions


def functions(files: list[str]) -> dict[str, types.FunctionType]:
    """Every public function and method of these files that has a body, by its name, without its decorators."""
    found: dict[str, types.FunctionType] = {}
    for file in files:
        module = importlib.import_module(f"nanochat.{file}")
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "_is_protocol", False):
                continue
            members = vars(value).items() if isinstance(value, type) else [("", value)]
            for method, item in members:
                function = bare(item)
                if function is None or method.startswith("_") or is_abstract(function):
                    continue
                if function.__code__.co_filename == module.__file__:  # not imported, not made by a dataclass
                    found[".".join(filter(None, (file, name, method)))] = function
    return found


def bare(thing: Any) -> types.FunctionType | None:
    """The function of a method, a property or a decorated function; None for anything else."""
    for kind, attribute in ((property, "fget"), (functools.cached_property, "func")):
        if isinstance(thing, kind):
            thing = getattr(thing, attribute)
    thing = inspect.unwrap(getattr(thing, "__func__", thing)) if not isinstance(thing, type) else thing
    return thing if isinstance(thing, types.FunctionType) else None


def is_abstract(function: types.FunctionType) -> bool:
    """Whether it only names an operator that each device has."""
    return function.__code__.co_names == ("NotImplementedError",)


def watched(device: str, name: str, codes: dict[types.CodeType, str]) -> str:
    """Runs a command; its outcome and the functions that it calls, as JSON."""
    seen: set[str] = set()

    def watch(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in codes:
            seen.add(codes[frame.f_code])

    threading.setprofile(watch)
    sys.setprofile(watch)
    found = outcome(device, name)
    sys.setprofile(None)
    return json.dumps([found, sorted(seen)])


# ---------------------------------------------------------------------- breaking


class Unbreakable(Exception):
    """Nothing of this value can be another one."""


class Useless:
    """Stands for an object; whatever is done with it fails."""


OTHER: dict[type, Callable[[Any], Any]] = {
    bool: lambda value: not value,
    int: lambda value: value + 1,
    float: lambda value: value * 1.5 + 0.125,
    str: lambda value: value + "x",
    bytes: lambda value: value + b"x",
    Path: lambda value: value.with_name(value.name + "x"),
}


def broken(value: Any) -> Any:
    """Another value of the same kind. Raises Unbreakable: when there is none, as for an empty list."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 0:
            raise Unbreakable
        if value.dtype == torch.bool:
            return ~value
        if value.is_floating_point():
            ramp = torch.linspace(0.1, 1, value.numel(), dtype=value.dtype, device=value.device).view(value.shape)
            return value + ramp * value.detach().abs().mean().clamp(min=0.1)
        return value.flip(-1) if value.ndim and not torch.equal(value, value.flip(-1)) else value + 1
    if value is None or isinstance(value, type):
        raise Unbreakable
    for kind, change in OTHER.items():
        if isinstance(value, kind):
            return change(value)
    if isinstance(value, tuple | list):
        items = broken_items(value)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return dict(zip(value, broken_items(list(value.values())), strict=True))
    if isinstance(value, set | frozenset):
        return type(value)(broken_items(list(value)))
    if isinstance(value, Iterator):
        return map(broken_or_same, value)
    return Useless()


def broken_items(values: Any) -> list[Any]:
    items = [broken_or_same(value) for value in values]
    if all(item is value for item, value in zip(items, values, strict=True)):
        raise Unbreakable
    return items


def broken_or_same(value: Any) -> Any:
    try:
        return broken(value)
    except Exception:  # an error in the breaking does not count as an outcome
        return value


def break_function(function: types.FunctionType, runs: bool) -> None:
    """From now on the function returns another result, or does nothing at all if it no longer `runs`."""
    original = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    original.__kwdefaults__ = function.__kwdefaults__
    REPLACED[function.__qualname__] = lambda *args, **kwargs: broken_or_same(original(*args, **kwargs))
    line = f"import __main__; return __main__.REPLACED[{function.__qualname__!r}](*args, **kwargs)"
    if is_context(function):
        line = "yield None"
    elif not runs:
        line = "pass"
    names: dict[str, Any] = {}
    exec(f"def stub(*args, **kwargs): {line}", names)
    # The code and not the name: other files have imported the function by its name.
    function.__code__ = names["stub"].__code__.replace(co_freevars=function.__code__.co_freevars)
    function.__defaults__ = None
    function.__kwdefaults__ = None


REPLACED: dict[str, Callable[..., Any]] = {}


def is_context(function: types.FunctionType) -> bool:
    """Whether contextlib.contextmanager wraps it: it must yield once."""
    if not inspect.isgeneratorfunction(function):
        return False
    source = inspect.getsource(function)
    return "contextmanager" in source.split("def ")[0]


# ---------------------------------------------------------------------- processes


FAILED = ("failed: ", "ended with ")
MOST_USERS = 4  # commands in which a function that makes them fail gets a chance to change one


def in_a_process(base: Path, work: Callable[[], str], seconds: int = 60) -> str:
    """What `work` returns in a copy of this process, or how that ended. `base` is the base folder there."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(10 * seconds)  # one that waits
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))  # one that computes for ever
        os.environ["NANOCHAT_BASE_DIR"] = str(base)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        try:
            answer = work()
        except BaseException as error:
            answer = f"failed: {type(error).__name__}: {error}"
        with os.fdopen(write, "w") as pipe:
            pipe.write(answer)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    return answer or f"ended with {os.waitstatus_to_exitcode(status)}"


def in_a_copy(base: Path, work: Callable[[], str]) -> str:
    """As `in_a_process`, with a copy of the base folder."""
    copy = base.with_name("copy")
    shutil.copytree(base, copy)
    answer = in_a_process(copy, work)
    shutil.rmtree(copy)
    return answer


def verdict_of(
    function: types.FunctionType, users: list[str], expected: dict[str, str], answer: Callable[[str, bool], str]
) -> str:
    """What becomes of the commands `users` with a function broken; `answer(user, runs)` is the outcome of one."""
    verdict = "nothing" if users else "is not called"
    # Without its result a caller fails, which says nothing of the value that the function returns.
    has_result = function.__annotations__.get("return", "") is not None and not is_context(function)
    for runs in (True, False):
        for number, user in enumerate(users):
            if verdict == "fails" and number >= MOST_USERS:
                break
            ended = answer(user, runs)
            if ended != expected[user] and not ended.startswith(FAILED):
                return "changes"
            if ended != expected[user] and (runs or not has_result):
                verdict = "fails"
        if verdict == "fails":
            break
    return verdict


def main() -> None:
    device, chosen, *files = sys.argv[1:]
    names = list(COMMANDS) if chosen == "all" else chosen.split(",")
    torch.set_num_threads(1)
    for module in MODULES:
        importlib.import_module(module)
    left_out = os.environ.get("LEFT_OUT", "").split()
    found = {name: function for name, function in functions(files).items() if name not in left_out}
    codes = {function.__code__: name for name, function in found.items()}
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        for name, text in FILES.items():
            Path(name).write_text(text)
        base = Path(temporary) / "base"
        base.mkdir()
        expected: dict[str, str] = {}
        calls: dict[str, list[str]] = {}
        seconds: dict[str, float] = {}
        before: dict[str, Path] = {}  # the base folder before each command
        for name in names:
            before[name] = Path(temporary) / f"before {name}"
            shutil.copytree(base, before[name])
            began = os.times()
            answer = in_a_process(base, lambda name=name: watched(device, name, codes))
            assert not answer.startswith(FAILED), (name, answer)
            expected[name], calls[name] = json.loads(answer)
            seconds[name] = os.times().children_user - began.children_user
            print(name, f"{seconds[name]:.2f} s", file=sys.stderr, flush=True)
        for name, function in found.items():
            users = sorted((command for command in names if name in calls[command]), key=lambda user: seconds[user])

            def answer_of(user: str, runs: bool, function: types.FunctionType = function) -> str:
                def work() -> str:
                    break_function(function, runs)
                    return outcome(device, user)

                return in_a_copy(before[user], work)

            print(json.dumps([name, verdict_of(function, users, expected, answer_of)]), flush=True)


if __name__ == "__main__":
    main()
