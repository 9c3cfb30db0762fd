"""Questions that take a tool: the model calls a calculator or Python, reads the result, and answers with a number.

    user         What is 517 * 88 - 340?
    assistant    calculator: 517*88-340
    tool         45156
    assistant    It is 45156.                             the last number is right: reward 1

A model with this project's own chat format learns to write calls from the reference replies (SFT), and reads a result
as a user's message. A model of another family finds the tools in its chat template, and may write a call as a JSON
object with a name and arguments, as most families do.
"""

import json
import random
import re
from collections.abc import Sequence
from typing import Any

from nanochat.calculator import calculate
from nanochat.conversation import Message, Part, text_of
from nanochat.task import Environment, Step
from nanochat.tools.sandbox import run_program

CALL = re.compile(r"^(calculator|python): *(.+)", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")
MAX_CALLS = 4
MAX_OUTPUT = 200  # characters of a result


def _function(name: str, argument: str, description: str) -> dict[str, Any]:
    """A tool in the form for chat templates."""
    properties = {argument: {"type": "string", "description": description}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


class ToolUse(Environment):
    """One question; the reward is 1 if the last number of the final reply is right."""

    tools = [
        _function("calculator", "expression", "An arithmetic expression; the result is its value."),
        _function("python", "code", "A Python program; the result is what it prints."),
    ]

    def __init__(self, rng: random.Random):
        super().__init__(rng)
        a, b, c = rng.randint(100, 999), rng.randint(11, 99), rng.randint(100, 999)
        if rng.random() < 0.7:
            sign = rng.choice("+-")
            self.question = f"What is {a} * {b} {sign} {c}?"
            self.call = f"calculator: {a}*{b}{sign}{c}"
            self.answer = a * b + (c if sign == "+" else -c)
        else:
            self.question = f"How many numbers from 1 to {a} are divisible by {b % 9 + 2}?"
            self.call = f"python: print(sum(n % {b % 9 + 2} == 0 for n in range(1, {a + 1})))"
            self.answer = a // (b % 9 + 2)
        self.results: list[str] = []

    def start(self) -> list[Message]:
        return [{"role": "user", "content": self.question}]

    def step(self, reply: Sequence[Part]) -> Step:
        text = text_of(reply)
        call = call_in(text)
        if call is None or len(self.results) == MAX_CALLS:
            numbers = NUMBER.findall(text)
            is_right = bool(numbers) and float(numbers[-1].replace(",", "")) == self.answer
            return Step(reward=float(is_right))
        name, argument = call
        self.results.append(run_tool(name, argument))
        return Step([{"role": "tool", "name": name, "content": self.results[-1]}])

    def reference_reply(self) -> str:
        return f"It is {self.results[-1]}." if self.results else self.call


def run_tool(name: str, argument: str) -> str:
    """The result of a call. Raises UserError: when this machine cannot run a model's Python safely."""
    if name == "calculator":
        return calculate(argument) or "error: this has no value"
    run = run_program(argument)
    result = run.output.strip() or run.error or "(nothing was printed)"
    return result[:MAX_OUTPUT]


def call_in(text: str) -> tuple[str, str] | None:
    """The first call in a reply: the tool's name and its argument."""
    match = CALL.search(text)
    if match:
        name, argument = match.groups()
        return name, argument.strip().splitlines()[0] if name == "calculator" else argument.strip()
    # {"name": "calculator", "arguments": {"expression": "2+3"}}, between whatever marks a family has for it; Llama
    # writes "parameters" instead.
    for place in re.finditer(r"\{", text):
        try:
            call, _ = json.JSONDecoder().raw_decode(text, place.start())
        except (ValueError, RecursionError):
            continue
        arguments = call.get("arguments", call.get("parameters"))
        values = list(arguments.values()) if isinstance(arguments, dict) else []
        if call.get("name") in ("calculator", "python") and len(values) == 1 and isinstance(values[0], str):
            return call["name"], values[0]
    return None
