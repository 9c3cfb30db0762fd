"""The columns of records: which one is the question, which one the answer, and what --columns says about it.

Data sets of other projects have other heads. `tidied` gives a record the names that this room reads: without white
space around them, in lower case, in English. `--columns question=input,answer=output` chooses the columns of a role
where the names mislead; the other names of that role then mean nothing.
"""

import difflib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from nanochat.ground.cli import UserError
from nanochat.tasks.forms import value_of

# role -> the names of its column; the first that a record has is read. ms-swift, too, prefers query and response.
NAMES = {
    "messages": ("messages", "conversations", "conversation"),
    "question": ("query", "instruction", "prompt", "question", "problem"),
    "input": ("input", "context"),
    "answer": ("response", "output", "completion", "answer", "target", "targets", "solution", "content"),
    "thought": ("reasoning_content", "reasoning", "thinking"),
    "chosen": ("chosen", "preferred_output"),
    "rejected": ("rejected", "rejected_response", "rejected_messages", "non_preferred_output"),
    "system": ("system", "system_prompt"),
    "history": ("history",),
    "tools": ("tools",),
    "rendered": (" rendered",),  # a name that no tidied record has: only --columns chooses this column
}
# An input belongs to its instruction: beside both, these come first.
INSTRUCTED = ("instruction", "input")
ALPACA = {"question": "instruction", "answer": "output"}
ROLES = {name: role for role, names in NAMES.items() for name in names}
CHINESE = {
    "问题": "question", "提问": "question", "题目": "question", "指令": "instruction", "提示": "prompt",
    "提示词": "prompt", "输入": "input", "上下文": "context", "答案": "answer", "回答": "answer", "答复": "answer",
    "回复": "response", "输出": "output", "系统": "system", "系统提示": "system", "系统提示词": "system",
    "对话": "conversations", "历史": "history", "工具": "tools",
}  # fmt: skip
# Columns that say whether a row is learned; 0 and false mean that it is not, and other values mean nothing here.
ROW_MARKS = ("weight", "loss_weight", "sample_weight", "loss", "train")
LABELS = ("label", "kto_tag", "标签")  # columns of files for KTO: whether the reply is good
# Columns of data with more than text. A model that reads only text must not learn to answer what it cannot see.
MEDIA = ("images", "image", "videos", "video", "audios", "audio")


def parse_columns(text: str) -> dict[str, str]:
    """The column of each role in `--columns ROLE=NAME,...`.

    Raises UserError: for an unknown role, and for a role or a column that is named twice.
    """
    columns: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        role, equals, name = (part.strip() for part in entry.partition("="))
        if role == "text":
            raise UserError(f"--columns {entry}: a text is for --data of base_train and mid_train")
        if role not in NAMES or not name:
            near = difflib.get_close_matches(role, NAMES, n=1)
            hint = f"did you mean {near[0]}? " if near and near[0] != role else ""
            raise UserError(f"--columns {entry}: write ROLE=COLUMN; {hint}the roles are {', '.join(NAMES)}")
        if role in columns or name in columns.values():
            raise UserError(f"--columns {entry}: each role and each column is named once")
        columns[role] = name
    return columns


def known_name(head: Any) -> str:
    """The name by which this room knows a column; for an unknown column its own name."""
    name = CHINESE.get(_plain(head), _plain(head))
    return name if name in ROLES else str(head)


def origins(heads: Iterable[Any], columns: Mapping[str, str]) -> dict[str, str]:
    """For each name that this room reads, and for each unknown column, the head as the record has it."""
    return dict(_origins(tuple(heads), tuple(columns.items())))


@lru_cache(maxsize=256)
def _origins(heads: tuple[Any, ...], columns: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    found: dict[str, str] = {}
    for head in heads:
        name = known_name(head)
        # Where a record has both `Answer` and `answer`, the exact name is meant.
        if name == head or name not in found:
            found[name] = head
    for role, column in columns:
        taken = next((head for head in (column, *heads) if head in heads and _plain(head) == _plain(column)), None)
        for name in [name for name, head in found.items() if ROLES.get(name) == role or head == taken]:
            del found[name]
        if taken is not None:
            found[NAMES[role][0]] = taken
    return tuple(found.items())


def tidied(record: Any, columns: Mapping[str, str]) -> Any:
    """A record with the names of its columns as this room reads them. NaN, which pandas writes for nothing, is null."""
    if not isinstance(record, dict):
        return record
    found = origins(record, columns)
    # A number is not equal to itself only where it is NaN.
    return {name: None if record[head] != record[head] else record[head] for name, head in found.items()}


def first_name(fields: Mapping[str, Any], role: str) -> str | None:
    """The name of the column that is read for a role; None where a tidied record has none."""
    names = NAMES[role]
    if role in ALPACA and all(fields.get(name) is not None for name in INSTRUCTED):
        names = (ALPACA[role], *names)
    return next((name for name in names if fields.get(name) is not None), None)


def first_of(fields: Mapping[str, Any], role: str) -> Any:
    """The value of the column that is read for a role, as forms.py reads it. Raises ValueError: with the problem."""
    name = first_name(fields, role)
    return None if name is None else value_of(role, fields[name])


def is_mark(head: Any) -> bool:
    """Whether a column of this name may say of the whole row that it is not learned, or in files for KTO, that its
    reply is bad."""
    return _plain(head) in (*LABELS, *ROW_MARKS)


def is_off(head: Any, value: Any) -> bool:
    """Whether a column says by this value that its row is not learned."""
    return _plain(head) in ROW_MARKS and weight_of(value) == 0


def weight_of(value: Any) -> float | None:
    """The weight that such a column states, as a number or a word; None: neither."""
    text = str(value).strip().lower()
    try:
        return {"false": 0.0, "true": 1.0}[text] if text in ("false", "true") else float(text)
    except ValueError:
        return None


def label_of(fields: Any) -> str | None:
    """What such a column of a record has, as a text in small letters; None without one."""
    if not isinstance(fields, dict):
        return None
    return next((str(value).strip().lower() for head, value in fields.items() if _plain(head) in LABELS), None)


def has(names: Iterable[str], *roles: str) -> bool:
    """Whether each of these roles has a column among the names."""
    present = {ROLES.get(name) for name in names}
    return present.issuperset(roles)


def _plain(head: Any) -> str:
    return str(head).strip().strip("\ufeff").strip().lower()
