"""Samples for RL: what was chosen and what the tool gave, rewards, advantages by hand."""

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from tiny import all_losses, complaint, cpu_device, lively_model, run_ranks, tiny_config, tiny_tokenizer

from nanochat import rollout
from nanochat.alignment.advantages import kl_of_samples
from nanochat.alignment.dapo import replace_questions
from nanochat.conversation import Message, parse_reply, render_prompt, text_of
from nanochat.cross_entropy import IGNORE
from nanochat.device import Device
from nanochat.engine import Engine, SamplingParams
from nanochat.ground.cli import Failed
from nanochat.losses import token_logp
from nanochat.packing import pack_sequences
from nanochat.rollout import Sample, Samples, policy_batches, with_advantages
from nanochat.sampling import seed_of
from nanochat.task import Environment, Example, Step, Task, opening_of


class Length(Task):
    """Rewards the length of a reply."""

    name, kind = "length", "generative"

    def __init__(self):
        self.seen = []

    def reward(self, example, reply) -> float:
        self.seen.append((example.answer, text_of(reply)))
        return float(len(text_of(reply)))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine(cpu_device())


def make_engine(device: Device) -> Engine:
    tokenizer = tiny_tokenizer()
    model = lively_model(tiny_config(vocab_size=tokenizer.vocab_size, sequence_len=64))
    return Engine(model, tokenizer, device)


def sample_episodes(engine: Engine, asked: list[tuple[Task, Example]], *, rows: int, **settings: Any) -> Samples:
    sampler = rollout.EngineSampler(engine, rows)
    return tiny.sample_episodes(sampler, engine.tokenizer, engine.device, asked, context=64, **settings)


def questions(count: int, task: Task) -> list[tuple[Task, Example]]:
    return [(task, Example([{"role": "user", "content": "q" * (i % 3 + 1)}, {}], answer=i)) for i in range(count)]


