"""Numbers that follow from one dial, the depth: sizes, FLOPs, horizon, batch, learning rates.

The rules extrapolate from one model, the reference: depth 12, tuned by nanochat.
Legend: N scaling parameters, D training tokens (the horizon), B tokens a batch.
"""

import math
from dataclasses import asdict, dataclass
from typing import Literal

from nanochat.gpt import GPT, GPTConfig
from nanochat.ground.cli import UserError

WIDTH_PER_LAYER = 64  # every model has the same shape: its width is 64 times its depth
HEAD_DIM = 128
# The reference, once through all the rules below. Depth 12, 32,768 tokens in the vocabulary, rows of 2,048:
#
#     width        12 x 64                                              768, which is 6 heads of 128
#     N            12 layers x 12 x 768^2 + a head of 768 x 32,768      110 million
#     FLOPs        6 N + 12 x 768 x 12 layers x 2,048 keys              0.89 billion a token
#     D            12 N                                                 1.32 billion tokens
#     B                                                                 524,288 tokens
#     steps        D / B                                                2,520
#
# Depth 20 has 4 times the N (435 million), so 4 times the D (5.2 billion) and twice the B (1,048,576).
REFERENCE_WIDTH = 768  # the width of depth 12
REFERENCE_BATCH = 524_288  # tokens: the best batch at depth 12 ...
REFERENCE_RATIO = 12  # ... when it trains for this many tokens per scaling parameter
BATCH_EXPONENT = 0.383  # source: Bergsma et al. 2025, Power Lines (arXiv 2505.13738)
# Bounds for sizes far outside the range of the rules: the demo's batch of 4,096 tokens is 128 times smaller than the
# reference's.
SMALLEST_BY_BATCH = 0.5  # smallest factor of the reference rates, for any batch size
LARGEST_DECAY = 0.1  # largest decay of a weight in one step: runs of less than about 100 steps reach it
# A model from elsewhere: AdamW's rate, which the stages scale down, mid-training by half and SFT to 2e-5, as usual in
# full fine-tuning. Muon's rate is 0.2 sqrt(width) times as much: the rows of its updates have norm 1 (optim.py), so the
# elements of a matrix that reads the stream move by 0.2 of AdamW's rate in root mean square. AdamW's own updates have
# 0.2 to 0.4 (source: Liu et al. 2025, Muon is Scalable for LLM Training). Their factor is another, 0.2 sqrt(max(rows,
# columns)) over updates U V^T, which gives every matrix 0.2. With ours, o_proj and down_proj move by 0.2 sqrt(width /
# columns): rows of norm 1 change each output by as much, however many inputs it has.
IMPORTED_RATE = 1e-4


def model_config(
    depth: int,
    vocab_size: int,
    sequence_len: int,
    window_pattern: str = "L",
    head_dim: int = HEAD_DIM,
    mlp: Literal["relu2", "swiglu"] = "relu2",
) -> GPTConfig:
    """The fast preset at a depth: 64 of width a layer, rounded up to whole heads (source: nanochat).

    An MLP of `relu2` has two matrices of 4 x width. One of `swiglu` has three of 8/3 x width, which are as many
    parameters (source: Shazeer 2020, GLU variants improve Transformer).

    Raises UserError: when such a model does not exist.
    """
    # One dial: a model grows in depth and width together, so that each rule below has one variable. Depth 12 has 6
    # heads; depth 5 has 320 of width, which is 2.5 heads: it gets 3, and a width of 384.
    n_head = math.ceil(depth * WIDTH_PER_LAYER / head_dim)
    width = n_head * head_dim
    mlp_width = 4 * width
    if mlp == "swiglu":
        mlp_width = round(8 / 3 * width / 64) * 64  # a multiple of 64 suits matrix units
    try:
        return GPTConfig(
            vocab_size=vocab_size,
            sequence_len=sequence_len,
            n_layer=depth,
            width=width,
            n_head=n_head,
            n_kv_head=n_head,
            window_pattern=window_pattern,
            mlp=mlp,
            mlp_width=mlp_width,
            lookback_heads=min(2, max(0, n_head - 2)),  # at least two heads begin free
        )
    except ValueError as error:  # it names the flag
        raise UserError(str(error)) from error


