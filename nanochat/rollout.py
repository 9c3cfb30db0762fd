"""Samples for reinforcement learning: questions in, conversations with rewards and advantages out. A step of chat_rl:

    1. sample      G episodes of each of Q questions, with the present policy           `play`
    2. reward      by their tasks, such as 1 if right                                   `Environment.step`, `Reward`
    3. pack        the samples into rows, with log probabilities of policy, reference   `policy_batches`
    4. compare     an advantage for each sample: its reward against the others'         `with_advantages`, losses.py
    5. learn       tokens of samples with a positive advantage become more likely       losses.py

Legend: Q questions, G samples a question, S = Q x G samples, N rows, T tokens a row.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from nanochat.conversation import Message, Part, chat_format, parse_reply, parts_of, render_prompt
from nanochat.cross_entropy import IGNORE
from nanochat.device import Device
from nanochat.engine import Ending, Engine, ending
from nanochat.gpt import GPT
from nanochat.ground import user_code
from nanochat.ground.cli import Failed, Interrupted, UserError
from nanochat.ground.screen import Bar
from nanochat.losses import PolicyBatch, has_signal, token_logp
from nanochat.mixture import Mixture
from nanochat.packing import PackedBatch, pack_sequences
from nanochat.ranks import gather_values
from nanochat.sampling import SamplingParams, seed_of
from nanochat.task import Environment, Example, Task, opening_of, take_step
from nanochat.tokenizer import Tokenizer

ROWS_AT_ONCE = 256  # replies that a device samples at once


# ---------------------------------------------------------------------- the sampler


@dataclass
class Reply:
    """A sampler's reply to a prompt. It keeps the sampled tokens: text is never encoded again."""

    tokens: list[int] = field(default_factory=list)  # with the end token: the policy must learn to end
    mask: list[int] = field(default_factory=list)  # 1 under each token that the policy chose
    logprobs: list[float] = field(default_factory=list)  # one per token in nats, at the reply's temperature
    ending: Ending = "cut off"


# (prompts, how each is sampled, new tokens at most) -> replies
Sampler = Callable[[Sequence[Sequence[int]], Sequence[SamplingParams], int], list[Reply]]


class EngineSampler:
    """Samples by an engine of this process, at most `rows` replies at once. samplers/ has others of this interface.

    Calling it raises Interrupted: when `should_stop` returns True.
    """

    def __init__(self, engine: Engine, rows: int, should_stop: Callable[[], bool] = lambda: False):
        self.engine = engine
        engine.tempered_logprobs = True
        self.rows = rows
        self.should_stop = should_stop

    def hand_over(self, model: GPT) -> None:
        """Sample with the model's present weights from now on. All ranks call it together, while none samples."""
        self.engine.update(model)

    def __call__(
        self, prompts: Sequence[Sequence[int]], settings: Sequence[SamplingParams], max_tokens: int
    ) -> list[Reply]:
        replies = [Reply() for _ in prompts]
        if not replies:
            return replies
        stream = self.engine.stream(
            prompts, max_tokens=max_tokens, sampling=settings, max_rows=self.rows, should_stop=self.should_stop,
            logprobs=0,
        )  # fmt: skip
        with Bar("replies", len(prompts)) as progress:
            for new in stream:
                reply = replies[new.row.number]
                reply.tokens.append(new.id)
                reply.mask.append(int(new.by_model))
                reply.logprobs.append(new.logprobs[0] if new.by_model else 0.0)
                progress.done += new.finish_reason is not None
        for reply in replies:
            reply.ending = ending(reply.tokens, reply.mask, self.engine.tokenizer)
        return replies


@dataclass(frozen=True)
class Reward:
    """A part of a sample's reward. This one is the reward of the task or its environment, such as 1 if right;
    alignment/rewards.py has users' functions and reward models."""

    name: str = "task"  # in the log
    weight: float = 1.0

    def rate(self, episodes: Sequence["Episode"], seconds: float, should_stop: Callable[[], bool]) -> list[float]:
        """Its value for each finished episode, before the weight.

        Raises Failed: when it fails, or takes longer than `seconds`. Raises Interrupted: when `should_stop` is True.
        """
        return [episode.reward for episode in episodes]


# ---------------------------------------------------------------------- samples


