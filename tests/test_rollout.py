"""Samples for RL: what was chosen and what the tool gave, rewards, advantages by hand."""

import time
from typing import Any

import numpy as np
import pytest
import torch
from tiny import cpu_device, lively_model, run_ranks, tiny_config, tiny_tokenizer

from nanochat import rollout
from nanochat.conversation import parse_reply, render_prompt, text_of
from nanochat.cross_entropy import IGNORE
from nanochat.data.packing import pack_sequences
from nanochat.device import Device
from nanochat.engine import Engine, seed_of
from nanochat.tasks.task import Example, Task


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


def questions(count: int, task: Task) -> list[tuple[Task, Example]]:
    return [(task, Example([{"role": "user", "content": "q" * (i % 3 + 1)}, {}], answer=i)) for i in range(count)]


def test_advantages_by_hand():
    rewards = np.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    assert rollout.group_advantages(rewards, by_deviation=False).tolist() == [[0.75, -0.25, -0.25, -0.25], [0] * 4]
    by_deviation = rollout.group_advantages(rewards, by_deviation=True)
    assert by_deviation[0] == pytest.approx(np.array([0.75, -0.25, -0.25, -0.25]) / (0.1875**0.5), rel=1e-5)
    assert by_deviation[1].tolist() == [0] * 4  # equals: nothing to learn, and no NaN


