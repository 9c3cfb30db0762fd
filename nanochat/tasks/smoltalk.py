"""SmolTalk: dialogues for small models to learn from, about 460,000 of them and 24,000 for testing.

The part of it that its authors made for their smallest models (smol-smoltalk): shorter, and without function calls.

Source: Ben Allal et al. 2025, SmolLM2: When Smol Goes Big (arXiv:2502.02737).
"""

from nanochat.data.records import open_split
from nanochat.tasks.conversations import Conversations
from nanochat.tasks.task import Split


class SmolTalk(Conversations):
    """A dialogue of one or more turns; a row is checked when it is read, as there are so many."""

    name = "smoltalk"

    def __init__(self, split: Split, path: str | None = None, hub: str = "hf"):
        self.records = open_split(self.name, split, path, hub, {"messages": list})
        self.range = range(len(self.records))
