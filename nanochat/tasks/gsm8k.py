"""GSM8K: grade-school word problems whose worked answers use a calculator, 7,473 to learn from and 1,319 to be graded.

A source's answer marks each calculation, `48/2 = <<48/2=24>>24 clips`, and ends in a line `#### 72`. A mark becomes a
call with its output; the text after it stays as it is, so that the reader sees the result too. The output is the
mark's own, which that text repeats: all 27,998 of them have the calculator's value, 823 in another spelling (`9.00` for
9, `.4` for 0.4, once `3/4`).

Source: Cobbe et al. 2021, Training Verifiers to Solve Math Word Problems (arXiv:2110.14168).
"""

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from nanochat.conversation import Part, text_of
from nanochat.task import Example, turn
from nanochat.tasks.recorded import RecordTask

MARK = re.compile(r"<<([^<>=]*)=([^<>]*)>>")
NUMBER = re.compile(r"\s*\$?\s*([-+\u2212]?)\s*\$?\s*([0-9.,]+)(?![0-9.,]|/[0-9])")


class Gsm8k(RecordTask):
    """A word problem; graded by the number after the last `####`."""

    name = "gsm8k"
    fields = {"question": str, "answer": str}

    def read(self, record: Any) -> Example:
        number = final_number(record["answer"])
        if number is None:
            raise ValueError("its answer has no line `#### NUMBER`")
        return Example(turn(record["question"], with_calls(record["answer"])), number)

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        return final_number(text_of(reply)) == example.answer


def with_calls(answer: str) -> list[Part]:
    """An answer as parts, each calculator mark as a call and its output."""
    pieces = MARK.split(answer)  # text, expression, result, text, ...
    kinds = ("text", "python", "python_output")
    return [{"type": kinds[place % 3], "text": piece} for place, piece in enumerate(pieces) if piece]


def final_number(text: str) -> str | None:
    """The number after the last `####` in its plainest form: `$1,080.00.` is 1080; a fraction or a word is None."""
    _, mark, rest = text.rpartition("####")
    match = NUMBER.match(rest) if mark else None
    if not match:
        return None
    digits = match[2].replace(",", "").rstrip(".")
    if not re.fullmatch(r"[0-9]*\.?[0-9]+", digits):
        return None
    is_negative = match[1] in ("-", "\u2212") and digits.strip("0.") != ""
    return ("-" if is_negative else "") + f"{Decimal(digits).normalize():f}"
