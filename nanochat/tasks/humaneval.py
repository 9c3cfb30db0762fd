"""HumanEval: 164 Python functions to complete from their header and description, graded by running their tests.

What the model writes runs in the jail of sandbox.py only.

Source: Chen et al. 2021, Evaluating Large Language Models Trained on Code (arXiv:2107.03374).
"""

import re
import textwrap
from collections.abc import Sequence

from nanochat.conversation import Part, text_of
from nanochat.data.records import open_split
from nanochat.tasks.task import Example, Split, Task
from nanochat.tools.sandbox import passes

ASK = "Complete this Python function. Answer with the whole function in one code block."
BLOCK = re.compile(r"```[^\n`]*\n(.*?)(?:\n?```|\Z)", re.DOTALL)  # the last one may be cut off
TIMEOUT_SECONDS = 10.0


class HumanEval(Task):
    """A function to complete; right when its tests pass."""

    name, kind, baseline = "humaneval", "generative", 0.0

    def __init__(self, split: Split, path: str | None = None, hub: str = "hf"):
        fields = {"prompt": str, "canonical_solution": str, "test": str, "entry_point": str}
        self.records = open_split(self.name, split, path, hub, fields)

    def __len__(self) -> int:
        return len(self.records)

    def example(self, index: int) -> Example:
        row = self.records[index]
        header = row["prompt"].rstrip()
        messages = [
            {"role": "user", "content": f"{ASK}\n\n```python\n{header}\n```"},
            {"role": "assistant", "content": f"```python\n{header}\n{row['canonical_solution'].rstrip()}\n```"},
        ]
        return Example(messages, {name: row[name] for name in ("prompt", "test", "entry_point")})

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        prompt, test, function = (example.answer[name] for name in ("prompt", "test", "entry_point"))
        # Some tests call a helper of the prompt: they get the prompt's own, not what the reply made of it.
        checks = f"{above(prompt, function)}\n{test}\n\ncheck({function})\n"
        return passes(complete_program(prompt, function, text_of(reply)), checks, timeout_seconds=TIMEOUT_SECONDS)


def above(prompt: str, function: str) -> str:
    """What a prompt has above the function: imports, other functions."""
    place = _definition(function).search(prompt)
    return prompt[: place.start()] if place else ""


def complete_program(prompt: str, function: str, reply: str) -> str:
    """The program that a reply means: its code block that defines the function, else its first, else all of it.

    What the prompt has above the function is put before it; a body alone gets the whole prompt.
    """
    definition = _definition(function)
    blocks = BLOCK.findall(reply) or [reply]
    code = next((block for block in blocks if definition.search(block)), blocks[0]).strip("\n")
    if definition.search(code):
        return f"{above(prompt, function)}\n{code}\n"
    if not code.startswith((" ", "\t")):
        code = textwrap.indent(code, "    ")
    return f"{prompt.rstrip()}\n{code}\n"


def _definition(function: str) -> re.Pattern[str]:
    return re.compile(rf"^(?:async +)?def +{re.escape(function)}\b|^{re.escape(function)} *=", re.MULTILINE)
