"""Record the values of every module in a training step, and compare two recordings.

python -m scripts.probe --device cpu --out cpu.json

python -m scripts.probe --device npu --out npu.json

python -m scripts.probe --compare cpu.json npu.json

Weights and tokens are the same on every device. The comparison names the first module, kernel or gradient that differs,
in the order in which a step computes them. The fault is there, or in its direct successor.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from nanochat.cli import Count, Depth, Positive, Range, Seed, Size, UserError, run
from nanochat.log import print0


@dataclass(frozen=True)
class Config:
    out: str | None = None  # record to this file
    compare: tuple[str, str] | None = None  # compare two recordings instead of recording
    # The largest difference that counts as rounding, relative to the norm; default: 1e-3 in float32, 0.05 in bfloat16.
    tolerance: Annotated[float, Range(0)] | None = None
    depth: Depth = 4  # layers
    max_seq_len: Size = 256  # tokens a row
    vocab_size: Size = 1024  # tokens that the model knows
    device_batch_size: Size = 2  # rows
    steps: Positive = 1  # training steps, each with an update; with more than one, compare in float32 only
    document_tokens: Count = 0  # pack rows with documents of this many tokens; 0: a row is one document
    window_pattern: str = "SSSL"  # see base_train
    seed: Seed = 0  # seed of the weights and the tokens
    device: str = "auto"  # auto, npu, cuda or cpu
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # the dtype of matrix products


def main(config: Config) -> None:
    if config.compare:
        compare(config)
    elif config.out:
        record(config, Path(config.out))
    else:
        raise UserError("--out FILE records, --compare FILE FILE compares two recordings: name one of the two")


def record(config: Config, out: Path) -> None:
    # The heavy imports are here so that --help answers at once.
    from nanochat import device as devices
    from nanochat import scaling
    from nanochat.run.probe import record_steps

    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}")

    # ---- the steps
    device = devices.init(config.device, config.dtype)
    shape = scaling.model_config(
        config.depth, config.vocab_size, config.max_seq_len, window_pattern=config.window_pattern
    )
    losses, readings = record_steps(
        device,
        shape,
        rows=config.device_batch_size,
        steps=config.steps,
        document_tokens=config.document_tokens,
        seed=config.seed,
    )
    for step, loss in enumerate(losses):
        print0(f"step {step}: loss {loss:.6f}")

    # ---- the recording
    data = {"vocab_size", "device_batch_size", "max_seq_len", "document_tokens", "seed"}
    settings = {"depth", "window_pattern", "steps", *data}
    recording = {
        "device": str(device),
        "dtype": str(device.dtype).removeprefix("torch."),
        "kernels": str(device.kernels),
        "versions": device.versions(),
        "config": {name: value for name, value in vars(config).items() if name in settings},
        "readings": readings,
    }
    out.write_text(json.dumps(recording, indent=0), encoding="utf-8")
    bad = sum(reading["not_finite"] > 0 for reading in readings)
    print0(f"{out}: {len(readings)} readings, {bad} with values that are not finite; {device}, {device.kernels}")


def compare(config: Config) -> None:
    from nanochat.run.probe import first_difference

    assert config.compare is not None
    ours, theirs = (load(Path(name)) for name in config.compare)
    for name, value in ours["config"].items():
        if theirs["config"].get(name) != value:
            raise UserError(f"the recordings differ in --{name}: record both with the same flags")
    tolerance = config.tolerance
    if tolerance is None:
        tolerance = 1e-3 if ours["dtype"] == theirs["dtype"] == "float32" else 0.05
    line = first_difference(ours["readings"], theirs["readings"], tolerance)
    if line is not None:
        raise UserError(f"first difference above {tolerance:g} of the norm: {line}")
    print0(f"{len(ours['readings'])} readings agree within {tolerance:g} of their norms")


def load(path: Path) -> dict[str, Any]:
    try:
        recording = json.loads(path.read_text(encoding="utf-8"))
        for name, kind in (("readings", list), ("config", dict), ("dtype", str)):
            if not isinstance(recording[name], kind):
                raise TypeError(name)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"--compare {path}: not a recording of this script's --out") from error
    return recording


if __name__ == "__main__":
    run(main, Config)
