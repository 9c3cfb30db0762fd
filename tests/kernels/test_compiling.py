"""What is compiled on which device, and what is said where a compiler is missing or fails."""

import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_setup import tomllib
from tiny import complaint, cpu_device, tiny_config

from nanochat.gpt import Block
from nanochat.ground.cli import UserError
from nanochat.kernels import compiling
from nanochat.kernels.compiling import compile_blocks, missing_compiler
from nanochat.kernels.cpu import CpuKernels
from nanochat.kernels.run_flags import eager_reason
from nanochat.operators import TorchKernels

COMPILED = tomllib.loads(Path(__file__).with_name("compiled.toml").read_text())["rows"]


@pytest.fixture(autouse=True)
def restored_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test sets in the environment goes with it."""
    monkeypatch.setattr(os, "environ", {**os.environ})


@pytest.mark.parametrize(("kind", "requested", "missing", "run_flops", "outcome"), COMPILED)
def test_what_is_compiled(
    kind: str, requested: Any, missing: str, run_flops: float, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "missing_compiler", lambda device: missing or None)
    monkeypatch.setattr(torch, "compile", lambda f, **options: ("compiled", f))
    flops = {"cuda": TorchKernels.compiled_flops, "cpu": CpuKernels.compiled_flops, "npu": math.inf}
    device: Any = SimpleNamespace(context_ranks=1, kernels=SimpleNamespace(compiled_flops=flops[kind]))
    model: Any = SimpleNamespace(config=tiny_config())
    reason = eager_reason(device, model.config, requested, run_flops)
    if reason is not None:
        assert f"eager ({reason})" == outcome
        return
    if outcome == "refused":
        with pytest.raises(UserError, match=f"--compile on needs {missing}".replace("+", r"\+")):
            compile_blocks(device, model, requested)
        return
    made, how = compile_blocks(device, model, requested)
    assert how == outcome
    assert made is model if how != "compiled" else made._compute == ("compiled", Block.compute)


@pytest.mark.parametrize(
    ("ranks", "experts", "is_sharded", "reason", "flag"),
    [
        (2, 0, False, "ranks share rows", "--context_parallel"),
        (1, 0, True, "sharded", "--parallel fsdp"),  # a reference would wait for a backward pass that never comes
        (1, 4, False, "a model with experts", "it"),
    ],
)
def test_what_cannot_be_compiled(ranks: int, experts: int, is_sharded: bool, reason: str, flag: str) -> None:
    run: Any = (replace(cpu_device(), context_ranks=ranks), tiny_config(experts=experts))
    assert eager_reason(*run, "auto", 1e30, is_sharded) == reason
    assert f"leave {flag}" in complaint(lambda: eager_reason(*run, "on", 1, is_sharded)).replace("leave out", "leave")


def test_a_cpu_compiles_with_the_compiler_that_torch_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The one of CXX, else g++ (clang++ on a Mac); it must run."""
    default = "clang++" if sys.platform == "darwin" else "g++"
    os.environ.pop("CXX", None)
    os.environ["PATH"] = str(tmp_path)
    assert missing_compiler(cpu_device()) == f"the C++ compiler {default}"
    (tmp_path / default).symlink_to(sys.executable)
    assert missing_compiler(cpu_device()) is None
    os.environ["CXX"] = str(tmp_path / "nothing")
    assert missing_compiler(cpu_device()) == f"the C++ compiler {tmp_path}/nothing"
    os.environ["CXX"] = "/bin/false"
    assert missing_compiler(cpu_device()) == "the C++ compiler /bin/false"


def test_code_that_cannot_be_compiled_is_one_line() -> None:
    error = type("InductorError", (RuntimeError,), {})("CppCompileError: C++ compile error\n\nCommand:\ng++ a.cpp")
    line = compiling.explain(error)
    assert line is not None and "\n" not in line
    assert "C++ compile error" in line and "--compile off" in line
