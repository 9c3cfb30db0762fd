"""From logits to a token: the sampling settings, the function that applies them, and the numbers that decide.

A new setting is one field of `SamplingParams` (with its range and its help) and one step in `sample`. The command line,
the API and the decoder's bookkeeping read the fields. This file uses torch through its tensors' methods only, so that
a script's `--help` does not import it.

Legend: B rows, V vocab.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from nanochat.ground.cli import Range, UserError, check_ranges

if TYPE_CHECKING:
    from torch import Tensor

    from nanochat.operators import TorchKernels

GREEDY_BELOW = 1e-6  # a temperature; dividing logits by less would overflow fp32


# `sample` for one row of four tokens at top_k 3 and top_p 0.7, when its noise is 0.7:
#
#     token                   a     b     c     d
#     softmax of the logits  0.50  0.30  0.15  0.05
#     after top_k = 3        0.53  0.32  0.16  0        the logit of d is -inf, so the others sum to 1 again
#     after top_p = 0.7      0.53  0.32  0     0        only a and b together reach 0.7
#     cumulative sum         0.53  0.84  0.84  0.84
#     0.7 x 0.84 = 0.59      it falls after 0.53 and before 0.84: the row draws b


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one row are chosen. A setting that has its default value changes nothing."""

    temperature: Annotated[float, Range(0, 100)] = 1.0  # below 1 likely tokens become likelier; 0: greedy
    top_k: Annotated[int, Range(0)] = 0  # keep the k likeliest tokens; 0: all
    top_p: Annotated[float, Range(1e-9, 1)] = 1.0  # keep the fewest likeliest tokens that reach this probability
    min_p: Annotated[float, Range(0, 1)] = 0.0  # keep tokens with this share of the likeliest one's probability
    repetition_penalty: Annotated[float, Range(0.01, 100)] = 1.0  # above 1: tokens seen so far become less likely
    presence_penalty: Annotated[float, Range(-2, 2)] = 0.0  # subtracted from the logit of a token that the reply has
    frequency_penalty: Annotated[float, Range(-2, 2)] = 0.0  # the same, for each time that the reply has the token
    seed: Annotated[int, Range(0, 2**64)] = 0  # the same seed and prompt give the same reply

    @property
    def is_greedy(self) -> bool:
        return self.temperature <= GREEDY_BELOW


# Each row of a batch has its own settings: one is greedy, the next uses top_p. `sample` computes all rows together,
# so it reads a table with a row for each sequence and a column for each of these settings. A row with the neutral value
# keeps its logits.
NEUTRAL = {field.name: field.default for field in fields(SamplingParams) if field.name != "seed"}

# The default settings of replies. Training saves them with the checkpoint ("sampling" in meta.json), where the API, the
# page, the terminal chat and the evaluation read them. Plain sampling at a temperature keeps the long tail of unlikely
# tokens. Of the demo's stories 74% hold together with min_p 0.05, 82% with 0.2, 80% with 0.3, where they become alike:
# 0.74, 0.71 and 0.68 of their 4-grams are distinct (400 or more stories each, Xeon with AMX, 2026-11-30).
CHAT_SAMPLING = SamplingParams(temperature=0.8, min_p=0.2)


def saved_settings(params: SamplingParams) -> dict[str, float]:
    """The settings that meta.json stores: those that differ from the neutral values."""
    return {name: getattr(params, name) for name, off in NEUTRAL.items() if getattr(params, name) != off}


def read_settings(saved: Any) -> SamplingParams:
    """The settings that a checkpoint's meta.json stores; the others are neutral.

    Raises ValueError: for anything that `saved_settings` cannot have written.
    """
    if not isinstance(saved, dict) or not set(saved) <= set(NEUTRAL):
        raise ValueError(f"sampling in meta.json is not an object of {', '.join(NEUTRAL)}")
    for name, value in saved.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or (isinstance(NEUTRAL[name], int) and not isinstance(value, int)):
            raise ValueError(f"sampling in meta.json has a {name} that is no {type(NEUTRAL[name]).__name__}")
    params = SamplingParams(**saved)
    try:
        check_ranges(params)
    except UserError as error:
        raise ValueError(f"sampling in meta.json is out of range ({error})") from error
    return params


