"""Several tasks as one endless row of examples, by weight: example k is the same at every call and on every machine.

Draws go round a wheel of slots that the tasks share by weight, shuffled anew each turn; a task's own examples come in
a shuffled order, each once before any comes again.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from nanochat.conversation import render
from nanochat.data.catalog import DATASETS
from nanochat.shell.cli import UserError
from nanochat.tasks.registry import open_task, parse_tasks
from nanochat.tasks.task import Example, Pair, Split, Task
from nanochat.tokenizer import Tokenizer

WHEEL_SLOTS = 1000
BLOCK_EXAMPLES = 32

# For a model pretrained on the demo corpus; and for one that has read the web.
BUILT_IN_TASKS = "stories:5,questions:2.5,addition:1,arithmetic:2,identity:2"
HUB_TASKS = "smoltalk:460,mmlu:100,gsm8k:16,arc_easy:2,arc_challenge:1,spelling:40,letters:20,addition:5,identity:1"


def default_tasks(pretraining_data: str) -> str:
    """The mixture for a model pretrained on `--data pretraining_data`."""
    return HUB_TASKS if _from_hub(pretraining_data) else BUILT_IN_TASKS


def default_rl_tasks(pretraining_data: str) -> str:
    """What such a model is rewarded for."""
    return "gsm8k" if _from_hub(pretraining_data) else "stories"


def default_dpo_tasks(pretraining_data: str) -> str:
    """What such a model learns to prefer."""
    return "ultrafeedback" if _from_hub(pretraining_data) else "stories"


def _from_hub(data: str) -> bool:
    return data in DATASETS or ("/" in data and not Path(data).exists())


def open_mixture(text: str, split: Split, hub: str = "hf", seed: int = 0, pairs: bool = False) -> "Mixture":
    """The mixture that a --tasks flag describes; its files hold conversations, or preference `pairs`.

    Raises UserError: when a name is unknown, or data are missing or damaged.
    """
    choices = parse_tasks(text)
    return Mixture([open_task(choice, split, hub, pairs) for choice in choices], [c.weight for c in choices], seed)


class Mixture:
    def __init__(self, tasks: Sequence[Task], weights: Sequence[float], seed: int = 0):
        for task in tasks:
            if not len(task):
                raise UserError(
                    f"--tasks {task.name}: there are no examples in this split: two rows or more, or files of both"
                )
        self.tasks, self.seed = list(tasks), seed
        shares = np.array(weights) / sum(weights) * WHEEL_SLOTS
        self.slots = np.maximum(1, np.floor(shares)).astype(np.int64)  # of each task on the wheel
        self._wheel = lru_cache(4)(self._shuffled_wheel)
        self._order = lru_cache(4 * len(tasks))(self._shuffled_task)

    def draw(self, index: int) -> tuple[Task, int]:
        """Which task, and which of its examples, stands at place `index` of the row."""
        turn, place = divmod(index, int(self.slots.sum()))
        wheel, ranks = self._wheel(turn)
        number = int(wheel[place])
        epoch, mine = divmod(turn * int(self.slots[number]) + int(ranks[place]), len(self.tasks[number]))
        return self.tasks[number], int(self._order(number, epoch)[mine])

    def example(self, index: int) -> Example:
        task, number = self.draw(index)
        return task.example(number)

    def pair(self, index: int) -> Pair:
        task, number = self.draw(index)
        return task.pair(number)

    def fingerprint(self) -> str:
        """A sha256 by which to know it again: of the tasks' names and lengths, and of sixteen examples of each."""
        digest = hashlib.sha256()
        for task in self.tasks:
            numbers = sorted({i * len(task) // 16 for i in range(16)})
            digest.update(repr((task.name, len(task), [task.example(i).messages for i in numbers])).encode())
        return digest.hexdigest()

    def _shuffled_wheel(self, turn: int) -> tuple[np.ndarray, np.ndarray]:
        """The task at each slot of one turn, and how many of its slots stand before that one."""
        wheel = np.repeat(np.arange(len(self.tasks)), self.slots)
        np.random.default_rng((self.seed, turn)).shuffle(wheel)
        ranks = np.zeros(len(wheel), np.int64)
        for number in range(len(self.tasks)):
            mine = wheel == number
            ranks[mine] = np.arange(mine.sum())
        return wheel, ranks

    def _shuffled_task(self, number: int, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, number, epoch)).permutation(len(self.tasks[number]))


class MixtureCorpus:
    """A mixture as a corpus for the loader: whole conversations as documents of tokens."""

    def __init__(self, mixture: Mixture, tokenizer: Tokenizer):
        self.name = "+".join(task.name for task in mixture.tasks)
        self.mixture, self.tokenizer = mixture, tokenizer

    def block_count(self) -> None:
        return None

    def read_block(self, index: int) -> list[np.ndarray]:
        examples = range(index * BLOCK_EXAMPLES, (index + 1) * BLOCK_EXAMPLES)
        rendered = (render(self.tokenizer, self.mixture.example(i).messages) for i in examples)
        return [np.array(conversation.ids, dtype=np.int32) for conversation in rendered]
