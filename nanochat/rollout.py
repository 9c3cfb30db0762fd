"""Samples for reinforcement learning: questions in, conversations with rewards and advantages out. A step of chat_rl:

    1. sample      G episodes of each of Q questions, by the policy as it is now      `sample_episodes`
    2. reward      by their tasks, such as 1 if right, or by the user's functions     `Environment.step`, rewards.py
    3. pack        the episodes in rows, and what the policy and a reference think    `policy_batches`
    4. compare     an advantage for each episode: its reward against the others'      `spread`, advantages.py
    5. learn       tokens of episodes with a positive advantage become likelier       losses.py

Legend: Q questions, G samples a question, S = Q x G samples, N rows, T tokens a row.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from nanochat import user_code
from nanochat.alignment import rewards as reward_functions
from nanochat.alignment.advantages import has_signal
from nanochat.alignment.rewards import Reward
from nanochat.cli import Failed, Interrupted, UserError
from nanochat.collectives import gather_values, sum_over_ranks
from nanochat.conversation import Message, parse_reply, render_continuation, render_prompt, text_of
from nanochat.cross_entropy import IGNORE
from nanochat.device import Device
from nanochat.engine import Ending, Engine
from nanochat.environment import Environment
from nanochat.losses import PolicyBatch, token_logp
from nanochat.mixture import Mixture
from nanochat.packing import PackedBatch, pack_sequences
from nanochat.sampling import SamplingParams, seed_of
from nanochat.screen import bar
from nanochat.task import Example, Task
from nanochat.tokenizer import Tokenizer

# ---------------------------------------------------------------------- the sampler


@dataclass
class Reply:
    """What a sampler returns for a prompt. The tokens are those that were sampled: text is never encoded again."""

    tokens: list[int] = field(default_factory=list)  # with the end token: the policy must learn to end
    mask: list[int] = field(default_factory=list)  # 1 under each token that the policy chose
    logp: list[float] = field(default_factory=list)  # of each token in nats, at temperature 1
    ending: Ending = "cut off"


# (prompts, how each is sampled, new tokens at most) -> replies
Sampler = Callable[[Sequence[Sequence[int]], Sequence[SamplingParams], int], list[Reply]]


def engine_sampler(engine: Engine, rows: int, should_stop: Callable[[], bool] = lambda: False) -> Sampler:
    """Samples by an engine of this process, at most `rows` replies at once.

    The sampler raises Interrupted: when `should_stop` returns True.
    """

    def sample(prompts: Sequence[Sequence[int]], settings: Sequence[SamplingParams], max_tokens: int) -> list[Reply]:
        replies = [Reply() for _ in prompts]
        if not replies:
            return replies
        stream = engine.stream(
            prompts, max_tokens=max_tokens, sampling=settings, max_rows=rows, should_stop=should_stop, logprobs=0
        )
        with bar("replies", len(prompts)) as progress:
            for new in stream:
                reply = replies[new.row.number]
                reply.tokens.append(new.id)
                reply.mask.append(int(new.by_model))
                reply.logp.append(new.logprobs[0] if new.by_model else 0.0)
                progress.done += new.finish_reason is not None
        for reply in replies:
            reply.ending = engine.ending(reply.tokens, reply.mask)
        return replies

    return sample


# ---------------------------------------------------------------------- episodes


def draw_questions(mixture: Mixture, tokenizer: Tokenizer, numbers: range, context: int) -> list[tuple[Task, Example]]:
    """Questions by number, the same on every rank, without those that leave a context no room for a reply."""
    questions = []
    for number in numbers:
        task, index = mixture.draw(number)
        example = task.example(index)
        environment = task.environment(example)
        if len(render_prompt(tokenizer, environment.start(), tools=environment.tools)) < context:
            questions.append((task, example))
    return questions


@dataclass(frozen=True)
class Samples:
    """S episodes; those of one question are neighbours."""

    ids: list[list[int]]  # question and reply, and so on: the whole conversation
    masks: list[list[int]]  # 1 under each token that the policy chose: not the question's, not the tool's
    logp: list[list[float]]  # of each token in nats by the weights that sampled; 0 where the mask is
    endings: list[Ending]  # of the last reply
    longest: np.ndarray  # tokens of each episode's longest reply, (Q, G)
    rewards: np.ndarray  # (Q, G)
    parts: dict[str, np.ndarray] = field(default_factory=dict)  # of the rewards by name, before their weights: (Q, G)

    def select(self, questions: Sequence[int]) -> "Samples":
        """The episodes of these questions, in their order."""
        G = self.rewards.shape[1]
        chosen = [question * G + sample for question in questions for sample in range(G)]
        numbers = list(questions)
        return Samples(
            [self.ids[i] for i in chosen], [self.masks[i] for i in chosen], [self.logp[i] for i in chosen],
            [self.endings[i] for i in chosen], self.longest[numbers], self.rewards[numbers],
            {name: values[numbers] for name, values in self.parts.items()},
        )  # fmt: skip

    def split(self, count: int) -> list["Samples"]:
        """In `count` parts, each with all episodes of its share of the questions; a part may be empty."""
        Q = len(self.rewards)
        return [self.select(range(Q * part // count, Q * (part + 1) // count)) for part in range(count)]

    def refill(self, more: "Samples") -> "Samples":
        """With questions of `more` that have a signal in the places of those that have none, as far as they last."""
        # By the rewards themselves: DAPO filters by accuracy, before its overlong penalty shapes them. Replies that are
        # all right but not equally long would pass for a signal otherwise.
        both = Samples(
            self.ids + more.ids, self.masks + more.masks, self.logp + more.logp, self.endings + more.endings,
            np.concatenate((self.longest, more.longest)), np.concatenate((self.rewards, more.rewards)),
            {name: np.concatenate((values, more.parts[name])) for name, values in self.parts.items()},
        )  # fmt: skip
        chosen = list(range(len(self.rewards)))
        free = np.flatnonzero(~has_signal(self.rewards)).tolist()
        spare = np.flatnonzero(has_signal(more.rewards)).tolist()
        for place, question in zip(free, spare, strict=False):
            chosen[place] = len(self.rewards) + question
        return both.select(chosen)

    @property
    def without_signal(self) -> int:
        """Questions whose replies are all equally good."""
        return int(np.count_nonzero(~has_signal(self.rewards)))

    def metrics(self) -> dict[str, float]:
        """For the log, without a look at the model."""
        replies = max(1, self.rewards.size)
        questions = max(1, len(self.rewards))
        of_parts = self.parts if len(self.parts) > 1 else {}
        return {
            "reward": self.rewards.sum() / replies,
            **{f"reward/{name}": values.sum() / replies for name, values in of_parts.items()},
            # Of rewards of 0 and 1 the share of questions with a right reply among the G: pass@G.
            "pass_at_k": self.rewards.max(axis=1).sum() / questions,
            "no_signal": self.without_signal / questions,
            "response_tokens": sum(sum(mask) for mask in self.masks) / replies,
            "truncated": self.endings.count("cut off") / replies,
        }


@dataclass
class LiveEpisode:
    """A conversation as it grows: the tokens of the question, of a reply, of the environment's answer, and so on."""

    numbers: tuple[int, int]  # of the question, and of the sample among its question's
    task: Task
    example: Example
    environment: Environment
    question: list[Message]
    messages: list[Message]
    ids: list[int]
    mask: list[int]
    logp: list[float]
    reward: float = 0.0
    turns: int = 0  # replies so far
    longest: int = 0  # tokens of the longest reply
    ending: Ending = "cut off"
    is_over: bool = False

    def add(self, reply: Reply, tokenizer: Tokenizer, room: int) -> None:
        """Take in the policy's reply, and the environment's answer to it as far as the context has room."""
        self.ids += reply.tokens
        self.mask += reply.mask
        self.logp += reply.logp
        self.turns += 1
        self.longest = max(self.longest, len(reply.tokens))
        self.ending = reply.ending
        parts = parse_reply(tokenizer, reply.tokens)
        self.messages.append({"role": "assistant", "content": parts})
        # The model must not learn to end with whatever stops the engine: such a reply is worth nothing.
        if reply.ending == "broken":
            self.is_over = True
            return
        step = self.environment.step(parts)
        self.messages += step.messages
        self.reward += step.reward
        self.is_over = not step.messages
        if self.is_over:
            return
        # What the environment says is context: the policy did not choose it.
        answer = render_continuation(
            tokenizer, self.question, step.messages, reply.ending == "complete", self.environment.tools
        )
        if len(self.ids) + len(answer) > room:
            self.is_over = True
            self.ending = "cut off"
            return
        self.ids += answer
        self.mask += [0] * len(answer)
        self.logp += [0.0] * len(answer)

    def finished(self) -> reward_functions.Episode:
        """What a reward function reads of it."""
        replies = [message["content"] for message in self.messages if message["role"] == "assistant"]
        return reward_functions.Episode(
            self.messages, text_of(replies[-1]), reward_functions.answer_of(self.example), self.example.fields,
            self.task.name, self.reward, sum(self.mask), self.ending,
        )  # fmt: skip


