"""ARC: multiple choice from school science exams, an easy set (2,376 questions graded) and a challenge set (1,172).

The letters are the row's own: A to D as a rule, sometimes 1 to 4, and now and then three or five of them.

Source: Clark et al. 2018, Think you have Solved Question Answering? Try ARC (arXiv:1803.05457).
"""

from collections.abc import Sequence

from nanochat.conversation import Part
from nanochat.data.records import open_split
from nanochat.tasks.mmlu import choice_example
from nanochat.tasks.task import Example, Split, Task, chosen_letter


class ArcEasy(Task):
    """The questions that simple methods answer."""

    name, kind, baseline = "arc_easy", "choice", 0.25

    def __init__(self, split: Split, path: str | None = None, hub: str = "hf"):
        self.records = open_split(self.name, split, path, hub, {"question": str, "choices": dict, "answerKey": str})

    def __len__(self) -> int:
        return len(self.records)

    def example(self, index: int) -> Example:
        row = self.records[index]
        texts, letters, answer = row["choices"].get("text"), row["choices"].get("label"), row["answerKey"]
        if not (_are_texts(texts) and _are_texts(letters) and len(texts) == len(letters) >= 2):
            raise self.records.error(index, "has choices that are not as many texts as labels")
        if answer not in letters or not all(len(letter) == 1 for letter in letters):
            raise self.records.error(index, f"has the answer {answer!r}, not one of {', '.join(letters)}")
        return choice_example(row["question"], texts, letters, answer)

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        return chosen_letter(reply) == example.answer


class ArcChallenge(ArcEasy):
    """The questions that a retrieval and a co-occurrence method both got wrong."""

    name = "arc_challenge"


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
