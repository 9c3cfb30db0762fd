"""Samples for RL: what was chosen and what the tool gave, rewards, advantages by hand."""

import time
from typing import Any

import numpy as np
import pytest
import torch
from tiny import cpu_device, lively_model, run_ranks, tiny_config, tiny_tokenizer

from nanochat import rollout
from nanochat.conversation import parse_reply, text_of
from nanochat.cross_entropy import IGNORE
from nanochat.device import Device
from nanochat.engine import Engine
from nanochat.packing import pack
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
    rows = pack(samples.ids, samples.masks, 8)
    batch = rollout.policy_batch(rows, samples, np.array([[2.0, -1.0]]), cpu_device())
    of = {(s, t): (a, w) for s, t, a, w in zip(
        rows.source.flatten().tolist(), rows.targets.flatten().tolist(),
        batch.advantages.flatten().tolist(), batch.sample_share.flatten().tolist(), strict=True,
    ) if t != IGNORE}  # fmt: skip
    assert of == {(0, 3): (2.0, 0.5), (0, 4): (2.0, 0.5), (1, 6): (-1.0, 1.0)}
    assert batch.sample_share.sum() == 2  # one a sample


def test_no_question_is_no_sample(engine):
    drawn = rollout.sample_replies(engine, [], samples=3, max_tokens=5, temperature=1.0, seed=0, rows=4)
    assert drawn.rewards.size == 0 and drawn.ids == []
    rows = pack(drawn.ids, drawn.masks, 8)
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


def test_whoever_is_free_samples_the_next_batch_and_all_ranks_have_all_samples() -> None:
    ranks = run_ranks(sampled_on_a_rank)
    alone = sampled_on_a_rank(cpu_device())
    assert alone["batches"] == [10, 10]
    for rank in ranks:
        assert rank["drawn"] == alone["drawn"]
    for slow in (0, 1):
        assert sum(rank["batches"][slow] for rank in ranks) == 10, "each batch is one rank's"
        assert ranks[slow]["batches"][slow] <= 3, "the slow one leaves the work to the other"
