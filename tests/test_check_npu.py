"""check_npu.py: each judgement on made-up values, and the whole command on this machine's CPU."""

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from simnpu import build
from simnpu.forks import simulated
from tiny import is_running

import check_npu
from check_npu import Chip, Fail, Holder, Machine, Report, Skip
from nanochat import device as devices
from nanochat.operators import TorchKernels
from nanochat.run import full_report

ROOT = Path(__file__).resolve().parent.parent

# What `npu-smi info` prints, by chip and release.
A2 = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.2.0                   Version: 25.2.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 97.9        34                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3408 / 65536         |
+===========================+===============+====================================================+
| 2     910B4-1             | OK            | 92.3        32                0    / 0             |
| 0                         | 0000:81:00.0  | 0           0    / 0          41052/ 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| No running processes found in NPU 0                                                            |
+===========================+===============+====================================================+
| 2       0                 | 1333928       |                          | 37709                   |
+===========================+===============+====================================================+
"""
A2_CONTAINER = """\
+------------------------------------------------------------------------------------------------------------------+
| npu-smi 26.0.rc2                            Version: 26.0.rc2                                                    |
+---------------------------+---------------+----------------------------------------------------------------------+
| NPU   Name                | Health        | Power(W)             Temp(C)                 Hugepages-Usage(page)   |
| Chip                      | Bus-Id        | AICore(%)            Memory-Usage(MB)        HBM-Usage(MB)           |
+===========================+===============+======================================================================+
| 7     910B4               | OK            | 82.6                 32                      0    / 0                |
| 0                         | 0000:C1:00.0  | 0                    0    / 0                8046 / 32768            |
+===========================+===============+======================================================================+
+---------------------------+---------------+----------------------------------------------------------------------+
| NPU     Chip              | Process id    | Process name       | Process memory(MB)    | Process id in container |
+===========================+===============+======================================================================+
| 7       0                 | 485946        | pytest             | 5175                  | NA                      |
+===========================+===============+======================================================================+
"""
A3 = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.2.3                   Version: 25.2.3                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     Ascend910           | OK            | 232.5       52                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 17          0    / 0          53444/ 65536         |
+------------------------------------------------------------------------------------------------+
| 0     Ascend910           | Warning       | -           51                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 17          0    / 0          2888 / 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 0       0                 | 3325989       |                          | 50128                   |
| 0       1                 | 3325989       |                          | 132                     |
+===========================+===============+====================================================+
"""
INFERENCE = """\
+--------------------------------------------------------------------------------------------------------+
| npu-smi 25.2.0                                   Version: 25.2.0                                       |
+-------------------------------+-----------------+------------------------------------------------------+
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
| 2       310P3                 | OK              | NA           45                0     / 0             |
| 0       0                     | 0000:01:00.0    | 0            1529 / 44280                            |
+-------------------------------+-----------------+------------------------------------------------------+
"""
OLD_TRAINING = """\
| npu-smi 24.1.0                   Version: 24.1.0                                               |
| 0     910ProB             | OK            | 78.0        38                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           2387 / 13553      18   / 32768         |
"""
A5 = """\
| npu-smi 25.7.rc1    Version: 25.7.rc1 |
| NPU ID | Name        | Health | Power(W) Temp(C) Hugepages-Usage(page) |
|        |             | Bus-Id | NPU Util(%) Memory-Usage(MB) HBM-Usage(MB) |
| 3      | Ascend950DT | Alarm  | 120.0 45 0 / 0 |
|        |             | NA     | 0 0 / 0 2048 / 8192 |
| NPU ID | Process id | Process name | Process memory(MB) | Process id in container |
| 3      | 1001       | python       | 256                | NA                      |
| No running processes found in NPU 4 |
"""


def on(cann: str | None, arch: str = "aarch64") -> Machine:
    return Machine(arch=arch, cann=cann, cann_home="/usr/local/Ascend/cann")


@pytest.mark.parametrize(
    ("cann", "torch", "torch_npu"),
    [
        ("8.5.0", "2.9.0", "2.9.0"),
        ("8.5.2", "2.9.0", "2.9.0"),
        ("8.3.RC2", "2.8.0+cpu", "2.8.0"),
        ("9.0.0", "2.9.0+cpu", "2.9.0.post2"),
        ("9.1.0", "2.7.1", "2.7.1.post8"),
        ("9.1.0", "2.9.0", "2.9.0.post8+git1234567"),
    ],
)
def test_versions_that_match(cann: str, torch: str, torch_npu: str):
    assert torch_npu in check_npu.check_match(on(cann), torch, torch_npu)


LABELLED = "pip install --extra-index-url https://download.pytorch.org/whl/cpu "
NEWEST = "torch==2.12.0 torch_npu==2.12.0"


