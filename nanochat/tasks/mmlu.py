"""MMLU: four-way multiple choice over 57 subjects, graded on 14,042 questions.

To learn from there is its auxiliary training set, 99,842 questions of older exams.

Source: Hendrycks et al. 2021, Measuring Massive Multitask Language Understanding (arXiv:2009.03300).
"""

from collections.abc import Sequence

from nanochat.conversation import Part
from nanochat.data.records import open_split
from nanochat.tasks.task import Example, Split, Task, choice_question, chosen_letter

LETTERS = ("A", "B", "C", "D")


class Mmlu(Task):
    """A question with four answers."""

    name, kind, baseline = "mmlu", "choice", 0.25

    def __init__(self, split: Split, path: str | None = None, hub: str = "hf"):
        self.records = open_split(self.name, "auxiliary_train" if split == "train" else split, path, hub, also=(split,))

    def __len__(self) -> int:
        return len(self.records)

    def example(self, index: int) -> Example:
        row = self.records[index]
        if isinstance(row, dict) and isinstance(row.get("train"), dict):
            row = row["train"]  # the repo's folder auxiliary_train wraps each row once more
        self.records.require(index, row, {"question": str, "choices": list, "answer": int})
        choices, answer = row["choices"], row["answer"]
        if len(choices) != len(LETTERS) or not all(isinstance(choice, str) for choice in choices):
            raise self.records.error(index, f"has not {len(LETTERS)} texts to choose from")
        if not 0 <= answer < len(LETTERS):
            raise self.records.error(index, f"has the answer {answer}: 0 to {len(LETTERS) - 1}")
        return choice_example(row["question"], choices, LETTERS, LETTERS[answer])

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        return chosen_letter(reply) == example.answer


def choice_example(question: str, choices: Sequence[str], letters: Sequence[str], answer: str) -> Example:
    messages = [
        {"role": "user", "content": choice_question(question, choices, letters)},
        {"role": "assistant", "content": answer},
    ]
    return Example(messages, answer, tuple(letters))
