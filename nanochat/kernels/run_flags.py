"""What --compile and --profile request of a training run."""

from collections.abc import Sequence
from typing import Any

from nanochat.ground.log import print0
from nanochat.run.loop import Run
from nanochat.run.speed import eager_reason, warn_of_days


def compiled_and_profiled(
    run: Run, step_flops: int, shape: Sequence[int], model: Any, reference: Any = None, forward_alone: bool = False
) -> tuple[Any, Any]:
    """The model and its reference, compiled for micro-batches of `shape` (rows, tokens) if that pays; the run records
    the steps of --profile. Prints why it stays eager, and warns of a run of days.

    `forward_alone`: some passes have no backward pass.
    Raises UserError: when --compile is "on" and the model cannot be compiled.
    """
    is_sharded = forward_alone and run.start.layout.sharded
    eager = eager_reason(run.device, run.start.model.config, run.config.compile, step_flops * run.last, is_sharded)
    warn_of_days(run, step_flops, eager is None)
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
