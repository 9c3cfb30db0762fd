"""Tasks whose examples are the records of a dataset: from a hub, or from a local file or folder."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nanochat.data.records import Fields, open_split
from nanochat.task import Example, Split, Task, turn


class RecordTask(Task):
    """One example per record of the dataset `name` in data/catalog.py."""

    source = "dataset"
    # The fields that each record must have, with their types; other columns of a .parquet stay unread.
    fields: Fields | None = None
    unlearned = 0  # examples whose replies are all empty, or marked as not to be learned
    splits: dict[Split, str] = {"train": "train", "test": "test"}  # our name -> the dataset's

    def __init__(self, split: Split, path: str | None = None, hub: str = "hf"):
        self.records = open_split(self.name, self.splits[split], path, hub, self.fields, also=(split,))
        self.numbers: range | np.ndarray = range(len(self.records))  # which records are examples

    def read(self, record: Any) -> Example:
        """The example of a record. Raises ValueError: with the problem."""
        raise NotImplementedError

    def example(self, index: int) -> Example:
        return self.records.parse(int(self.numbers[index]), self.read_with_fields)

    def read_with_fields(self, record: Any) -> Example:
        """The example of a record, with the record's other fields."""
        return replace(self.read(self.tidy(record)), fields=record if isinstance(record, dict) else {})

    def tidy(self, record: Any) -> Any:
        """A record with the names of its columns as `read` knows them."""
        return record

    def where(self, index: int) -> str:
        return self.records.where(int(self.numbers[index]))

    def __len__(self) -> int:
        return len(self.numbers)


def choice_example(question: str, choices: Sequence[str], letters: Sequence[str], answer: str) -> Example:
    """A multiple-choice question as one text; its answer is a single letter.

    Raises ValueError: when a letter has no text, or the answer is not one of the letters.
    """
    are_lists = isinstance(choices, Sequence) and isinstance(letters, Sequence) and len(choices) == len(letters)
    if not are_lists or not all(isinstance(text, str) for text in [*choices, *letters]):
        raise ValueError("its choices are not as many texts as letters")
    if answer not in letters or any(len(letter) != 1 for letter in letters):
        raise ValueError(f"its answer {answer!r} is not one of the letters {', '.join(letters)}")
    lines = [f"- {letter}: {choice}" for letter, choice in zip(letters, choices, strict=True)]
    text = "\n".join([f"Multiple choice: {question}", *lines, "Answer with the letter alone."])
    return Example(turn(text, answer), answer, tuple(letters))
