"""Rewards of reinforcement learning: the flag --reward of chat_rl.

    --reward task                             the reward of the task or environment, such as 1 if right: the default
    --reward mine.py:is_short                 your function instead
    --reward task:0.8,mine.py:is_short:0.2    the weighted sum of both; a weight may be negative
    --reward rm:rm                            the score of a reward model: rm, rm/TAG or a folder

A function receives a list of episodes and returns one number for each. It may be `async`, for requests to other
services:

    def is_short(episodes):
        return [float(len(episode.reply) < 80) for episode in episodes]

Each process calls it with the episodes that it has sampled, once per sampling. The file runs with your rights.
"""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any

from nanochat import rollout
from nanochat.alignment.reward_model import rating
from nanochat.checkpoint_manager import load_folder
from nanochat.conversation import Message, text_of
from nanochat.device import Device
from nanochat.engine import Ending
from nanochat.ground import user_code
from nanochat.ground.cli import Failed, Interrupted, UserError
from nanochat.ground.log import print0
from nanochat.model_folder import find_source, short_name, tag_of, weights_sha256
from nanochat.rollout import Reward
from nanochat.task import LARGEST_REWARD, Example, Task, checked_reward


@dataclass(frozen=True)
class Episode:
    """A finished conversation, as a reward function reads it."""

    messages: list[Message]  # the whole conversation: the question, the replies, and the environment's answers
    reply: str  # the text of the last reply, without calls of the calculator and their results
    answer: Any  # the answer that the task grades by, else the text of the reference reply; None: both are missing
    fields: dict[str, Any]  # the other fields of the example's record: keys of a .jsonl, columns of a .parquet
    task: str  # name of the task
    reward: float  # reward of the task or its environment; 0 if it gives none
    tokens: int  # number of tokens that the model wrote
    ending: Ending  # how the last reply ended: "complete", "cut off" by a limit, "broken" by a wrong special token

    @classmethod
    def of(cls, played: rollout.Episode) -> "Episode":
        replies = [message["content"] for message in played.messages if message["role"] == "assistant"]
        return cls(
            played.messages, text_of(replies[-1]), answer_of(played.example), played.example.fields, played.task.name,
            played.reward, sum(played.sample.mask), played.sample.ending,
        )  # fmt: skip


Function = Callable[[list[Episode]], Any]  # -> one number per episode, or an awaitable of them


@dataclass(frozen=True)
class FunctionReward(Reward):
    """The result of a user's function, or the score of a model."""

    place: str = ""  # the entry of --reward; for a loaded model, with its tag and step
    sha256: str = ""  # hash of the file or the model's weights
    function: Function | None = None  # None: the model is not loaded yet

    def load(self, device: Device) -> "FunctionReward":
        """The reward of a model, loaded. The log calls `rm:rm` "rm", and any other model by its tag.

        Raises UserError: when the model does not exist.
        """
        if self.function is not None:
            return self
        kind, _, source = self.place.partition(":")
        folder = find_source(source, device=device, flag=f"--reward {kind}:")
        found = short_name(folder)
        print0(f"reward {self.place}: {found}")
        name = kind if source == kind else tag_of(folder)
        model, tokenizer, _ = load_folder(folder, device)
        rate = rating(model, tokenizer, device, folder)

        def function(episodes: list[Episode]) -> list[float]:
            return rate([episode.messages for episode in episodes])

        return replace(self, name=name, function=function, place=f"{kind}:{found}", sha256=weights_sha256(folder))

    def check(self, questions: Sequence[tuple[Task, Example]], seconds: float) -> None:
        """Try the function on examples with their reference replies. Raises UserError: when it fails."""
        episodes = []
        for task, example in questions:
            *messages, last = example.messages
            if messages and messages[-1]["role"] == "assistant":  # words that the reply continues
                last = {**last, "content": text_of(messages.pop()["content"]) + text_of(last["content"])}
            reply = text_of(last["content"])
            answer = answer_of(example)
            messages.append(last)
            episodes.append(Episode(messages, reply, answer, example.fields, task.name, 0.0, 1, "complete"))
        try:
            score(self, episodes, seconds)
        except Failed as failure:
            raise UserError(f"{failure} (before training, on examples with their reference replies)") from failure

    def rate(self, episodes: Sequence[rollout.Episode], seconds: float, should_stop: Callable[[], bool]) -> list[float]:
        values = score(self, [Episode.of(episode) for episode in episodes], seconds, should_stop)
        # A broken reply, which ends with another special token than the assistant's end, gets no positive reward.
        return [
            min(value, 0.0) if episode.sample.ending == "broken" else value
            for episode, value in zip(episodes, values, strict=True)
        ]


