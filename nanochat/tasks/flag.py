"""The flag --tasks: `NAME[=PATH][:WEIGHT]` with commas between, such as `gsm8k=my/folder:2,stories`.

NAME is a row "tasks" of a room (ground/rooms.py). PATH is a local file or folder that replaces the dataset of the hub.
A PATH without a NAME holds conversations, or preference pairs for DPO; so does `ORG/NAME[/CONFIG]` of a hub. `@SPLIT`
after either one chooses a split. A NAME that is not a row labels what its PATH holds. `FILE.py:CLASS[:WEIGHT]` is a
task or an environment of the user.

`open_tasks` opens what a training command learns from, and what is held out; `parse_tasks` and `open_task` one entry.
"""

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from nanochat.conversation import parts_of
from nanochat.data.catalog import HUB_NAME
from nanochat.ground import rooms, user_code
from nanochat.ground.cli import UserError
from nanochat.mixture import Mixture
from nanochat.task import Environment, Example, GeneratedTask, Split, Step, Task, opening_of, take_step
from nanochat.tasks.data_table import print_data
from nanochat.tasks.defaults import Stage, default_tasks

FileForm = Literal["conversations", "prompts", "pairs"]  # what a file without a task's name holds
FORMS: dict[Stage, FileForm] = {"sft": "conversations", "dpo": "pairs", "rl": "prompts"}
MAX_TURNS = 100  # the most turns of an episode by reference replies
LABEL = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")  # a name that --tasks gives to a PATH


@dataclass(frozen=True)
class Reading:
    """How the files that --tasks names are read, by the flags with these names."""

    files: FileForm = "conversations"
    hub: str = "hf"
    strict_data: bool = False  # a row that is left out, or any other doubt about the data, is an error
    val_share: float | None = None  # held out of a file without a test split; default: 2%, none of under 100 rows
    columns: str = ""
    thoughts: Literal["keep", "drop"] = "keep"  # what becomes of the thoughts in a file's replies
    learn: Literal["all", "last"] = "all"
    too_long: Literal["cut", "drop"] = "cut"


DEFAULT_READING = Reading()


def open_tasks(flags: Any, pretraining_data: str, stage: Stage = "sft") -> tuple[str, Mixture, Mixture]:
    """(--tasks, the mixture to learn from, the held-out one) of a stage's flags. The default of --tasks depends on what
    the model was pretrained on.

    Raises UserError: as `open_mixture`; for DPO, when a task has no second reply to compare.
    """
    tasks = flags.tasks or default_tasks(pretraining_data, flags.hub, stage)
    if stage == "dpo":
        require_pairs(parse_tasks(tasks))
    reading = Reading(
        FORMS[stage], flags.hub, flags.strict_data, getattr(flags, "val_share", None), flags.columns, flags.thoughts,
        getattr(flags, "learn", "all"), getattr(flags, "too_long", "cut"),
    )  # fmt: skip
    by_epoch = getattr(flags, "num_epochs", None) is not None
    train = open_mixture(tasks, "train", reading, flags.seed, by_epoch)
    held_out = open_mixture(tasks, "test", reading, flags.seed)
    print_data(train, held_out)
    return tasks, train, held_out


def open_mixture(
    text: str, split: Split, reading: Reading = DEFAULT_READING, seed: int = 0, by_epoch: bool = False
) -> Mixture:
    """The mixture that a --tasks flag describes.

    The test mixture leaves out tasks of which nothing is held out. `by_epoch`: all examples of all
    tasks come once before any comes again.

    Raises UserError: when a name is unknown, data are missing or damaged, or weights would have no effect.
    """
    specs = parse_tasks(text)
    if by_epoch and len({spec.weight for spec in specs}) > 1:
        raise UserError(f"--num_epochs: every example comes as often: leave the weights out of --tasks {text}")
    if reading.columns and not any(spec.name == "conversations" for spec in specs):
        raise UserError(f"--columns {reading.columns}: it names columns of files, and --tasks {text} has no file")
    tasks = [open_task(spec, split, reading) for spec in specs]
    parts = []
    for spec, task in zip(specs, tasks, strict=True):
        if len(task):
            parts.append((task, spec.weight))
    kind = EpochMixture if by_epoch else Mixture
    chosen = [task for task, _ in parts]
    weights = [weight for _, weight in parts]
    return kind(chosen, weights, seed, reading.strict_data, reading.learn, reading.too_long)


