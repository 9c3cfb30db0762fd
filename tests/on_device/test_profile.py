"""The profiler of a device."""

from collections.abc import Callable
from pathlib import Path

import torch

from nanochat import scaling
from nanochat.device import Device
from nanochat.gpt import GPT
from nanochat.kernels.profiling import Recorder
from nanochat.train import make_optimizer, next_token_loss, train_step
from on_device.sizes import Sizes


def test_profile(sizes: Sizes, trains: Device, measured: Callable[..., None], tmp_path: Path):
    """It records the fourth of four training steps: which operators or kernels take its time."""
    config = scaling.model_config(sizes.depth, sizes.vocab_size, sizes.tokens)
    model = GPT(config, trains.kernels).to(trains.torch_device)
    model.init_weights()
    batch_tokens = sizes.rows * sizes.tokens
    optimizer = make_optimizer(model, scaling.rates(config, batch_tokens, 1000 * batch_tokens), trains)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(sizes.vocab_size, (sizes.rows, sizes.tokens + 1), generator=generator)
    batch = (trains.to_device(ids[:, :-1].contiguous()), trains.to_device(ids[:, 1:].contiguous()))
    folder = tmp_path / "profile"
    with Recorder(1, 4, trains, folder) as recorder:
        for step in range(1, 5):
            train_step(model, optimizer, [batch], next_token_loss, device=trains)
            recorder.boundary(step)
    files = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())  # the folders have the host's name
    summary, *table = (folder / "summary.txt").read_text().splitlines()[:-1]  # the last line is the folder
    assert table, f"the profiler wrote no table of kernels: {', '.join(files)[:300]}"
    measured(table="\n".join([summary, *table]))