class RowSettings:
    """The settings of B rows: on the host, and as the table (B, settings) that a device reads."""

    def __init__(self, params: Sequence[SamplingParams], table: Tensor):
        self.table = table
        self.all_greedy = all(one.is_greedy for one in params)
        self.any_greedy = any(one.is_greedy for one in params)
        self.largest_top_k = max((one.top_k for one in params), default=0)
        # How many of the likeliest tokens top_p has to sort; 0: all. After a top_k of 50 only 50 are left, and perhaps
        # some that are exactly as likely as the 50th: top_p keeps or drops them together with it. min_p gives no such
        # number. At 0.05 it leaves at most 20 tokens if the likeliest has probability 1, but 2,000 if it has 0.01, and
        # the host would have to wait for the device to know.
        bounds = [one.top_k for one in params if one.top_p < 1 and not one.is_greedy]
        self.top_p_candidates = max(bounds, default=1) if all(bounds) else 0
        # A step of `sample` that no row needs is skipped: each costs launches, top_p without top_k also a sort of the
        # vocabulary.
        self.in_use: set[str] = set()
        for name, off in NEUTRAL.items():
            if any(getattr(one, name) != off for one in params):
                self.in_use.add(name)

    @staticmethod
    def numbers(params: SamplingParams) -> list[float]:
        """One row of the table."""
        # All settings as fp32 in one table: one copy to the device per admitted row, instead of one per setting.
        row = {name: float(getattr(params, name)) for name in NEUTRAL}
        row["temperature"] = max(row["temperature"], GREEDY_BELOW)  # a greedy row's quotient is not read, but finite
        return list(row.values())

    def __getitem__(self, name: str) -> Tensor:
        """One setting of each row, (B, 1)."""
        column = list(NEUTRAL).index(name)
        return self.table[:, column : column + 1]


