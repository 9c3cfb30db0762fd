"""The sizes of a new model with experts, by the flags of base_train."""

from dataclasses import replace
from typing import Any

from nanochat import scaling
from nanochat.experts.layer import require_possible
from nanochat.gpt import GPTConfig
from nanochat.ground.log import print0

WIDTH_MULTIPLE = 16  # suits matrix units, and grouped products, whose rows begin at multiples of 16 bytes


def with_experts(config: GPTConfig, flags: Any) -> GPTConfig:
    """A dense config with experts instead of its MLPs. By default the experts of a token are together as wide as the
    MLP: a token is multiplied by as many parameters, except for the router's.

    Raises UserError: when such experts do not exist.
    """
    width = flags.expert_width
    if not width:
        width = config.mlp_width / (flags.experts_per_token + flags.shared_experts)
        width = max(WIDTH_MULTIPLE, round(width / WIDTH_MULTIPLE) * WIDTH_MULTIPLE)
    config = replace(
        config,
        experts=flags.experts,
        experts_per_token=flags.experts_per_token,
        shared_experts=flags.shared_experts,
        mlp_width=width,
        # A single expert with a weight of 1 would teach the router nothing (source: Fedus et al. 2021, Switch
        # Transformers).
        router_normalized=flags.experts_per_token > 1 or flags.experts == 1,
    )
    require_possible(config)
    print0(
        f"experts: {config.experts} in each block, {width} wide, {config.experts_per_token} for each token, which is "
        f"multiplied by {scaling.scaling_parameters(config):,} parameters in all"
    )
    return config