@pytest.mark.parametrize(
    ("versions", "reason", "fix"),
    [
        (
            ("9.0.0", "2.9.0", "2.9.0"),
            "torch_npu 2.9.0 is for CANN 8.5.0, here is CANN 9.0.0; CANN 9.0.0 takes "
            "torch==2.9.0 torch_npu==2.9.0.post2",
            "pip install torch==2.9.0 torch_npu==2.9.0.post2",
        ),
        (
            ("8.5.0", "2.8.0", "2.8.0.post4"),
            "torch_npu 2.8.0.post4 is for CANN 9.0.0, here is CANN 8.5.0; CANN 8.5.0 takes "
            "torch==2.8.0 torch_npu==2.8.0.post2",
            "pip install torch==2.8.0 torch_npu==2.8.0.post2",
        ),
        (
            ("9.0.0", "2.13.0+cpu", "2.9.0.post2"),
            "torch_npu 2.9.0.post2 is not for torch 2.13.0+cpu: their first three numbers differ; CANN 9.0.0 takes "
            "torch==2.9.0 torch_npu==2.9.0.post2",
            "pip install torch==2.9.0 torch_npu==2.9.0.post2",
        ),
        (
            ("9.1.0", "2.12.0", None),
            f"torch_npu is not installed, torch is 2.12.0; CANN 9.1.0 takes {NEWEST} or {NEWEST}.post2",
            f"{LABELLED}torch==2.12.0+cpu torch_npu==2.12.0",
        ),
        (
            ("8.4.0", "2.9.0", "2.9.0"),
            "CANN 8.4.0 is not in the version table (8.1.RC1, 8.2.RC1, 8.3.RC1, 8.5.0, 9.0.0, 9.1.0)",
            "`bash setup_ascend.sh --cann 8.3.RC1` takes torch==2.7.1 torch_npu==2.7.1, the pair of the nearest older "
            "one, or install a CANN of the table (https://www.hiascend.com/cann/download)",
        ),
        (
            ("8.1.RC1", "2.7.1", "2.7.1"),
            "CANN 8.1.RC1 takes torch==2.5.1 torch_npu==2.5.1, this project needs torch>=2.7",
            "install CANN 8.3.RC1 or later (https://www.hiascend.com/cann/download)",
        ),
    ],
)
def test_a_mismatch_is_explained_from_the_table(versions: tuple[str, str, str | None], reason: str, fix: str):
    cann, torch, torch_npu = versions
    with pytest.raises(Fail) as failure:
        check_npu.check_match(on(cann), torch, torch_npu)
    assert (str(failure.value), failure.value.fix) == (reason, fix)


