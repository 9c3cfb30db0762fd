"""SmolTalk: dialogues for small models to learn from, about 460,000 of them and 24,000 for testing; and a Chinese set
after its example.

The part of it that its authors wrote for their smallest models (smol-smoltalk): shorter, and without function calls.

Sources: Ben Allal et al. 2025, SmolLM2: When Smol Goes Big (arXiv:2502.02737); Yu et al. 2025, OpenCSG Chinese Corpus
(arXiv:2501.08197).
"""

from typing import Any

from nanochat.task import Example
from nanochat.tasks.conversations import messages_of
from nanochat.tasks.recorded import RecordTask


class SmolTalk(RecordTask):
    """A dialogue of one or more turns; checked when it is read, because the dataset is large."""

    name = "smoltalk"
    kind = "dialogue"
    fields = {"messages": list}

    def read(self, record: Any) -> Example:
        return Example(messages_of(record))


class SmolTalkChinese(SmolTalk):
    """A Chinese dialogue."""

    name = "smoltalk_zh"
    fields = {"conversations": list}