def sample(
    logits: Tensor,
    settings: RowSettings,
    noise: Tensor,
    seen: Tensor,
    kernels: TorchKernels,
    counts: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Choose one token for each row, each by its own settings, from logits (B, V) in fp32; returns (B,).

    `noise` (B, 1) in [0, 1) decides; `seen` (B, V) is True for the tokens that the repetition penalty is for. `counts`
    (B, V) is how often each token is in the reply, for the presence and the frequency penalty; `bias` (B, V) is added
    to the logits, -inf forbids a token. Both are None where no row needs them. What a row draws does not depend on its
    neighbours: a setting that is off changes no bit of the row. Where several tokens are exactly as likely as the last
    one kept, all of them are kept.
    """
    V = logits.size(-1)

    # The bias comes first: it changes the model's prediction; the settings change how the prediction is used.
    if bias is not None:
        logits = logits + bias

    # Repetition penalty: a logit of 4 becomes 2 at a penalty of 2, and one of -4 becomes -8. To divide both would make
    # the second token likelier. Source: Keskar et al. 2019, CTRL.
    if "repetition_penalty" in settings.in_use:
        penalty = settings["repetition_penalty"]
        penalized = (logits / penalty).where(logits > 0, logits * penalty)
        logits = penalized.where(seen, logits)

    # OpenAI's two penalties are subtracted, and the prompt's tokens do not count: a token that the reply has twice
    # loses one presence penalty and two frequency penalties.
    if counts is not None:
        logits = logits - settings["frequency_penalty"] * counts - settings["presence_penalty"] * (counts > 0)

    # Greedy rows take the likeliest token and ignore the rest. In a mixed batch their choice is made here, before the
    # other settings change the logits, and put in place at the end.
    if settings.all_greedy:
        return logits.argmax(dim=-1)
    greedy_choice = logits.argmax(dim=-1) if settings.any_greedy else None

    # Temperature: with probabilities 0.8 and 0.2, a temperature of 0.5 squares their ratio (0.94 and 0.06), and a
    # temperature of 2 takes its root (0.67 and 0.33).
    if "temperature" in settings.in_use:
        logits = logits / settings["temperature"]

    # top_k: drop what is less likely than the k-th. One topk call serves all rows, with the largest k among them.
    if "top_k" in settings.in_use:
        top_k = settings["top_k"]
        best = logits.topk(min(settings.largest_top_k, V), dim=-1).values
        # Row by row the k-th of the sorted logits. Where top_k is 0 the index is clamped, and its result is not used.
        last_kept = best.gather(-1, (top_k.long() - 1).clamp(0, best.size(-1) - 1))  # (B, 1)
        logits = logits.masked_fill((logits < last_kept) & (top_k > 0), -math.inf)
    probabilities = logits.softmax(dim=-1)

    # top_p and min_p each drop the tokens below some probability; the greater of the two decides.
    # Sources: Holtzman et al. 2020 (top_p), Nguyen et al. 2024 (min_p).
    # top_p cuts the unreliable tail, which is long where the model is unsure. min_p scales with the likeliest token: at
    # 0.1 a token needs 9% where the likeliest has 90%, and 1% where it has 10%.
    if "top_p" in settings.in_use:
        candidates = min(settings.top_p_candidates or V, V)
        least = _least_of_top_p(probabilities, settings["top_p"], candidates, kernels)
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
    if "min_p" in settings.in_use:
        least = settings["min_p"] * probabilities.amax(dim=-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)

    # The noise falls into one token's part of the cumulative sum. The sum is below 1 after tokens were dropped, so the
    # noise is scaled by it. One number for each row takes 11 to 17 ms for 64 rows of 32,768, torch.multinomial, which
    # draws one for each token, 60 to 97 (a thread of an AMD EPYC, 2026-11-21). Noise of 23 bits is below 1, so that a
    # token without probability, which adds nothing to the sum, is never drawn.
    mass = kernels.running_sums(probabilities)
    drawn = (mass <= noise * mass[:, -1:]).sum(dim=-1)
    if greedy_choice is None:
        return drawn
    return greedy_choice.where(settings["temperature"][:, 0] <= GREEDY_BELOW, drawn)


def _least_of_top_p(probabilities: Tensor, top_p: Tensor, candidates: int, kernels: TorchKernels) -> Tensor:
    """The smallest probability that each row (B, V) keeps, (B, 1), 0 where top_p is off.

    No row with top_p has more than `candidates` different probabilities above 0.
    """
    off = top_p >= 1
    first = kernels.top_p_first
    # With `first` 64, look at the likeliest 64 tokens, then at 512, and so on, until they reach top_p in every row.
    # Only a CPU does that (kernels/cpu.py): it sorts slowly, and elsewhere a look at the result waits for the device.
    width = min(first, candidates) if first else candidates
    while True:
        ordered = probabilities.topk(width, dim=-1).values
        mass = kernels.running_sums(ordered)
        if width == candidates:
            break
        enough = (mass[:, -1:] >= top_p) | off  # (B, 1)
        if bool(enough.all()):
            break
        width = min(8 * width, candidates)
    # A token is kept while the likelier ones do not reach top_p together. For the likeliest their mass is 0, so it is
    # always kept.
    kept = (mass - ordered) < top_p
    return ordered.masked_fill(~kept, math.inf).amin(dim=-1, keepdim=True).masked_fill(off, 0.0)


# ---------------------------------------------------------------------- seeds and noise


def uniforms(seed: int, count: int) -> np.ndarray:
    """`count` fp32 numbers in [0, 1): number i depends only on the seed and i, on any machine.

    A row that draws by its own numbers gets the same reply in any batch, which a generator shared by a batch would not
    give. Source: Salmon et al. 2011, Philox.
    """
    bits = np.random.Philox(key=seed).random_raw(count)  # it hashes a counter: no two seeds share numbers
    # The upper 23 bits as a fraction: fp32 holds 24 bits, so no number is rounded up to 1.
    return (bits >> np.uint64(41)).astype(np.float32) * np.float32(2**-23)


def seed_of(seed: int, *numbers: int) -> int:
    """A 64-bit seed for the whole numbers under a seed: a step's, a question's, a sample's."""
    return int(np.random.SeedSequence(seed, spawn_key=numbers).generate_state(1, np.uint64)[0])