def test_the_pip_line_is_for_this_architecture_and_index(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(Fail) as failure:
        check_npu.check_match(on("8.5.0", "x86_64"), "2.9.0+cpu", "2.9.0.post2")
    assert failure.value.fix == f"{LABELLED}torch==2.9.0+cpu torch_npu==2.9.0"
    monkeypatch.setenv("TORCH_INDEX_URL", "https://mirror.example/cpu")
    with pytest.raises(Fail) as failure:
        check_npu.check_match(on("8.5.0", "x86_64"), "2.9.0+cpu", "2.9.0.post2")
    assert failure.value.fix == (
        "pip install --extra-index-url https://mirror.example/cpu torch==2.9.0+cpu torch_npu==2.9.0"
    )


@pytest.mark.parametrize(
    ("cann", "torch"),
    [("9.1.0", "2.13.0"), ("9.9.0", "2.13.0"), ("10.0.0", "2.9.0"), ("unknown", "2.9.0"), (None, "2.9.0")],
)
def test_what_the_table_cannot_know_is_not_judged(cann: str | None, torch: str):
    with pytest.raises(Skip):
        check_npu.check_match(on(cann), torch, torch)


@pytest.mark.parametrize(
    ("cann", "torch", "torch_npu"),
    [("9.0.0", "2.9.0", "2.9.0.post5"), ("8.5.2", "2.9.0+cpu", "2.9.0.post4"), ("9.1.0", "2.12.0", "2.12.0.post4")],
)
def test_a_post_that_the_table_lacks_is_not_taken_back(cann: str, torch: str, torch_npu: str):
    """Others run such pairs: 2.9.0.post4 on CANN 8.5.2, for one."""
    with pytest.raises(Skip, match=f"torch_npu {torch_npu} "):
        check_npu.check_match(on(cann), torch, torch_npu)


@pytest.mark.parametrize(
    ("cann", "pair"),
    [
        ("8.3.RC1", ("2.7.1", "2.7.1")),
        ("8.5.2", ("2.9.0", "2.9.0")),
        ("9.0.0", ("2.9.0", "2.9.0.post2")),
        ("9.1.1", ("2.12.0", "2.12.0")),
    ],
)
def test_numpy_2_is_for_cann_9(cann: str, pair: tuple[str, str]):
    assert "is for torch" in check_npu.check_match(on(cann), *pair, "1.26.4")
    if cann.startswith("9"):
        assert "is for torch" in check_npu.check_match(on(cann), *pair, "2.0.2")
        return
    with pytest.raises(Fail, match=f"numpy 2.0.2, .*CANN {cann} .* 500001") as failure:
        check_npu.check_match(on(cann), *pair, "2.0.2")
    assert failure.value.fix == 'pip install "numpy<2"'


@pytest.mark.parametrize(
    ("cann", "driver", "fits"),
    [
        ("9.1.0", "25.0.RC1.1", False),
        ("9.1.1", "25.2.0", True),
        ("9.0.0", "25.0.RC1", True),
        ("8.5.0", "24.1.0", False),
        ("8.5.2", "26.0.rc1", True),
        ("8.3.RC1", "23.0.0", True),  # no source, no judgement
        ("10.0.0", "23.0.0", True),
        ("unknown", "23.0.0", True),
        (None, "23.0.0", True),
    ],
)
def test_a_driver_older_than_cann_takes(cann: str | None, driver: str, fits: bool):
    machine = Machine(cann=cann, npu_smi="/usr/local/bin/npu-smi", npu_driver=driver)
    if fits:
        assert check_npu.check_driver(machine, A2).startswith("npu-smi 25.2.0")
        return
    oldest = check_npu.OLDEST_DRIVERS[check_npu.release_of_series(cann or "") or ""]
    with pytest.raises(Fail, match=f"driver {driver}, .*CANN {cann} .*{oldest}") as failure:
        check_npu.check_driver(machine, A2)
    assert "firmware-drivers" in failure.value.fix


def test_packages_are_those_of_the_extra():
    """check_npu.py may stand alone on a machine, so it has the list too."""
    text = (ROOT / "pyproject.toml").read_text()
    extra = re.findall(r'"([\w-]+)"', text[text.index("npu = [") : text.index("track = [")])
    assert extra == ["torch_npu", *check_npu.PACKAGES.split()]


def test_the_version_table_is_in_order():
    keys = [check_npu.version_key(release) for release in check_npu.RELEASES]
    assert keys == sorted(keys)
    for pairs in check_npu.RELEASES.values():
        assert len(set(pairs)) == len(pairs)
        assert all(check_npu.version_key(torch_npu)[:3] == check_npu.version_key(torch) for torch, torch_npu in pairs)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            A2,
            (
                "25.2.0",
                [Chip(0, "910B3", "OK", 3408, 65536), Chip(2, "910B4-1", "OK", 41052, 65536)],
                [Holder(2, 1333928, "", 37709)],
            ),
        ),
        (A2_CONTAINER, ("26.0.rc2", [Chip(7, "910B4", "OK", 8046, 32768)], [Holder(7, 485946, "pytest", 5175)])),
        (
            A3,
            (
                "25.2.3",
                [Chip(0, "Ascend910", "OK", 53444, 65536), Chip(0, "Ascend910", "Warning", 2888, 65536)],
                [Holder(0, 3325989, "", 50128), Holder(0, 3325989, "", 132)],
            ),
        ),
        (INFERENCE, ("25.2.0", [Chip(2, "310P3", "OK", 1529, 44280)], [])),
        (OLD_TRAINING, ("24.1.0", [Chip(0, "910ProB", "OK", 18, 32768)], [])),
        (A5, ("25.7.rc1", [Chip(3, "Ascend950DT", "Alarm", 2048, 8192)], [Holder(3, 1001, "python", 256)])),
        ("no such table", ("unknown", [], [])),
    ],
    ids=["A2", "A2 in a container", "A3", "310P", "910", "950", "none"],
)
def test_npu_smi_is_parsed(text: str, expected: tuple[str, list[Chip], list[Holder]]):
    assert check_npu.parse_npu_smi(text) == expected


def test_driver():
    machine = Machine(npu_smi="/usr/local/bin/npu-smi")
    assert check_npu.check_driver(machine, A2) == "npu-smi 25.2.0, 2 x 910B3/910B4-1, 3408 to 41052 of 65536 MB in use"
    for here, output, reason in (
        (Machine(), "", "npu-smi not found"),
        (machine, "", "lists no NPU: it prints nothing"),
        (machine, "DrvMngGetConsoleLogLevel failed.\ndcmi module initialize failed. ret is -8005\n", "ret is -8005"),
        (machine, A3, "NPU 0 is Warning"),
    ):
        with pytest.raises(Fail, match=reason) as failure:
            check_npu.check_driver(here, output)
        assert failure.value.fix


def test_who_holds_the_memory_is_printed():
    held = [Holder(0, 11, "python", 107), *(Holder(n, 20 + n, "", 30000 + n) for n in range(5))]
    device = SimpleNamespace(kind="npu", module=SimpleNamespace(mem_get_info=lambda: (40 * 2**30, 61 * 2**30)))
    assert check_npu.check_memory(device, held) == (
        "40.0 of 61.0 GiB free, 21.0 in use already: process 24 30004 MB of NPU 4, process 23 30003 MB of NPU 3, "
        "process 22 30002 MB of NPU 2, process 21 30001 MB of NPU 1 and 2 more"
    )
    device.module.mem_get_info = lambda: (2**29, 61 * 2**30)
    with pytest.raises(Fail, match="0.5 of 61.0 GiB.*60.5.*python 11 107 MB.*NPU 0") as failure:
        check_npu.check_memory(device, held[:1])
    assert failure.value.fix == "stop what holds the memory: `npu-smi info` shows it"


