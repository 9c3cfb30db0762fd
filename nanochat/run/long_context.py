"""Another context than a model has: a longer one than it was trained with scales its rotary positions to fit.

A context of 2,048 tokens becomes one of 8,192 by `--max_seq_len 8192 --rope_scaling yarn`.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from nanochat.checkpoint_manager import Preparation
from nanochat.gpt import GPTConfig
from nanochat.ground.cli import UserError
from nanochat.rotary import RopeScaling

ContextMethod = Literal["auto", "yarn"]


@dataclass(frozen=True)
class NewContext(Preparation):
    """Changes the context of a model that is loaded to `tokens`; 0 leaves it."""

    tokens: int
    method: ContextMethod | None = None  # how to reach a longer context than the trained one; None: refuse it

    def configure(self, config: GPTConfig, meta: dict[str, Any]) -> tuple[GPTConfig, dict[str, Any]]:
        if not self.tokens and self.method in (None, "auto"):
            return config, meta
        # A stage may have trained with shorter rows than the model can read.
        pretraining = meta.get("pretraining", {})
        context = pretraining.get("context")
        trained = max(config.sequence_len, context if isinstance(context, int) else 0)
        tokens = self.tokens or config.sequence_len
        config = with_context(config, tokens, trained, self.method)
        return config, {**meta, "pretraining": {**pretraining, "context": max(trained, tokens)}}


def with_context(config: GPTConfig, context: int, trained: int, method: ContextMethod | None) -> GPTConfig:
    """A model's config with this context, in tokens; beyond the `trained` one its rotary positions are scaled.

    `auto`: as they are scaled already, and refused if they are not. None: a longer context is refused.
    Raises UserError: when the model cannot have that context.
    """
    scaled = config.rope_scaling
    if scaled is not None and scaled.kind == "yarn":
        # YaRN reaches its factor times the original context, and a folder may state less: Qwen3 with YaRN of factor 4
        # over 32,768 tokens still names max_position_embeddings 40,960. Up to 131,072 its positions fit as they are.
        trained = max(trained, int(scaled.factor * scaled.original_len))
    present = "auto" if scaled is None else scaled.kind
    if context <= trained and method not in (None, "auto", present):
        raise UserError(
            f"--rope_scaling {method} needs a --max_seq_len beyond the {trained} tokens of the model's context"
        )
    if context == config.sequence_len:
        return config
    # Short windows keep their length. By default they would be a quarter of the new context.
    if "S" in config.window_pattern and not config.window_tokens:
        windows = [config.window(layer) for layer in range(config.n_layer)]
        pattern = "".join("S" if window else "L" for window in windows)
        config = replace(config, window_pattern=pattern, window_tokens=max(windows))
    longer = replace(config, sequence_len=context)
    if context <= trained:
        return longer
    if method is None:
        raise UserError(f"--max_seq_len {context}: the model's context has {trained} tokens, the most that it takes")
    if method == "auto" and scaled is None:
        raise UserError(
            f"--max_seq_len {context}: the model's context has {trained} tokens; --rope_scaling yarn "
            "reaches further, by other positions of all tokens: train on rows of that length then"
        )
    factor = context / trained
    if scaled is not None:  # positions are scaled once, by both factors together
        if method not in ("auto", scaled.kind):
            raise UserError(
                f"--rope_scaling {method}: the positions of this model are scaled, as {scaled.kind}: leave the flag out"
            )
        gain = scaled.gain + (_yarn_gain(factor) - 1 if scaled.kind == "yarn" else 0.0)
        return replace(longer, rope_scaling=replace(scaled, factor=scaled.factor * factor, gain=gain))
    # 1 and 32 turns are the values that Peng et al. found for Llama, and the usual defaults for folders without values.
    scaling = RopeScaling("yarn", factor, trained, fewest_turns=1.0, most_turns=32.0, gain=_yarn_gain(factor))
    return replace(longer, rope_scaling=scaling)


def _yarn_gain(factor: float) -> float:
    """YaRN's factor for cos and sin (source: Peng et al. 2023): over more tokens attention has to be sharper."""
    return 0.1 * math.log(factor) + 1.0
