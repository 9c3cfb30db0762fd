"""Packed rows: every sequence once and whole, none attending to another, the same loss as each by itself."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import cpu_device, lively_model, rendered_pairs, tiny_config

from nanochat.alignment.reply_pairs import pair_batches
from nanochat.cross_entropy import IGNORE
from nanochat.losses import masked_loss
from nanochat.packing import pack_sequences


def sequences(count: int, longest: int, seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, 100, rng.integers(2, longest)).tolist() for _ in range(count)]
    return ids, [[0, *rng.integers(0, 2, len(i) - 1).tolist()] for i in ids]


def test_every_sequence_is_there_once_and_whole():
    ids, masks = sequences(40, 25)
    rows = pack_sequences(ids, masks, 32)
    found = {}
    for row in range(len(rows)):
        for number in rows.segments.numbers[row].unique().tolist():
            places = (rows.segments.numbers[row] == number).nonzero().flatten()
            source = set(rows.source[row, places].tolist())
            if (rows.targets[row, places] == IGNORE).all() and rows.inputs[row, places].eq(0).all():
                continue  # padding
            (one,) = source
            assert one not in found
            found[one] = (rows.inputs[row, places].tolist(), rows.targets[row, places].tolist())
    for i, (tokens, mask) in enumerate(zip(ids, masks, strict=True)):
        targets = [t if m else IGNORE for t, m in zip(tokens[1:], mask[1:], strict=True)]
        if any(mask[1:]) or any(tokens[:-1]):
            assert found[i] == (tokens[:-1], targets)
    assert len(rows) <= -(-sum(len(i) - 1 for i in ids) // 32) + 2  # little padding


@pytest.mark.parametrize("pattern", ["L", "SSL"])
def test_packed_and_unpacked_have_the_same_loss_and_gradient(pattern):
    ids, masks = sequences(12, 20)
    model = lively_model(tiny_config(window_pattern=pattern))
    packed = pack_sequences(ids, masks, 32)
    assert len(packed) < len(ids)
    loss, targets = masked_loss(model, packed)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    alone_loss, alone_targets = torch.zeros(()), 0
    for tokens, mask in zip(ids, masks, strict=True):
        one, count = masked_loss(model, pack_sequences([tokens], [mask], 32))
        one.backward()
        alone_loss, alone_targets = alone_loss + one.detach(), alone_targets + count
    assert targets == alone_targets
    torch.testing.assert_close(loss.detach(), alone_loss, rtol=2e-6, atol=0)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=2e-4, atol=2e-5)


def test_micro_batches_deal_out_every_row_once():
    ids, masks = sequences(30, 25)
    rows, device = pack_sequences(ids, masks, 32), cpu_device()
    for world_size in (1, 2, 3):
        shares = [list(rows.micro_batches(4, device, rank, world_size)) for rank in range(world_size)]
        shapes = [[tuple(micro.inputs.shape) for micro in share] for share in shares]
        assert shapes == [shapes[0]] * world_size  # ranks join each other's collectives
        assert all(count <= 4 and places % 4 == 0 for count, places in shapes[0])
        dealt = [row for share in shares for micro in share for row in micro.targets.tolist()]
        dealt = [[*row, *[IGNORE] * (32 - len(row))] for row in dealt]
        empty = [IGNORE] * 32
        assert sorted(row for row in dealt if row != empty) == sorted(
            row for row in rows.targets.tolist() if row != empty
        )
        assert dealt.count(empty) - rows.targets.tolist().count(empty) < world_size  # rows of padding


def documented_step(seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Lengths as a mixture for a model of the web has them: dialogues around 600 tokens, and short questions."""
    rng = np.random.default_rng(seed)
    dialogues = np.minimum(rng.lognormal(np.log(440), 0.8, 23), 2049).astype(int)
    lengths = [*(dialogues + 1), *rng.integers(40, 250, 9)]
    ids = [[1] * min(int(length), 2049) for length in lengths]
    return ids, [[0, *[1] * (len(i) - 1)] for i in ids]


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_a_step_of_sft_is_at_least_seventy_percent_real(world_size):
    """chat_sft's documented flags: 32 conversations, 8 rows a device, a context of 2,048."""
    real = computed = 0
    shapes = set()
    for step in range(8):
        ids, masks = documented_step(step)
        rows = pack_sequences(ids, masks, 2048, world_size)
        targets = 0
        for rank in range(world_size):
            for micro in rows.micro_batches(8, cpu_device(), rank, world_size):
                computed += micro.inputs.numel()
                targets += (micro.targets != IGNORE).sum().item()
                shapes.add(tuple(micro.inputs.shape))
        assert targets == sum(map(sum, masks))
        real += targets
    assert real / computed >= 0.7
    assert len(shapes) <= 20


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_rows_for_several_ranks_have_the_same_loss(world_size):
    ids, masks = sequences(13, 20)
    model = lively_model(tiny_config())
    expected, targets = masked_loss(model, pack_sequences(ids, masks, 32))
    rows = pack_sequences(ids, masks, 32, world_size)
    assert len(rows) % world_size == 0
    micros = [m for rank in range(world_size) for m in rows.micro_batches(2, cpu_device(), rank, world_size)]
    assert sum(masked_loss(model, micro)[1] for micro in micros) == targets
    torch.testing.assert_close(sum(masked_loss(model, micro)[0] for micro in micros), expected, rtol=2e-6, atol=0)