def test_replies_stand_in_the_order_of_their_questions(engine):
    task = Length()
    drawn = rollout.sample_replies(
        engine, questions(5, task), samples=3, max_tokens=12, temperature=1.0, seed=1, rows=4
    )
    assert drawn.rewards.shape == (5, 3) and len(drawn.ids) == 15
    for number, (ids, mask, reply) in enumerate(zip(drawn.ids, drawn.masks, drawn.replies, strict=True)):
        question = engine.tokenizer.decode(ids)
        assert question.startswith(f"<|bos|><|user_start|>{'q' * (number // 3 % 3 + 1)}<|user_end|><|assistant_start|>")
        assert question.endswith(reply) and len(mask) == len(ids)
        text = text_of(parse_reply(engine.tokenizer, [t for t, m in zip(ids, mask, strict=True) if m]))
        assert drawn.rewards.flat[number] == len(text)
    assert sorted(answer for answer, _ in task.seen) == [i // 3 for i in range(15)], "each reply is graded once"
    assert len({tuple(ids) for ids in drawn.ids[:3]}) > 1  # samples differ


def test_the_end_is_learned_and_the_tools_answer_is_not(engine, monkeypatch):
    """A model forced to write a call: the call and the end are chosen, the answer is given."""
    tokenizer = engine.tokenizer
    mark = tokenizer.encode_special
    script = [mark("<|python_start|>"), *tokenizer.encode("2+3"), mark("<|python_end|>")]
    script += [0, 0, 0]  # whatever the model would say while it is given the answer
    script += [*tokenizer.encode("5"), mark("<|assistant_end|>"), 7, 7]
    calls = iter(script)
    monkeypatch.setattr("nanochat.engine.sample", lambda logits, **_: torch.full((len(logits),), next(calls)))
    task = Length()
    drawn = rollout.sample_replies(
        engine, questions(1, task), samples=2, max_tokens=20, temperature=1.0, seed=1, rows=8
    )
    assert drawn.replies[0] == ("<|python_start|>2+3<|python_end|><|output_start|>5<|output_end|>5<|assistant_end|>")
    chosen = [t for t, m in zip(drawn.ids[0], drawn.masks[0], strict=True) if m]
    assert tokenizer.decode(chosen) == "<|python_start|>2+3<|python_end|>5<|assistant_end|>"


def test_a_batch_carries_each_samples_advantage_and_share():
    samples = rollout.Samples([[1, 2, 3, 4], [5, 6, 7]], [[0, 0, 1, 1], [0, 1, 0]], np.zeros((1, 2)), ["", ""])
    rows = pack_sequences(samples.ids, samples.masks, 8)
    batch = rollout.policy_batch(rows, samples, np.array([[2.0, -1.0]]), cpu_device())
    of = {(s, t): (a, w) for s, t, a, w in zip(
        rows.source.flatten().tolist(), rows.targets.flatten().tolist(),
        batch.advantages.flatten().tolist(), batch.sample_share.flatten().tolist(), strict=True,
    ) if t != IGNORE}  # fmt: skip
    assert of == {(0, 3): (2.0, 0.5), (0, 4): (2.0, 0.5), (1, 6): (-1.0, 1.0)}
    assert batch.sample_share.sum() == 2  # one a sample


def drawn_on_a_rank(device: Device, rows: int) -> dict[str, Any]:
    drawn = rollout.sample_replies(
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
        made, _ = engine.generate([prompt], max_tokens=12, seed=[seed_of(7, question, sample)], keep_stop=True)
        assert prompt + made[0] == ids


def test_every_reply_is_in_one_batch():
    for count, ranks, most in ((0, 2, 4), (1, 4, 8), (15, 2, 256), (16, 3, 2), (100, 8, 5), (600, 2, 256)):
        batches = rollout.dealt(count, ranks, most)
        assert sorted(place for batch in batches for place in batch) == list(range(count))
        assert all(1 <= len(batch) <= most for batch in batches)
        for first in range(0, len(batches), ranks):  # those at one time differ by one row at most, and lie together
            together = [len(batch) for batch in batches[first : first + ranks]]
            assert max(together) - min(together) <= 1
    assert [list(batch) for batch in rollout.dealt(7, 2, 2)] == [[0, 2], [1, 3], [4, 6], [5]]


def time_of(lengths: np.ndarray, fixed: int) -> int:
    """Of a batch, in units of what a row costs: each token costs `fixed` and the rows that are still in the batch, of
    which the engine lets go when half of them have ended."""
    rows, time = len(lengths), 0
    for made in range(1, lengths.max() + 1):
        time += fixed + rows
        running = int((lengths > made).sum())
        rows = running if 2 * running <= rows else rows
    return time


def sampled_in(lengths: np.ndarray, batches: list[range], ranks: int, fixed: int) -> tuple[float, float]:
    """Time until the last rank is done, each taking the next batch when it is free; and the share that ranks idle."""
    busy = np.zeros(ranks)
    for batch in batches:
        busy[busy.argmin()] += time_of(lengths[np.array(batch)], fixed)
    return busy.max(), 1 - busy.mean() / busy.max()


@pytest.mark.parametrize("fixed", [8, 32, 128])  # rows that cost as much as launching a token: a CPU, an accelerator
def test_dealing_keeps_ranks_busy_and_cutting_does_not_pay(fixed):
    """16 questions, 16 replies to each of heavy-tailed lengths, some questions' longer than others', on 8 ranks."""
    ranks, count = 8, 256
    ways = {
        "a batch a rank": [range(first, first + 32) for first in range(0, count, 32)],
        "four batches a rank": [range(first, first + 8) for first in range(0, count, 8)],
        "dealt": rollout.dealt(count, ranks, 256),
    }
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for trial in range(10):
        source = np.random.default_rng(trial)
        mean = source.lognormal(np.log(60), 0.8, (16, 1))
        lengths = source.lognormal(np.log(mean), 0.6, (16, 16)).clip(4, 256).astype(int).flatten()
        for way, batches in ways.items():
            found[way].append(sampled_in(lengths, batches, ranks, fixed))
    time, idle = ({way: float(np.mean([one[i] for one in found[way]])) for way in ways} for i in (0, 1))
    print({way: (round(time[way] / time["a batch a rank"], 2), round(idle[way], 2)) for way in ways})
    assert idle["dealt"] < 0.1 and idle["dealt"] < idle["a batch a rank"] / 3
    assert time["dealt"] < 0.97 * time["a batch a rank"] < time["four batches a rank"]


def test_no_question_is_no_sample(engine):
    drawn = rollout.sample_replies(engine, [], samples=3, max_tokens=5, temperature=1.0, seed=0, rows=4)
    assert drawn.rewards.size == 0 and drawn.ids == []
    rows = pack_sequences(drawn.ids, drawn.masks, 8)
    assert (rows.targets == IGNORE).all()
    batch = rollout.policy_batch(rows, drawn, rollout.group_advantages(drawn.rewards, by_deviation=True), cpu_device())
    assert batch.advantages.abs().sum() == batch.sample_share.sum() == 0


def sampled_on_a_rank(device: Device) -> dict[str, Any]:
    """Twice, in batches of one question; rank 0 is slow the first time, rank 1 the second time."""
    engine, drawn, batches = make_engine(device), [], []
    generate = engine.generate
    for slow in (0, 1):
        mine = []

        def slowly(prompts: list[list[int]], slow: int = slow, mine: list[int] = mine, **settings: Any) -> Any:
            mine.append(len(prompts))
            time.sleep(0.3 if device.rank == slow else 0.01)
            return generate(prompts, **settings)

        engine.generate = slowly
        own = rollout.sample_replies(
            engine, questions(10, Length()), samples=2, max_tokens=8, temperature=1.0, seed=slow, rows=2
        )
        drawn.append((own.ids, own.masks, own.replies, own.rewards.tolist()))
        batches.append(len(mine))
    return {"drawn": drawn, "batches": batches}


@pytest.mark.slow
def test_whoever_is_free_samples_the_next_batch_and_all_ranks_have_all_samples() -> None:
    ranks = run_ranks(sampled_on_a_rank)
    alone = sampled_on_a_rank(cpu_device())
    assert alone["batches"] == [10, 10]
    for rank in ranks:
        assert rank["drawn"] == alone["drawn"]
    for slow in (0, 1):
        assert sum(rank["batches"][slow] for rank in ranks) == 10, "each batch is one rank's"
        assert ranks[slow]["batches"][slow] <= 3, "the slow one leaves the work to the other"
