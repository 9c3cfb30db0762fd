"""What an episode of reinforcement learning is worth: the flag --reward of chat_rl.

    --reward task                             what the task or its environment gives, such as 1 if right: the default
    --reward mine.py:is_short                 a function of your own in its place
    --reward task:0.8,mine.py:is_short:0.2    the sum of both, by weight; a weight may be negative
    --reward rm:rm                            the score of a reward model (scripts/chat_rm): a stage, rm/TAG or a folder

A function gets a list of episodes and returns as many numbers. It may be `async`, for requests to other services:

    def is_short(episodes):
        return [float(len(episode.reply) < 80) for episode in episodes]

Each process calls it with the episodes that it has sampled itself, once for each time that it samples. The file runs
with your rights.
"""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanochat import user_code
from nanochat.alignment.reward_model import load_reward_model
from nanochat.cli import Failed, Interrupted, UserError
from nanochat.conversation import Message, text_of
from nanochat.device import Device
from nanochat.engine import Ending
from nanochat.log import print0
from nanochat.model_folder import find_source, short_name, tag_of, weights_sha256
from nanochat.task import Example, Task


@dataclass(frozen=True)
class Episode:
    """A finished conversation, as a reward function reads it."""

    messages: list[Message]  # all of it: the question, the replies, and what the environment said
    reply: str  # the text of the last reply, without calls of the calculator and their results
    answer: Any  # of the example: what its task grades by, else the text of its reference reply; None: it has neither
    fields: dict[str, Any]  # of the example's record: the other keys of a .jsonl, columns of a .parquet
    task: str  # its name
    reward: float  # what the task or its environment gave; 0 where it gives nothing
    tokens: int  # that the model wrote
    ending: Ending  # of the last reply: "complete", "cut off" by a limit, or "broken" by a wrong special token


LARGEST = 1e9  # reward or weight: sums and squares of them are finite in fp32
Function = Callable[[list[Episode]], Any]  # -> as many numbers, or an awaitable of them

# What KIND:SOURCE in --reward opens: a function from the folder of SOURCE and the device to a reward function.
KINDS: dict[str, Callable[[Path, Device], Function]] = {
    # rm:SOURCE, a reward model of scripts/chat_rm: a stage, a tag of it, a checkpoint's folder.
    "rm": lambda folder, device: of_conversations(load_reward_model(folder, device, verified=True)),
}


def of_conversations(reward: Callable[[list[list[Message]]], list[float]]) -> Function:
    return lambda episodes: reward([episode.messages for episode in episodes])


@dataclass(frozen=True)
class Reward:
    """A part of an episode's reward."""

    name: str  # in the log
    weight: float = 1.0
    function: Function | None = None  # None: the task's own
    place: str = ""  # what --reward names; of a model, once it is loaded, with its tag and step
    sha256: str = ""  # of the file or the model's weights


TASK = Reward("task", place="task")


def parse_rewards(text: str) -> list[Reward]:
    """The entries of `task[:WEIGHT],FILE.py:FUNCTION[:WEIGHT],KIND:SOURCE[:WEIGHT],...`; `load_models` completes them.

    Raises UserError: for anything else, and where a file cannot be loaded.
    """
    rewards: list[Reward] = []
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        what, weight = _weighted(entry)
        kind, _, source = what.partition(":")
        if what == TASK.name:
            reward = replace(TASK, weight=weight)
        elif user_code.PLACE.fullmatch(what):
            function = user_code.load("--reward", what)
            if not callable(function):
                raise UserError(f"--reward {what}: this is no function")
            reward = Reward(what.rpartition(":")[2], weight, function, what, user_code.fingerprint(what))
        elif kind in KINDS and source:
            reward = Reward(what, weight, place=what)
        else:
            forms = ["task", "FILE.py:FUNCTION", *(f"{kind}:SOURCE" for kind in KINDS)]
            raise UserError(f"--reward {entry}: it is none of {', '.join(forms)}, each with :WEIGHT or without")
        rewards.append(reward)
    if not rewards:
        raise UserError("--reward is empty: task, or FILE.py:FUNCTION")
    _require_names(rewards)
    return rewards


def load_models(rewards: Sequence[Reward], device: Device) -> list[Reward]:
    """The same rewards, those of models with their functions; all ranks call this together.

    `rm:rm` is called rm in the log, any other by its tag. Raises UserError: when there is no such model.
    """
    loaded = [_load(reward, device) if reward.place.partition(":")[0] in KINDS else reward for reward in rewards]
    _require_names(loaded)
    return loaded