def parameter_counts(model: GPT) -> dict[str, int]:
    """Parameters by role, and their total. A padded vocabulary's rows count: they are stored."""
    counts = {}
    for role, parameters in model.parameter_groups().items():
        counts[role] = sum(parameter.numel() for _, parameter in parameters)
    counts["total"] = sum(counts.values())
    return counts


def scaling_parameters(config: GPTConfig) -> int:
    """N: the parameters that every token is multiplied by, which are the blocks' matrices and the head.

    Embedding tables are looked up, so they cost memory but no FLOPs (source: nanochat, whose ratio of D to N counts
    these parameters).
    """
    # At depth 12, in millions: a layer has 1.77 (q, k, v) + 0.59 (output) + 4.72 (MLP) = 7.08, and 12 layers have 84.9.
    # The head has 25.2. Together N = 110.1.
    queries = 2 * config.n_head if config.attention_gate else config.n_head
    qkv = config.width * config.head_dim * (queries + 2 * config.n_kv_head)
    attention_output = config.width * config.head_dim * config.n_head
    mlp_matrices = 3 if config.mlp == "swiglu" else 2
    mlp = mlp_matrices * config.width * config.mlp_width
    if config.experts:  # those of one token, and the router's scores of all
        mlp *= config.experts_per_token + config.shared_experts
        mlp += config.width * config.experts
    head = config.width * config.vocab_size
    # A layer with a state: queries, keys and values; a gate and an output as wide as the values; two numbers a head.
    values = config.state_value_heads * config.state_value_dim
    state = 2 * config.state_key_heads * config.state_key_dim + 3 * values + 2 * config.state_value_heads
    attending = len(config.attention_layers)
    mixing = attending * (qkv + attention_output) + (config.n_layer - attending) * config.width * state
    return mixing + config.n_layer * mlp + head


def flops_per_token(config: GPTConfig, is_frozen: bool = False) -> int:
    """Training FLOPs a token, forward and backward (source: Chowdhery et al. 2022, PaLM, appendix B).

    `is_frozen`: the parameters are not trained, only adapters, whose own products do not count.
    """
    # A parameter costs a multiplication and an addition forward, and twice that backward, for the gradients of its
    # input and of itself. That makes 6, or 4 for a frozen parameter, which has no gradient.
    # Attention adds 12 for each channel and each key in the window: two products, q k and the weighted sum of values,
    # again 6 each. Keys that causality masks count as well: the convention of the paper, so that MFU compares.
    T = config.sequence_len
    keys = 0  # over all layers
    for layer in config.attention_layers:
        window = config.window(layer)  # 0: all of the row
        keys += min(window or T, T)
    return (4 if is_frozen else 6) * scaling_parameters(config) + 12 * config.n_head * config.head_dim * keys


def training_tokens(config: GPTConfig, ratio: float) -> int:
    """D, the tokens to train for."""
    # D = ratio x N: a fixed budget of FLOPs is spent best when data grows as fast as the model. Hoffmann et al. 2022
    # (Chinchilla) find a ratio of 20; for this recipe it is 8 to 12.
    return int(ratio * scaling_parameters(config))


def reference_tokens() -> int:
    """D of the reference."""
    return training_tokens(model_config(12, 32768, 2048), REFERENCE_RATIO)


