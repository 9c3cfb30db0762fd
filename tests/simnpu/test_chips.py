"""Chips without the fused operators: what they refuse, and that this project chooses torch's own operators there."""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from simnpu import cases
from simnpu.conftest import computing

# What fails on such a chip, each with what its message names.
REFUSED = {
    "torch_npu.npu_rms_norm(x, x[0], epsilon=1e-6)": "npu_rms_norm",
    "torch_npu.npu_add_rms_norm(x, x, x[0], epsilon=1e-6)": "npu_add_rms_norm",
    "torch_npu.npu_swiglu(x)": "npu_swiglu",
    "torch_npu.npu_rotary_mul(x[None, None], x[None, None], x[None, None])": "npu_rotary_mul",
    "torch_npu.npu_fusion_attention(x[None], x[None], x[None], 1, 'BSH')": "npu_fusion_attention",
    "x.bfloat16() @ x.bfloat16()": "DT_BFLOAT16",
}


@pytest.fixture(scope="module", params=[pytest.param("", marks=pytest.mark.slow)])
def chip(built: None) -> Iterator[Callable[[str], Callable[..., Any]]]:
    """From a chip's name to the process, shared by all tests, that computes cases of cases.py on it."""
    with contextlib.ExitStack() as stack:

        def start(soc: str) -> Callable[..., Any]:
            return functools.partial(stack.enter_context(computing("cases", soc=soc)), device="npu:0")

        yield functools.cache(start)


@pytest.mark.parametrize("soc", ["Ascend910A", "Ascend910ProB", "Ascend310P3"])
def test_an_old_chip_refuses_fused_operators_and_bfloat16(chip, soc: str):
    messages, multiplies = chip(soc)("refusals", expressions=list(REFUSED))
    for message, name in zip(messages, REFUSED.values(), strict=True):
        assert name in message and soc in message
    assert multiplies


@pytest.mark.parametrize("soc", ["Ascend910B3", "Ascend910_9391", "Ascend950PR_9579"])
def test_a_newer_chip_takes_bfloat16_and_the_fused_operators(chip, soc: str):
    expressions = ["x.bfloat16() @ x.bfloat16()", next(iter(REFUSED))]
    assert chip(soc)("refusals", expressions=expressions)[0] == [None, None]


def test_the_name_chooses_the_kernels(chip):
    """Ascend910B without a number is of the first generation. A name that is not known is newer than this test."""
    fused = ("Ascend910B1", "Ascend910B4-1", "Ascend910B2C", "Ascend910_9362", "Ascend950DT_9571", "Ascend970A")
    plain = (
        *("Ascend910A", "Ascend910B", "Ascend910ProA", "Ascend910ProB", "Ascend910PremiumA", "Ascend910"),
        *("Ascend310P1", "Ascend310P7", "Ascend310B4"),
    )
    names = [*fused, *plain]
    chosen = chip("Ascend910B3")("kernels", names=names)
    assert [name[:5] for name in chosen] == ["npu_f"] * len(fused) + ["torch"] * len(plain)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_training_on_a_910a_is_the_cpus(chip, packed: bool):
    on_npu = chip("Ascend910A")("train_losses", dtype="auto", packed=packed)
    on_cpu = cases.train_losses("cpu", packed=packed)
    assert chip("Ascend910A")("kernels")[0].startswith("torch")
    assert on_npu[:6:2] == pytest.approx(on_cpu[:6:2], rel=1e-5)  # losses
    assert on_npu == pytest.approx(on_cpu, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("soc", ["Ascend910A", "Ascend310P3"])
def test_replies_of_an_old_chip_are_the_cpus(chip, soc: str):
    assert chip(soc)("greedy_tokens", dtype="auto", max_tokens=30) == cases.greedy_tokens("cpu", max_tokens=30)
    assert chip(soc)("kernels")[0].startswith("torch")


@pytest.mark.slow
def test_training_on_a_chip_for_inference_is_one_line(simulated, tmp_path: Path):
    command = ["-m", "scripts.mid_train", "--device=npu"]
    done = simulated(command, soc="Ascend310P3", env={"NANOCHAT_BASE_DIR": str(tmp_path)})
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (line,) = re.findall("^error: .*", done.stderr, re.MULTILINE)
    assert "Ascend310P3 is made for inference and cannot train" in line
