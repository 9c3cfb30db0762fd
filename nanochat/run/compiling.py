"""Compile a model's blocks with torch.compile, and measure the time that this takes.

Blocks are alike, so one compiled program runs all of them. Each block is compiled separately: it passes its gradients
on before the block below begins its backward pass, and FSDP gathers and frees the weights of one block at a time. The
rest stays eager: a few operators, and the loss (cross_entropy.py).
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nanochat.attention import Segments
from nanochat.device import Device
from nanochat.gpt import GPT, Block
from nanochat.ground import screen
from nanochat.ground.cli import UserError
from nanochat.ground.log import duration, print0, warn
from nanochat.kernels import compiler
from nanochat.run.loop import Attendant, Run
from nanochat.train import Meter

LONG_RUN_SECONDS = 86400.0  # if the estimate is longer, the run begins with a warning
TIMED_STEPS = 2
COMPILER_SECONDS = 25  # an estimate: 21 to 25 s on two cores with AMX (2026-11-23)


def compile_model(
    run: Run,
    model: Any,
    mode: Literal["auto", "on", "off"],
    step_flops: int,
    shape: Sequence[int] | None,
    part: str = "step",
    forward_alone: bool = False,
) -> Any:
    """The model, compiled if that pays over the run's steps; prints how this `part` of the run is computed.

    If micro-batches differ, only `shape` (rows, tokens) is compiled; the others stay eager. None: all have the same
    shape. `forward_alone`: some passes have no backward pass.
    Raises UserError: when `mode` is "on" and the model cannot be compiled.
    """
    over = getattr(model, "over", None)
    if over is not None:  # a function over a model, as the reference of adapters is
        return over(compile_model(run, model.model, mode, step_flops, shape, part, forward_alone))
    if run.device.context_ranks > 1:
        if mode == "on":
            raise UserError("--compile on: blocks that exchange tokens are not compiled: leave out --context_parallel")
        print0(f"{part}: eager (ranks share rows); kernels: {run.device.kernels}")
        return model
    # A compiled model runs each pass with autograd. FSDP would wait for a backward pass to free the gathered weights.
    if forward_alone and run.start.layout.sharded:
        if mode == "on":
            raise UserError(f"--compile on: chat_{run.stage} compiles no sharded model: leave out --parallel fsdp")
        print0(f"{part}: eager (sharded); kernels: {run.device.kernels}")
        return model
    # Neither the decision nor the shape may depend on the step at which a run resumes: compiled code rounds
    # differently.
    compiled, how = compile_blocks(run.device, model, mode, step_flops * run.last, shape)
    print0(f"{part}: {how}; kernels: {run.device.kernels}")
    clock = None
    if compiled is not model:
        clock = next((one for one in run.attendants if isinstance(one, CompilerClock)), None)
        if clock is None:
            clock = CompilerClock(run.meter)
            run.attendants.append(clock)
    if part == "step":
        _warn_of_days(run, step_flops, compiled is not model)
        run.attendants.append(StepClock(run, clock))
    return compiled


def _warn_of_days(run: Run, step_flops: int, is_compiled: bool) -> None:
    """Warn before the first step, which may take an hour, if the run takes days by the speed of a matrix product."""
    product_flops = compiler.product_flops(run.device) if run.device.is_main else None
    if product_flops is None:
        return
    # On a CPU in bf16 a compiled step reaches half of a bare product's speed, an eager one a quarter (2026-11-20).
    share = 0.5 if is_compiled else 0.25
    step_seconds = step_flops / (share * product_flops * run.device.world_size)
    seconds = step_seconds * (run.last - run.progress.step)
    if seconds > LONG_RUN_SECONDS:
        warn(
            f"this run takes about {duration(seconds)} here, by the speed of a matrix product: lower --num_iterations, "
            "or train a smaller model (--depth of base_train); Ctrl-C saves, --resume continues"
        )


def compile_blocks(
    device: Device, model: GPT, mode: Literal["auto", "on", "off"], run_flops: float, shape: Sequence[int] | None = None
) -> tuple[Any, str]:
    """Compile a model's blocks if the device's policy says so; returns the model, and the decision for the log.

    The code is compiled for tokens of one `shape` (rows, tokens); other shapes, as packed micro-batches have them, stay
    eager. None: all tokens have the same shape.
    Raises UserError: when `mode` is "on" and the compiler is missing.
    """
    if model.config.experts:  # the sizes of their products differ from pass to pass
        if mode == "on":
            raise UserError("--compile on: a model with experts is not compiled, leave it out")
        return model, "eager (a model with experts)"
    compute, how = compiler.compile_by_policy(device, Block.compute, mode, run_flops)
    return (model if compute is Block.compute else CompiledBlocks(model, compute, shape)), how


class CompiledBlocks:
    """A callable that runs a model with compiled blocks. The model itself stays eager."""

    def __init__(self, model: GPT, compute: Any, shape: Sequence[int] | None):
        self.model = model
        self._compute = compute
        self._shape = None if shape is None else torch.Size(shape)

    def modules(self) -> Iterator[nn.Module]:
        return self.model.modules()

    def cast_weights(self) -> AbstractContextManager[None]:
        return self.model.cast_weights()

    def __call__(
        self, tokens: Tensor, targets: Tensor | None = None, segments: Segments | None = None, **options: Any
    ) -> Tensor:
        model = self.model
        if self._shape is not None and tokens.shape != self._shape:
            return model(tokens, targets, segments=segments, **options)
        # One program for any number of documents; without the mark there is one program per number.
        if segments is not None:
            torch._dynamo.maybe_mark_dynamic(segments.bounds, 0)  # pyright: ignore[reportPrivateImportUsage]
        model.compute_block = self._compute
        try:
            # Always use autograd, even if the caller needs no gradient. Without it the compiler makes another program,
            # which rounds elsewhere: in bf16 the ratio of a policy to itself is then 0.97 to 1.03 (two cores of an
            # Intel Xeon, 2026-11-22). With one program, a policy and its reference, or an earlier policy, differ only
            # by their weights.
            with torch.enable_grad():
                result = model(tokens, targets, segments=segments, **options)
        finally:
            model.compute_block = Block.compute
        return result if torch.is_grad_enabled() else result.detach()


class StepClock(Attendant):
    """Prints once how long the rest of the run takes, from the time of two steps. Later lines have an `eta`."""

    def __init__(self, run: Run, compiler_clock: "CompilerClock | None"):
        self.run = run
        self.compiler_clock = compiler_clock
        # The first step allocates. With a compiler the second one is the first to run what it made.
        self.first_timed = run.progress.step + (1 if compiler_clock is None else 2)
        self.began = 0.0
        self.aside = 0.0  # seconds of evaluation and saving

    def boundary(self, step: int) -> float:
        if step == self.first_timed:
            self.began = self._now()
            self.aside = 0.0
        elif step == self.first_timed + TIMED_STEPS < self.run.last:
            each = (self._now() - self.began - self.aside) / TIMED_STEPS
            left = each * (self.run.last - step)
            print0(f"time: about {duration(left)} more, {each:,.2f} s a step")
        return 0.0

    @contextlib.contextmanager
    def phase(self, name: str, seconds: float = 0.0) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            if name != "sampling":  # in RL a part of every step
                self.aside += time.perf_counter() - began

    def _now(self) -> float:
        """Seconds on the clock without torch.compile's, once the device has computed all steps."""
        self.run.device.synchronize()
        compiling = 0.0 if self.compiler_clock is None else self.compiler_clock.seconds
        return time.perf_counter() - compiling


class CompilerClock(Attendant):
    """Prints when torch.compile begins, and keeps its seconds out of the run's speed; a context manager."""

    def __init__(self, meter: Meter):
        from torch._dynamo.callback import callback_handler  # takes a second, but torch.compile has imported it already

        self.handler = callback_handler
        self.meter = meter
        self.noticed = False  # print the line once: forward and backward are compiled one after the other
        self.began = 0.0
        self.seconds = 0.0  # spent in torch.compile so far

    def __enter__(self) -> "CompilerClock":
        self.handler.register_start_callback(self.start)
        self.handler.register_end_callback(self.end)
        return self

    def __exit__(self, *_: object) -> None:
        self.handler.remove_start_callback(self.start)
        self.handler.remove_end_callback(self.end)

    def start(self, *_: object) -> None:
        self.began = time.perf_counter()
        if not self.noticed:
            print0(f"compiling, about {duration(COMPILER_SECONDS)}, once")
        self.noticed = True
        self.bar = screen.Bar("compiling").begin()

    def end(self, *_: object) -> None:
        self.bar.end()
        seconds = time.perf_counter() - self.began
        self.meter.compiling += seconds
        self.seconds += seconds
