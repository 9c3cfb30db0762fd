"""MMLU: four-way multiple choice over 57 subjects, graded on 14,042 questions.

The training split is its auxiliary set, 99,842 questions of older exams.

Source: Hendrycks et al. 2021, Measuring Massive Multitask Language Understanding (arXiv:2009.03300).
"""

from typing import Any

from nanochat.task import Example
from nanochat.tasks.recorded import RecordTask, choice_example

LETTERS = ("A", "B", "C", "D")


class Mmlu(RecordTask):
    """A question with four answers."""

    name = "mmlu"
    kind = "choice"
    baseline = 0.25
    fields = {"question": str, "choices": list, "answer": int}
    splits = {"train": "auxiliary_train", "test": "test"}

    def read(self, record: Any) -> Example:
        answer = record["answer"]
        if not 0 <= answer < len(LETTERS):
            raise ValueError(f"its answer is {answer}, not one of 0 to {len(LETTERS) - 1}")
        return choice_example(record["question"], record["choices"], LETTERS, LETTERS[answer])
