"""Samples for RL: what was chosen and what the tool gave, rewards, advantages by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import cpu_device, lively_model, run_ranks, tiny_config, tiny_tokenizer

from nanochat import rollout
from nanochat.conversation import Message, parse_reply, render_prompt, text_of
from nanochat.cross_entropy import IGNORE
from nanochat.device import Device
from nanochat.engine import Engine, SamplingParams
from nanochat.environment import Environment, Step
from nanochat.losses import POLICY_LOSSES
from nanochat.packing import pack_sequences
from nanochat.sampling import seed_of
from nanochat.task import Example, Task


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


def sample_episodes(
    engine: Engine, asked: list[tuple[Task, Example]], *, rows: int, **settings: Any
) -> rollout.Samples:
    sampler = rollout.engine_sampler(engine, rows)
    return rollout.sample_episodes(sampler, engine.tokenizer, engine.device, asked, context=64, **settings)


def questions(count: int, task: Task) -> list[tuple[Task, Example]]:
    return [(task, Example([{"role": "user", "content": "q" * (i % 3 + 1)}, {}], answer=i)) for i in range(count)]


def test_replies_stand_in_the_order_of_their_questions(engine):
    task = Length()
    drawn = sample_episodes(engine, questions(5, task), samples=3, max_tokens=12, temperature=1.0, seed=1, rows=4)
    assert drawn.rewards.shape == (5, 3) and len(drawn.ids) == 15
    graded = []
    for number, (ids, mask) in enumerate(zip(drawn.ids, drawn.masks, strict=True)):
        question = engine.tokenizer.decode(ids)
        assert question.startswith(f"<|bos|><|user_start|>{'q' * (number // 3 % 3 + 1)}<|user_end|><|assistant_start|>")
        assert len(mask) == len(ids)
        text = text_of(parse_reply(engine.tokenizer, [t for t, m in zip(ids, mask, strict=True) if m]))
        broken = mask[-1] == 1 and ids[-1] in engine.stop_ids - {engine.reply_end}
        assert drawn.rewards.flat[number] == (0 if broken else len(text))
        graded += [] if broken else [number // 3]
    assert sorted(answer for answer, _ in task.seen) == graded, "each reply that is not broken is graded once"
    assert 5 < len(graded) < 15
    assert len({tuple(ids) for ids in drawn.ids[:3]}) > 1  # samples differ


def test_the_end_is_learned_and_the_tools_answer_is_not(engine, monkeypatch):
    """A model forced to write a call: the call and the end are chosen, the answer is given."""
    tokenizer = engine.tokenizer
    mark = tokenizer.encode_special
    script = [mark("<|python_start|>"), *tokenizer.encode("2+3"), mark("<|python_end|>")]
    script += [0, 0, 0]  # whatever the model would say while it is given the answer
    script += [*tokenizer.encode("5"), mark("<|assistant_end|>"), 7, 7]
    calls = iter(script)
    monkeypatch.setattr("nanochat.engine.sample", lambda logits, *_: torch.full((len(logits),), next(calls)))
    task = Length()
    drawn = sample_episodes(engine, questions(1, task), samples=2, max_tokens=20, temperature=1.0, seed=1, rows=8)
    reply = "<|python_start|>2+3<|python_end|><|output_start|>5<|output_end|>5<|assistant_end|>"
    assert tokenizer.decode(drawn.ids[0]).endswith(reply)
    chosen = [t for t, m in zip(drawn.ids[0], drawn.masks[0], strict=True) if m]
    assert tokenizer.decode(chosen) == "<|python_start|>2+3<|python_end|>5<|assistant_end|>"


@pytest.mark.parametrize(("last", "reward"), [("<|assistant_end|>", 2.0), ("<|user_start|>", 0.0), ("<|bos|>", 0.0)])
def test_only_the_assistants_end_is_an_end(engine, monkeypatch, last, reward):
    """The engine stops at any special token, and RL must not teach the model to write it."""
    script = iter([*engine.tokenizer.encode("ab"), engine.tokenizer.encode_special(last)])
    monkeypatch.setattr("nanochat.engine.sample", lambda logits, *_: torch.full((len(logits),), next(script)))
    drawn = sample_episodes(engine, questions(1, Length()), samples=2, max_tokens=20, temperature=1.0, seed=1, rows=8)
    assert drawn.rewards.tolist() == [[reward] * 2]


def numbered(rewards: list[list[float]], first: int = 0) -> rollout.Samples:
    """Episodes of one token, which is their number."""
    count = sum(map(len, rewards))
    ids = [[first + n] for n in range(count)]
    whole: list[Any] = ["complete"] * count
    numbers = np.arange(first, first + count).reshape(len(rewards), -1)
    return rollout.Samples(ids, [[1]] * count, [[0.0]] * count, whole, numbers, np.array(rewards))


def test_questions_without_a_signal_are_replaced():
    samples = numbered([[1, 1], [0, 1], [0, 0], [0, 0]])
    assert samples.without_signal == 3
    assert samples.metrics() == {
        "reward": 3 / 8, "pass_at_k": 0.5, "no_signal": 0.75, "response_tokens": 1.0, "truncated": 0.0
    }  # fmt: skip
    filled = samples.refill(numbered([[0, 0], [1, 0], [0.5, 1]], first=10))
    assert filled.rewards.tolist() == [[1, 0], [0, 1], [0.5, 1], [0, 0]], "the first two that have one"
    assert filled.ids == [[12], [13], [2], [3], [14], [15], [6], [7]] and filled.longest[2].tolist() == [14, 15]
    assert filled.refill(numbered([[1, 1]])).rewards.tolist() == filled.rewards.tolist()


def test_parts_hold_whole_questions():
    samples = numbered([[0, 1], [2, 3], [4, 5]])
    assert [part.ids for part in samples.split(2)] == [[[0], [1]], [[2], [3], [4], [5]]]
    assert [part.rewards.tolist() for part in samples.split(2)] == [[[0, 1]], [[2, 3], [4, 5]]]
    assert sorted(len(part.ids) for part in samples.split(4)) == [0, 2, 2, 2]


def test_a_batch_carries_each_samples_advantage_and_share():
    samples = rollout.Samples(
        [[1, 2, 3, 4], [5, 6, 7]], [[0, 0, 1, 1], [0, 1, 0]], [[0, 0, -1.0, -2.0], [0, -4.0, 0]], ["complete"] * 2,
        np.array([[2, 1]]), np.zeros((1, 2)),
    )  # fmt: skip
    device = cpu_device()
    minibatches = [rollout.policy_batches(samples, (4, 8), device)]
    ((batch,),) = rollout.with_advantages([samples], minibatches, np.array([[2.0, -1.0]]), device)
    rows = batch.rows
    fields = (rows.source, rows.targets, batch.advantages, batch.sample_share, rows.values)
    numbers = zip(*(field.flatten().tolist() for field in fields), strict=True)
    of = {(s, t): more for s, t, *more in numbers if t != IGNORE}
    assert of == {(0, 3): [2.0, 0.5, -1.0], (0, 4): [2.0, 0.5, -2.0], (1, 6): [-1.0, 1.0, -4.0]}
    assert batch.sample_share.sum() == 2  # one a sample
    # What the reference thinks of the samples, summed up; parts are one after the other.
    batch = replace(batch, reference_logp=torch.where(rows.targets != IGNORE, -1.5, 0.0))
    kl = rollout.kl_of_samples([samples, samples], [[batch], [batch]], device)
    assert kl.tolist() == [[0.0, -2.5], [0.0, -2.5]]


def drawn_on_a_rank(device: Device, rows: int) -> dict[str, Any]:
    drawn = sample_episodes(
        make_engine(device), questions(5, Length()), samples=3, max_tokens=12, temperature=1.0, seed=7, rows=rows
    )
    return {"ids": drawn.ids, "masks": drawn.masks, "rewards": drawn.rewards.tolist()}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_ranks_samples_the_same(ranks):
    alone = drawn_on_a_rank(cpu_device(), 256)
    assert run_ranks(drawn_on_a_rank, 256, world_size=ranks) == [alone] * ranks


def test_rows_at_once_change_no_sample_and_neighbours_do_not(engine):
    """Each reply is what it is by itself, with the seed of its question and its number."""
    alone = drawn_on_a_rank(cpu_device(), 256)
    for rows in (1, 2, 7):
        assert drawn_on_a_rank(cpu_device(), rows) == alone
    for number, ids in enumerate(alone["ids"]):
        question, sample = divmod(number, 3)
        prompt = render_prompt(engine.tokenizer, questions(5, Length())[question][1].question)
        sampling = SamplingParams(seed=seed_of(7, question, sample))
        made, _ = engine.generate([prompt], max_tokens=12, sampling=sampling, keep_stop=True)
        assert prompt + made[0] == ids


def test_no_question_is_no_sample(engine):
    drawn = sample_episodes(engine, [], samples=3, max_tokens=5, temperature=1.0, seed=0, rows=4)
    assert drawn.rewards.size == 0 and drawn.ids == []
    (batch,) = rollout.policy_batches(drawn, (4, 8), cpu_device())
    assert (batch.rows.targets == IGNORE).all() and batch.sample_share.sum() == 0
    for method in POLICY_LOSSES.values():
        if method.advantages is not None:
            advantages = method.advantages(drawn.rewards)
            ((batch,),) = rollout.with_advantages([drawn], [[batch]], advantages, cpu_device())
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
    drawn = rollout.sample_episodes(sampler, tokenizer, engine.device, questions(1, Echoing()), context=100, **settings)
    said = "<|user_start|>you said aba<|user_end|><|assistant_start|>"
    text = f"<|user_start|>q<|user_end|><|assistant_start|>aba<|assistant_end|>{said}aba<|assistant_end|>{said}<|bos|>"
    assert tokenizer.decode(drawn.ids[0]) == "<|bos|>" + text
    chosen = [t for t, m in zip(drawn.ids[0], drawn.masks[0], strict=True) if m]
    assert chosen == [*odd, end, *odd, tokenizer.get_bos_token_id()], "not the end that a cut-off reply had to be given"
    assert [logp for logp, m in zip(drawn.logp[0], drawn.masks[0], strict=True) if m] == [-1.0] * 4 + [-2.0] * 3 + [
        -3.0
    ]
    assert {logp for logp, m in zip(drawn.logp[0], drawn.masks[0], strict=True) if not m} == {0.0}
    assert drawn.rewards.tolist() == [[3.0, 3.0]], "of turns 1 and 2; the broken reply is worth nothing"
    assert drawn.endings == ["broken"] * 2 and len({seed for turn in seeds for seed in turn}) == 6
    # Where the context has no room for what the environment says, the episode ends.
    seeds.clear()
    short = rollout.sample_episodes(sampler, tokenizer, engine.device, questions(1, Echoing()), context=20, **settings)
    assert short.endings == ["cut off"] * 2 and short.rewards.tolist() == [[1.0, 1.0]]
    assert short.ids[0] == drawn.ids[0][: len(short.ids[0])] and short.ids[0][-1] == end


def test_sampler_and_trainer_agree(engine):
    """The log probabilities of the samples, with a cache and token by token, are those of training in packed rows."""
    drawn = sample_episodes(engine, questions(3, Echoing()), samples=2, max_tokens=8, temperature=0.7, seed=3, rows=4)
    assert max(ids.count(engine.tokenizer.encode_special("<|assistant_start|>")) for ids in drawn.ids) > 1
    rows = pack_sequences(drawn.ids, drawn.masks, 64)
    logp = rollout.logp_of(lively_model(engine.model.config), rows)  # the engine's own is packed
    for sample, (values, mask) in enumerate(zip(drawn.logp, drawn.masks, strict=True)):
        own = logp[(rows.source == sample) & (rows.targets != IGNORE)]
        expected = [value for value, m in zip(values, mask, strict=True) if m]
        assert own.tolist() == pytest.approx(expected, abs=1e-5)