class EpochMixture(Mixture):
    """The examples of several tasks as one list, shuffled again for each epoch: draws 0 to len - 1 are the first."""

    def __len__(self) -> int:
        return sum(len(task) for task in self.tasks)

    def draw(self, index: int) -> tuple[Task, int]:
        epoch, place = divmod(index, len(self))
        number = int(self._order(0, epoch)[place])  # number in the list
        for task in self.tasks:
            if number < len(task):
                return task, number
            number -= len(task)
        raise AssertionError("the list is as long as its tasks")

    def _shuffled_task(self, number: int, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, number, epoch)).permutation(len(self))


# ---------------------------------------------------------------------- one entry


@dataclass(frozen=True)
class TaskSpec:
    """One entry of a --tasks flag."""

    name: str  # a task's name, or "conversations"
    path: str | None  # a file or a folder, or the name on a hub
    weight: float
    label: str | None = None  # the name of conversations in the log


def parse_tasks(text: str) -> list[TaskSpec]:
    """The entries of `NAME[=PATH][:WEIGHT],...`.

    Raises UserError: for an unknown name or a weight that is not a positive number.
    """
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    if not entries:
        raise UserError(f"--tasks is empty: name some of {', '.join(task_names())}, or a .jsonl of conversations")
    return [_parse_entry(entry) for entry in entries]


def _parse_entry(entry: str) -> TaskSpec:
    if entry.startswith(("hf:", "modelscope:", "ms:")):
        raise UserError(f"--tasks {entry}: write ORG/NAME alone; --hub modelscope fetches it from ModelScope")
    rest, colon, number = entry.rpartition(":")
    if not colon or user_code.PLACE.fullmatch(entry):
        rest = entry
        number = "1"
    try:
        weight = float(number)
    except ValueError as error:
        raise UserError(f"--tasks {entry}: the weight {number!r} is not a number") from error
    if not 0 < weight < math.inf:
        raise UserError(f"--tasks {entry}: the weight is a finite number above 0")
    if user_code.PLACE.fullmatch(rest):
        return TaskSpec(rest, None, weight)
    name, equals, path = rest.partition("=")
    if name in task_names():
        source = task_class(name).source
        if source == "program" and equals:
            raise UserError(f"--tasks {entry}: {name} is generated, it takes no path")
        if (source == "file" or equals) and not path:
            raise UserError(f"--tasks {entry}: there is no path: {name}=PATH")
        return TaskSpec(name, path or None, weight)
    if rest.endswith(".py"):
        raise UserError(f"--tasks {entry}: name the class of a task or an environment in it: {rest}:CLASS")
    if _is_here(rest):
        return TaskSpec("conversations", rest, weight)
    if HUB_NAME.fullmatch(rest.partition("@")[0]):
        return TaskSpec("conversations", rest, weight, label=rest)
    near = difflib.get_close_matches(name, task_names(), n=1)
    if equals and LABEL.fullmatch(name) and _is_here(path) and not near:
        return TaskSpec("conversations", path, weight, label=name)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(
        f"--tasks {entry}: no such task or file; {hint}the tasks are {', '.join(task_names())}, and ORG/NAME of a hub"
    )


def _is_here(path: str) -> bool:
    """Whether a path with or without `@SPLIT` is a file or a folder."""
    return any(name and Path(name).expanduser().exists() for name in (path, path.rpartition("@")[0]))


def task_names() -> list[str]:
    return [name for name in rooms.names("tasks") if name not in get_args(FileForm)]


def generated_tasks() -> list[str]:
    """The tasks whose questions a program writes, each with one reply to grade."""
    classes = {name: task_class(name) for name in task_names()}
    return [
        name for name, kind in classes.items() if kind.source == "program" and not issubclass(kind, EnvironmentTask)
    ]


