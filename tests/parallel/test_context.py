"""Ranks that share rows: documents, the comparison with a sampler, and what a rank keeps and sends.

That such ranks learn as one process is promise T8.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import call, losses
from test_parallel import Collectives, Stats, make_run
from test_scripts import TINY, base, tokenizer, trained_tokenizer  # noqa: F401 (fixtures)
from test_train import make_batch, numbers
from tiny import Kept, complaint, cpu_device, lively_model, run_command, run_ranks, tiny_config
from torch import Tensor

from nanochat.attention import Segments
from nanochat.device import Device
from nanochat.gpt import GPT, GPTConfig
from nanochat.kernels.gradients import WrittenKernels
from nanochat.packing import PackedBatch, pack_sequences
from nanochat.parallel.context import RowGroup, SharedRows
from nanochat.ranks import Layout, lay_out
from nanochat.rollout import Sample
from nanochat.samplers.agreement import measure
from nanochat.train import next_token_loss, train_step

slow = pytest.mark.slow
# Windows, documents, grouped heads, value embeddings and recomputed activations together.
PACKED = tiny_config(sequence_len=16, lookback_heads=2)
LONG = tiny_config(sequence_len=256, window_pattern="L")


def sharing(device: Device, ranks: int) -> Device:
    return replace(device, context_ranks=ranks)


# ---------------------------------------------------------------------- what a rank learns


def packed_steps(device: Device, how: Any, count: int) -> Stats:
    """Steps over rows of documents, within windows, with recomputed activations."""
    run = make_run(device, how, config=PACKED, recompute=True)
    stats = []
    for step in range(count):
        inputs, targets = make_batch(step)
        mine = slice(device.data_rank, None, device.data_ranks)
        begins = torch.rand(inputs.shape, generator=torch.Generator().manual_seed(step)) < 0.3
        segments = Segments.from_numbers(begins.cumsum(dim=1)[mine]).to(device.to_device)
        batch = device.to_device(inputs[mine]), device.to_device(targets[mine]), segments
        stats.append(numbers(train_step(*run, [batch], next_token_loss, device=device, momentum=0.9)))
    return stats


def sample(seed: int, tokens: int, question: int = 0) -> Sample:
    ids = torch.randint(0, 100, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    reply = tokens - 3
    logprobs = [0.0] * 3 + [-1.0 - seed] * reply
    return Sample(question, seed, ids, [0] * 3 + [1] * reply, logprobs, reward=float(seed % 2))


def agreement(device: Device, samples: list[Sample]) -> tuple[float, float, int]:
    """The comparison of a sampler's log probabilities with this model's."""
    return measure(make_run(device)[0], samples, device, 1.0)


# ---------------------------------------------------------------------- what a rank keeps and sends


def kept_and_sent(device: Device, kernels: WrittenKernels, mask: Tensor | None = None) -> dict[str, Any]:
    """A forward and a backward pass over 2 rows of 256 tokens: the shapes in a block, the bytes kept, and the bytes
    that this rank passes to each kind of collective, also with recomputed activations. With documents where the
    kernels have one `mask` for all layers and lengths."""
    found: dict[str, Any] = {"shapes": []}
    rows = torch.randint(0, 100, (2, 257), generator=torch.Generator().manual_seed(0))
    tokens = device.to_device(rows[:, :-1].contiguous())
    targets = device.to_device(rows[:, 1:].contiguous())
    segments = None
    if mask is not None:
        segments = Segments.from_numbers((rows[:, :-1] < 5).cumsum(dim=1)).to(device.to_device)
    for recompute in (False, True):
        model = lively_model(LONG, kernels=kernels).to(device.torch_device)
        if recompute:
            model.recompute_activations()
        lay_out(device).shard(model, device)
        attend = kernels.attention

        def noted(q: Tensor, k: Tensor, v: Tensor, attend: Any = attend, **options: Any) -> Tensor:
            found["shapes"] += [[*q.shape], [*k.shape], [*v.shape]]
            found["contiguous"] = all(x.is_contiguous() for x in (q, k, v))
            return attend(q, k, v, **options)

        hook = model.blocks[0].register_forward_pre_hook(lambda _, inputs: found["shapes"].append([*inputs[0].shape]))
        kernels.attention = noted  # type: ignore[method-assign]
        kept = Kept([*model.parameters(), *model.buffers(), *([] if mask is None else [mask])])
        with Collectives() as seen:
            with kept.counting():
                loss, _ = next_token_loss(model, (tokens, targets, segments))
            if not recompute:
                found["kept"] = kept.bytes
            loss.backward()
        hook.remove()
        del kernels.attention
        found["sent, recomputed" if recompute else "sent"] = dict(seen.bytes)
        found["events, recomputed" if recompute else "events"] = seen.events
    found["shapes"] = found["shapes"][:4]
    return found


# ---------------------------------------------------------------------- on two ranks


def on_two_ranks(device: Device) -> dict[str, Any]:
    device = sharing(device, 2)
    own = sample(device.rank, 9 + device.rank)
    plain = WrittenKernels()  # its attention keeps no products of queries and keys, as operators of accelerators
    return {"agreement": agreement(device, [own]), "costs": kept_and_sent(device, plain)}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks)


@slow
def test_a_sampler_is_compared_over_the_samples_of_all_ranks_of_a_row(two_ranks: list[dict[str, Any]]) -> None:
    expected = agreement(cpu_device(), [sample(0, 9), sample(1, 10)])
    for rank in two_ranks:
        assert rank["agreement"] == pytest.approx(expected, rel=1e-5)


def formula(config: GPTConfig, ranks: int, rows: int, tokens: int, key_heads: int) -> int:
    """Bytes that a rank passes to all-to-alls in a forward pass in fp32; parallel/context.py states it."""
    per_layer = rows * tokens // ranks * (2 * config.n_head + 2 * key_heads) * config.head_dim
    return 4 * config.n_layer * per_layer


def check_costs(costs: dict[str, Any], whole: dict[str, Any], ranks: int, key_heads: int) -> None:
    B, T, C = whole["shapes"][0]
    D = LONG.head_dim
    # The block has a part of the tokens with all channels, attention all tokens of a part of the heads.
    assert costs["shapes"][0] == [B, T // ranks, C]
    heads = [LONG.n_head // ranks, key_heads // ranks, key_heads // ranks]
    assert costs["shapes"][1:] == [[B, T, count, D] for count in heads]
    assert costs["contiguous"]
    # Two all-to-alls a layer and pass, and one gathering of the losses.
    layers = LONG.n_layer
    sent = formula(LONG, ranks, B, T, key_heads)
    assert costs["sent"] == {"all_to_all": 2 * sent, "all_gather": 4 * ranks}
    assert costs["sent, recomputed"] == {"all_to_all": 3 * sent, "all_gather": 4 * ranks}
    forward = ["all_to_all"] * (2 * layers)
    assert costs["events"] == [*forward, "all_gather", *forward]
    assert costs["events, recomputed"] == [*forward, "all_gather", *forward, *forward]
    assert whole["sent"] == {}
    assert costs["kept"] <= (1 / ranks + 0.05) * whole["kept"]


@slow
def test_a_rank_keeps_and_sends_its_share(two_ranks: list[dict[str, Any]]) -> None:
    whole = kept_and_sent(cpu_device(), WrittenKernels())
    for rank in two_ranks:
        check_costs(rank["costs"], whole, 2, key_heads=2)


# ---------------------------------------------------------------------- without ranks


def test_micro_batches_end_where_the_ranks_divide_them() -> None:
    """Rows of 24 tokens: an eighth is 3, which two ranks do not divide, so lengths are multiples of 4."""
    rows: PackedBatch = pack_sequences([[1] * 6], [[0] + [1] * 5], 24)
    lengths = [next(rows.micro_batches(1, sharing(cpu_device(), R))).inputs.size(1) for R in (1, 2, 4)]
    assert lengths == [6, 8, 8]


@pytest.mark.parametrize(("world_size", "context_ranks"), [(1, 2), (4, 3), (2, 4)])
def test_processes_that_form_no_groups_are_refused(world_size: int, context_ranks: int) -> None:
    line = complaint(lambda: lay_out(sharing(cpu_device(world_size=world_size), context_ranks)))
    assert f"--context_parallel {context_ranks}" in line and f"processes here: {world_size}" in line


@pytest.mark.parametrize(
    ("ranks", "changes", "words"),
    [(3, {}, ("4 heads", "2 or 4")), (4, {"sequence_len": 30}, ("30 tokens", "--max_seq_len 28"))],
)
def test_models_that_ranks_cannot_divide_are_refused(ranks: int, changes: Any, words: tuple[str, ...]) -> None:
    model = GPT(tiny_config(**changes))
    line = complaint(lambda: SharedRows(Layout(), RowGroup(0, ranks, None)).shard(model, cpu_device()))
    assert all(word in line for word in (f"--context_parallel {ranks}", *words))
    assert model.forward == GPT.forward.__get__(model)


@pytest.mark.usefixtures("tokenizer")
def test_a_dry_run_counts_a_part_of_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    def counted(ranks: int) -> float:
        flags = ("--max_seq_len=1024", "--device_batch_size=1", "--gradient_accumulation_steps=1")
        pretended = ("--dry_run", "--dry_run_devices=4", f"--context_parallel={ranks}", "--document_mask=off")
        call("base_train", "--depth=2", "--head_dim=32", "--dtype=float32", "--device=cpu", *flags, *pretended)
        (activations,) = re.findall(r"activations +([\d,.]+) MiB", capsys.readouterr().out)
        return float(activations)

    assert counted(4) / counted(1) == pytest.approx(1 / 4, rel=0.05)


@slow
@pytest.mark.usefixtures("tokenizer")
def test_base_train_shares_rows(base: Path) -> None:  # noqa: F811
    flags = (*TINY, "--depth=2", "--num_iterations=2")
    call("base_train", *flags, "--model_tag=one")
    sharded = ("--parallel=fsdp", "--replicate=2", "--context_parallel=2", "--activation_checkpointing")
    run_command("base_train", *flags, *sharded, "--model_tag=shared", ranks=4)
    assert losses(base, "base", "shared") == pytest.approx(losses(base, "base", "one"), rel=1e-6)
