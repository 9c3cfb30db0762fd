"""UltraFeedback: replies of many models to 64,000 questions, graded by a larger one.

Each question has its best reply and another one: 61,135 pairs, and 2,000 for testing.

Source: Cui et al. 2023, UltraFeedback (arXiv:2310.01377), as paired by Tunstall et al. 2023, Zephyr.
"""

from typing import Any

from nanochat.task import Example, Pair
from nanochat.tasks.preferences import pair_of
from nanochat.tasks.recorded import RecordTask


class UltraFeedback(RecordTask):
    """A question, and two replies to it; checked when it is read."""

    name = "ultrafeedback"
    kind = "dialogue"
    fields = {"chosen": list, "rejected": list}
    splits = {"train": "train_prefs", "test": "test_prefs"}  # its other splits are for SFT and for generating

    def pair(self, index: int) -> Pair:
        return self.records.parse(index, pair_of)

    def read(self, record: Any) -> Example:
        pair = pair_of(record)
        return Example([*pair.question, pair.chosen])