@dataclass
class Share:
    """The episodes that one rank has sampled, as JSON can hold them."""

    questions: int  # of all ranks
    samples: int  # of each question
    episodes: list[dict[str, Any]] = field(default_factory=list)
    interrupted: bool = False
    failed: str = ""  # why


def sample_episodes(
    sampler: Sampler,
    tokenizer: Tokenizer,
    device: Device,
    questions: Sequence[tuple[Task, Example]],
    *,
    rewards: Sequence[Reward] = (reward_functions.TASK,),
    **settings: Any,
) -> Samples:
    """`samples` episodes of each question, with their rewards. All ranks call it together and get all episodes.

    `settings` are those of `sample_share`. Raises Interrupted: on every rank, when the sampler did on any of them.
    Raises Failed: on every rank, when the sampler, or the user's reward or environment, fails on any of them.
    """
    return exchange(sample_share(sampler, tokenizer, device, questions, rewards=rewards, **settings), device, rewards)


def sample_share(
    sampler: Sampler,
    tokenizer: Tokenizer,
    device: Device,
    questions: Sequence[tuple[Task, Example]],
    *,
    rewards: Sequence[Reward] = (reward_functions.TASK,),
    reward_seconds: float = 600.0,
    should_stop: Callable[[], bool] = lambda: False,
    **settings: Any,
) -> Share:
    """This rank's share of the episodes, with their rewards. It waits for no other rank, so any thread may call it.

    `settings` are those of `play`; `reward_seconds` and `should_stop` are for `rewards`, see `score`. A reply that is
    cut off is worth what its reward says, one that ends with another special token than the assistant's end is worth
    nothing, or less.
    """
    own = Share(len(questions), settings["samples"])
    try:
        mine = play(sampler, tokenizer, device, questions, **settings)
        finished = [episode.finished() for episode in mine]
        own.episodes = [
            {
                "numbers": e.numbers, "ids": e.ids, "mask": e.mask, "logp": e.logp, "ending": e.ending,
                "longest": e.longest, "parts": {},
            }
            for e in mine
        ]  # fmt: skip
        for reward in rewards:
            values = reward_functions.score(reward, finished, reward_seconds, should_stop)
            for episode, sampled, value in zip(finished, own.episodes, values, strict=True):
                is_broken = episode.ending == "broken" and reward.function is not None
                sampled["parts"][reward.name] = min(value, 0.0) if is_broken else value
    # A rank without samples still takes part in the exchange, or the others would wait for it in vain.
    except (Failed, UserError) as failure:
        own.failed = str(failure)
    except Interrupted:
        own.interrupted = True
    return own


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
) -> list[LiveEpisode]:
    """This rank's share of `samples` episodes of each question, to their ends.

    A reply has at most `max_tokens`, an episode at most `context`. `sampling` names fields of SamplingParams. What a
    reply draws depends on `seed`, its question's number, its own number and its turn, not on the rank that samples it.
    Its neighbours change at most the rounding, because they change the shapes of the products.
    Raises Failed: when an environment of the user's fails. Raises UserError: for a chat template that cannot be used.
    """
    # At least one token of the context is left for the reply.
    room = context - 1
    environments = [task.environment(example) for task, example in questions]
    prompts = [render_prompt(tokenizer, one.start(), room, tools=one.tools) for one in environments]

    # 1. Deal. Episodes are dealt out to the ranks like cards, in the order of their questions' lengths, so that each
    #    rank gets some of every question: replies to one question tend to be long together, and a rank that had them
    #    all would keep the others waiting. Two ranks, questions A and B, three samples of each:
    #
    #        wanted   A0 A1 A2 B0 B1 B2
    #        rank 0   A0    A2    B1
    #        rank 1      A1    B0    B2
    #
    #    In a simulation of 8 ranks ranks then idle 3 to 9% of the time instead of 26 to 39% (docs/measurements.md).
    by_length = sorted(range(len(prompts)), key=lambda question: len(prompts[question]))
    wanted: list[tuple[int, int]] = []
    for question in by_length:
        wanted += [(question, sample) for sample in range(samples)]
    mine = []
    for question, sample in wanted[device.rank :: device.world_size]:
        task, example = questions[question]
        environment = task.environment(example)
        opening = list(environment.start())
        prompt = prompts[question]
        mine.append(LiveEpisode(
            (question, sample), task, example, environment, opening, list(opening), list(prompt), [0] * len(prompt),
            [0.0] * len(prompt),
        ))  # fmt: skip

    # 2. Sample, each reply from a seed of its own: 1, 2 and 3 ranks sample the same replies in fp32. A turn of all
    #    episodes is one batch. The reward is on the rank that has sampled: it may run a program, so the ranks share
    #    this work, too.
    params = SamplingParams(**sampling)
    open_episodes = mine
    while open_episodes:
        settings = []
        for episode in open_episodes:
            turn = [episode.turns] if episode.turns else []
            settings.append(replace(params, seed=seed_of(seed, *episode.numbers, *turn)))
        replies = sampler([episode.ids for episode in open_episodes], settings, max_tokens)
        for episode, reply in zip(open_episodes, replies, strict=True):
            episode.add(reply, tokenizer, room)
        open_episodes = [episode for episode in open_episodes if not episode.is_over]
    return mine


