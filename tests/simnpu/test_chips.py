"""Chips without the fused operators: what they refuse, and that this project chooses torch's own operators there."""

import functools
import re
from pathlib import Path

import pytest

from simnpu import cases, tomllib
from simnpu.conftest import computing

CHIPS = tomllib.loads(Path(__file__).with_name("chips.toml").read_text("utf-8"))
FUSED, PLAIN, REFUSED = CHIPS["fused"], CHIPS["plain"], CHIPS["refused"]
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
    """A name that is not known is newer than this test."""
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
