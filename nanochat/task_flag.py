"""The --tasks flag: `NAME[=PATH][:WEIGHT]` with commas between, such as `gsm8k=my/folder:2,stories`.

NAME is a row "tasks" of a room (rooms.py). PATH is a local file or folder that replaces the dataset of the hub. A PATH
without a NAME holds conversations, or preference pairs for DPO; so does `ORG/NAME[/CONFIG]` of a hub. `@SPLIT` after
either one chooses a split. A NAME that is not a row labels what its PATH holds. `FILE.py:CLASS[:WEIGHT]` is a task or
an environment of the user.
"""

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nanochat import rooms, user_code
from nanochat.cli import UserError
from nanochat.environment import Environment
from nanochat.task import EnvironmentTask, Split, Task

GENERATED = rooms.names("tasks")
ENVIRONMENTS = rooms.names("environments")
FROM_HUB = rooms.names("task datasets")
FROM_PATH = rooms.names("task files")
NAMES = (*GENERATED, *ENVIRONMENTS, *FROM_HUB, *FROM_PATH)

FileForm = Literal["conversations", "prompts", "pairs"]  # what a file without a task's name holds
BadRecords = Literal["skip", "fail"]  # leave out and count a record that is not a conversation, or fail
Thoughts = Literal["keep", "drop"]  # what becomes of the thoughts in a file's replies

# ORG/NAME[/CONFIG] of any dataset of a hub; not what looks like the name of a file.
HUB_NAME = re.compile(
    r"(?!.*\.(?:txt|csv|json|jsonl|jsonl\.gz|parquet)$)"
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(?P<config>[A-Za-z0-9][\w.-]*))?"
)
LABEL = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")  # a name that --tasks gives to a PATH


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
        raise UserError(f"--tasks is empty: name some of {', '.join(NAMES)}, or a .jsonl of conversations")
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
    if name in FROM_HUB or name in FROM_PATH:
        if (equals or name in FROM_PATH) and not path:
            raise UserError(f"--tasks {entry}: there is no path: {name}=PATH")
        return TaskSpec(name, path or None, weight)
    if name in GENERATED or name in ENVIRONMENTS:
        if equals:
            raise UserError(f"--tasks {entry}: {name} is generated, it takes no path")
        return TaskSpec(name, None, weight)
    if _is_here(rest):
        return TaskSpec("conversations", rest, weight)
    if HUB_NAME.fullmatch(rest.partition("@")[0]):
        return TaskSpec("conversations", rest, weight, label=rest)
    near = difflib.get_close_matches(name, NAMES, n=1)
    if equals and LABEL.fullmatch(name) and _is_here(path) and not near:
        return TaskSpec("conversations", path, weight, label=name)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(
        f"--tasks {entry}: no such task or file; {hint}the tasks are {', '.join(NAMES)}, and ORG/NAME of a hub"
    )


def _is_here(path: str) -> bool:
    """Whether a path with or without `@SPLIT` is a file or a folder."""
    return any(name and Path(name).expanduser().exists() for name in (path, path.rpartition("@")[0]))


def task_class(name: str) -> type[Task]:
    """The class of a task, from its room or from the user's file. This imports its module.

    Raises UserError: when a `FILE.py:CLASS` is neither a task nor an environment.
    """
    code = ""
    if user_code.PLACE.fullmatch(name):
        found = user_code.load("--tasks", name)
        code = user_code.fingerprint(name)
        name = name.rpartition(":")[2].lower()
    else:
        seams = ("tasks", "environments", "task datasets", "task files", "file forms")
        found = next(rooms.find(seam, name) for seam in seams if name in rooms.names(seam))
    if isinstance(found, type) and issubclass(found, Environment):
        return type(found.__name__, (EnvironmentTask,), {"name": name, "code": code, "environment_class": found})
    if not isinstance(found, type) or not issubclass(found, Task):
        raise UserError(f"--tasks: {name} is neither a subclass of Environment nor of Task")
    if code:
        return type(found.__name__, (found,), {"name": getattr(found, "name", name), "code": code})
    return found


def open_task(
    spec: TaskSpec,
    split: Split,
    hub: str = "hf",
    files: FileForm = "conversations",
    bad_records: BadRecords = "skip",
    val_share: float | None = None,
    columns: str = "",
    thoughts: Thoughts = "keep",
) -> Task:
    """The task of an entry; `files` is what a file without a task's name holds, and `columns` names its columns.

    Where such a file has no test split, `val_share` of it is the test split (default: a tenth).
    Raises UserError: in one line, when its data are missing or damaged.
    """
    if spec.name != "conversations":
        return task_class(spec.name)(split, spec.path, hub)
    kind: Any = task_class(files)
    reading = {"bad_records": bad_records, "val_share": val_share, "columns": columns, "thoughts": thoughts}
    return kind(split, spec.path, hub, label=spec.label, **reading)


def require_grades(specs: Sequence[TaskSpec]) -> None:
    """Raises UserError: for an entry whose replies are neither right nor wrong."""
    for spec in specs:
        if task_class(spec.name).kind == "dialogue":
            graded = ", ".join(name for name in NAMES if task_class(name).kind != "dialogue")
            problem = f"a dialogue has no right answer to grade; those with one are {graded}"
            hint = "chat_rl needs none with --reward FILE.py:FUNCTION, without task in it"
            raise UserError(f"--tasks {spec.path or spec.name}: {problem}; {hint}")


def require_pairs(specs: Sequence[TaskSpec]) -> None:
    """Raises UserError: for an entry that has no second reply to compare."""
    for spec in specs:
        if spec.name != "conversations" and not task_class(spec.name).has_pairs:
            paired = ", ".join(name for name in NAMES if task_class(name).has_pairs)
            problem = f"a dialogue has one reply to a question; those with two to compare are {paired}"
            raise UserError(f"--tasks {spec.name}: {problem}, and a .jsonl of pairs")
