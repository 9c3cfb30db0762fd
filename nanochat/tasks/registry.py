"""Tasks by name: `arithmetic`, `gsm8k`, ..., or a file of conversations or of preference pairs.

A flag names several as `NAME[=PATH][:WEIGHT]` with commas between: `gsm8k=my/folder:2,stories`. PATH is a local file
or folder instead of the hub's; a PATH alone holds conversations, or preference pairs for DPO.
"""

import difflib
import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nanochat.shell.cli import UserError
from nanochat.tasks.task import Split, Task

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
FROM_FILES = {"conversations": "conversations:Conversations", "preferences": "preferences:Preferences"}
NAMES = (*BUILT_IN, *FROM_HUB, *FROM_PATH)


@dataclass(frozen=True)
class TaskSpec:
    """One entry of a --tasks flag."""

    name: str  # a task's name, or "conversations"
    path: str | None
    weight: float


def task_class(name: str) -> type[Task]:
    """The class of a task; its module is imported now."""
    module, _, class_name = {**BUILT_IN, **FROM_HUB, **FROM_PATH, **FROM_FILES}[name].partition(":")
    return getattr(importlib.import_module(f"nanochat.tasks.{module}"), class_name)


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
    if not colon:
        rest = entry
        number = "1"
    try:
        weight = float(number)
    except ValueError as error:
        raise UserError(f"--tasks {entry}: the weight {number!r} is not a number") from error
    if not 0 < weight < math.inf:
        raise UserError(f"--tasks {entry}: the weight is a finite number above 0")
    name, equals, path = rest.partition("=")
    if name in FROM_HUB or name in FROM_PATH:
        if (equals or name in FROM_PATH) and not path:
            raise UserError(f"--tasks {entry}: there is no path: {name}=PATH")
        return TaskSpec(name, path or None, weight)
    if name in BUILT_IN:
        if equals:
            raise UserError(f"--tasks {entry}: {name} is generated, it takes no path")
        return TaskSpec(name, None, weight)
    if Path(rest).expanduser().exists():
        return TaskSpec("conversations", rest, weight)
    near = difflib.get_close_matches(name, NAMES, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(f"--tasks {entry}: no such task or file; {hint}the tasks are {', '.join(NAMES)}")


def open_task(spec: TaskSpec, split: Split, hub: str = "hf", pairs: bool = False) -> Task:
    """The task of an entry; a file alone holds conversations, or preference `pairs`.

    Raises UserError: in one line, when its data are missing or damaged.
    """
    name = "preferences" if pairs and spec.name == "conversations" else spec.name
    return task_class(name)(split, spec.path, hub)


def require_grades(specs: Sequence[TaskSpec]) -> None:
    """Raises UserError: for an entry whose replies are neither right nor wrong."""
    for spec in specs:
        if task_class(spec.name).kind == "dialogue":
            graded = ", ".join(name for name in NAMES if task_class(name).kind != "dialogue")
            problem = f"a dialogue has no right answer to grade; those with one are {graded}"
            raise UserError(f"--tasks {spec.path or spec.name}: {problem}")


def require_pairs(specs: Sequence[TaskSpec]) -> None:
    """Raises UserError: for an entry that has no second reply to compare."""
    for spec in specs:
        if spec.name != "conversations" and not task_class(spec.name).has_pairs:
            paired = ", ".join(name for name in NAMES if task_class(name).has_pairs)
            problem = f"a dialogue has one reply to a question; those with two to compare are {paired}"
            raise UserError(f"--tasks {spec.name}: {problem}, and a .jsonl of pairs")
