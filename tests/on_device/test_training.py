"""Speed of training, and its memory against the count of `--dry_run`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nanochat import scaling
from nanochat.device import Device
from nanochat.gpt import GPT
from nanochat.parallel import dry_run
from nanochat.train import make_optimizer, next_token_loss
from on_device.sizes import Sizes
from scripts import bench

GIB = 1 << 30
LEAST_MFU = 0.1  # a step below a tenth of the nominal peak waits for something else than its products


@pytest.mark.parametrize("depth", [12, 20])
def test_train_depth(
    kind: str, sizes: Sizes, trains: Device, measured: Callable[..., None], tmp_path: Path, depth: int
):
    """A step takes the memory that was counted, and reaches a tenth of the nominal peak."""
    if kind == "cpu":
        pytest.skip("the peak of a CPU is the whole process")
    if not sizes.judges_speed and depth != 12:
        pytest.skip("only at its full size")
    depth = depth if sizes.judges_speed else sizes.depth
    counted = counted_bytes(trains, sizes, depth)
    free, total = trains.module.mem_get_info()
    if counted + 2 * GIB > free:
        pytest.skip(f"needs {counted / GIB:.1f} GiB and some, {free / GIB:.1f} of {total / GIB:.1f} are free")
    file = tmp_path / "bench.json"
    held = trains.module.memory_allocated()  # by other tests in this process
    trains.module.reset_peak_memory_stats()
    flags = bench.Train(
        depth=depth, vocab_size=sizes.vocab_size, max_seq_len=sizes.tokens, device=kind, json=str(file),
        device_batch_size=sizes.rows, steps=sizes.steps, compile="off",
    )  # fmt: skip
    bench.main(bench.Config(flags))
    found = json.loads(file.read_text())
    peak = found["peak_memory_bytes"] - held
    speed = found["tokens_per_second"]
    measured(depth=depth, tokens_per_second=speed, peak_gib=peak / GIB, counted_gib=counted / GIB)
    if found["mfu"]:
        measured(mfu=found["mfu"])
    assert peak == pytest.approx(counted, rel=0.05, abs=4 << 20)
    if sizes.judges_speed and found["mfu"]:
        assert found["mfu"] >= LEAST_MFU


def counted_bytes(device: Device, sizes: Sizes, depth: int) -> int:
    """The peak of a step of `bench train`, as `--dry_run` counts it: on tensors without data."""
    rows = sizes.rows
    tokens = sizes.tokens
    config = scaling.model_config(depth, sizes.vocab_size, tokens)
    with torch.device("meta"):
        model = GPT(config, device.kernels)
    ledger = dry_run.begin(device, model)
    try:
        optimizer = make_optimizer(model, scaling.rates(config, rows * tokens, 1000 * rows * tokens), device)
        ids = torch.zeros(2, rows, tokens, dtype=torch.long, device=device.torch_device)
        ledger.count_step(model, optimizer, [(ids[0], ids[1])], next_token_loss)
    finally:
        ledger.modes.close()
    products = 2 * rows * tokens * 1024 * device.dtype.itemsize  # the bare product that bench times beside the step
    return max(ledger.peaks.values()) + products