def parse_rewards(text: str) -> list[Reward]:
    """The entries of `task[:WEIGHT],FILE.py:FUNCTION[:WEIGHT],rm:SOURCE[:WEIGHT],...`; `load` completes them.

    Raises UserError: for anything else, and when a file cannot be loaded.
    """
    rewards: list[Reward] = []
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        what, weight = _weighted(entry)
        kind, _, source = what.partition(":")
        if what == "task":
            reward = Reward(weight=weight)
        elif user_code.PLACE.fullmatch(what):
            function = user_code.load("--reward", what)
            if not callable(function):
                raise UserError(f"--reward {what}: this is not a function")
            name = what.rpartition(":")[2]
            reward = FunctionReward(name, weight, what, user_code.fingerprint(what), function)
        elif kind == "rm" and source:
            reward = FunctionReward(what, weight, what)
        else:
            forms = "task, FILE.py:FUNCTION, rm:SOURCE"
            raise UserError(f"--reward {entry}: it is none of {forms}, each with :WEIGHT or without")
        rewards.append(reward)
    if not rewards:
        raise UserError("--reward is empty: task, or FILE.py:FUNCTION")
    require_names(rewards)
    return rewards


def load_rewards(rewards: Sequence[Reward], device: Device) -> list[Reward]:
    """The same rewards, ready to rate; all ranks call this together. Raises UserError: when a model is missing."""
    loaded = [reward.load(device) if isinstance(reward, FunctionReward) else reward for reward in rewards]
    require_names(loaded)
    return loaded


def require_names(rewards: Sequence[Reward]) -> None:
    names = [reward.name for reward in rewards]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--reward names {name} twice: leave one out, or give it another name")


def reward_fingerprints(rewards: Sequence[Reward]) -> dict[str, str]:
    """The facts that must be the same in a resumed run: the entries of --reward, and the sha256 of each file and model.

    A model is named by tag and step instead of the flag's value: `rm:rm` may be another model now. A run resumes if the
    flag then names the same model.
    """
    entries = []
    sums = {}
    for reward in rewards:
        entry = reward.name
        if isinstance(reward, FunctionReward):
            entry = reward.place
            sums[f"--reward {entry}"] = reward.sha256
        entries.append(entry if reward.weight == 1 else f"{entry}:{reward.weight:g}")
    return {"--reward": ",".join(entries), **sums}


def _weighted(entry: str) -> tuple[str, float]:
    what, colon, number = entry.rpartition(":")
    if user_code.PLACE.fullmatch(entry):  # checked first, because a function may be called nan or inf
        return entry, 1.0
    try:
        weight = float(number)
    except ValueError:
        return entry, 1.0
    if not colon or not 0 < abs(weight) <= LARGEST_REWARD:
        raise UserError(f"--reward {entry}: a weight is a number other than 0, up to {LARGEST_REWARD:g}, after a colon")
    return what, weight


def score(
    reward: FunctionReward, episodes: Sequence[Episode], seconds: float, should_stop: Callable[[], bool] = lambda: False
) -> list[float]:
    """The function's number for each episode.

    Raises Failed: when the function fails, returns something else, or takes longer than `seconds`.
    Raises Interrupted: when `should_stop` returns True in the meantime.
    """
    if not episodes:
        return []
    assert reward.function is not None
    until = time.monotonic() + seconds
    outcome: Future[Any] = Future()
    # Call it in a thread: a function that blocks is abandoned, and ends with the process.
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
    # Accept a list, or an array or tensor of one dimension.
    values = found.tolist() if hasattr(found, "tolist") else found
    if not isinstance(values, Sequence) or len(values) != len(episodes):
        shape = f"{len(values)} values" if isinstance(values, Sequence) else type(found).__name__
        raise Failed(f"--reward {reward.name} returned {shape} for {len(episodes)} episodes: one number for each")
    source = f"--reward {reward.name}"
    try:
        return [checked_reward(value, source, f" for episode {number}") for number, value in enumerate(values)]
    except UserError as failure:
        raise Failed(str(failure)) from failure


def _call(function: Function, episodes: list[Episode], outcome: "Future[Any]") -> None:
    """Call a function, wait for it if it is async, and keep its result or error."""

    async def awaited() -> Any:
        return await found

    try:
        found = function(episodes)
        outcome.set_result(asyncio.run(awaited()) if inspect.isawaitable(found) else found)
    except BaseException as error:  # sys.exit() too, which would end only this thread
        outcome.set_exception(error)


def answer_of(example: Example) -> Any:
    """The answer by which an example is graded, or else the text of its reference reply; None if both are missing."""
    if example.answer is not None:
        return example.answer
    return text_of(example.messages[-1]["content"]) or None
