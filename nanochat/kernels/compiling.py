"""Compile a model's blocks with torch.compile, and measure the time that this takes.

Blocks are alike, so one compiled program runs all of them. Each block is compiled separately: it passes its gradients
on before the block below begins its backward pass, and FSDP gathers and frees the weights of one block at a time. The
rest stays eager: a few operators, and the loss (cross_entropy.py). Whether compiling pays is decided in run_flags.py.
"""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nanochat.attention import Segments
from nanochat.device import Device
from nanochat.gpt import GPT, Block
from nanochat.ground import screen
from nanochat.ground.cli import UserError, explainers
from nanochat.ground.log import print0
from nanochat.ground.screen import duration
from nanochat.run.loop import Run
from nanochat.run.progress import Attendant, Meter

COMPILER_SECONDS = 25  # an estimate: 21 to 25 s on two cores with AMX (2026-11-23)


def compile_model(run: Run, model: Any, shape: Sequence[int] | None = None, part: str = "step") -> Any:
    """The model with compiled blocks, or unchanged if the compiler is missing; prints how this `part` of the run is
    computed. None, where a run has no reference, is returned as it is.

    If micro-batches differ, only `shape` (rows, tokens) is compiled; the others stay eager. None: all have the same
    shape.
    Raises UserError: when the compiler is missing, and --compile is "on".
    """
    if model is None:
        return None
    over = getattr(model, "over", None)
    if over is not None:  # a function over a model, as the reference of adapters is
        return over(compile_model(run, model.model, shape, part))
    # Neither the decision nor the shape may depend on the step at which a run resumes: compiled code rounds
    # differently.
    compiled, how = compile_blocks(run.device, model, run.config.compile, shape)
    print0(f"{part}: {how}; kernels: {run.device.kernels}")
    if compiled is not model and not any(isinstance(one, CompilerClock) for one in run.attendants):
        run.attendants.append(CompilerClock(run.meter))
    return compiled


def compile_blocks(
    device: Device, model: GPT, mode: Literal["auto", "on", "off"], shape: Sequence[int] | None = None
) -> tuple[Any, str]:
    """Compile a model's blocks; returns the model, and a word on it for the log.

    The code is compiled for tokens of one `shape` (rows, tokens); other shapes, as packed micro-batches have them, stay
    eager. None: all tokens have the same shape.
    Raises UserError: when `mode` is "on" and the compiler is missing.
    """
    missing = missing_compiler(device)
    if missing and mode == "on":
        raise UserError(f"--compile on needs {missing}; install it or leave --compile out")
    if missing:
        return model, f"eager ({missing} is missing)"
    if model.config.experts:  # a teacher: speed.py has looked at the model that is trained
        return model, "eager (a model with experts)"
    import torch._dynamo
    import torch._inductor.config

    # By default the compiler first builds and loads a library as a test, which takes 4 of 38 s.
    torch._inductor.config.cpp.vec_isa_ok = True
    # A model has several kinds of blocks: with value embeddings, with short windows, with and without adapters. With
    # the default of 8 the compiler gives up.
    torch._dynamo.config.recompile_limit = 64
    explainers.add(explain)
    # Compile for fixed shapes: a training step has one shape, and known sizes make faster code.
    return CompiledBlocks(model, torch.compile(Block.compute, dynamic=False), shape), "compiled"


def missing_compiler(device: Device) -> str | None:
    """The tool that torch.compile needs and this machine lacks; None if nothing is missing."""
    # torch.compile generates Triton kernels for an accelerator and C++ for a CPU.
    if device.kind != "cpu":
        return None if importlib.util.find_spec("triton") else "triton"
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")  # as torch chooses it
    try:
        subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return f"the C++ compiler {compiler}"
    return None


def explain(error: BaseException) -> str | None:
    """One line with a fix for a compilation error; None for other errors."""
    if type(error).__name__ not in ("InductorError", "BackendCompilerFailed"):  # importing them would load the compiler
        return None
    # "...Error: what happened" is in the first line; commands and the compiler's own output follow.
    return f"torch.compile failed ({str(error).strip().splitlines()[0][:300]}): leave it out with --compile off"


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
        for block in model.blocks:
            vars(block)["compute"] = MethodType(self._compute, block)
        try:
            # Always use autograd, even if the caller needs no gradient. Without it the compiler makes another program,
            # which rounds elsewhere: in bf16 the ratio of a policy to itself is then 0.97 to 1.03 (two cores of an
            # Intel Xeon, 2026-11-22). With one program, a policy and its reference, or an earlier policy, differ only
            # by their weights.
            with torch.enable_grad():
                result = model(tokens, targets, segments=segments, **options)
        finally:
            for block in model.blocks:
                del vars(block)["compute"]
        return result if torch.is_grad_enabled() else result.detach()


class CompilerClock(Attendant):
    """Prints when torch.compile begins, and keeps its seconds out of the run's speed; a context manager."""

    def __init__(self, meter: Meter):
        from torch._dynamo.callback import callback_handler  # takes a second, but torch.compile has imported it already

        self.handler = callback_handler
        self.meter = meter
        self.noticed = False  # print the line once: forward and backward are compiled one after the other
        self.began = 0.0

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
        self.meter.compiling += time.perf_counter() - self.began
