"""ARC: multiple choice from school science exams, an easy set (2,376 questions graded) and a challenge set (1,172).

The letters are the record's own: A to D as a rule, sometimes 1 to 4, and in rare cases three or five of them.

Source: Clark et al. 2018, Think you have Solved Question Answering? Try ARC (arXiv:1803.05457).
"""

from typing import Any

from nanochat.task import Example
from nanochat.tasks.recorded import RecordTask, choice_example


class ArcEasy(RecordTask):
    """The questions that simple methods answer."""

    name = "arc_easy"
    kind = "choice"
    baseline = 0.25
    fields = {"question": str, "choices": dict, "answerKey": str}

    def read(self, record: Any) -> Example:
        choices = record["choices"]
        return choice_example(record["question"], choices.get("text"), choices.get("label"), record["answerKey"])


class ArcChallenge(ArcEasy):
    """The questions that a retrieval and a co-occurrence method both got wrong."""

    name = "arc_challenge"
