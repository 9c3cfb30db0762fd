"""Tasks by name: `arithmetic`, `gsm8k`, ..., or a file of conversations or of preference pairs.

A flag names several as `NAME[=PATH][:WEIGHT]` with commas between: `gsm8k=my/folder:2,stories`. PATH is a local file
or folder in place of the hub's; a PATH alone is conversations in .jsonl, or where pairs are asked for, pairs.
"""

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.shell.cli import UserError
from nanochat.tasks.arc import ArcChallenge, ArcEasy
from nanochat.tasks.arithmetic import Addition, Arithmetic
from nanochat.tasks.conversations import Conversations
from nanochat.tasks.gsm8k import Gsm8k
from nanochat.tasks.humaneval import HumanEval
from nanochat.tasks.identity import Identity
from nanochat.tasks.mmlu import Mmlu
from nanochat.tasks.preferences import Preferences, UltraFeedback
from nanochat.tasks.smoltalk import SmolTalk
from nanochat.tasks.spelling import LetterCount, Spelling
from nanochat.tasks.stories import Stories, StoryQuestions
from nanochat.tasks.task import Split, Task

# name -> the task's class. What is made here takes (split) and needs no network ...
BUILT_IN: dict[str, Any] = {
    "stories": Stories,
    "questions": StoryQuestions,
    "addition": Addition,
    "arithmetic": Arithmetic,
    "spelling": Spelling,
    "letters": LetterCount,
    "identity": Identity,
}
# ... the others take (split, path, hub).
FROM_HUB: dict[str, Any] = {
    "gsm8k": Gsm8k,
    "mmlu": Mmlu,
    "arc_easy": ArcEasy,
    "arc_challenge": ArcChallenge,
    "humaneval": HumanEval,
    "smoltalk": SmolTalk,
    "ultrafeedback": UltraFeedback,
}
NAMES = (*BUILT_IN, *FROM_HUB)


@dataclass(frozen=True)
class Choice:
    """One entry of a --tasks flag."""

    name: str  # a task's name, or "conversations"
    path: str | None
    weight: float


def parse_tasks(text: str) -> list[Choice]:
    """The entries of `NAME[=PATH][:WEIGHT],...`.

    Raises UserError: for an unknown name or a weight that is no positive number.
    """
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    if not entries:
        raise UserError(f"--tasks is empty: name some of {', '.join(NAMES)}, or a .jsonl of conversations")
    return [_parse_entry(entry) for entry in entries]


def _parse_entry(entry: str) -> Choice:
    rest, colon, number = entry.rpartition(":")
    if not colon:
        rest, number = entry, "1"
    try:
        weight = float(number)
    except ValueError as error:
        raise UserError(f"--tasks {entry}: the weight {number!r} is no number (NAME[=PATH][:WEIGHT])") from error
    if not 0 < weight < math.inf:
        raise UserError(f"--tasks {entry}: the weight must be above 0")
    name, equals, path = rest.partition("=")
    if name in FROM_HUB:
        if equals and not path:
            raise UserError(f"--tasks {entry}: there is no path behind the =")
        return Choice(name, path or None, weight)
    if name in BUILT_IN:
        if equals:
            raise UserError(f"--tasks {entry}: {name} is made here, it takes no path")
        return Choice(name, None, weight)
    if Path(rest).expanduser().exists():
        return Choice("conversations", rest, weight)
    near = difflib.get_close_matches(name, NAMES, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(f"--tasks {entry}: no such task or file; {hint}the tasks are {', '.join(NAMES)}")


def open_task(choice: Choice, split: Split, hub: str = "hf", pairs: bool = False) -> Task:
    """The task of an entry; a file alone holds conversations, or preference `pairs`.

    Raises UserError: in one line, when its data are missing or damaged.
    """
    if choice.name == "conversations":
        assert choice.path is not None
        return (Preferences if pairs else Conversations)(split, choice.path, hub)
    if choice.name in BUILT_IN:
        return BUILT_IN[choice.name](split)
    return FROM_HUB[choice.name](split, choice.path, hub)


def require_grades(choices: Sequence[Choice]) -> None:
    """Raises UserError: for an entry whose replies are neither right nor wrong."""
    graded = [name for name, task in {**BUILT_IN, **FROM_HUB}.items() if task.kind != "dialogue"]
    for choice in choices:
        if choice.name not in graded:
            name = choice.path if choice.name == "conversations" else choice.name
            raise UserError(
                f"--tasks {name}: a dialogue has no right answer to grade; those with one are {', '.join(graded)}"
            )


def require_pairs(choices: Sequence[Choice]) -> None:
    """Raises UserError: for an entry that has no second reply to compare."""
    tasks = {**BUILT_IN, **FROM_HUB}.items()
    paired = [name for name, task in tasks if task.kind != "dialogue" or issubclass(task, Preferences)]
    for choice in choices:
        if choice.name not in (*paired, "conversations"):
            raise UserError(
                f"--tasks {choice.name}: a dialogue has one reply to a question, not two to compare; those with a "
                f"better and a worse one are {', '.join(paired)}, and a .jsonl of pairs"
            )
