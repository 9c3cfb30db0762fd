"""Chips without the fused operators: what they refuse, and that this project chooses torch's own operators there."""

import functools
import re
from pathlib import Path

import pytest

from simnpu import cases
from simnpu.conftest import computing

# What fails on such a chip, each with what its message names.
REFUSED = {
    "torch_npu.npu_rms_norm(x, x[0], epsilon=1e-6)": "npu_rms_norm",
    "torch_npu.npu_swiglu(x)": "npu_swiglu",
    "torch_npu.npu_fusion_attention(x[None], x[None], x[None], 1, 'BSH')": "npu_fusion_attention",
    "x.bfloat16() @ x.bfloat16()": "DT_BFLOAT16",
}
FUSED = ("Ascend910B1", "Ascend910B4-1", "Ascend910B2C", "Ascend910_9362", "Ascend950DT_9571", "Ascend970A")
PLAIN = (
    *("Ascend910A", "Ascend910B", "Ascend910ProA", "Ascend910ProB", "Ascend910PremiumA", "Ascend910"),
    *("Ascend310P1", "Ascend310P7", "Ascend310B4"),
)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("built")]


@pytest.mark.parametrize("soc", ["Ascend910A", "Ascend310P3"])
def test_an_old_chip_computes_what_a_cpu_does_without_fused_operators_and_bfloat16(soc: str):
    with computing("cases", soc=soc) as compute:
        on_npu = functools.partial(compute, device="npu:0")
        messages, multiplies = on_npu("refusals", expressions=list(REFUSED))
        assert multiplies and on_npu("kernels")[0].startswith("torch")
        for message, name in zip(messages, REFUSED.values(), strict=True):
            assert name in message and soc in message
        assert on_npu("greedy_tokens", dtype="auto", max_tokens=30) == cases.greedy_tokens("cpu", max_tokens=30)
        if soc == "Ascend910A":
            found = on_npu("train_losses", dtype="auto", packed=True)
            on_cpu = cases.train_losses("cpu", packed=True)
            assert found[:6:2] == pytest.approx(on_cpu[:6:2], rel=1e-5)  # losses
            assert found == pytest.approx(on_cpu, rel=1e-4, abs=1e-4)


def test_the_name_chooses_the_kernels():
    """Ascend910B without a number is of the first generation. A name that is not known is newer than this test."""
    with computing("cases", soc="Ascend950PR_9579") as compute:
        assert compute("refusals", device="npu:0", expressions=[*REFUSED][::3])[0] == [None, None]
        chosen = compute("kernels", device="npu:0", names=[*FUSED, *PLAIN])
    assert [name[:5] for name in chosen] == ["npu_f"] * len(FUSED) + ["torch"] * len(PLAIN)


def test_training_on_a_chip_for_inference_is_one_line(simulated, tmp_path: Path):
    command = ["-m", "scripts.mid_train", "--device=npu"]
    done = simulated(command, soc="Ascend310P3", env={"NANOCHAT_BASE_DIR": str(tmp_path)})
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (line,) = re.findall("^error: .*", done.stderr, re.MULTILINE)
    assert "Ascend310P3" in line and "inference" in line
