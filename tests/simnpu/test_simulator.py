"""The simulator itself: its build, its processes, and what checks.py finds inside one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from simnpu import build
from simnpu.conftest import computing

HERE = Path(__file__).resolve().parent
CHECKS = re.findall(r"^def (\w+)\(\) -> None", (HERE / "checks.py").read_text(), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.usefixtures("built")
def test_inside():
    with computing("checks", devices=2, memory="2GiB") as compute:
        for name in CHECKS:
            compute(name)


@pytest.mark.slow
@pytest.mark.usefixtures("built")
def test_either_import_brings_the_kernels_and_the_devices_asked_for():
    """In a process that starts as a user's does; the others are forked."""
    show = "(torch.ones(2, device='npu') * 3).tolist(), torch.npu.device_count(), torch.npu.mem_get_info(2)[1]"
    code = f"import torch; print({show}, torch.npu.get_device_name(2))"
    environment = {**os.environ, **build.environment(devices=3, soc="Ascend910_9391", memory="1.5GiB")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == f"[3.0, 3.0] 3 {3 << 29} Ascend910_9391\n", done.stderr[-2000:]


def test_without_a_wheel_or_a_compiler_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("SIMNPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SIMNPU_WHEEL", str(tmp_path))  # an index without wheels
    command = [sys.executable, str(HERE / "run"), sys.executable, "-c", "print('ran')"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "no torch_npu" in done.stderr and "ran" not in done.stdout
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.Unavailable, match="gcc"):
        build.environment()