def _load(reward: Reward, device: Device) -> Reward:
    kind, _, source = reward.place.partition(":")
    folder = find_source(source, device=device, flag=f"--reward {kind}:")
    found = short_name(folder)
    print0(f"reward {reward.place}: {found}")
    name = kind if source == kind else tag_of(folder)
    function = KINDS[kind](folder, device)
    return replace(reward, name=name, function=function, place=f"{kind}:{found}", sha256=weights_sha256(folder))


def _require_names(rewards: Sequence[Reward]) -> None:
    names = [reward.name for reward in rewards]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--reward names {name} twice: leave one out, or give it another name")


def _weighted(entry: str) -> tuple[str, float]:
    what, colon, number = entry.rpartition(":")
    if user_code.PLACE.fullmatch(entry):  # of a function that may be called nan or inf, too
        return entry, 1.0
    try:
        weight = float(number)
    except ValueError:
        return entry, 1.0
    if not colon or not 0 < abs(weight) <= LARGEST:
        raise UserError(f"--reward {entry}: a weight is a number other than 0, up to {LARGEST:g}, after a colon")
    return what, weight


def fingerprints(rewards: Sequence[Reward]) -> dict[str, str]:
    """What a resumed run must find the same: what --reward names, and the sha256 of each file and model.

    A model is named by tag and step, in place of the flag's value: `rm:rm` may be another one now, and a run resumes
    when the flag then names the one that it had.
    """
    entries = [reward.place if reward.weight == 1 else f"{reward.place}:{reward.weight:g}" for reward in rewards]
    sums = {f"--reward {reward.place}": reward.sha256 for reward in rewards if reward.sha256}
    return {"--reward": ",".join(entries), **sums}


def score(
    reward: Reward, episodes: Sequence[Episode], seconds: float, should_stop: Callable[[], bool] = lambda: False
) -> list[float]:
    """A part of the reward of each episode, before its weight.

    Raises Failed: when the function fails, returns something else, or takes longer than `seconds`.
    Raises Interrupted: when `should_stop` returns True meanwhile.
    """
    if reward.function is None:
        return [episode.reward for episode in episodes]
    if not episodes:
        return []
    until = time.monotonic() + seconds
    outcome: Future[Any] = Future()
    # A thread of its own: a function that blocks is left behind, and ends with the process.
    threading.Thread(target=_call, args=(reward.function, list(episodes), outcome), daemon=True).start()
    while not wait([outcome], timeout=0.1).done:
        if should_stop():
            raise Interrupted
        if time.monotonic() > until:
            raise Failed(f"--reward {reward.name} took longer than --hang_seconds {seconds:g}")
    error = outcome.exception()
    if error is not None:
        problem = user_code.explain(error) or f"{type(error).__name__}: {error}"
        raise Failed(f"--reward {reward.name} fails: {problem}") from error
    found = outcome.result()
    # A list, or an array or tensor of one dimension.
    values = found.tolist() if hasattr(found, "tolist") else found
    if not isinstance(values, Sequence) or len(values) != len(episodes):
        shape = f"{len(values)} values" if isinstance(values, Sequence) else type(found).__name__
        raise Failed(f"--reward {reward.name} returned {shape} for {len(episodes)} episodes: one number for each")
    values = [value.item() if hasattr(value, "item") else value for value in values]
    for number, value in enumerate(values):
        if not isinstance(value, int | float) or not abs(value) <= LARGEST:
            shown = repr(value)[:40]
            raise Failed(
                f"--reward {reward.name} returned {shown} for episode {number}: not a number up to {LARGEST:g}"
            )
    return [float(value) for value in values]


def _call(function: Function, episodes: list[Episode], outcome: "Future[Any]") -> None:
    """Call a function, wait for it where it is async, and keep what it returns or raises."""
    try:
        found = function(episodes)
        outcome.set_result(asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found)
    except BaseException as error:  # sys.exit() too, which would end this thread alone
        outcome.set_exception(error)


async def _awaited(work: Any) -> Any:
    return await work


def check(rewards: Sequence[Reward], questions: Sequence[tuple[Task, Example]], seconds: float) -> None:
    """Try the functions on examples with their reference replies, before anything is trained.

    Raises UserError: when one of them fails.
    """
    episodes = []
    for task, example in questions:
        reply = text_of(example.messages[-1]["content"])
        answer = answer_of(example)
        episodes.append(Episode(example.messages, reply, answer, example.fields, task.name, 0.0, 1, "complete"))
    for reward in rewards:
        try:
            score(reward, episodes, seconds)
        except Failed as failure:
            raise UserError(f"{failure} (before training, on examples with their reference replies)") from failure


def answer_of(example: Example) -> Any:
    """What an example is graded by, or else the text of its reference reply; None where both are missing."""
    if example.answer is not None:
        return example.answer
    return text_of(example.messages[-1]["content"]) or None
