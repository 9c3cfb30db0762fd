"""Several tasks as one endless sequence of examples: example k is the same at every call and on every machine.

Draws go round a wheel of 1,000 slots, which the tasks share by weight. Each turn of the wheel has another order. The
examples of a task come in a shuffled order, each of them once before any comes again.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from nanochat.conversation import Message, Rendered, UnrenderableChat, renderings
from nanochat.ground.cli import UserError
from nanochat.ground.log import warn
from nanochat.task import Example, GeneratedTask, Task
from nanochat.tokenizer import Tokenizer

WHEEL_SLOTS = 1000
BLOCK_EXAMPLES = 32
FAR_DRAW = 1 << 40  # beyond the draws that a run reaches
FIRST_EXAMPLES = 100  # a run ends if the model can learn nothing from any of them
RenderedPair = tuple[Rendered, Rendered]  # a question with the chosen reply, and with the rejected one


class Mixture:
    """Examples of several tasks, in an order that is a function of (seed, index)."""

    def __init__(
        self, tasks: Sequence[Task], weights: Sequence[float], seed: int = 0,
        strict_data: bool = False, learn: Literal["all", "last"] = "all",
        too_long: Literal["cut", "drop"] = "cut",
    ):  # fmt: skip
        self.tasks = list(tasks)
        self.seed = seed
        self.strict_data = strict_data
        self.learn = learn  # which replies of a chat SFT learns
        self.too_long = too_long  # what SFT does with a chat that is longer than a row
        self._refused = 0  # conversations that the chat format cannot write
        self._written = 0
        shares = np.array(weights) / sum(weights) * WHEEL_SLOTS
        self.slots = np.maximum(1, np.floor(shares)).astype(np.int64)  # (tasks,): slots of each task on the wheel
        self._wheel = lru_cache(4)(self._shuffled_wheel)
        self._order = lru_cache(4 * len(tasks))(self._shuffled_task)

    @property
    def task_names(self) -> list[str]:
        return [task.name for task in self.tasks]

    def draw(self, index: int) -> tuple[Task, int]:
        """The task of draw `index`, and the number of its example."""
        turn, slot = divmod(index, int(self.slots.sum()))
        wheel, earlier = self._wheel(turn)
        number = int(wheel[slot])
        task = self.tasks[number]
        draws_before = turn * int(self.slots[number]) + int(earlier[slot])  # earlier draws of this task
        epoch, place = divmod(draws_before, len(task))
        return task, int(self._order(number, epoch)[place])

    def before(self, index: int, task: Task, example: Example) -> list[Message]:
        """The messages before example `index` of this task: one in three generated examples follows another, as in a
        chat."""
        # People ask for several things in one chat. After SFT and RL on single questions only, 5 of 12 stories that
        # came after a sum ended with their first sentence or were refused (2026-11-22).
        if index % 3 or not isinstance(task, GeneratedTask) or example.messages[0]["role"] == "system":
            return []
        other, number = self.draw(FAR_DRAW + index)
        return other.example(number).messages if isinstance(other, GeneratedTask) else []

    def rendered(self, tokenizer: Tokenizer, index: int) -> list[Rendered]:
        """Example `index` as mid-training reads it."""
        task, number = self.draw(index)
        example = task.example(number)
        return self._render(tokenizer, task, number, example.messages, example.tools, None)

    def rendered_chat(self, tokenizer: Tokenizer, index: int, max_tokens: int) -> list[Rendered]:
        """Example `index` as SFT reads it, in a chat that may begin with another."""
        task, number = self.draw(index)
        example = task.example(number)
        before = self.before(index, task, example)
        messages = example.messages if self.learn == "all" else last_turn(example.messages)
        chat = self._render(tokenizer, task, number, [*before, *messages], example.tools, max_tokens)
        if before and any(one.cut for one in chat):  # without the earlier messages it is more likely to fit
            chat = self._render(tokenizer, task, number, messages, example.tools, max_tokens)
        if self.too_long == "drop":
            chat = [replace(one, ids=[], mask=[]) if one.cut else one for one in chat]
        return chat

    def rendered_pair(self, tokenizer: Tokenizer, index: int, max_tokens: int) -> RenderedPair:
        """Example `index` as DPO reads it."""
        task, number = self.draw(index)
        tools = task.example(number).tools
        chosen, rejected = task.pair(number).conversations
        sides = [self._render(tokenizer, task, number, side, tools, max_tokens) for side in (chosen, rejected)]
        # Both sides are compared as a whole: where a template writes earlier turns in another way, that is impossible.
        if any(len(side) > 1 for side in sides):
            self._leave_out(task, number, "the chat template writes the turns before its last reply in another way")
            return Rendered([], []), Rendered([], [])
        return sides[0][0], sides[1][0]

    def _render(
        self, tokenizer: Tokenizer, task: Task, number: int, messages: Sequence[Message],
        tools: Sequence[Any] | None, max_tokens: int | None,
    ) -> list[Rendered]:  # fmt: skip
        """Messages of an example as tokens, as conversation.renderings does. An example that the model's chat format
        refuses becomes empty: the model learns nothing from it. With `strict_data`, or where the format refuses
        all, it is an error that names the example.
        """
        try:
            rendered = renderings(tokenizer, messages, max_tokens, tools)
        except UnrenderableChat as error:
            self._leave_out(task, number, str(error))
            replies = sum(message["role"] == "assistant" for message in messages)
            return [Rendered([], [], replies=replies, unlearned=replies)]
        self._written += 1
        return rendered

    def _leave_out(self, task: Task, number: int, problem: str) -> None:
        problem = f"--tasks {task.name}: {task.where(number)}: {problem}"
        self._refused += 1
        if self.strict_data or (not self._written and self._refused >= FIRST_EXAMPLES):
            raise UserError(problem)
        if self._refused == 1:
            warn(f"{problem}; it is left out, as others like it will be (--strict_data makes this an error)")

    def fingerprint(self) -> str:
        """A sha256 of the mixture: of the name, length, identity and sixteen examples of each task."""
        digest = hashlib.sha256()
        for task in self.tasks:
            numbers = sorted({i * len(task) // 16 for i in range(16)})
            digest.update(repr((task.name, len(task), [task.example(i).messages for i in numbers])).encode())
            digest.update(task.identity)
        return digest.hexdigest()

    def _shuffled_wheel(self, turn: int) -> tuple[np.ndarray, np.ndarray]:
        """The task at each slot of one turn, and how many earlier slots have the same task. Both (slots,)."""
        wheel = np.repeat(np.arange(len(self.tasks)), self.slots)
        np.random.default_rng((self.seed, turn)).shuffle(wheel)
        earlier = np.zeros(len(wheel), np.int64)
        for number in range(len(self.tasks)):
            of_task = wheel == number
            earlier[of_task] = np.arange(of_task.sum())
        return wheel, earlier

    def _shuffled_task(self, number: int, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, number, epoch)).permutation(len(self.tasks[number]))


@dataclass(frozen=True)
class Horizon:
    """Which examples each step of SFT or DPO learns from: a function of the step, so a resume needs no position."""

    steps: int
    examples: int  # per step
    first: int = 0  # number of the run's first example
    epoch: int = 0  # examples in an epoch, whose last step has the rest; 0: without epochs

    @classmethod
    def of(cls, mixture: Mixture, examples: int, steps: int, epochs: float | None, first: int = 0) -> "Horizon":
        """The horizon of this many steps, or of `epochs` in their place. An epoch is all of the mixture."""
        if epochs is None:
            return cls(steps, examples, first)
        epoch = sum(len(task) for task in mixture.tasks)
        # Rounded: 1.1 epochs of 10 steps are 11.000000000000002 in floats.
        steps = math.ceil(round(epochs * math.ceil(epoch / examples), 6))
        return cls(max(1, steps), examples, epoch=epoch)

    def draws(self, step: int) -> range:
        """The numbers of a step's examples."""
        if not self.epoch:
            start = self.first + step * self.examples
            return range(start, start + self.examples)
        epoch, place = divmod(step, math.ceil(self.epoch / self.examples))
        start = epoch * self.epoch + place * self.examples
        return range(start, min(start + self.examples, (epoch + 1) * self.epoch))


