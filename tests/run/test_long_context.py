"""A longer context than a model was trained with."""

import dataclasses
import math

import pytest
from tiny import tiny_config

from nanochat.ground.cli import UserError
from nanochat.rotary import RopeScaling
from nanochat.run.long_context import with_context


def test_a_longer_context_scales_the_positions_and_a_shorter_one_does_not() -> None:
    config = tiny_config(window_pattern="SSL")  # 32 tokens, short windows of 8
    once = with_context(config, 128, 32, "yarn")
    assert (once.sequence_len, once.rope_scaling) == (
        128,
        RopeScaling("yarn", 4.0, 32, fewest_turns=1, most_turns=32, gain=1 + 0.1 * math.log(4)),
    )
    # Short windows stay as long as they were, and the last layer still sees all.
    assert [once.window(layer) for layer in range(3)] == [config.window(layer) for layer in range(3)] == [8, 8, 0]
    # In two steps as in one; and back, and to where it was.
    twice = with_context(with_context(config, 64, 32, "yarn"), 128, 64, "auto")
    assert twice.rope_scaling is not None and once.rope_scaling is not None
    assert twice.rope_scaling.gain == pytest.approx(once.rope_scaling.gain)
    assert dataclasses.replace(twice.rope_scaling, gain=once.rope_scaling.gain) == once.rope_scaling
    short = with_context(once, 16, 128, None)
    assert short.rope_scaling == once.rope_scaling and with_context(short, 128, 128, None) == once
    assert with_context(config, 32, 32, "auto") == config
    with pytest.raises(UserError, match="beyond the 32 tokens"):
        with_context(config, 16, 32, "yarn")
    linear = dataclasses.replace(config, sequence_len=64, rope_scaling=RopeScaling("linear", 2.0))
    linear = with_context(linear, 128, 64, "auto")
    assert linear.rope_scaling == RopeScaling("linear", 4.0)
    for method, source, words in (
        (None, config, "context has 32 tokens"),
        ("auto", config, "--rope_scaling yarn"),
        ("yarn", linear, "as linear"),
    ):
        with pytest.raises(UserError, match=words):
            with_context(source, 256, source.sequence_len, method)