@dataclass
class Sample:
    """One episode, as the policy learns from it: the tokens of a question, of a reply, of the environment's answer, and
    so on."""

    question: int  # its number in the step
    number: int  # its number among the samples of its question
    tokens: list[int]  # the whole conversation
    mask: list[int]  # 1 under each token that the policy chose: not the question's, not the tool's
    logprobs: list[float]  # one per token in nats, by the sampling weights; 0 where the mask is 0
    ending: Ending = "cut off"  # how the last reply ended
    longest: int = 0  # tokens of the longest reply
    reward_parts: dict[str, float] = field(default_factory=dict)  # by name, before their weights
    reward: float = 0.0  # the weighted sum of these parts

    def extend(self, tokens: list[int], mask: list[int], logprobs: list[float]) -> None:
        self.tokens += tokens
        self.mask += mask
        self.logprobs += logprobs


@dataclass(frozen=True)
class Samples:
    """The samples of a step, in groups of the G samples of each question."""

    groups: list[list[Sample]]
    group_size: int  # G, even without a question

    def __iter__(self) -> Iterator[Sample]:
        for group in self.groups:
            yield from group

    def grid(self, value: Callable[[Sample], float]) -> np.ndarray:
        """A number of each sample, (Q, G)."""
        return np.array([value(sample) for sample in self]).reshape(len(self.groups), self.group_size)

    @property
    def rewards(self) -> np.ndarray:
        return self.grid(lambda sample: sample.reward)

    @property
    def without_signal(self) -> int:
        """Questions whose replies are all equally good."""
        return int(np.count_nonzero(~has_signal(self.rewards)))

    @property
    def token_count(self) -> int:
        return sum(len(sample.tokens) for sample in self)

    def split(self, count: int) -> list["Samples"]:
        """Split into `count` minibatches of about equally many questions, each with all of its samples."""
        Q = len(self.groups)
        bounds = [Q * number // count for number in range(count + 1)]
        return [replace(self, groups=self.groups[first:end]) for first, end in pairwise(bounds)]

    def metrics(self) -> dict[str, float]:
        """The metrics for the log that do not need the model."""
        rewards = self.rewards
        replies = max(1, rewards.size)
        questions = max(1, len(self.groups))
        metrics = {"reward": rewards.sum() / replies}
        names = [*next(iter(self)).reward_parts] if self.groups else []
        if len(names) > 1:
            for name in names:
                values = self.grid(lambda sample, name=name: sample.reward_parts[name])
                metrics[f"reward/{name}"] = values.sum() / replies
        # With rewards of 0 and 1 this is the share of questions with a right reply among the G: pass@G.
        metrics["pass_at_k"] = rewards.max(axis=1).sum() / questions
        metrics["no_signal"] = self.without_signal / questions
        metrics["response_tokens"] = sum(sum(sample.mask) for sample in self) / replies
        metrics["truncated"] = len([sample for sample in self if sample.ending == "cut off"]) / replies
        return metrics


# ---------------------------------------------------------------------- episodes


def draw_questions(mixture: Mixture, tokenizer: Tokenizer, numbers: range, context: int) -> list[tuple[Task, Example]]:
    """Questions by number, the same on every rank, without those that leave a context no room for a reply."""
    questions = []
    for number in numbers:
        task, index = mixture.draw(number)
        example = task.example(index)
        environment = task.environment(example)
        if len(render_prompt(tokenizer, opening_of(environment, task.name), tools=environment.tools)) < context:
            questions.append((task, example))
    return questions


@dataclass
class Episode:
    """A conversation as it grows, with its environment."""

    task: Task
    example: Example
    environment: Environment
    opening: list[Message]  # the messages before the first reply
    messages: list[Message]  # all of the conversation so far
    sample: Sample
    begun: Sequence[Part] = ()  # words of the assistant at the prompt's end, which the next reply continues
    reward: float = 0.0  # from the task or its environment
    turns: int = 0  # replies so far
    is_over: bool = False

    def add(self, reply: Reply, tokenizer: Tokenizer, room: int) -> None:
        """Add the policy's reply, and the environment's answer to it if the context has room."""
        sample = self.sample
        sample.extend(reply.tokens, reply.mask, reply.logprobs)
        sample.longest = max(sample.longest, len(reply.tokens))
        sample.ending = reply.ending
        self.turns += 1
        parts = [*self.begun, *parse_reply(tokenizer, reply.tokens)]
        self.begun = ()
        self.messages.append({"role": "assistant", "content": parts})
        # The model must not learn to end with any token that stops the engine: such a reply is worth nothing.
        if reply.ending == "broken":
            self.is_over = True
            return
        step = take_step(self.environment, parts, self.task.name)
        self.messages += step.messages
        self.reward += step.reward
        self.is_over = not step.messages
        if self.is_over:
            return
        # The environment's text is context: the policy did not choose it.
        is_complete = reply.ending == "complete"
        tools = self.environment.tools
        answer = chat_format(tokenizer).continuation(self.opening, step.messages, is_complete, tools)
        if len(sample.tokens) + len(answer) > room:
            self.is_over = True
            sample.ending = "cut off"
            return
        sample.extend(answer, [0] * len(answer), [0.0] * len(answer))


@user_code.failures()
def play(
    sampler: Sampler,
    tokenizer: Tokenizer,
    device: Device,
    questions: Sequence[tuple[Task, Example]],
    *,
    samples: int,
    max_tokens: int,
    context: int,
    seed: int,
    **sampling: Any,
) -> list[Episode]:
    """This rank's share of `samples` episodes of each question, to their ends.

    A reply has at most `max_tokens`, an episode at most `context`. `sampling` names fields of SamplingParams. A reply
    depends on `seed`, its question's number, its own number and its turn, but not on the rank that samples it. Its
    neighbours change at most the rounding, because they change the shapes of the products.
    Raises Failed: when an environment of the user's fails. Raises UserError: when one returns something else than a
    Step with a finite reward, and for a chat template that cannot be used.
    """
    # At least one token of the context is left for the reply.
    room = context - 1
    environments = [(task.name, task.environment(example)) for task, example in questions]
    prompts = [render_prompt(tokenizer, opening_of(one, name), room, tools=one.tools) for name, one in environments]

    # 1. Deal. Episodes are dealt out to the ranks like cards, in the order of their questions' lengths, so that each
    #    rank gets some of every question: replies to one question tend to be long together, and a rank that had them
    #    all would keep the others waiting. Two ranks, questions A and B, three samples of each:
    #
    #        wanted   A0 A1 A2 B0 B1 B2
    #        rank 0   A0    A2    B1
    #        rank 1      A1    B0    B2
    #
    #    In a simulation of 8 ranks (2026-11-21) they then idle 3 to 9% of the time instead of 26 to 39%.
    by_length = sorted(range(len(prompts)), key=lambda question: len(prompts[question]))
    wanted: list[tuple[int, int]] = []
    for question in by_length:
        wanted += [(question, sample) for sample in range(samples)]
    mine = []
    for question, number in wanted[device.rank :: device.world_size]:
        task, example = questions[question]
        environment = task.environment(example)
        opening = opening_of(environment, task.name)
        prompt = prompts[question]
        sample = Sample(question, number, [*prompt], [0] * len(prompt), [0.0] * len(prompt))
        begun = parts_of(opening.pop()["content"]) if opening[-1]["role"] == "assistant" else ()
        mine.append(Episode(task, example, environment, opening, [*opening], sample, begun))

    # 2. Sample. Each reply has its own seed: 1, 2 and 3 ranks sample the same replies in fp32. A turn of all episodes
    #    is one batch. The rank that has sampled an episode rewards it: the reward may run a program, so the ranks share
    #    this work, too.
    params = SamplingParams(**sampling)
    open_episodes = mine
    while open_episodes:
        settings = []
        for episode in open_episodes:
            turn = [episode.turns] if episode.turns else []
            place = (episode.sample.question, episode.sample.number)
            settings.append(replace(params, seed=seed_of(seed, *place, *turn)))
        replies = sampler([episode.sample.tokens for episode in open_episodes], settings, max_tokens)
        for episode, reply in zip(open_episodes, replies, strict=True):
            episode.add(reply, tokenizer, room)
        open_episodes = [episode for episode in open_episodes if not episode.is_over]
    return mine


@dataclass
class RankSamples:
    """The samples that one rank has drawn, in a form for JSON."""

    questions: int  # number over all ranks
    group_size: int  # samples of each question
    samples: list[dict[str, Any]] = field(default_factory=list)  # the fields of Sample
    interrupted: bool = False
    failed: str = ""  # why


def sample_on_rank(
    sampler: Sampler,
    tokenizer: Tokenizer,
    device: Device,
    read_questions: Callable[[], Sequence[tuple[Task, Example]]],
    *,
    samples: int,
    rewards: Sequence[Reward] = (Reward(),),
    reward_seconds: float = 600.0,
    should_stop: Callable[[], bool] = lambda: False,
    **settings: Any,
) -> RankSamples:
    """This rank's share of `samples` episodes of each question, with their rewards. It waits for no other rank, so any
    thread may call it.

    `settings` are as in `play`; `reward_seconds` and `should_stop` are for `rewards`. A reply that is cut off is
    worth its reward. A reply that ends with another special token than the assistant's end is worth at most 0.
    """
    own = RankSamples(0, samples)
    try:
        questions = read_questions()
        own.questions = len(questions)
        episodes = play(sampler, tokenizer, device, questions, samples=samples, **settings)
        for reward in rewards:
            values = reward.rate(episodes, reward_seconds, should_stop)
            for episode, value in zip(episodes, values, strict=True):
                episode.sample.reward_parts[reward.name] = value
                episode.sample.reward += reward.weight * value
        own.samples = [vars(episode.sample) for episode in episodes]
    # A rank without samples still calls `gather_samples`, or the others would wait for it in vain.
    except (Failed, UserError, OSError) as failure:
        own.failed = str(failure)
    except Interrupted:
        own.interrupted = True
    return own


def gather_samples(own: RankSamples, device: Device) -> Samples:
    """The samples of all ranks, which call it together.

    Raises Interrupted: on every rank, when the sampler did on any of them. Raises Failed: on every rank, when the
    sampler, or the user's reward or environment, fails on any of them.
    """
    ranks = [RankSamples(**rank) for rank in gather_values(vars(own), device)]
    for rank in ranks:
        if rank.failed:
            raise Failed(rank.failed)
        if rank.interrupted:
            raise Interrupted
    # Every rank packs the same batch from all samples, in the order of questions and samples.
    samples = [Sample(**sample) for rank in ranks for sample in rank.samples]
    samples.sort(key=lambda sample: (sample.question, sample.number))
    groups = [samples[first : first + own.group_size] for first in range(0, len(samples), own.group_size)]
    return Samples(groups, own.group_size)


class OnPolicy:
    """The samples of each step, drawn in the step by its weights. samplers/ahead.py draws them earlier.

    `sampler` is an EngineSampler or like it; `draw(step)` draws this rank's samples.
    """

    def __init__(self, sampler: Any, model: GPT, draw: Callable[[int], RankSamples]):
        self.sampler = sampler
        self.model = model
        self.draw = draw
        self.handed_over = -1  # the step whose weights the sampler has

    def hand_over(self, step: int) -> None:
        """Sample with the weights of this step, which are the model's present ones. All ranks call it together."""
        if self.handed_over != step:
            self.sampler.hand_over(self.model)
            self.handed_over = step

    def take(self, step: int) -> RankSamples:
        """This rank's samples of a step. All ranks call it, and then `gather_samples` before anything else."""
        self.hand_over(step)
        return self.draw(step)


# ---------------------------------------------------------------------- pack, compare


@torch.no_grad()
def policy_batches(
    samples: Samples,
    shape: tuple[int, int],
    device: Device,
    policy: Any = None,
    reference: Any = None,
    temperature: float = 1.0,
) -> list[PolicyBatch]:
    """This rank's share of the samples in micro-batches of a `shape` (rows, tokens of a row), on the device.

    With the log probabilities of the models that are given, at a temperature; all advantages are 0 so far.
    """
    rows, row_tokens = shape
    packed = pack_sequences(
        [sample.tokens for sample in samples], [sample.mask for sample in samples], row_tokens, device.data_ranks,
        [sample.logprobs for sample in samples],
    )  # fmt: skip
    # 1 / its number of targets, for losses that give every sample the same weight however long it is.
    shares = samples.grid(lambda sample: 1 / max(1, sum(sample.mask)))
    batches = []
    for micro in packed.micro_batches(rows, device, device.data_rank, device.data_ranks):
        sample_share = spread(shares, micro, device)
        old_logp = None if policy is None else token_logp(policy, micro, temperature)
        reference_logp = None if reference is None else token_logp(reference, micro, temperature)
        batches.append(PolicyBatch(micro, torch.zeros_like(sample_share), sample_share, old_logp, reference_logp))
    return batches


def spread(per_sample: np.ndarray, rows: PackedBatch, device: Device) -> torch.Tensor:
    """A number of each sample, (S,) or (Q, G), at each of its targets, (N, T); 0 elsewhere."""
    numbers = torch.from_numpy(per_sample).float().flatten()
    if not len(numbers):
        numbers = torch.zeros(1)  # no questions: the batch is one row of padding, which has no sample
    # `source` (N, T) names the sample of each token. Padding has source 0 and no target: it is multiplied by 0.
    return (rows.targets != IGNORE) * device.to_device(numbers)[rows.source]


def with_advantages(
    minibatches: Sequence[Samples], batches: Sequence[Sequence[PolicyBatch]], advantages: np.ndarray, device: Device
) -> list[list[PolicyBatch]]:
    """The micro-batches of each minibatch, with the advantages (Q, G) of the samples of all minibatches."""
    done = []
    first = 0
    for minibatch, micro_batches in zip(minibatches, batches, strict=True):
        own = advantages[first : first + len(minibatch.groups)]
        done.append([replace(batch, advantages=spread(own, batch.rows, device)) for batch in micro_batches])
        first += len(minibatch.groups)
    return done