def task_class(name: str) -> type[Task]:
    """The class of a task, from its room or from the user's file. This imports its module.

    Raises UserError: when a `FILE.py:CLASS` is neither a task nor an environment.
    """
    identity = b""
    entry = name
    if user_code.PLACE.fullmatch(entry):
        found = user_code.load("--tasks", entry)
        identity = user_code.fingerprint(entry).encode()
        name = entry.rpartition(":")[2].lower()
    else:
        found = rooms.find("tasks", entry)
    if isinstance(found, type) and issubclass(found, Environment):
        require_methods(entry, found, Environment, "start", "step")
        facts = {"name": name, "identity": identity, "environment_class": found}
        return type(found.__name__, (EnvironmentTask,), facts)
    if not isinstance(found, type) or not issubclass(found, Task):
        raise UserError(f"--tasks {entry}: this is neither a subclass of Environment nor of Task")
    if not identity:
        return found
    require_methods(entry, found, Task, "__init__", "__len__", "example")

    def example(self: Task, index: int) -> Example:
        one = found.example(self, index)
        if not isinstance(one, Example) or not one.messages or (found.kind == "choice" and not one.letters):
            needed = "an Example with messages" + (", and letters for a choice" if found.kind == "choice" else "")
            raise UserError(f"--tasks {entry}: example({index}) returned {repr(one)[:80]}: {needed}")
        return one

    facts = {"name": getattr(found, "name", name), "identity": identity, "example": example}
    return type(found.__name__, (found,), facts)


def require_methods(entry: str, found: type, base: type, *methods: str) -> None:
    """Raises UserError: when the user's class `found` leaves out methods that its `base` only names."""
    missing = [method for method in methods if getattr(found, method) is getattr(base, method)]
    if missing:
        hint = "; GeneratedTask has all but `example`" if base is Task else ""
        raise UserError(f"--tasks {entry}: a subclass of {base.__name__} needs {', '.join(missing)}{hint}")


class EnvironmentTask(GeneratedTask):
    """Episodes of an environment, each with its own random numbers."""

    environment_class: type[Environment]

    def example(self, index: int) -> Example:
        """The episode of the environment's reference replies; only its question where it has none."""
        environment = self.environment_class(self.rng(index))
        messages = opening_of(environment, self.name)
        for _ in range(MAX_TURNS):
            reply = environment.reference_reply() or ""
            messages.append({"role": "assistant", "content": reply})
            step = take_step(environment, parts_of(reply), self.name) if reply else Step()
            if not step.messages:
                break
            messages += step.messages
        return Example(messages, answer=index, tools=environment.tools)

    def environment(self, example: Example) -> Environment:
        return self.environment_class(self.rng(example.answer))


def open_task(spec: TaskSpec, split: Split, reading: Reading = DEFAULT_READING) -> Task:
    """The task of an entry. Raises UserError: in one line, when its data are missing or damaged."""
    if spec.name != "conversations":
        return task_class(spec.name)(split, spec.path, reading.hub)
    kind: Any = task_class(reading.files)
    return kind(split, spec.path, reading.hub, label=spec.label, reading=reading)


def require_grades(specs: Sequence[TaskSpec]) -> None:
    """Raises UserError: for an entry whose replies are neither right nor wrong."""
    for spec in specs:
        if task_class(spec.name).kind == "dialogue":
            graded = ", ".join(name for name in task_names() if task_class(name).kind != "dialogue")
            problem = f"a dialogue has no right answer to grade; those with one are {graded}"
            hint = "chat_rl needs none with --reward FILE.py:FUNCTION, without task in it"
            raise UserError(f"--tasks {spec.path or spec.name}: {problem}; {hint}")


def require_pairs(specs: Sequence[TaskSpec]) -> None:
    """Raises UserError: for an entry that has no second reply to compare."""
    for spec in specs:
        if spec.name != "conversations" and not has_pairs(task_class(spec.name)):
            paired = ", ".join(name for name in task_names() if has_pairs(task_class(name)))
            problem = f"a dialogue has one reply to a question; those with two to compare are {paired}"
            raise UserError(f"--tasks {spec.name}: {problem}, and a .jsonl of pairs")


def has_pairs(kind: type[Task]) -> bool:
    """Whether each reference reply has a worse one to compare with: in the data, or one that is graded wrong."""
    if (kind.pair, kind.wrong) != (Task.pair, Task.wrong):
        return True
    return kind.kind != "dialogue" and kind.source != "file" and not issubclass(kind, EnvironmentTask)
