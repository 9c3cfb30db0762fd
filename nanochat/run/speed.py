"""How fast the steps of a run are: whether compiling them pays, and a warning of a run that takes days."""

import math
import time
from typing import Literal

import torch

from nanochat.device import Device
from nanochat.gpt import GPTConfig
from nanochat.ground.cli import UserError
from nanochat.ground.log import warn
from nanochat.ground.screen import duration
from nanochat.run.loop import Run

LONG_RUN_SECONDS = 86400.0  # if the estimate is longer, the run begins with a warning


def eager_reason(
    device: Device, config: GPTConfig, mode: Literal["auto", "on", "off"], run_flops: float, is_sharded: bool = False
) -> str | None:
    """Why a model stays eager in a run of `run_flops`; None: it is compiled, if the compiler is there.

    `is_sharded`: a sharded model has passes without a backward pass.
    Raises UserError: when `mode` is "on" and the model cannot be compiled.
    """
    if mode == "off":
        return "--compile off"
    obstacle = None
    fix = ""
    if device.context_ranks > 1:
        obstacle = "ranks share rows"
        fix = "blocks that exchange tokens are not compiled: leave out --context_parallel"
    elif is_sharded:
        # A compiled model runs each pass with autograd. FSDP would wait for a backward pass to free the gathered
        # weights.
        obstacle = "sharded"
        fix = "chat_dpo and chat_rl compile no sharded model: leave out --parallel fsdp"
    elif config.experts:  # the sizes of their products differ from pass to pass
        obstacle = "a model with experts"
        fix = "a model with experts is not compiled, leave it out"
    if obstacle is not None and mode == "on":
        raise UserError(f"--compile on: {fix}")
    if obstacle is None and mode == "auto":
        least_flops = device.kernels.compiled_flops
        if math.isinf(least_flops):
            obstacle = "compile is opt-in here: --compile on"
        elif run_flops < least_flops:
            obstacle = "too short a run to repay compiling"
    return obstacle


def warn_of_days(run: Run, step_flops: int, is_compiled: bool) -> None:
    """Warn before the first step, which may take an hour, if the run takes days by the speed of a matrix product."""
    speed = product_flops(run.device) if run.device.is_main else None
    if speed is None:
        return
    # On a CPU in bf16 a compiled step reaches half of a bare product's speed, an eager one a quarter (2026-11-20).
    part = 0.5 if is_compiled else 0.25
    step_seconds = step_flops / (part * speed * run.device.world_size)
    seconds = step_seconds * (run.last - run.progress.step)
    if seconds > LONG_RUN_SECONDS:
        warn(
            f"this run takes about {duration(seconds)} here, by the speed of a matrix product: lower --num_iterations, "
            "or train a smaller model (--depth of base_train); Ctrl-C saves, --resume continues"
        )


def product_flops(device: Device) -> float | None:
    """FLOP/s of a bare matrix product in the device's dtype: measured on a CPU, elsewhere 60% of the peak, or None if
    the peak is unknown."""
    if device.kind != "cpu":
        return device.peak_flops and 0.6 * device.peak_flops
    size = 512
    square = torch.ones(size, size, dtype=device.dtype)
    seconds = []
    for _ in range(4):  # the first one is slower
        began = time.perf_counter()
        torch.mm(square, square)
        seconds.append(time.perf_counter() - began)
        if seconds[-1] > 0.2:  # bfloat16 on a CPU without its instructions
            break
    return 2 * size**3 / min(seconds)
