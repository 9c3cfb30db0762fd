"""Tasks by name: `arithmetic`, `gsm8k`, ..., or conversations or preferences of a file, a folder or a hub.

A flag names several as `NAME[=PATH][:WEIGHT]` with commas between: `gsm8k=my/folder:2,stories`. PATH is a local file
or folder instead of the hub's; a PATH alone holds conversations, or preference pairs for DPO, and so does any hub's
`ORG/NAME[/CONFIG]`. `@SPLIT` after either names a split. A NAME of no task is a name for what its PATH holds. Tasks and
environments of the user's own are `FILE.py:CLASS[:WEIGHT]`.
"""

import difflib
import importlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nanochat import user_code
from nanochat.cli import UserError
from nanochat.data.catalog import HUB_NAME
from nanochat.task import EnvironmentTask, Split, Task
from nanochat.tasks.environment import Environment

LABEL = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")  # a name that --tasks gives to a PATH

# name -> module:class; a module is imported when its task is requested. These examples are generated ...
BUILT_IN = {
    "stories": "stories:Stories",
    "questions": "stories:StoryQuestions",
    "addition": "arithmetic:Addition",
    "arithmetic": "arithmetic:Arithmetic",
    "spelling": "spelling:Spelling",
    "letters": "spelling:LetterCount",
    "identity": "identity:Identity",
    "unknown": "identity:Unknown",
}
# Episodes of several turns, with a reward: for RL, and for SFT before it.
ENVIRONMENTS = {"nim": "nim:Nim", "tool_use": "tool_use:ToolUse"}
# ... and these are read from a hub or a PATH.
FROM_HUB = {
    "gsm8k": "gsm8k:Gsm8k",
    "mmlu": "mmlu:Mmlu",
    "arc_easy": "arc:ArcEasy",
    "arc_challenge": "arc:ArcChallenge",
    "humaneval": "humaneval:HumanEval",
    "smoltalk": "smoltalk:SmolTalk",
    "smoltalk_zh": "smoltalk:SmolTalkChinese",
    "ultrafeedback": "ultrafeedback:UltraFeedback",
}
# This one is read from a PATH alone, and only to evaluate ...
FROM_PATH = {"first_questions": "first_questions:FirstQuestions"}
# ... and these are files without a task's name.
FROM_FILES = {
    "conversations": "conversations:Conversations",
    "prompts": "conversations:Prompts",
    "pairs": "preferences:Preferences",
    "labelled": "preferences:Labelled",
}
FileForm = Literal["conversations", "prompts", "pairs", "labelled"]  # the keys
NAMES = (*BUILT_IN, *ENVIRONMENTS, *FROM_HUB, *FROM_PATH)


@dataclass(frozen=True)
class TaskSpec:
    """One entry of a --tasks flag."""

    name: str  # a task's name, or "conversations"
    path: str | None  # or the name on a hub
    weight: float
    label: str | None = None  # of conversations: the name they have in the log


def task_class(name: str) -> type[Task]:
    """The class of a task; its module is imported now.

    Raises UserError: for a `file.py:CLASS` that is no task and no environment.
    """
    if user_code.PLACE.fullmatch(name):
        found = user_code.load("--tasks", name)
        code = user_code.fingerprint(name)
        name = name.rpartition(":")[2].lower()
    else:
        module, _, class_name = {**BUILT_IN, **ENVIRONMENTS, **FROM_HUB, **FROM_PATH, **FROM_FILES}[name].partition(":")
        found = getattr(importlib.import_module(f"nanochat.tasks.{module}"), class_name)
        code = ""
    if isinstance(found, type) and issubclass(found, Environment):
        return type(found.__name__, (EnvironmentTask,), {"name": name, "code": code, "environment_class": found})
    if not isinstance(found, type) or not issubclass(found, Task):
        raise UserError(f"--tasks: {name} is neither a subclass of Environment nor of Task")
    if code:
        return type(found.__name__, (found,), {"name": getattr(found, "name", name), "code": code})
    return found


def parse_tasks(text: str) -> list[TaskSpec]:
    """The entries of `NAME[=PATH][:WEIGHT],...`.

    Raises UserError: for an unknown name or a weight that is not a positive number.
    """
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    if not entries:
        raise UserError(f"--tasks is empty: name some of {', '.join(NAMES)}, or a .jsonl of conversations")
    return [_parse_entry(entry) for entry in entries]


def _parse_entry(entry: str) -> TaskSpec:
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
    if name in BUILT_IN or name in ENVIRONMENTS:
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


def open_task(
    spec: TaskSpec,
    split: Split,
    hub: str = "hf",
    files: FileForm = "conversations",
    bad_records: Literal["skip", "fail"] = "skip",
    val_share: float | None = None,
) -> Task:
    """The task of an entry; `files` is what a file alone holds.

    `val_share` of such a file that has no test split is its test split (default: a tenth).
    Raises UserError: in one line, when its data are missing or damaged.
    """
    if spec.name != "conversations":
        return task_class(spec.name)(split, spec.path, hub)
    kind: Any = task_class(files)
    return kind(split, spec.path, hub, label=spec.label, bad_records=bad_records, val_share=val_share)


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
