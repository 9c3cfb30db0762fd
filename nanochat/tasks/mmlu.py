"""MMLU: four-way multiple choice over 57 subjects, graded on 14,042 questions.

The training split is its auxiliary set, 99,842 questions of older exams.

Source: Hendrycks et al. 2021, Measuring Massive Multitask Language Understanding (arXiv:2009.03300).
"""

from collections.abc import Sequence

from nanochat.conversation import Part
from nanochat.tasks.recorded import RecordTask
from nanochat.tasks.task import Example, choice_example, chosen_letter

LETTERS = ("A", "B", "C", "D")


class Mmlu(RecordTask):
    """A question with four answers."""

    name = "mmlu"
    kind = "choice"
    baseline = 0.25
    splits = {"train": "auxiliary_train", "test": "test"}

    def example(self, index: int) -> Example:
        record = self.records[index]
        if isinstance(record, dict) and isinstance(record.get("train"), dict):
            record = record["train"]  # the repo's folder auxiliary_train wraps each record once more
        self.records.require(index, record, {"question": str, "choices": list, "answer": int})
        choices = record["choices"]
        answer = record["answer"]
        if len(choices) != len(LETTERS) or not all(isinstance(choice, str) for choice in choices):
            raise self.records.error(index, f"has not {len(LETTERS)} texts to choose from")
        if not 0 <= answer < len(LETTERS):
            raise self.records.error(index, f"has the answer {answer}: 0 to {len(LETTERS) - 1}")
        return choice_example(record["question"], choices, LETTERS, LETTERS[answer])

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        return chosen_letter(reply) == example.answer