def exchange(own: Share, device: Device, rewards: Sequence[Reward] = (reward_functions.TASK,)) -> Samples:
    """The episodes of all ranks, which call it together. Raises Interrupted, Failed: as `sample_episodes`."""
    shares = [Share(**share) for share in gather_values(asdict(own), device)]
    for share in shares:
        if share.failed:
            raise Failed(share.failed)
        if share.interrupted:
            raise Interrupted
    # Every rank packs the same batch from all episodes, in the order of questions and samples.
    episodes = [episode for share in shares for episode in share.episodes]
    episodes.sort(key=lambda episode: episode["numbers"])
    parts = {}
    total = np.zeros((own.questions, own.samples))
    for reward in rewards:
        values = [episode["parts"][reward.name] for episode in episodes]
        parts[reward.name] = np.array(values).reshape(total.shape)
        total += reward.weight * parts[reward.name]
    return Samples(
        ids=[episode["ids"] for episode in episodes],
        masks=[episode["mask"] for episode in episodes],
        logp=[episode["logp"] for episode in episodes],
        endings=[episode["ending"] for episode in episodes],
        longest=np.array([episode["longest"] for episode in episodes]).reshape(total.shape),
        rewards=total,
        parts=parts,
    )


# ---------------------------------------------------------------------- batches


