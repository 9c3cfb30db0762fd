"""Numbers that follow from one dial, the depth: sizes, FLOPs, horizon, batch, learning rates.

Each rule names its source. Legend: N parameters, D training tokens, B tokens a batch.
"""

import math
from dataclasses import dataclass, fields

from nanochat.gpt import GPT, GPTConfig

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
