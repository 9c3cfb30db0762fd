"""Chips without the fused operators: what they refuse, and that this project chooses torch's own operators there."""

import json
import re
import sys
from pathlib import Path

import pytest

from simnpu import cases

HERE = Path(__file__).resolve().parent

# What fails on such a chip, each with what its message names.
REFUSED = {
    "torch_npu.npu_rms_norm(x, x[0], epsilon=1e-6)": "npu_rms_norm",
    "torch_npu.npu_add_rms_norm(x, x, x[0], epsilon=1e-6)": "npu_add_rms_norm",
    "torch_npu.npu_swiglu(x)": "npu_swiglu",
    "torch_npu.npu_rotary_mul(x[None, None], x[None, None], x[None, None])": "npu_rotary_mul",
    "torch_npu.npu_fusion_attention(x[None], x[None], x[None], 1, 'BSH')": "npu_fusion_attention",
    "x.bfloat16() @ x.bfloat16()": "DT_BFLOAT16",
}
TRY = """
import json, sys
import torch, torch_npu
x = torch.rand(4, 4).npu()
messages = []
for text in json.loads(sys.argv[1]):
    try:
        eval(text)
        messages.append(None)
    except RuntimeError as error:
        messages.append(str(error))
print(json.dumps([messages, (x @ x).sum().item() > 0]))
"""
# A case of cases.py in a simulated process of its own.
CASE = """
import json, sys
sys.path[:0] = [{root!r}, {tests!r}]
from simnpu import cases
from nanochat import device
print(json.dumps([getattr(cases, {function!r})("npu:0", **{arguments!r}), str(device.init("npu:0").kernels)]))
"""


def case(simulated, soc: str, function: str, **arguments):
    """The result of a case, and the kernels of its device."""
    code = CASE.format(root=str(HERE.parents[1]), tests=str(HERE.parent), function=function, arguments=arguments)
    done = simulated(["-c", code], soc=soc)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("soc", ["Ascend910A", "Ascend910ProB", "Ascend310P3"])
def test_an_old_chip_refuses_fused_operators_and_bfloat16(simulated, soc: str):
    done = simulated(["-c", TRY, json.dumps(list(REFUSED))], soc=soc)
    messages, multiplies = json.loads(done.stdout.splitlines()[-1])
    for message, name in zip(messages, REFUSED.values(), strict=True):
        assert name in message and soc in message
    assert multiplies


@pytest.mark.parametrize("soc", ["Ascend910B3", "Ascend910_9391", "Ascend950PR_9579"])
def test_a_newer_chip_takes_bfloat16_and_the_fused_operators(simulated, soc: str):
    done = simulated(["-c", TRY, json.dumps(["x.bfloat16() @ x.bfloat16()", next(iter(REFUSED))])], soc=soc)
    assert json.loads(done.stdout.splitlines()[-1])[0] == [None, None], done.stderr[-2000:]


def test_the_name_chooses_the_kernels(simulated):
    """Ascend910B without a number is of the first generation. A name that is not known is newer than this test."""
    fused = ("Ascend910B1", "Ascend910B4-1", "Ascend910B2C", "Ascend910_9362", "Ascend950DT_9571", "Ascend970A")
    plain = (
        *("Ascend910A", "Ascend910B", "Ascend910ProA", "Ascend910ProB", "Ascend910PremiumA", "Ascend910"),
        *("Ascend310P1", "Ascend310P7", "Ascend310B4"),
    )
    names = [*fused, *plain]
    code = f"from nanochat import device; print([str(device.kernels('npu', name=name))[:5] for name in {names}])"
    done = simulated(["-c", f"import torch; {code}"])
    assert done.stdout.splitlines()[-1] == str(["npu_f"] * len(fused) + ["torch"] * len(plain)), done.stderr[-2000:]


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_training_on_a_910a_is_the_cpus(simulated, packed: bool):
    on_npu, kernels = case(simulated, "Ascend910A", "train_losses", dtype="auto", packed=packed)
    on_cpu = cases.train_losses("cpu", packed=packed)
    assert kernels.startswith("torch")
    assert on_npu[:12:2] == pytest.approx(on_cpu[:12:2], rel=1e-5)  # losses
    assert on_npu == pytest.approx(on_cpu, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("soc", ["Ascend910A", "Ascend310P3"])
def test_replies_of_an_old_chip_are_the_cpus(simulated, soc: str):
    on_npu, kernels = case(simulated, soc, "greedy_tokens", dtype="auto")
    assert kernels.startswith("torch")
    assert on_npu == cases.greedy_tokens("cpu")


def test_training_on_a_chip_for_inference_is_one_line(simulated, tmp_path: Path):
    command = [sys.executable, "-m", "scripts.mid_train", "--device=npu"]
    done = simulated(command, soc="Ascend310P3", env={"NANOCHAT_BASE_DIR": str(tmp_path)})
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (line,) = re.findall("^error: .*", done.stderr, re.MULTILINE)
    assert "Ascend310P3 is made for inference and cannot train" in line
