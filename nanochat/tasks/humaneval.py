"""HumanEval: 164 Python functions to complete from their header and description, graded by running their tests.

Code that the model writes runs in the jail of tools/sandbox.py only.

Source: Chen et al. 2021, Evaluating Large Language Models Trained on Code (arXiv:2107.03374).
"""

import re
import textwrap
from collections.abc import Sequence
from typing import Any

from nanochat.conversation import Part, text_of
from nanochat.task import Example, turn
from nanochat.tasks.recorded import RecordTask
from nanochat.tools.sandbox import run_checks

INSTRUCTION = "Complete this Python function. Answer with the whole function in one code block."
BLOCK = re.compile(r"```[^\n`]*\n(.*?)(?:\n?```|\Z)", re.DOTALL)  # the last one may be cut off
TIMEOUT_SECONDS = 10.0


class HumanEval(RecordTask):
    """A function to complete; right when its tests pass."""

    name = "humaneval"
    fields = {"prompt": str, "canonical_solution": str, "test": str, "entry_point": str}

    def read(self, record: Any) -> Example:
        header = record["prompt"].rstrip()
        question = f"{INSTRUCTION}\n\n```python\n{header}\n```"
        answer = f"```python\n{header}\n{record['canonical_solution'].rstrip()}\n```"
        return Example(turn(question, answer), record)

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        prompt = example.answer["prompt"]
        function = example.answer["entry_point"]
        # The reply's function has the name `candidate` in the checks; every other name there is the dataset's own. Some
        # tests call a helper of the prompt, and number 33 the function itself for the results that it expects: with the
        # reply's version, it would compare the reply with itself.
        solution = f"{prompt.rstrip()}\n{example.answer['canonical_solution']}"
        checks = f"{solution}\n{example.answer['test']}\n\ncheck(candidate)\n"
        program = f"{complete_program(prompt, function, text_of(reply))}\ncandidate = {function}\n"
        return run_checks(program, checks, timeout_seconds=TIMEOUT_SECONDS).ok


def complete_program(prompt: str, function: str, reply: str) -> str:
    """The program of a reply: its code block that defines the function, else its first, else all of it.

    A whole function gets the part of the prompt above it; a body without its header gets the whole prompt.
    """
    definition = _definition(function)
    blocks = BLOCK.findall(reply) or [reply]
    code = next((block for block in blocks if definition.search(block)), blocks[0]).strip("\n")
    if definition.search(code):
        header = definition.search(prompt)
        above = prompt[: header.start()] if header else ""  # imports, other functions
        return f"{above}\n{code}\n"
    if not code.startswith((" ", "\t")):
        code = textwrap.indent(code, "    ")
    return f"{prompt.rstrip()}\n{code}\n"


def _definition(function: str) -> re.Pattern[str]:
    return re.compile(rf"^(?:async +)?def +{re.escape(function)}\b|^{re.escape(function)} *=", re.MULTILINE)
