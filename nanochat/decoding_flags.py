"""The flags that scripts which decode share: how replies are drawn, and how they are computed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import tyro

from nanochat.cli import Range
from nanochat.sampling import NEUTRAL, SamplingParams

T = TypeVar("T")
# A setting that takes the checkpoint's value if the flag is not set.
Setting = Annotated[T | None, tyro.conf.arg(help_behavior_hint="(default: the checkpoint's)")]


@dataclass(frozen=True)
class SamplingFlags:
    """The settings of `SamplingParams`, repeated because tyro reads a flag's help from the comment at its field. A test
    compares the two."""

    # below 1 likely tokens become likelier; 0: greedy
    temperature: Setting[Annotated[float, Range(0, 100)]] = None
    # keep the k likeliest tokens; 0: all
    top_k: Setting[Annotated[int, Range(0)]] = None
    # keep the fewest likeliest tokens that reach this probability
    top_p: Setting[Annotated[float, Range(1e-9, 1)]] = None
    # keep tokens with this share of the likeliest one's probability
    min_p: Setting[Annotated[float, Range(0, 1)]] = None
    # above 1: tokens seen so far become less likely
    repetition_penalty: Setting[Annotated[float, Range(0.01, 100)]] = None
    # subtracted from the logit of a token that the reply has
    presence_penalty: Setting[Annotated[float, Range(-2, 2)]] = None
    # the same, for each time that the reply has the token
    frequency_penalty: Setting[Annotated[float, Range(-2, 2)]] = None
    # the same seed and prompt give the same reply
    seed: Annotated[int, Range(0, 2**64)] = 0

    def over(self, sampling: Mapping[str, Any]) -> SamplingParams:
        """The settings of a checkpoint (`meta["sampling"]`), replaced by the flags that are set."""
        flags = {name: getattr(self, name) for name in NEUTRAL if getattr(self, name) is not None}
        return SamplingParams(**{**sampling, **flags, "seed": self.seed})


@dataclass(frozen=True)
class DecodingFlags:
    """How `Engine` decodes, by its names."""

    # An accelerator records the launches of a decoded token and replays them as one; auto: on accelerators.
    graphs: Literal["auto", "on", "off"] = "auto"
    # fp16: weights of half the size and faster products on an x86 CPU without bf16, rounded to 3 digits, so that a
    # reply may take another word where two are about as likely; auto: in the dtype of the products, but fp16 on a
    # CPU with AVX-512 for which --dtype auto chooses float32.
    weights: Literal["auto", "fp16"] = "auto"
