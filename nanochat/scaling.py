"""Numbers that follow from one dial, the depth: sizes, FLOPs, horizon, batch, learning rates.

Each rule names its source. Legend: N parameters, D training tokens, B tokens a batch.
"""

import math
from collections import Counter
from dataclasses import dataclass, fields
from typing import Literal

import torch

from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import SHARD_ELEMENTS, buckets
from nanochat.parallel.mesh import Layout

WIDTH_PER_LAYER = 64
HEAD_DIM = 128
REFERENCE_WIDTH = 768  # the learning rates below were tuned at depth 12
REFERENCE_BATCH = 524_288  # tokens, at depth 12
REFERENCE_RATIO = 12  # training tokens a scaling parameter behind REFERENCE_BATCH
SMALLEST_BY_BATCH = 0.5  # of the reference rates
LARGEST_DECAY = 0.1  # of a weight in one step; reached by runs of under some 100 steps
BATCH_EXPONENT = 0.383  # B grows as D ** 0.383 (source: Bergsma et al. 2025, Power Lines, arXiv 2505.13738)


def model_config(
    depth: int, vocab_size: int, sequence_len: int, window_pattern: str = "L", head_dim: int = HEAD_DIM
) -> GPTConfig:
    """The fast preset at a depth: width 64 x depth, rounded up to whole heads (source: nanochat)."""
    width = -(-depth * WIDTH_PER_LAYER // head_dim) * head_dim
    heads = width // head_dim
    return GPTConfig(
        vocab_size=vocab_size,
        sequence_len=sequence_len,
        n_layer=depth,
        width=width,
        n_head=heads,
        n_kv_head=heads,
        window_pattern=window_pattern,
    )


def parameter_counts(model: GPT) -> dict[str, int]:
    """Parameters by role, and their total. A padded vocabulary's rows count: they are stored."""
    counts = {role: sum(p.numel() for _, p in group) for role, group in model.parameter_groups().items()}
    return {**counts, "total": sum(counts.values())}


def scaling_parameters(config: GPTConfig) -> int:
    """Parameters that a token is multiplied with: the blocks' matrices and the head."""
    heads = config.n_head + 2 * config.n_kv_head
    attention = config.width * config.head_dim * (heads + config.n_head)
    mlp = (3 if config.mlp == "swiglu" else 2) * config.width * config.mlp_width
    return config.n_layer * (attention + mlp) + config.width * config.vocab_size


def flops_per_token(config: GPTConfig) -> int:
    """Training FLOPs a token, forward and backward: 6 a scaling parameter, and attention's products
    (source: Chowdhery et al. 2022, PaLM, appendix B: causal masking is not counted as saving anything)."""
    T = config.sequence_len
    seen = sum(min(config.window(layer) or T, T) for layer in range(config.n_layer))
    return 6 * scaling_parameters(config) + 12 * config.n_head * config.head_dim * seen


def training_tokens(config: GPTConfig, ratio: float) -> int:
    """The horizon D: tokens a scaling parameter times their number (source: Hoffmann et al. 2022, Chinchilla,
    who find 20; this recipe's optimum lies at 8 to 12)."""
    return int(ratio * scaling_parameters(config))


def batch_tokens(config: GPTConfig, tokens: int) -> int:
    """B for a horizon of `tokens`: a power of two near the power law through the depth-12 reference."""
    reference = training_tokens(model_config(12, 32768, 2048), REFERENCE_RATIO)
    return 2 ** round(math.log2(REFERENCE_BATCH * (tokens / reference) ** BATCH_EXPONENT))


@dataclass(frozen=True)
class Rates:
    """Peak learning rates by role, and Muon's weight decay."""

    matrix: float
    embedding: float
    value_embedding: float
    head: float
    vector: float
    residual_scale: float
    weight_decay: float

    def scaled(self, factor: float, tables: float = 1.0) -> "Rates":
        """For a later stage: all learning rates times a factor, those of embeddings and head times `tables` as well,
        and no weight decay."""
        rates = {field.name: factor * getattr(self, field.name) for field in fields(self)}
        for name in ("embedding", "value_embedding", "head"):
            rates[name] *= tables
        return Rates(**{**rates, "weight_decay": 0.0})


def rates(config: GPTConfig, batch: int, tokens: int) -> Rates:
    """Rates tuned at depth 12 carried to this model, batch and horizon (all in tokens).

    AdamW's go with width ** -0.5, all go with sqrt(B) (source: Malladi et al. 2022) down to a floor: at
    4,096 tokens the square root asks for a sixth of what is best (docs/measurements.md). Weight decay keeps
    rate x decay x steps (source: Wang and Aitchison 2024, arXiv 2405.13698).
    """
    reference = training_tokens(model_config(12, 32768, 2048), REFERENCE_RATIO)
    by_batch = max(SMALLEST_BY_BATCH, math.sqrt(batch / REFERENCE_BATCH))
    by_width = (config.width / REFERENCE_WIDTH) ** -0.5
    matrix = 0.02 * by_batch
    return Rates(
        matrix=matrix,
        embedding=0.3 * by_width * by_batch,
        value_embedding=0.15 * by_width * by_batch,
        head=0.008 * by_width * by_batch,
        vector=0.05 * by_batch,
        residual_scale=0.005 * by_batch,
        weight_decay=min(0.2 / by_batch * (reference / REFERENCE_BATCH) / (tokens / batch), LARGEST_DECAY / matrix),
    )


def communication(
    config: GPTConfig,
    parallel: Literal["ddp", "fsdp"],
    devices: int,
    replicate: int = 1,
    *,
    micro_batches: int = 1,
    weight_bytes: int = 2,
    rank: int = 0,
) -> dict[str, int]:
    """Bytes that a rank hands to each kind of collective in a step with Muon: the whole of what is gathered,
    scattered or reduced, and what it sends in an all-to-all, its own part included.

    Of n bytes a ring sends and receives n (R - 1) / R over R ranks, for an all-reduce twice that. `weight_bytes` are
    those of a block's gathered weights. Exact, what rounds shares up to equal ones included.
    """
    with torch.device("meta"):
        model = GPT(config)
    ranks = devices // replicate
    layout, total = Layout(rank=rank % ranks, ranks=ranks), Counter[str]()
    if devices == 1:
        return {}
    total["all_reduce"] = 3 * 4  # loss, targets, squared gradients

    def padded(count: int) -> int:
        return -(-count // ranks) * ranks

    roles, order = model.parameter_groups(), model.gradient_order()
    heads = config.head_dim * config.n_head, config.head_dim * config.n_kv_head, config.head_dim * config.n_kv_head
    for role, splits in (("matrix", None), ("qkv", heads)):
        stacks: dict[tuple[int, int], list[tuple[int, int, int]]] = {}  # parameter's rows, first and last of a matrix
        for _, p in roles[role]:
            start = 0
            for rows in splits or (p.size(0),):
                stacks.setdefault((rows, p.size(1)), []).append((p.size(0), start, start + rows))
                start += rows
        if parallel == "ddp":
            by_turn = [p for _, p in sorted(roles[role], key=lambda one: order.index(one[0]))]
            for elements in (sum(p.numel() for p in bucket) for bucket in buckets(by_turn)):
                total["reduce_scatter"] += 4 * padded(elements)
                total["all_gather"] += 4 * padded(elements)
                length = padded(elements) // ranks  # of a rank's slice, whose gradients go to the owners
                total["all_to_all"] += 4 * max(0, min(length, elements - layout.rank * length))
        for (rows, columns), matrices in stacks.items():
            own = len(range(len(matrices))[layout.share(len(matrices))])
            if parallel == "ddp":  # new weights back to the slices
                total["all_to_all"] += 4 * own * rows * columns
                continue
            held = [layout.share(size) for size, _, _ in matrices]
            mine = sum(max(0, min(b, h.stop) - max(a, h.start)) for h, (_, a, b) in zip(held, matrices, strict=True))
            # gradients to the owners; updates back, and each rank is told the size of each
            total["all_to_all"] += 4 * (mine * columns + own * (rows * columns + ranks))

    for name, p in model.named_parameters():
        if parallel == "ddp":
            if any(name == other for role in ("matrix", "qkv") for other, _ in roles[role]):
                continue
            if p.numel() >= SHARD_ELEMENTS and p.size(0) % ranks == 0:
                total["reduce_scatter"] += 4 * p.numel()
                total["all_gather"] += 4 * p.numel()
            else:
                total["all_reduce"] += 4 * p.numel()
            continue
        elements = padded(p.size(0)) * (p.numel() // p.size(0))
        table = name.startswith("value_embeddings.") or (
            name.startswith(("embedding.", "head.")) and not config.tied_head
        )
        gathered = weight_bytes * 2 if name.startswith("blocks.") else 4 if table else 4 * 2  # forward and backward
        total["all_gather"] += gathered * elements * micro_batches
        total["reduce_scatter"] += 4 * elements
        if replicate > 1:
            total["all_reduce"] += 4 * elements // ranks
    return dict(total)
