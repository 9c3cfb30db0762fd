"""The flags that scripts which decode share: how replies are drawn, and how they are computed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import tyro

from nanochat.ground.cli import check_ranges
from nanochat.sampling import SamplingParams

T = TypeVar("T")
# A setting that takes the checkpoint's value if the flag is not set.
Setting = Annotated[T | None, tyro.conf.arg(help_behavior_hint="(default: the checkpoint's)")]


@dataclass(frozen=True)
class SamplingFlags:
    """Settings of `SamplingParams`, which has their ranges."""

    temperature: Setting[float] = None  # below 1 likely tokens become likelier; 0: greedy
    top_k: Setting[int] = None  # keep the k likeliest tokens; 0: all
    top_p: Setting[float] = None  # keep the fewest likeliest tokens that reach this probability
    min_p: Setting[float] = None  # keep tokens with this share of the likeliest one's probability
    repetition_penalty: Setting[float] = None  # above 1: tokens seen so far become less likely
    seed: int = 0  # the same seed and prompt give the same reply

    def __post_init__(self):
        check_ranges(self.over({}))

    def over(self, sampling: Mapping[str, Any]) -> SamplingParams:
        """The settings of a checkpoint (`meta["sampling"]`), replaced by the flags that are set."""
        flags = {name: value for name, value in vars(self).items() if value is not None}
        return SamplingParams(**{**sampling, **flags})


@dataclass(frozen=True)
class DecodingFlags:
    """How `Engine` decodes, by its names."""

    # An accelerator records the launches of a decoded token and replays them as one; auto: on accelerators.
    graphs: Literal["auto", "on", "off"] = "auto"
    # fp16: weights of half the size and faster products on an x86 CPU without bf16, rounded to 3 digits, so that a
    # reply may take another word where two are about as likely; auto: in the dtype of the products, but fp16 on a
    # CPU with AVX-512 for which --dtype auto chooses float32.
    weights: Literal["auto", "fp16"] = "auto"