def last_turn(messages: Sequence[Message]) -> list[Message]:
    """A conversation of which only the replies behind the user's last message are learned."""
    last = max(number for number, message in enumerate(messages) if message["role"] == "user")
    earlier = [
        {**message, "train": False} if message["role"] == "assistant" else message for message in messages[:last]
    ]
    return [*earlier, *messages[last:]]


def is_learned(*replies: Rendered) -> bool:
    """Whether a conversation has anything to learn, or a pair anything to prefer: no reply is empty or cut off, and
    within the context the two differ."""
    ids = [tuple(reply.ids) for reply in replies]
    return all(reply.target_count for reply in replies) and len(set(ids)) == len(ids)


def require_learnable(rendered: Iterable[Rendered]) -> None:
    """Raises UserError: when a run's first examples have nothing to learn."""
    if not any(map(is_learned, rendered)):
        raise UserError(
            "the first examples of --tasks leave nothing to learn: they are longer than --max_seq_len, or the model's "
            "chat format leaves their replies out; python -m scripts.preview shows what of them is learned"
        )


class MixtureCorpus:
    """A mixture as a corpus for the loader: whole conversations as documents of tokens."""

    def __init__(self, mixture: Mixture, tokenizer: Tokenizer):
        self.name = "+".join(mixture.task_names)
        self.mixture = mixture
        self.tokenizer = tokenizer

    def block_count(self) -> None:
        return None

    def read_block(self, index: int) -> list[np.ndarray]:
        examples = range(index * BLOCK_EXAMPLES, (index + 1) * BLOCK_EXAMPLES)
        documents = []
        for number in examples:
            for one in self.mixture.rendered(self.tokenizer, number):
                if not one.ids:
                    continue
                # The loader finds a document by its begin token, which chats of some families (Qwen) lack.
                bos = self.tokenizer.get_bos_token_id()
                begin = [] if one.ids[0] == bos else [bos]
                documents.append(np.array([*begin, *one.ids], dtype=np.int32))
        return documents
