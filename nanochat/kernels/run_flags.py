"""What --compile and --profile request of a training run."""

import math
from collections.abc import Sequence
from typing import Any, Literal

from nanochat.device import Device
from nanochat.gpt import GPTConfig
from nanochat.ground.cli import UserError
from nanochat.ground.log import print0
from nanochat.run.loop import Run


def compiled_and_profiled(
    run: Run, step_flops: int, shape: Sequence[int], model: Any, reference: Any = None, forward_alone: bool = False
) -> tuple[Any, Any]:
    """The model and its reference, compiled for micro-batches of `shape` (rows, tokens) if that pays; the run records
    the steps of --profile. Prints why it stays eager.

    `forward_alone`: some passes have no backward pass.
    Raises UserError: when --compile is "on" and the model cannot be compiled.
    """
    is_sharded = forward_alone and run.start.layout.sharded
    eager = eager_reason(run.device, run.start.model.config, run.config.compile, step_flops * run.last, is_sharded)
    if eager is not None:
        print0(f"step: eager ({eager}); kernels: {run.device.kernels}")
    else:
        from nanochat.kernels.compiling import compile_model  # here: eager runs do without it

        model = compile_model(run, model, shape)
        reference = compile_model(run, reference, shape, "reference")
    if run.config.profile:
        from nanochat.kernels.profiling import Recorder

        left = run.last - run.first_step
        run.attendants.append(Recorder(run.config.profile, left, run.device, run.log_folder / "profile"))
    return model, reference


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
    elif config.has_states:  # their loop over chunks is not compiled in reasonable time
        obstacle = "a model with states"
        fix = "a model with states (Qwen3.5) is not compiled, leave it out"
    if obstacle is not None and mode == "on":
        raise UserError(f"--compile on: {fix}")
    if obstacle is None and mode == "auto":
        least_flops = device.kernels.compiled_flops
        if math.isinf(least_flops):
            obstacle = "compile is opt-in here: --compile on"
        elif run_flops < least_flops:
            obstacle = "too short a run to repay compiling"
    return obstacle