def batch_tokens(tokens: int) -> int:
    """B for a horizon of `tokens`, as a power of two."""
    # A longer run ends at a lower loss, where gradients are noisier, and affords a larger batch: B grows as D ** 0.383,
    # through the reference. A run 8 times as long has a batch 8 ** 0.383 = 2.2 times as large, rounded to 2 times: a
    # power of two divides evenly over rows, micro-batches and ranks.
    batch = REFERENCE_BATCH * (tokens / reference_tokens()) ** BATCH_EXPONENT
    return 2 ** round(math.log2(batch))


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
        """The rates of a later stage: all times `factor`, embeddings and head times `tables` as well, without weight
        decay."""
        scaled = {name: factor * rate for name, rate in asdict(self).items()}
        for table in ("embedding", "value_embedding", "head"):
            scaled[table] *= tables
        return Rates(**{**scaled, "weight_decay": 0.0})


def rates(config: GPTConfig, batch: int, tokens: int, matrices: str = "muon") -> Rates:
    """The reference's rates, carried to this model, its batch and its horizon (both in tokens).

    `matrices` is the optimizer of the blocks' matrices.
    """
    # The rules below are about the preset, whose embedding and head are scaled in their own ways and whose matrices are
    # still to find their directions. With them a model from elsewhere would forget what it knows within a few steps.
    if not config.embedding_norm:
        matrix = IMPORTED_RATE * (0.2 * math.sqrt(config.width) if matrices == "muon" else 1.0)
        others = ("embedding", "value_embedding", "head", "vector", "residual_scale")
        return Rates(matrix=matrix, **dict.fromkeys(others, IMPORTED_RATE), weight_decay=0.0)
    # Batch. Four times the batch has half the noise in its gradient, and allows steps twice as long (source: Malladi
    # et al. 2022, On the SDEs and scaling rules for adaptive gradient algorithms). The floor: at B = 4,096 the square
    # root would give the matrices only 0.0018, where 0.01 and 0.02 are best (depth 4, 200 steps, 2026-11-20).
    by_batch = max(SMALLEST_BY_BATCH, math.sqrt(batch / REFERENCE_BATCH))
    # Width. In a wider model every output adds up more inputs, so AdamW's equal steps add up to more. Muon's orthogonal
    # updates keep their size (source: nanochat).
    # At depth 20, with B twice and the width 1.67 times the reference's: by_batch is 1.41 and by_width 0.77.
    by_width = (config.width / REFERENCE_WIDTH) ** -0.5
    matrix = 0.02 * by_batch
    # Horizon. A run forgets its early weights at the speed rate x decay: keep rate x decay x steps (source: Wang and
    # Aitchison 2024, arXiv 2405.13698). At depth 20: 0.2 / 1.41 x 2,520 / 4,980 steps = 0.07. Without weight decay the
    # demo ends at 0.2082 bits per byte, with it at 0.2000 (depth 4, 200 steps of 4,096 tokens, 2026-11-20).
    steps = tokens / batch
    reference_steps = reference_tokens() / REFERENCE_BATCH
    weight_decay = 0.2 / by_batch * reference_steps / steps
    # Each step of AdamW moves every element of a matrix by about the rate, so that an output, a sum over the width,
    # moves the more the wider the model is: the rate falls as 1 / width (source: Yang et al. 2022, Tensor Programs V).
    # 0.0015 was found at depth 2 and 3, on the demo and on pydoc (2026-11-22); a decay of 0.1 is the usual one (source:
    # Brown et al. 2020, GPT-3).
    if matrices == "adamw":
        matrix = 0.0015 * by_batch * REFERENCE_WIDTH / config.width
        weight_decay = 0.1
    return Rates(
        matrix=matrix,
        # A step of the embedding sees few of its rows, and a norm removes their size (gpt.py): it takes the largest
        # rate. The head's rows see every token: they take a small one.
        embedding=0.3 * by_width * by_batch,
        value_embedding=0.15 * by_width * by_batch,
        head=0.008 * by_width * by_batch,
        # Gates and norms. At ten times this rate, rounding parts two runs of the same rows by 1e-3 in 20 steps; at
        # this one by 1e-4 (depth 3, fp32, two cores of an AMD EPYC, 2026-11-20).
        vector=0.05 * by_batch,
        residual_scale=0.005 * by_batch,
        weight_decay=min(weight_decay, LARGEST_DECAY / matrix),
    )