def policy_batches(
    samples: Samples, shape: tuple[int, int], device: Device, policy: Any = None, reference: Any = None
) -> list[PolicyBatch]:
    """This rank's share of the samples in micro-batches of a `shape` (rows, tokens of a row), on the device.

    With the log probabilities of the models that are given; all advantages are 0 so far.
    """
    rows, row_tokens = shape
    packed = pack_sequences(samples.ids, samples.masks, row_tokens, device.world_size, samples.logp)
    # 1 / its number of targets, for losses that give every sample the same weight however long it is.
    share = np.array([1 / max(1, sum(mask)) for mask in samples.masks])
    batches = []
    for micro in packed.micro_batches(rows, device, device.rank, device.world_size):
        per_token = spread(share, micro, device)
        old_logp = None if policy is None else logp_of(policy, micro)
        reference_logp = None if reference is None else logp_of(reference, micro)
        batches.append(PolicyBatch(micro, torch.zeros_like(per_token), per_token, old_logp, reference_logp))
    return batches


def spread(per_sample: np.ndarray, rows: PackedBatch, device: Device) -> torch.Tensor:
    """A number of each sample, (S,) or (Q, G), at each of its targets, (N, T); 0 elsewhere."""
    numbers = torch.from_numpy(per_sample).float().flatten()
    if not len(numbers):
        numbers = torch.zeros(1)  # no questions: the batch is one row of padding, which has no sample
    # `source` (N, T) names the sample of each token. Padding has source 0 and no target: it is multiplied by 0.
    return (rows.targets != IGNORE) * device.to_device(numbers)[rows.source]


@torch.no_grad()
def logp_of(model: Any, rows: PackedBatch) -> torch.Tensor:
    """Log probabilities of a micro-batch's targets under a model, without a gradient."""
    return token_logp(model, rows)


def kl_of_samples(parts: Sequence[Samples], minibatches: Sequence[Sequence[PolicyBatch]], device: Device) -> np.ndarray:
    """log p(o) - log p_reference(o) of each sample in nats, (Q, G): its share of the KL to the reference.

    `parts` are the samples of each minibatch. The host waits once, for all of them.
    """
    differences = []
    sources = []
    samples = 0
    for part, batches in zip(parts, minibatches, strict=True):
        for batch in batches:
            assert batch.rows.values is not None and batch.reference_logp is not None
            differences.append((batch.rows.values - batch.reference_logp).flatten())
            sources.append((samples + batch.rows.source).flatten())
        samples += part.rewards.size
    # A sample lies in one row of one rank: added up there, and 0 on the others.
    own = np.bincount(torch.cat(sources).cpu().numpy(), torch.cat(differences).cpu().numpy(), samples)
    totals = sum_over_ranks(device.to_device(torch.from_numpy(own).float()), device)
    return totals.cpu().numpy().reshape(-1, parts[0].rewards.shape[1])


def with_advantages(
    parts: Sequence[Samples], minibatches: Sequence[Sequence[PolicyBatch]], advantages: np.ndarray, device: Device
) -> list[list[PolicyBatch]]:
    """The minibatches with the advantages (Q, G) of their samples; `parts` are the samples of each."""
    done = []
    first = 0
    for part, batches in zip(parts, minibatches, strict=True):
        own = advantages[first : first + len(part.rewards)]
        done.append([replace(batch, advantages=spread(own, batch.rows, device)) for batch in batches])
        first += len(part.rewards)
    return done
