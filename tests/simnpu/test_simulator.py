"""The simulator itself: its build, its processes, and what checks.py finds inside one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from simnpu import build

HERE = Path(__file__).resolve().parent
CHECKS = re.findall(r"^def (check_\w+)", (HERE / "checks.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module", params=[pytest.param(kind, marks=pytest.mark.slow) for kind in ("expandable", "plain")])
def checked(request, simulated) -> dict[str, str | None]:
    """The checks of one process, with memory in segments that grow (nanochat asks for those) and without."""
    allocator = {"PYTORCH_NPU_ALLOC_CONF": f"expandable_segments:{request.param == 'expandable'}"}
    done = simulated([str(HERE / "checks.py")], devices=2, memory="2GiB", env=allocator)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CHECKS)
def test_inside(checked, name: str):
    assert checked[name] is None, checked[name]


@pytest.mark.slow
def test_a_check_that_fails_is_seen(simulated):
    planted = """
import sys
sys.path.insert(0, "tests/simnpu")
import checks
for name in [name for name in vars(checks) if name.startswith("check_")]:
    delattr(checks, name)
checks.check_planted = lambda: checks.same(checks.torch.ones(2), checks.torch.ones(2).npu() * 2)
checks.main()
"""
    done = simulated(["-c", planted], devices=2)
    assert "AssertionError" in json.loads(done.stdout)["check_planted"], done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["torch", "torch_npu"])
@pytest.mark.usefixtures("built")
def test_either_import_brings_the_kernels_and_the_devices_asked_for(first: str):
    show = "(torch.ones(2, device='npu') * 3).tolist(), torch.npu.device_count(), torch.npu.mem_get_info(2)[1]"
    code = f"import {first}, torch; print({show}, torch.npu.get_device_name(2))"
    environment = {**os.environ, **build.environment(devices=3, soc="Ascend910_9391", memory="1.5GiB")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == f"[3.0, 3.0] 3 {3 << 29} Ascend910_9391\n", done.stderr[-2000:]


@pytest.mark.slow
def test_a_process_ends_as_its_program_says(simulated):
    assert simulated(["-c", "import torch, sys; torch.ones(1, device='npu'); sys.exit(3)"]).returncode == 3
    failed = simulated(["-c", "import torch; torch.ones(1, device='npu') + torch.ones(2, 3, device='npu:1')"])
    assert failed.returncode == 1 and "RuntimeError" in failed.stderr


def test_sizes():
    assert build.parse_size("2GiB") == 2 << 30 and build.parse_size("512MiB") == 512 << 20
    assert build.parse_size("1.5KiB") == 1536 and build.parse_size("100") == 100
    with pytest.raises(ValueError, match="2GiB"):
        build.parse_size("2 gigs")


def test_without_a_wheel_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("SIMNPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SIMNPU_WHEEL", str(tmp_path))  # an index without wheels
    with pytest.raises(build.Unavailable, match="no torch_npu .* wheel for cp"):
        build.environment()
    command = [sys.executable, str(HERE / "run"), sys.executable, "-c", "print('ran')"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "no torch_npu" in done.stderr and "ran" not in done.stdout


def test_without_a_compiler_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.Unavailable, match="gcc"):
        build.environment()