def test_nothing_to_pack_and_what_does_not_fit():
    rows = pack_sequences([], [], 8)
    assert rows.inputs.shape == (1, 8) and (rows.targets == IGNORE).all()
    loss, targets = masked_loss(lively_model(tiny_config()), rows)
    assert loss.item() == 0 and targets.item() == 0
    pack_sequences([list(range(9))], [[1] * 9], 8)  # its last token is only a target
    with pytest.raises(ValueError, match="10 tokens .* 8"):
        pack_sequences([list(range(10))], [[1] * 10], 8)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_both_replies_of_a_pair_are_in_one_micro_batch(world_size):
    ids, masks = sequences(60, 30)
    masks = [[0, *[1] * (len(i) - 1)] for i in ids]
    devices = [replace(cpu_device(), rank=rank, world_size=world_size) for rank in range(world_size)]
    shares = [list(pair_batches(rendered_pairs(ids, masks), 32, 3, device)) for device in devices]
    assert len({len(share) for share in shares}) == 1
    found = []
    for rows, pairs in ((micro.rows, micro.pairs) for share in shares for micro in share):
        assert rows.inputs.shape == (3, 32)
        numbers = rows.source[rows.targets != IGNORE].unique().tolist()
        assert numbers == list(range(2 * pairs)) or not numbers
        for pair in range(pairs if numbers else 0):
            texts = []
            for number in (2 * pair, 2 * pair + 1):
                own = (rows.source == number) & (rows.targets != IGNORE)
                texts.append(rows.inputs[own][:1].tolist() + rows.targets[own].tolist())
                assert own.any(dim=1).sum() == 1 and rows.segments.numbers[own].unique().numel() == 1
            found.append(texts)
    assert sorted(found) == sorted([ids[i], ids[i + 1]] for i in range(0, 60, 2))
    places = sum(len(i) - 1 for i in ids)
    assert sum(len(share) for share in shares) <= places / (3 * 32) * 1.25 + world_size  # little padding


def test_two_long_replies_take_two_rows():
    long = [1] * 33
    (batch,) = pair_batches(rendered_pairs([long, long], [[0, *[1] * 32]] * 2), 32, 2, cpu_device())
    assert batch.pairs == 1 and batch.rows.source.tolist() == [[0] * 32, [1] * 32]
    with pytest.raises(ValueError, match="34 tokens does not fit a row of 32"):
        list(pair_batches(rendered_pairs([long, [*long, 1]], [long, [*long, 1]]), 32, 2, cpu_device()))
