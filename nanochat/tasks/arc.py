"""ARC: multiple choice from school science exams, an easy set (2,376 questions graded) and a challenge set (1,172).

The letters are the record's own: A to D as a rule, sometimes 1 to 4, and in rare cases three or five of them.

Source: Clark et al. 2018, Think you have Solved Question Answering? Try ARC (arXiv:1803.05457).
"""

from collections.abc import Sequence

from nanochat.conversation import Part
from nanochat.tasks.recorded import RecordTask
from nanochat.tasks.task import Example, choice_example, chosen_letter


class ArcEasy(RecordTask):
    """The questions that simple methods answer."""

    name = "arc_easy"
    kind = "choice"
    baseline = 0.25
    fields = {"question": str, "choices": dict, "answerKey": str}

    def example(self, index: int) -> Example:
        record = self.records[index]
        texts = record["choices"].get("text")
        letters = record["choices"].get("label")
        answer = record["answerKey"]
        if not (_are_texts(texts) and _are_texts(letters) and len(texts) == len(letters) >= 2):
            raise self.records.error(index, "has choices that are not as many texts as labels")
        if answer not in letters or not all(len(letter) == 1 for letter in letters):
            raise self.records.error(index, f"has the answer {answer!r}, not one of {', '.join(letters)}")
        return choice_example(record["question"], texts, letters, answer)

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        return chosen_letter(reply) == example.answer


class ArcChallenge(ArcEasy):
    """The questions that a retrieval and a co-occurrence method both got wrong."""

    name = "arc_challenge"


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
