"""The profiler of a device over four kinds of work: what takes the time of each."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nanochat import scaling
from nanochat.device import Device
from nanochat.kernels.profiling import Recorder
from on_device.recording import make_step
from on_device.sizes import Sizes
from on_device.test_decoding import PROMPT_LENGTHS, SAMPLINGS, decoder

STEPS = 4  # the last one is recorded


def training(device: Device, sizes: Sizes, document_tokens: int = 0, **changes: int) -> Callable[[], object]:
    """A call that takes a training step."""
    config = replace(scaling.model_config(sizes.depth, sizes.vocab_size, sizes.tokens), **changes)
    return make_step(device, config, rows=sizes.rows, document_tokens=document_tokens)[1]


def decoding(device: Device, sizes: Sizes) -> Callable[[], object]:
    """A call that decodes a token of each row."""
    prompts = [[5] * length for length in PROMPT_LENGTHS]
    tokens = decoder(device, sizes.depth, "auto").stream(prompts, max_tokens=2 * STEPS, sampling=SAMPLINGS["sampled"])
    return lambda: [next(tokens) for _ in prompts]


WORK: dict[str, Callable[[Device, Sizes], Callable[[], object]]] = {
    "dense": training,
    "experts": lambda device, sizes: training(device, sizes, experts=8, experts_per_token=2, mlp_width=1024),
    "packed": lambda device, sizes: training(device, sizes, document_tokens=100),  # as in fine-tuning
    "decoding": decoding,
}


@pytest.mark.parametrize("work", WORK)
def test_profile(sizes: Sizes, trains: Device, measured: Callable[..., None], tmp_path: Path, work: str):
    """It records the last of four steps: which operators or kernels take its time."""
    take_step = WORK[work](trains, sizes)
    folder = tmp_path / "profile"
    with Recorder(1, STEPS, trains, folder) as recorder:
        for step in range(1, STEPS + 1):
            take_step()
            recorder.boundary(step)
    files = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())  # the folders have the host's name
    summary, *table = (folder / "summary.txt").read_text().splitlines()[:-1]  # the last line is the folder
    assert table, f"the profiler wrote no table of kernels: {', '.join(files)[:300]}"
    measured(table="\n".join([summary, *table]))