def test_device_files_must_be_open_to_us(tmp_path: Path):
    with pytest.raises(Fail, match="/dev/davinci"):
        check_npu.check_device_files(Machine(), tmp_path)
    machine = Machine(npu_files=("/dev/davinci0",))
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "davinci_manager").touch()
    with pytest.raises(Fail, match="/dev/devmm_svm .*/dev/hisi_hdc") as failure:
        check_npu.check_device_files(machine, tmp_path)
    assert "--device=/dev/devmm_svm" in failure.value.fix
    for name in ("devmm_svm", "hisi_hdc"):
        (tmp_path / "dev" / name).touch()
    with pytest.raises(Fail, match="permission.*/dev/davinci0") as failure:
        check_npu.check_device_files(machine, tmp_path)  # not there counts as closed
    assert "HwHiAiUser" in failure.value.fix
    (tmp_path / "dev" / "davinci0").touch()
    assert check_npu.check_device_files(machine, tmp_path) == "1: /dev/davinci0"


def test_sourced_means_home_and_libraries():
    home = "/usr/local/Ascend/cann"
    assert check_npu.is_sourced({"ASCEND_HOME_PATH": home, "LD_LIBRARY_PATH": f"/lib:{home}/lib64"})
    assert not check_npu.is_sourced({"ASCEND_HOME_PATH": home, "LD_LIBRARY_PATH": "/lib:"})
    assert not check_npu.is_sourced({"LD_LIBRARY_PATH": f"{home}/lib64"})
    assert not check_npu.is_sourced({})


SOURCE = "source /usr/local/Ascend/cann/set_env.sh"


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (
            "libhccl.so: cannot open shared object file: No such file or directory. Please check that the cann package "
            "is installed. Please run 'source set_env.sh' in the CANN installation path.",
            SOURCE,
        ),
        ("libascendcl.so: cannot open shared object file: No such file or directory", SOURCE),
        ("No module named 'tbe'", SOURCE),
        ("No module named 'decorator'", f"pip install {check_npu.PACKAGES}"),
        ("No module named 'ml_dtypes'", f"pip install {check_npu.PACKAGES}"),
        (
            "libgomp.so.1: cannot allocate memory in static TLS block",
            "export LD_PRELOAD=<the library named in this line>; it is loaded before the others then",
        ),
        (
            "/venv/torch_npu/lib/libtorch_npu.so: undefined symbol: _ZN3c1014",
            "torch, torch_npu and CANN do not fit: see `versions match`",
        ),
    ],
)
def test_an_import_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, error: str, fix: str):
    def import_module(name: str):
        try:
            raise ImportError(error)
        except ImportError as cause:
            raise RuntimeError("Failed to load the backend extension: torch_npu. You can disable ...") from cause

    monkeypatch.setattr(importlib, "import_module", import_module)
    machine = Machine(cann_environment="/usr/local/Ascend/cann/set_env.sh")
    with pytest.raises(Fail) as failure:
        check_npu.check_import("npu", machine)
    assert error[:40] in str(failure.value) and "\n" not in str(failure.value)
    assert failure.value.fix == fix
    with pytest.raises(Fail) as failure:
        check_npu.check_import("cpu", machine)
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in failure.value.fix


OUT_OF_MEMORY = (
    "NPU out of memory. Tried to allocate 52.00 MiB (NPU 0; 60.96 GiB total capacity; 59.36 GiB already allocated; "
    "59.36 GiB current active; 10.41 MiB free; 59.44 GiB reserved in total by PyTorch) If reserved memory is >> "
    "allocated memory try setting max_split_size_mb to avoid fragmentation."
)
SOCKET_TIMEOUT = """\
InnerRunOpApi:torch_npu/csrc/framework/OpParamMaker.cpp:281 OPS function error: HcclAllreduce, error code is 6
[ERROR] 2025-04-08-18:07:20 (PID:1292363, Device:1, RankID:1) ERR01100 OPS call acl api failed.
EI0006: [PID: 1292363] 2025-04-08-18:07:20.444.436 Getting socket times out. Reason: Remote Rank did not send the data
        Solution: 1. Check the rank service processes with other errors or no errors in the cluster.
"""
NO_KERNELS = """\
call aclnnAdd failed, detail:EZ9999: Inner Error!
EZ9999: [PID: 1] 2025-01-01-00:00:00.000.000 Parse dynamic kernel config fail.
"""
NO_DEVICE = """\
Initialize:npu_sys_ctrl.cpp:217 NPU function error: aclrtSetDevice(device_id_), error code is 507033
[ERROR] 2025-01-01-00:00:00 (PID:1, Device:0, RankID:-1) ERR00100 PTA call acl api failed
"""
NUMPY = """\
SetPrecisionMode:torch_npu/csrc/core/npu.cpp:155 NPU function error: at_npu::native::AclSetCompileopt(...), error code \
is 500001
[ERROR] 2025-08-05-08:05:26 (PID:504068, Device:0, RankID:-1) ERR00100 PTA call acl api failed
"""
NO_MEMORY = """\
call aclrtSetDevice failed, error code is 507033
EL0004: [PID: 553] 2025-09-17-04:55:13.065.712 Failed to allocate memory.
"""
OPERATOR = """\
npuSynchronizeDevice:torch_npu/csrc/core/npu/NPUStream.cpp:506 NPU function error: AclrtSynchronizeDeviceWithTimeout, \
error code is {code}
EZ9999: Inner Error!
"""


