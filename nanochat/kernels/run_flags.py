"""What --compile and --profile request of a training run."""

from collections.abc import Sequence
from typing import Any

from nanochat.run.loop import Run
from nanochat.run.speed import should_compile


def compiled_and_profiled(
    run: Run, step_flops: int, shape: Sequence[int], model: Any, reference: Any = None, forward_alone: bool = False
) -> tuple[Any, Any]:
    """The model and its reference, compiled for micro-batches of `shape` (rows, tokens) if that pays; the run records
    the steps of --profile. `forward_alone`: some passes have no backward pass."""
    if should_compile(run, step_flops, forward_alone):
        from nanochat.kernels.compiling import compile_model  # here: eager runs do without it

        model = compile_model(run, model, shape)
        reference = compile_model(run, reference, shape, "reference")
    if run.config.profile:
        from nanochat.kernels.profiling import Recorder

        left = run.last - run.first_step
        run.attendants.append(Recorder(run.config.profile, left, run.device, run.log_folder / "profile"))
    return model, reference
