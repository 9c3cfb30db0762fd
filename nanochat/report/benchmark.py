"""The files of `python -m scripts.bench --json`: two of them compared, with the noise of each ratio.

Such a file holds every single measurement, because a median does not show how far it can be trusted:

    {"what": "train", "device": ..., "config": {...}, "measurements": {
        "step": {"unit": "tokens/s", "values": [11020.1, 11180.4, ...]}, ...}}

docs/bench.md explains how to read the output.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from nanochat.cli import UserError
from nanochat.log import print_table, warn
from nanochat.untrusted import read_json

PRODUCT_NAME = "bare product"  # the measurements that show how fast the machine itself was begin so
RESAMPLES = 10_000
AT_ONCE = 10**7  # resampled numbers in memory
CONFIDENCE = 0.95
FEW = 8  # measurements: with fewer, resampling does not show how far they can spread
NOTICED = 0.1  # processors that other programs take: on a quiet machine it is some hundredths of one
NOT_SETTINGS = {"what", "files", "json", "plot"}  # flags of bench that change no measurement

# The word for a ratio below 1, and for a ratio above 1, by unit.
WORDS = {
    "tokens/s": ("slower", "faster"), "GFLOP/s": ("slower", "faster"), "ms": ("faster", "slower"),
    "s": ("faster", "slower"), "%": ("lower", "higher"), "MiB": ("less", "more"),
}  # fmt: skip
NOISE = "within the noise"
ONCE = "measured once"


@dataclass(frozen=True)
class Benchmark:
    """The content of a file of `bench --json`."""

    path: str
    what: str  # "train" or "serve"
    settings: dict[str, Any]  # flags, device and versions, by name
    measurements: dict[str, tuple[str, list[float]]]  # name -> unit, values
    others: float | None = None  # processors that other programs took meanwhile; None: nobody knows


@dataclass(frozen=True)
class Ratio:
    """One measurement after over before: of their medians, with the interval in which the true ratio probably is."""

    value: float
    low: float | None = None  # None: one side was measured once
    high: float | None = None

    def verdict(self, unit: str) -> str:
        """`faster`, `slower` and similar words if 1 is outside the interval."""
        if self.low is None or self.high is None:
            return ONCE
        below, above = WORDS.get(unit, ("less", "more"))
        if self.high < 1:
            return below
        return above if self.low > 1 else NOISE


# ---------------------------------------------------------------------- compare


def load(path: str) -> Benchmark:
    """Raises UserError: when bench did not write the file, or its single measurements are missing."""
    try:
        content = read_json(Path(path))
        what = content["what"]
        measurements = {}
        for name, measured in content["measurements"].items():
            if not isinstance(measured["values"], list):
                raise ValueError(f"{name} has no list of values")
            values = [float(value) for value in measured["values"]]
            if not values or not all(math.isfinite(value) and value > 0 for value in values):
                raise ValueError(f"{name} has a value that is not a positive number")
            measurements[str(name)] = (str(measured["unit"]), values)
        flags = {name: value for name, value in content["config"].items() if name not in NOT_SETTINGS}
        settings = flags | {"device": content["device"], "kernels": content["kernels"], **content["versions"]}
        settings["threads"] = content["threads"]
        others = content.get("other_programs")
        others = None if others is None else float(others)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: name two files of `python -m scripts.bench --json`") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        other = {KeyError: f"no {error}", TypeError: "another shape", AttributeError: "another shape"}
        reason = other.get(type(error), str(error))
        raise UserError(f"{path} is not a file of the current `bench --json` ({reason}): measure again") from error
    return Benchmark(path, str(what), settings, measurements, others)


def ratio_of(before: Sequence[float], after: Sequence[float]) -> Ratio:
    """The ratio of the medians, with a 95% interval.

    Many measurements are resampled in blocks of neighbours. A few give the widest ratio of any two of them.
    Source: Künsch 1989, The Jackknife and the Bootstrap for General Stationary Observations.
    """
    value = median(after) / median(before)
    fewest = min(len(before), len(after))
    if fewest == 1:
        return Ratio(value)
    if fewest < FEW:
        return Ratio(value, min(after) / max(before), max(after) / min(before))
    generator = np.random.default_rng(0)  # the same files give the same interval
    ratios = _resampled_medians(after, generator) / _resampled_medians(before, generator)
    low, high = np.quantile(ratios, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).tolist()
    return Ratio(value, low, high)


def _resampled_medians(values: Sequence[float], generator: np.random.Generator) -> np.ndarray:
    """Medians (RESAMPLES,) of resampled measurements."""
    # A neighbour on the machine slows several steps in a row. If each step were drawn separately, such a streak would
    # average out, and the interval would be too narrow. So streaks are drawn: 20 steps as 5 blocks of 4 neighbours.
    count = len(values)
    block = round(math.sqrt(count))
    starts = generator.integers(count, size=(RESAMPLES, math.ceil(count / block), 1))
    medians = []
    for part in np.array_split(starts, math.ceil(RESAMPLES * count / AT_ONCE)):  # a long file fits in memory
        places = (part + np.arange(block)) % count  # past the last measurement comes the first
        medians.append(np.median(np.asarray(values)[places.reshape(len(part), -1)[:, :count]], axis=1))
    return np.concatenate(medians)


def differences(before: Benchmark, after: Benchmark) -> list[str]:
    """The settings in which the two measurements differ: `depth 4 and 6`."""
    found = []
    for name in dict.fromkeys([*before.settings, *after.settings]):
        values = [side.settings.get(name) for side in (before, after)]
        if values[0] != values[1]:
            found.append(f"{name} {values[0]} and {values[1]}")
    return found


def compare(before: Benchmark, after: Benchmark) -> dict[str, Ratio]:
    """Print a row for each measurement that both have, and warn about differences that make them hard to compare.

    Raises UserError: when they are of different kinds, or have no measurement in common.
    """
    if before.what != after.what:
        sides = f"{before.path} is of `bench {before.what}` and {after.path} of `bench {after.what}`"
        raise UserError(f"{sides}: compare two files of one kind")
    shared = [name for name, (unit, _) in before.measurements.items() if after.measurements.get(name, ("",))[0] == unit]
    if not shared:
        raise UserError(f"{before.path} and {after.path} have no measurement in common: measure both with equal flags")
    different = differences(before, after)
    if different:
        warn(f"not measured alike: {'; '.join(different)}")
    for side in (before, after):
        warn_of(side.others, side.path)
    ratios = {}
    rows = []
    for name in shared:
        unit, values = before.measurements[name]
        _, later = after.measurements[name]
        ratio = ratios[name] = ratio_of(values, later)
        interval = "" if ratio.low is None else f"{ratio.low:.3f} to {ratio.high:.3f}"
        numbers = [short(median(values)), short(median(later)), f"{ratio.value:.3f}"]
        rows.append([f"{name}, {unit}", *numbers, interval, f"{min(len(values), len(later))}", ratio.verdict(unit)])
    print_table(["", "before", "after", "ratio", "95% interval", "times", "after is"], rows)
    products = [ratio.verdict("GFLOP/s") for name, ratio in ratios.items() if name.startswith(PRODUCT_NAME)]
    changes = sorted({*products} - {NOISE, ONCE})  # in a sweep: at some of its points
    if changes:
        warn(
            f"the machine itself was {' and '.join(changes)} in {after.path} (bare product): go by the step's share "
            "of it, or measure both again in turn"
        )
    return ratios


def warn_of(others: float | None, place: str = "") -> None:
    """Warn where other programs took `others` processors beside a measurement; `place` is its file."""
    if others is not None and others >= NOTICED:
        where = f"{place}: " if place else ""
        problem = f"other programs took {others:.1f} processors meanwhile, so the figures are too slow"
        warn(f"{where}{problem}: stop them and measure again (docs/bench.md)")


def short(value: float) -> str:
    """`12,345` from 1,000 on, three digits below."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