@pytest.mark.parametrize(
    ("text", "line", "fix"),
    [
        (OUT_OF_MEMORY, "NPU out of memory. Tried to allocate 52.00 MiB", "stop what holds the memory: `npu-smi info`"),
        (SOCKET_TIMEOUT, "HcclAllreduce, error code is 6 | EI0006: [PID: 1292363]", "on one node export HCCL_IF_IP"),
        (NO_KERNELS, "call aclnnAdd failed", "the kernels of this CANN for this chip must be installed"),
        (NO_DEVICE, "error code is 507033", "`npu-smi info` must list the device as OK"),
        (NUMPY, "error code is 500001", 'before CANN 9.0 `pip install "numpy<2"`'),
        # The general failure next to its cause: the cause decides.
        (NUMPY + "No module named 'decorator'", "error code is 500001", "pip install attrs cffi"),
        (NUMPY + "No module named 'tbe'", "error code is 500001", "source /usr/local/Ascend"),
        (NO_MEMORY, "EL0004", "stop what holds the memory: `npu-smi info`"),
        ("aclrtMalloc failed, error code is 207018", "207018", "stop what holds the memory: `npu-smi info`"),
        (OPERATOR.format(code=507046), "507046", "a device did not answer in time"),
        (OPERATOR.format(code=507048), "507048", "a device did not answer in time"),
        (OPERATOR.format(code=507053), "507053", "npu-smi info -t ecc -i 0 -c 0"),
        *(
            (OPERATOR.format(code=code), str(code), "an operator failed on the card: ASCEND_LAUNCH_BLOCKING=1")
            for code in (507014, 507015, 507017, 507018, 507035)
        ),
    ],
)
def test_known_errors_end_in_one_line_and_their_fix(capsys: pytest.CaptureFixture[str], text: str, line: str, fix: str):
    def check() -> None:
        raise RuntimeError(text)

    assert not Report("npu").check("it", check)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("FAIL it: RuntimeError: ") and line in first
    assert second.startswith("     fix: ") and fix in second