def test_replies_stand_in_the_order_of_their_questions(engine):
    task = Length()
    drawn = sample_episodes(engine, questions(5, task), samples=3, max_tokens=12, temperature=1.0, seed=1, rows=4)
    assert drawn.rewards.shape == (5, 3) and len([*drawn]) == 15
    graded = []
    for number, (ids, mask) in enumerate((sample.tokens, sample.mask) for sample in drawn):
        question = engine.tokenizer.decode(ids)
        assert question.startswith(f"<|bos|><|user_start|>{'q' * (number // 3 % 3 + 1)}<|user_end|><|assistant_start|>")
        assert len(mask) == len(ids)
        text = text_of(parse_reply(engine.tokenizer, [t for t, m in zip(ids, mask, strict=True) if m]))
        broken = mask[-1] == 1 and ids[-1] in engine.stop_ids - {engine.tokenizer.reply_ends[0]}
        assert drawn.rewards.flat[number] == (0 if broken else len(text))
        graded += [] if broken else [number // 3]
    assert sorted(answer for answer, _ in task.seen) == graded, "each reply that is not broken is graded once"
    assert 5 < len(graded) < 15
    assert len({tuple(sample.tokens) for sample in drawn.groups[0]}) > 1  # samples differ


def numbered(rewards: list[list[float]], first: int = 0) -> Samples:
    """Episodes of one token, which is their number."""
    groups: list[list[Sample]] = []
    for question, group in enumerate(rewards):
        numbers = [first + question * len(group) + place for place in range(len(group))]
        groups.append([
            Sample(question, place, [number], [1], [0.0], "complete", longest=number, reward=reward)
            for place, (number, reward) in enumerate(zip(numbers, group, strict=True))
        ])  # fmt: skip
    return Samples(groups, len(rewards[0]))


def tokens_of(samples: Samples) -> list[list[int]]:
    return [sample.tokens for sample in samples]


def test_questions_without_a_signal_are_replaced():
    samples = numbered([[1, 1], [0, 1], [0, 0], [0, 0]])
    assert samples.without_signal == 3
    assert samples.metrics() == {
        "reward": 3 / 8, "pass_at_k": 0.5, "no_signal": 0.75, "response_tokens": 1.0, "truncated": 0.0
    }  # fmt: skip
    filled = replace_questions(samples, numbered([[0, 0], [1, 0], [0.5, 1]], first=10))
    assert filled.rewards.tolist() == [[1, 0], [0, 1], [0.5, 1], [0, 0]], "the first two that have one"
    assert tokens_of(filled) == [[12], [13], [2], [3], [14], [15], [6], [7]]
    assert [sample.longest for sample in filled.groups[2]] == [14, 15]
    assert replace_questions(filled, numbered([[1, 1]])).rewards.tolist() == filled.rewards.tolist()


def test_minibatches_hold_whole_questions():
    samples = numbered([[0, 1], [2, 3], [4, 5]])
    assert [tokens_of(part) for part in samples.split(2)] == [[[0], [1]], [[2], [3], [4], [5]]]
    assert [part.rewards.tolist() for part in samples.split(2)] == [[[0, 1]], [[2, 3], [4, 5]]]
    assert sorted(len([*part]) for part in samples.split(4)) == [0, 2, 2, 2]


def test_a_batch_carries_each_samples_advantage_and_share():
    samples = Samples([[
        Sample(0, 0, [1, 2, 3, 4], [0, 0, 1, 1], [0, 0, -1.0, -2.0], "complete", 2),
        Sample(0, 1, [5, 6, 7], [0, 1, 0], [0, -4.0, 0], "complete", 1),
    ]], 2)  # fmt: skip
    device = cpu_device()
    minibatches = [policy_batches(samples, (4, 8), device)]
    ((batch,),) = with_advantages([samples], minibatches, np.array([[2.0, -1.0]]), device)
    rows = batch.rows
    fields = (rows.source, rows.targets, batch.advantages, batch.sample_share, rows.values)
    numbers = zip(*(field.flatten().tolist() for field in fields), strict=True)
    of = {(s, t): more for s, t, *more in numbers if t != IGNORE}
    assert of == {(0, 3): [2.0, 0.5, -1.0], (0, 4): [2.0, 0.5, -2.0], (1, 6): [-1.0, 1.0, -4.0]}
    assert batch.sample_share.sum() == 2  # one a sample
    # What the reference thinks of the samples, summed up; minibatches are one after the other.
    batch = replace(batch, old_logp=rows.values, reference_logp=torch.where(rows.targets != IGNORE, -1.5, 0.0))
    assert kl_of_samples([[batch], [batch]], [2, 2], device).tolist() == [0.0, -2.5, 0.0, -2.5]


def drawn_on_a_rank(device: Device, rows: int) -> dict[str, Any]:
    drawn = sample_episodes(
        make_engine(device), questions(5, Length()), samples=3, max_tokens=12, temperature=1.0, seed=7, rows=rows
    )
    masks = [sample.mask for sample in drawn]
    return {"ids": tokens_of(drawn), "masks": masks, "rewards": drawn.rewards.tolist()}


@pytest.mark.slow
def test_any_number_of_ranks_samples_the_same():
    alone = drawn_on_a_rank(cpu_device(), 256)
    assert run_ranks(drawn_on_a_rank, 256, world_size=3) == [alone] * 3


def test_rows_at_once_change_no_sample_and_neighbours_do_not(engine):
    """Each reply is what it is by itself, with the seed of its question and its number."""
    alone = drawn_on_a_rank(cpu_device(), 256)
    for rows in (2, 7):
        assert drawn_on_a_rank(cpu_device(), rows) == alone
    for number, ids in enumerate(alone["ids"]):
        question, sample = divmod(number, 3)
        prompt = render_prompt(engine.tokenizer, questions(5, Length())[question][1].question)
        sampling = SamplingParams(seed=seed_of(7, question, sample))
        made, _ = engine.generate([prompt], max_tokens=12, sampling=sampling, keep_stop=True)
        assert prompt + made[0] == ids


def test_no_question_is_no_sample(engine):
    drawn = sample_episodes(engine, [], samples=3, max_tokens=5, temperature=1.0, seed=0, rows=4)
    assert drawn.rewards.size == 0 and tokens_of(drawn) == []
    (batch,) = policy_batches(drawn, (4, 8), cpu_device())
    assert (batch.rows.targets == IGNORE).all() and batch.sample_share.sum() == 0
    for method in all_losses("policy losses").values():
        advantages = method.advantages(drawn.rewards)
        ((batch,),) = with_advantages([drawn], [[batch]], advantages, cpu_device())
        assert batch.advantages.abs().sum() == 0
    assert drawn.metrics()["pass_at_k"] == drawn.without_signal == 0


# ---------------------------------------------------------------------- episodes of several turns


class Echo(Environment):
    """Repeats what the model has written, three times, and rewards each reply by the number of its turn."""

    def __init__(self, example: Example):
        self.question = example.question
        self.turn = 0

    def start(self) -> list[Message]:
        return self.question

    def step(self, reply) -> Step:
        self.turn += 1
        if self.turn == 3:
            return Step(reward=3.0)
        return Step([{"role": "user", "content": f"you said {text_of(reply)}"}], reward=float(self.turn))


class Echoing(Length):
    def environment(self, example: Example) -> Environment:
        return Echo(example)


def test_an_episode_is_the_tokens_that_were_sampled(engine):
    """Replies whose text would be encoded otherwise, one complete and one cut off; then one that the engine stops."""
    tokenizer = engine.tokenizer
    end = tokenizer.encode_special("<|assistant_end|>")
    odd = [*tokenizer.encode("a"), *tokenizer.encode("b"), *tokenizer.encode("a")]
    seeds = []

    def sampler(prompts, settings, max_tokens):
        turn = len(seeds)
        seeds.append([one.seed for one in settings])
        assert [prompt[-1] for prompt in prompts] == [tokenizer.encode_special("<|assistant_start|>")] * len(prompts)
        reply = [
            rollout.Reply([*odd, end], [1] * 4, [-1.0] * 4, "complete"),
            rollout.Reply(odd, [1] * 3, [-2.0] * 3, "cut off"),
            rollout.Reply([tokenizer.get_bos_token_id()], [1], [-3.0], "broken"),
        ][turn]
        return [replace(reply, tokens=list(reply.tokens)) for _ in prompts]

    settings = {"samples": 2, "max_tokens": 9, "seed": 1}
    drawn = tiny.sample_episodes(sampler, tokenizer, engine.device, questions(1, Echoing()), context=100, **settings)
    said = "<|user_start|>you said aba<|user_end|><|assistant_start|>"
    text = f"<|user_start|>q<|user_end|><|assistant_start|>aba<|assistant_end|>{said}aba<|assistant_end|>{said}<|bos|>"
    first = drawn.groups[0][0]
    assert tokenizer.decode(first.tokens) == "<|bos|>" + text
    chosen = [t for t, m in zip(first.tokens, first.mask, strict=True) if m]
    assert chosen == [*odd, end, *odd, tokenizer.get_bos_token_id()], "not the end that a cut-off reply had to be given"
    logprobs = [*zip(first.logprobs, first.mask, strict=True)]
    assert [logprob for logprob, m in logprobs if m] == [-1.0] * 4 + [-2.0] * 3 + [-3.0]
    assert {logprob for logprob, m in logprobs if not m} == {0.0}
    assert drawn.rewards.tolist() == [[3.0, 3.0]], "of turns 1 and 2; the broken reply is worth nothing"
    assert [sample.ending for sample in drawn] == ["broken"] * 2 and len({seed for turn in seeds for seed in turn}) == 6
    # Where the context has no room for what the environment says, the episode ends.
    seeds.clear()
    short = tiny.sample_episodes(sampler, tokenizer, engine.device, questions(1, Echoing()), context=20, **settings)
    assert [sample.ending for sample in short] == ["cut off"] * 2 and short.rewards.tolist() == [[1.0, 1.0]]
    tokens = short.groups[0][0].tokens
    assert tokens == first.tokens[: len(tokens)] and tokens[-1] == end


def test_words_at_the_prompts_end_are_continued(engine):
    """As in TRL: they are a part of the first reply for rewards and in the conversation, and are not learned."""
    tokenizer = engine.tokenizer
    end = tokenizer.encode_special("<|assistant_end|>")
    prompts_read = []

    def sampler(prompts, settings, max_tokens):
        prompts_read.extend(tokenizer.decode(prompt) for prompt in prompts)
        return [rollout.Reply([*tokenizer.encode("b"), end], [1, 1], [-1.0] * 2, "complete") for _ in prompts]

    begun = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Let me think"}]
    task = Echoing()
    asked: list[tuple[Task, Example]] = [(task, Example([*begun, {}], answer=0))]
    settings = {"samples": 1, "max_tokens": 9, "context": 200, "seed": 1}
    (episode,) = rollout.play(sampler, tokenizer, engine.device, asked, **settings)
    opening = "<|bos|><|user_start|>q<|user_end|><|assistant_start|>Let me think"
    assert prompts_read[0] == opening
    assert prompts_read[1].startswith(f"{opening}b<|assistant_end|><|user_start|>you said Let me thinkb<|user_end|>")
    assert prompts_read[2].count("Let me think") == 2 and sum(episode.sample.mask) == 6
    said = [(message["role"], text_of(message["content"])) for message in episode.messages]
    assert said[:3] == [("user", "q"), ("assistant", "Let me thinkb"), ("user", "you said Let me thinkb")]
    assert said[3] == ("assistant", "b") and len(said) == 6
    # The log probabilities belong to the continued text.
    drawn = sample_episodes(engine, asked, samples=2, max_tokens=8, temperature=0.7, seed=3, rows=4)
    rows = pack_sequences(tokens_of(drawn), [sample.mask for sample in drawn], 64)
    logp = token_logp(lively_model(engine.model.config), rows, 0.7)
    values = [value for sample in drawn for value, m in zip(sample.logprobs, sample.mask, strict=True) if m]
    assert sorted(logp[rows.targets != IGNORE].tolist()) == pytest.approx(sorted(values), abs=1e-5)


class Odd(Length):
    """Its environment, or its own reward, returns this."""

    def __init__(self, step: Any, reward: Any = 0.0):
        self.step = step
        self.odd = reward

    def environment(self, example: Example) -> Environment:
        if self.step is None:
            return super().environment(example)
        game = {"start": lambda _: example.question, "step": lambda *_: self.step}
        return type("Game", (Environment,), game)(random.Random(0))

    def reward(self, example, reply) -> Any:
        return self.odd


NOT_REWARDS = [math.nan, math.inf, -math.inf, 1e10, "1", None, [1.0], np.zeros(2), torch.ones(2), 1j]
# What an environment or a task returns, and what the line must name.
MISTAKES: list[tuple[Task, str]] = [
    *((Odd(Step(reward=value)), "reward of length") for value in NOT_REWARDS),
    *((Odd(None, value), "reward of length") for value in (math.nan, "1", None)),
    (Odd(0.5), r"environment of length .* 0\.5"),
    (Odd([]), r"environment of length .* \[\]"),
    (Odd(Step("higher")), "environment of length .* 'higher'"),  # pyright: ignore[reportArgumentType]
    (Odd(Step(["higher"])), "environment of length.* message 0"),  # pyright: ignore[reportArgumentType]
    (Odd(Step([{"role": "guide", "content": "higher"}])), "environment of length.* message 0 .*'guide'"),
    (Odd(Step([{"role": "user", "content": 3}])), "environment of length.* message 0 .*3"),  # pyright: ignore
]


@pytest.mark.parametrize(("task", "words"), MISTAKES)
def test_what_is_not_a_reward_or_a_step_is_one_line_that_names_its_source(engine, task, words):
    with pytest.raises(Failed, match=words) as caught:
        sample_episodes(engine, questions(2, task), rows=4, samples=2, max_tokens=4, seed=1)
    assert "\n" not in str(caught.value)


NUMBERS = [(1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (np.ones(1), 1.0), (torch.tensor(0.25), 0.25)]


@pytest.mark.parametrize(("value", "number"), NUMBERS, ids=repr)
def test_numbers_of_any_library_are_rewards(engine, value, number):
    task = Odd(Step(reward=value))
    drawn = sample_episodes(engine, questions(2, task), rows=4, samples=2, max_tokens=4, seed=1)
    assert {sample.reward for sample in drawn} <= {0.0, number} and number in {sample.reward for sample in drawn}
    assert all(type(sample.reward) is float for sample in drawn)


@pytest.mark.parametrize("messages", [5, None, [], "hello", ["hello"], [{"role": "guide", "content": "x"}]], ids=repr)
def test_what_is_not_an_opening_is_one_line_that_names_its_environment(messages):
    environment = type("Game", (Environment,), {"start": lambda _: messages})(random.Random(0))
    assert "environment of game" in complaint(lambda: opening_of(environment, "game"))
