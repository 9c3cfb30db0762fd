"""Measure this machine with this code: training speed against the bare matrix product it is made of.

python -m scripts.bench train
python -m scripts.bench train --depth 12 --max_seq_len 2048 --vocab_size 32768 --device_batch_size 16
"""

import json
import statistics
import time
from dataclasses import dataclass
from typing import Literal

import tyro

from nanochat.cli import require, run


@dataclass(frozen=True)
class Config:
    what: tyro.conf.Positional[Literal["train"]]  # train: whole steps, optimizer included, on random tokens
    depth: int = 4  # layers; the width is 64 x depth, rounded up to whole heads
    head_dim: int = 128  # channels of an attention head
    max_seq_len: int = 512  # tokens a row
    vocab_size: int = 8192
    device_batch_size: int = 8  # rows
    optimizer: Literal["muon", "adamw"] = "muon"  # of the matrices
    steps: int = 20  # measured, each between two measurements of the bare product
    device: str = "auto"  # auto, npu, cuda or cpu
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of matrix products
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto: as in a long run
    json: str | None = None  # also write the figures to this file


def main(config: Config) -> None:
    # The heavy imports stand here so that --help answers at once.
    from pathlib import Path

    import torch

    from nanochat import device as devices
    from nanochat import scaling
    from nanochat.gpt import GPT
    from nanochat.log import print0
    from nanochat.train import make_optimizer, next_token_loss, train_step

    # ------------------------------------------------------------------ a model and a batch
    require(config, "depth max_seq_len device_batch_size vocab_size steps", 1)
    require(config, "head_dim", 2)
    device = devices.init(config.device, config.dtype)
    model_config = scaling.model_config(config.depth, config.vocab_size, config.max_seq_len, head_dim=config.head_dim)
    model = GPT(model_config).to(device.torch_device)
    model.init_weights()
    rows, tokens, width = config.device_batch_size, config.max_seq_len, model_config.width
    batch_tokens = rows * tokens
    rates = scaling.rates(model_config, batch_tokens, 1000 * batch_tokens)
    optimizer = make_optimizer(model, rates, device, config.optimizer)
    compiled, how = device.compile(model, config.compile, float("inf"))
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(config.vocab_size, (rows, tokens + 1), generator=generator)
    batch = (device.to_device(batch[:, :-1].contiguous()), device.to_device(batch[:, 1:].contiguous()))

    def step() -> None:
        train_step(compiled, optimizer, [batch], next_token_loss, device=device)

    # ------------------------------------------------------------------ the yardsticks
    def product(inner: int, outer: int):
        """A bare (tokens x inner) @ (inner x outer) in the dtype of training, and its FLOPs."""
        a = torch.randn(batch_tokens, inner, device=device.torch_device, dtype=device.dtype)
        b = torch.randn(inner, outer, device=device.torch_device, dtype=device.dtype)
        flops = 2 * batch_tokens * inner * outer
        out = torch.empty(batch_tokens, outer, device=device.torch_device, dtype=device.dtype)
        repeats = max(1, int(1e11 / flops))
        return (lambda: [torch.mm(a, b, out=out) for _ in range(repeats)]), flops * repeats

    measured = {
        "step": (step, scaling.flops_per_token(model_config) * batch_tokens),
        "own product": product(width, 4 * width),  # the MLP's first matrix
        "square product": product(1024, 1024),
    }

    # ------------------------------------------------------------------ measure in turn
    begin = time.perf_counter()
    for function, _ in measured.values():
        function()
        function()
    device.synchronize()
    print0(f"warm-up ({how}): {time.perf_counter() - begin:.1f} s")
    seconds: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(config.steps):
        for name, (function, _) in measured.items():
            device.synchronize()
            begin = time.perf_counter()
            function()
            device.synchronize()
            seconds[name].append(time.perf_counter() - begin)

    # ------------------------------------------------------------------ tell
    rate = {name: flops / statistics.median(seconds[name]) for name, (_, flops) in measured.items()}
    ratios = {
        name: statistics.median(
            measured["step"][1] / a / (measured[name][1] / b)
            for a, b in zip(seconds["step"], seconds[name], strict=True)
        )
        for name in ("own product", "square product")
    }
    step_seconds = statistics.median(seconds["step"])
    dtype = str(device.dtype).removeprefix("torch.")
    print0(
        f"device: {device.name} ({device.kind}, {dtype}), torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
    print0(
        f"model: depth {config.depth}, width {width}, vocabulary {config.vocab_size}, {rows} rows of {tokens} tokens, "
        f"{config.optimizer}"
    )
    print0(
        f"step: {step_seconds * 1e3:.1f} ms, {batch_tokens / step_seconds:,.0f} tokens/s, "
        f"{rate['step'] / 1e9:,.0f} GFLOP/s"
    )
    for name, shape in (
        ("own product", f"{batch_tokens} x {width} x {4 * width}"),
        ("square product", f"{batch_tokens} x 1024 x 1024"),
    ):
        print0(f"{name} ({shape}): {rate[name] / 1e9:,.0f} GFLOP/s; the step reaches {ratios[name]:.0%} of it")
    print0(f"peak memory: {device.peak_memory() / 2**20:,.0f} MiB")
    if config.json:
        figures = {"tokens_per_second": batch_tokens / step_seconds, "flops_per_second": rate, "ratio": ratios}
        Path(config.json).write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    run(main, Config)
