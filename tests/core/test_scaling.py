"""The numbers of a depth against numbers worked out by hand."""

import dataclasses
import math

import pytest
import torch
from tiny import SHAPES, tiny_config

from nanochat import scaling
from nanochat.gpt import GPT, GPTConfig
from nanochat.scaling import batch_tokens, flops_per_token, model_config, rates, scaling_parameters, training_tokens


def meta_model(config: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


# depth 2, width 128, 2 heads of 64, vocabulary 256, rows of 512, one short window of 128
SMALL = model_config(2, 256, 512, window_pattern="SL", head_dim=64)


def test_parameter_counts_by_hand() -> None:
    assert scaling.parameter_counts(meta_model(SMALL)) == {
        "matrix": 294_912,  # 2 x (128 x 128 + 2 x 128 x 512)
        "qkv": 98_304,  # 2 x 128 x (2 + 2 + 2) x 64
        "embedding": 32_768,  # 256 x 128
        "value_embedding": 32_768,  # on the second layer
        "head": 32_768,
        "vector": 66,  # a gate of 32 x 2, 2 embedding scales
        "residual_scale": 2,
        "total": 491_588,
    }


def test_flops_and_horizon_by_hand() -> None:
    assert scaling_parameters(SMALL) == 294_912 + 98_304 + 32_768
    assert training_tokens(SMALL, 10) == 4_259_840
    # 6 a parameter, and 12 x 2 heads x 64 x (128 + 512) tokens seen
    assert flops_per_token(SMALL) == 6 * 425_984 + 983_040


def test_windows_save_flops_only_while_they_are_shorter_than_the_row() -> None:
    long, short = (model_config(4, 256, 512, pattern, head_dim=64) for pattern in "LS")
    assert flops_per_token(long) - flops_per_token(short) == 12 * 256 * 3 * (512 - 128)


@pytest.mark.parametrize("shape", SHAPES)
def test_scaling_parameters_are_the_models_matrices_and_head(shape: str) -> None:
    config = tiny_config(**{**SHAPES[shape], "vocab_size": 128})  # no padding
    model = meta_model(config)
    roles = model.parameter_groups()
    weights = [p for name, p in roles["matrix"] + roles["qkv"]] + [model.head_weight()]
    assert scaling_parameters(config) == sum(p.numel() for p in weights)
    counts = scaling.parameter_counts(model)
    assert counts["total"] == sum(p.numel() for p in model.parameters()) == sum(counts.values()) - counts["total"]


@pytest.mark.parametrize(
    ("depth", "head_dim", "width", "heads"),
    [(1, 128, 128, 1), (2, 128, 128, 1), (3, 128, 256, 2), (4, 64, 256, 4), (5, 64, 320, 5), (12, 128, 768, 6)],
)
def test_depth_decides_the_width(depth: int, head_dim: int, width: int, heads: int) -> None:
    config = model_config(depth, 1000, 128, "SSL", head_dim)
    assert (config.n_layer, config.width, config.n_head, config.n_kv_head) == (depth, width, heads, heads)
    assert (config.head_dim, config.vocab_size, config.sequence_len) == (head_dim, 1000, 128)
    assert config.window_pattern == "SSL"


def test_the_reference_is_its_own_rule() -> None:
    config = model_config(12, 32768, 2048)
    tokens = training_tokens(config, scaling.REFERENCE_RATIO)
    assert tokens == 12 * (12 * 12 * 768**2 + 768 * 32768)
    assert batch_tokens(tokens) == 524_288
    gated = model_config(12, 32768, 2048, mlp="swiglu")
    assert gated.mlp_width == 2048 and scaling_parameters(gated) == scaling_parameters(config)
    reference = rates(config, 524_288, tokens)
    assert (reference.matrix, reference.embedding, reference.value_embedding) == (0.02, 0.3, 0.15)
    assert (reference.head, reference.vector, reference.residual_scale) == (0.008, 0.05, 0.005)
    assert reference.weight_decay == pytest.approx(0.2)


def test_batches_are_powers_of_two_that_grow_as_the_law() -> None:
    sizes = [batch_tokens(10**6 * 2**i) for i in range(24)]
    assert sizes == sorted(sizes)
    assert all(size & (size - 1) == 0 for size in sizes)
    assert math.log2(sizes[-1] / sizes[0]) / 23 == pytest.approx(0.383, abs=1 / 23)
    tokens = training_tokens(model_config(12, 32768, 2048), 12)
    assert batch_tokens(8 * tokens) == 1 << 20  # 8 ** 0.383 = 2.2


def test_rates_follow_width_batch_and_horizon() -> None:
    base = model_config(12, 32768, 2048)
    one, batch, long = rates(base, 1 << 19, 10**9), rates(base, 1 << 17, 10**9), rates(base, 1 << 19, 2 * 10**9)
    for role in ("matrix", "embedding", "value_embedding", "head", "vector", "residual_scale", "weight_decay"):
        assert getattr(batch, role) == pytest.approx(getattr(one, role) / 2), role  # sqrt(4)
        expected = 0.5 if role == "weight_decay" else 1.0
        assert getattr(long, role) == pytest.approx(getattr(one, role) * expected), role
    wide = rates(model_config(48, 32768, 2048), 1 << 19, 10**9)
    for role in ("embedding", "value_embedding", "head"):
        assert getattr(wide, role) == pytest.approx(getattr(one, role) / 2), role  # 4 times the width
    assert (wide.matrix, wide.vector, wide.residual_scale) == (one.matrix, one.vector, one.residual_scale)


def test_small_batches_keep_half_the_reference_rates_and_the_same_total_decay() -> None:
    base = model_config(12, 32768, 2048)
    floor, tiny = rates(base, 1 << 17, 10**9), rates(base, 1 << 12, 10**9)
    assert (tiny.matrix, tiny.vector) == (0.01, 0.025) == (floor.matrix, floor.vector)
    assert tiny.weight_decay * 2**5 == pytest.approx(floor.weight_decay), "with 32 times the steps"


@pytest.mark.parametrize("depth", [2, 3, 12, 24])
def test_adamw_has_its_own_rate_for_the_matrices(depth: int) -> None:
    config = model_config(depth, 32768, 2048)
    muon, adamw = (rates(config, 1 << 19, 10**9, matrices) for matrices in ("muon", "adamw"))
    assert adamw.matrix == pytest.approx(0.0015 * 768 / config.width)
    assert adamw.weight_decay == 0.1
    assert dataclasses.replace(adamw, matrix=muon.matrix, weight_decay=muon.weight_decay) == muon
    assert rates(config, 1 << 19, 10**9) == muon
    assert rates(config, 1 << 12, 10**9, "adamw").matrix == pytest.approx(adamw.matrix / 2)  # the floor of the batch