def all_reduce_of(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fail:
    """How check_all_reduce fails when its workers do this."""
    worker = tmp_path / "worker.py"
    worker.write_text(f"import os, pathlib, time\nrank = int(os.environ['RANK'])\n{script}")
    monkeypatch.setattr(check_npu, "__file__", str(worker))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(Fail) as failure:
        check_npu.check_all_reduce(SimpleNamespace(kind="cpu"), {})
    return failure.value


@pytest.mark.slow
def test_a_worker_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = f"if rank == 1:\n    raise RuntimeError({SOCKET_TIMEOUT!r})\nprint('all_reduce ok')\n"
    failure = all_reduce_of(script, tmp_path, monkeypatch)
    assert str(failure).startswith("2 processes: RuntimeError: InnerRunOpApi:")
    assert "| EI0006: [PID: 1292363]" in str(failure) and "\n" not in str(failure)
    assert "GLOO_SOCKET_IFNAME" in failure.fix
    failure = all_reduce_of(f"raise RuntimeError({OUT_OF_MEMORY!r})", tmp_path, monkeypatch)
    assert "NPU out of memory" in str(failure)
    assert failure.fix == "stop what holds the memory: `top` shows it"


@pytest.mark.slow
def test_a_collective_that_never_ends_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Within the time limit, and no worker is left behind on its device."""
    monkeypatch.setattr(check_npu, "WORKERS_SECONDS", 12)
    script = f"pathlib.Path({str(tmp_path)!r}, f'rank{{rank}}').write_text(str(os.getpid()))\ntime.sleep(600)\n"
    failure = all_reduce_of(script, tmp_path, monkeypatch)
    assert str(failure) == "2 processes: no answer within 12 s"
    workers = [int(file.read_text()) for file in sorted(tmp_path.glob("rank*"))]
    assert len(workers) == 2
    for _ in range(50):
        if not any(map(is_running, workers)):
            break
        time.sleep(0.1)
    else:
        pytest.fail("the workers still run")


def test_bandwidth():
    alone: Any = SimpleNamespace(kind="npu", module=SimpleNamespace(device_count=lambda: 1))
    with pytest.raises(Skip, match="one device"):
        check_npu.check_bandwidth(alone, {})
    several: Any = SimpleNamespace(kind="npu", module=SimpleNamespace(device_count=lambda: 8))
    with pytest.raises(Skip, match="needs the all-reduce"):
        check_npu.check_bandwidth(several, {})
    assert check_npu.check_bandwidth(several, {1: 0.512, 16: 9.87654, 128: 21.3}).startswith(
        "0.512 GB/s at 1 MiB, 9.88 GB/s at 16 MiB, 21.3 GB/s at 128 MiB"
    )


def test_torch_missing_old_or_too_new():
    with pytest.raises(Fail, match="not installed") as failure:
        check_npu.check_torch_version(None, "/usr/bin/python3")
    assert failure.value.fix in ("source .venv/bin/activate", "bash setup_ascend.sh")
    with pytest.raises(Fail, match=r"2\.1\.0 .*2\.7"):
        check_npu.check_torch_version("2.1.0")
    for version in ("2.14.0", "2.15.0+cpu"):
        with pytest.raises(Fail, match=rf"{re.escape(version)} .* below 2\.14"):
            check_npu.check_torch_version(version)
    assert check_npu.check_torch_version("2.13.1+cpu") == "2.13.1+cpu"
    with pytest.raises(Fail, match="3.10"):
        check_npu.check_python((3, 9, 1))


def test_a_wrong_number_fails():
    assert check_npu.within(0.001, 0.01, "it").startswith("it within 0.10%")
    for error in (0.02, float("nan")):
        with pytest.raises(Fail, match="is off by"):
            check_npu.within(error, 0.01, "it")


def test_report(capsys: pytest.CaptureFixture[str]):
    def good() -> str:
        return "fine"

    def bad() -> str:
        raise Fail("broken", "glue it")

    def skipped() -> str:
        raise Skip("not here")

    def crashes() -> str:
        raise KeyError("first line\nsecond line")

    report = Report()
    assert [report.check(f.__name__, f) for f in (good, skipped)] == [True, False]
    assert report.finish() == 0
    assert [report.check(f.__name__, f) for f in (bad, crashes)] == [False, False]
    assert report.finish() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "PASS good: fine",
        "SKIP skipped: not here",
        "1 passed, 0 failed, 1 skipped: this machine is ready to train on cpu",
        "FAIL bad: broken",
        "     fix: glue it",
    ]
    assert lines[5].startswith("FAIL crashes: KeyError: ") and lines[6].startswith("     fix: ")
    assert lines[-1] == "1 passed, 2 failed, 1 skipped: fix the FAIL lines from the top"


@pytest.mark.slow
def test_the_whole_command_on_a_cpu():
    """In a shell that has the ranks of a larger job exported, as a guide on several nodes asks for; the tests on
    simulated NPUs have none."""
    command = [sys.executable, str(ROOT / "check_npu.py"), "--device", "cpu"]
    environment = {**os.environ, "WORLD_SIZE": "8", "RANK": "0", "MASTER_ADDR": "10.0.0.1"}
    environment.pop("LOCAL_RANK", None)
    answer = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=300, env=environment)
    lines = answer.stdout.splitlines()
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert all(re.match(r"(PASS|SKIP) [\w -]+: \S", line) for line in lines[:-1])
    assert [line for line in lines if line.startswith("SKIP")] == [
        f"SKIP {name}: --device cpu"
        for name in ("device files", "driver", "CANN", "CANN environment", "versions match")
    ]
    assert "PASS all-reduce: 2 processes" in lines
    (bandwidth,) = (line for line in lines if "bandwidth" in line)
    assert re.match(r"PASS bandwidth: [\d.]+ GB/s at 1 MiB, [\d.]+ GB/s at 16 MiB \(size", bandwidth)
    assert lines[-1] == "11 passed, 0 failed, 5 skipped: this machine is ready to train on cpu"


@pytest.mark.slow
def test_a_copy_without_the_project_looks_around(tmp_path: Path):
    """The file is often all that someone copies to a machine."""
    shutil.copy(ROOT / "check_npu.py", tmp_path)
    command = [sys.executable, str(tmp_path / "check_npu.py"), "--device", "cpu"]
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    answer = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=outside, timeout=300)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "SKIP cpu devices: " in answer.stdout
    assert answer.stdout.splitlines()[-1].startswith("3 passed, 0 failed, 13 skipped")


def test_a_plan_is_not_a_full_report(capsys: pytest.CaptureFixture[str]):
    assert check_npu.main(["--plan", "--full"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == "error: --plan and --full exclude each other: a plan measures nothing\n"


def test_the_full_report_needs_the_project_and_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Both are said before ten minutes of work."""
    assert check_npu.main(["--full", "--device", "cpu", "--out", str(tmp_path / "none" / "report.json")]) == 1
    assert "--out names a file that can be written" in capsys.readouterr().out
    folder = tmp_path / "folder"
    folder.mkdir()
    assert check_npu.main(["--full", "--device", "cpu", "--out", str(folder)]) == 1
    assert capsys.readouterr().out.startswith(f"FAIL full: {folder}: Is a directory\n")
    assert list(tmp_path.iterdir()) == [folder]
    monkeypatch.setattr(check_npu, "ROOT", tmp_path)
    assert check_npu.main(["--full", "--device", "cpu"]) == 1
    assert "run this file in its folder" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_full_report_that_is_stopped_ends_its_part_and_keeps_its_lines(tmp_path: Path, number: signal.Signals):
    """The part is in a session of its own, which no signal of a terminal or a service manager reaches."""
    out = tmp_path / "report.json"
    hang = tmp_path / "sitecustomize.py"  # Python runs it at its start: the process of the checks hangs there
    hang.write_text(
        "import os, sys, time\n"
        "if '--record' in sys.orig_argv:\n"
        "    record = sys.orig_argv[-1]\n"
        '    open(record, \'a\').write(\'{"name": "first", "outcome": "PASS", "detail": "x"}\\n\')\n'
        f"    open({str(tmp_path / 'part')!r}, 'w').write(str(os.getpid()))\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "check_npu.py"), "--device", "cpu", "--full", "--out", str(out)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # tests may run under nohup
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("PASS first"):
            break
    process.send_signal(number)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in text
    assert not is_running(int((tmp_path / "part").read_text()))
    lines = json.loads(out.read_text())["lines"]
    assert [(line["name"], line["outcome"], line["detail"]) for line in lines] == [
        ("first", "PASS", "x"), ("part checks", "FAIL", "interrupted"),
    ]  # fmt: skip
    assert [path.name for path in tmp_path.glob("report*")] == ["report.json"]


def test_an_npu_that_is_not_there_fails_with_fixes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    assert check_npu.main(["--device", "npu", "--root", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    failures = [index for index, line in enumerate(lines) if line.startswith("FAIL")]
    assert {lines[index].split(":")[0] for index in failures} >= {"FAIL device files", "FAIL driver", "FAIL CANN"}
    assert all(lines[index + 1].startswith("     fix: ") for index in failures)


def test_the_plan_is_what_setup_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert (
        check_npu.main(["--plan", "--root", str(tmp_path), "--arch", "aarch64", "--device", "npu", "--cann", "8.3.RC1"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[-7:] == [
        "kind npu",
        "pythons 3.11 3.10",
        "install torch==2.7.1 torch_npu==2.7.1",
        "constraint torch==2.7.1",
        "constraint torch_npu==2.7.1",
        "constraint numpy<2",
        "extra npu",
    ]


# ---- On a simulated NPU: the real torch_npu over a CANN of our own (tests/simnpu) ---------------------------------


def check_simulated(
    root: Path, *flags: str, sourced: bool = True, forked: bool = True, **options: Any
) -> tuple[int, list[str]]:
    """The exit code and the lines of the whole command on a machine with NPUs, and CANN 9.1.0 below `root`."""
    try:
        environment = build.environment(**options)
    except build.Unavailable as missing:
        pytest.skip(f"no simulated NPU: {missing}")
    home = environment["ASCEND_HOME_PATH"]
    environment["LD_LIBRARY_PATH"] += f":{home}/lib64"
    files = {f"dev/{name}": "" for name in ("davinci0", "davinci1", "davinci_manager", "devmm_svm", "hisi_hdc")}
    files["usr/local/bin/npu-smi"] = f"#!/bin/sh\ncat <<'END'\n{A2}END\n"
    files["usr/local/Ascend/cann/set_env.sh"] = ""
    files[f"{home[1:]}/version.cfg"] = "toolkit_running_version=[7.8.0.1.1:9.1.0]\n"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "usr/local/bin/npu-smi").chmod(0o755)
    command = [str(ROOT / "check_npu.py"), "--root", str(root), *flags]
    if forked:
        answer = simulated(command, env=environment, **options)
    else:
        env = {**os.environ, **environment}
        if not sourced:
            env = {name: value for name, value in env.items() if not name.startswith(("ASCEND", "LD_"))}
        answer = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env, timeout=1500)
    assert "Traceback" not in answer.stdout + answer.stderr
    lines = answer.stdout.splitlines()
    failures = [index for index, line in enumerate(lines) if line.startswith("FAIL")]
    assert all(lines[index + 1].startswith("     fix: ") for index in failures)
    return answer.returncode, lines


@pytest.mark.slow
def test_the_whole_command_on_simulated_npus(tmp_path: Path):
    code, lines = check_simulated(tmp_path, forked=False, devices=2)
    assert code == 0, "\n".join(lines)
    found = dict(line.split(": ", 1) for line in lines)
    assert found["PASS device files"] == "2: /dev/davinci0 /dev/davinci1"
    assert found["PASS driver"] == "npu-smi 25.2.0, 2 x 910B3/910B4-1, 3408 to 41052 of 65536 MB in use"
    assert found["PASS CANN"].startswith("9.1.0 in ")
    assert found["PASS npu devices"] == "2 x Ascend910B3, computes in bfloat16"
    assert found["PASS memory"].startswith("64.0 of 64.0 GiB free, ")
    assert found["PASS memory"].endswith(" in use already: process 1333928 37709 MB of NPU 2")
    assert found["PASS attention"].startswith(
        "npu_fusion_attention: forward and backward, whole, windowed and packed, within 0."
    )
    assert found["PASS all-reduce"] == "2 processes"
    assert re.match(r"[\d.]+ GB/s at 1 MiB, [\d.]+ GB/s at 16 MiB, [\d.]+ GB/s at 128 MiB", found["PASS bandwidth"])


@pytest.mark.slow
def test_out_of_memory_on_a_simulated_npu(tmp_path: Path):
    code, lines = check_simulated(tmp_path, devices=1, memory="3MiB")
    assert code == 1
    index = next(index for index, line in enumerate(lines) if line.startswith("FAIL matrix product"))
    assert "OutOfMemoryError: NPU out of memory. Tried to allocate 20.00 MiB (NPU 0; 3.00 MiB" in lines[index]
    assert lines[index + 1] == "     fix: stop what holds the memory: `npu-smi info` shows it"
    assert lines[-1].endswith("fix the FAIL lines from the top")


@pytest.mark.slow
def test_a_collective_that_fails_on_simulated_chips_for_inference(tmp_path: Path):
    """The one failure of such chips, of which no training step is asked."""
    code, lines = check_simulated(tmp_path, devices=2, soc="Ascend310P3", hccl_fail="all_reduce:3@1")
    assert code == 1
    assert "SKIP training step: Ascend310P3 is made for inference" in lines
    assert any(line.startswith("PASS attention: torch") for line in lines)
    (index,) = (index for index, line in enumerate(lines) if line.startswith("FAIL"))
    assert re.match(r"FAIL all-reduce: 2 processes: RuntimeError: .*HcclAllreduce, error code is \d+", lines[index])
    assert "HCCL_SOCKET_IFNAME" in lines[index + 1]
    assert lines[index + 2] == "SKIP bandwidth: needs the all-reduce"


@pytest.mark.slow
def test_a_cann_that_is_not_sourced_under_the_real_torch_npu(tmp_path: Path):
    code, lines = check_simulated(tmp_path, sourced=False, forked=False)
    assert code == 1
    index = next(index for index, line in enumerate(lines) if line.startswith("FAIL import torch"))
    assert "cannot open shared object file" in lines[index]
    assert lines[index + 1] == "     fix: source /usr/local/Ascend/cann/set_env.sh"
    assert "SKIP training step: needs a npu device that works" in lines


def test_a_step_that_is_not_skipped_is_found(monkeypatch):
    """As where a fused optimizer ignores that the gradients are not finite."""
    device = devices.init("cpu", "float32")
    assert "changes nothing" in check_npu.check_skipped_step(device)
    right = TorchKernels.adamw
    monkeypatch.setattr(
        TorchKernels,
        "adamw",
        lambda self, updates, steps, targets, ok: right(self, updates, steps, targets, ok * 0 + 1),
    )
    with pytest.raises(check_npu.Fail, match="NaN"):
        check_npu.check_skipped_step(device)


@pytest.mark.slow
def test_the_full_report_on_two_simulated_npus(tmp_path: Path):
    """Every part passes, but for two: there is no device that could be profiled, and the one step of depth 20 that a
    simulator could take is too large."""
    out = tmp_path / "report.json"
    check_simulated(tmp_path, "--full", "--small", "--out", str(out), forked=False, devices=2)
    report = json.loads(out.read_text())
    lines = {line["name"]: line for line in report["lines"]}
    failed = {name for name, line in lines.items() if line["outcome"] == "FAIL"}
    assert failed == {"profile"}, {name: lines[name] for name in failed}
    assert "no table of kernels" in lines["profile"]["detail"]
    skipped = {name for name, line in lines.items() if line["outcome"] == "SKIP"}
    assert skipped == {"versions match", "train depth 20"}
    assert report["vendor_tool"]["output"] == A2 and report["versions"]["CANN"] == "9.1.0"
    assert report["environment"]["TASK_QUEUE_ENABLE"] and "~" in report["environment"]["ASCEND_HOME_PATH"]
    assert lines["recorded float32"]["figures"]["recordings"] >= 1
    assert re.search(r" (1 recording|([2-9]|\d\d+) recordings) in ", lines["recorded float32"]["detail"])
    trained = lines["train depth 4"]["figures"]
    assert trained["peak_gib"] == pytest.approx(trained["counted_gib"], rel=0.05) and trained["counted_gib"] > 0.1
    verdicts = {doubt.lines[0]: report["settles"][doubt.text] for doubt in full_report.DOUBTS}
    assert verdicts.pop("train depth") == "open: train depth 20 was skipped" and verdicts.pop("profile") == "wrong"
    assert verdicts.pop("cache write").startswith("open: cache write has no times_copy; ")  # a simulator has no speed
    assert set(verdicts.values()) == {"settled"}, verdicts


@pytest.mark.slow
def test_the_full_report_makes_calls_that_the_adapters_take(tmp_path: Path):
    """Nothing is computed, so that values are wrong. But no call raises an error, and memory is counted right."""
    record = tmp_path / "lines.jsonl"
    options = {"adapters": str(tmp_path / "calls.jsonl"), "memory": "64GiB"}
    parts = {"probe": ["--small"], "decode": ["--small"], "operators": ["--small"], "train depth 20": []}
    for part, flags in parts.items():
        command = ["-m", "nanochat.run.full_check", part, "--device", "npu", *flags, "--record", str(record)]
        try:
            done = simulated(command, **options)
        except build.Unavailable as missing:
            pytest.skip(f"no simulated NPU: {missing}")
        assert done.returncode == 0, done.stderr
    lines = {line.name: line for line in full_report.read_lines(record)}
    assert len(lines) == 8 + 5 + 8 + 1
    assert not {name: line.traceback for name, line in lines.items() if line.traceback}
    trained = lines["train depth 20"]
    assert trained.outcome == "PASS" and 42 < trained.figures["peak_gib"] < 45, trained
