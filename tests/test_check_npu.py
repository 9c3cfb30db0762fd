"""check_npu.py: each judgement on made-up values, and the whole command on this machine's CPU."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import check_npu
from check_npu import Chip, Fail, Machine, Report, Skip

ROOT = Path(__file__).resolve().parent.parent

NPU_SMI = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc2                 Version: 24.1.rc2                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 92.0        38                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3318 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | OK            | 92.0        39                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3314/ 65536          |
+===========================+===============+====================================================+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 0       0                 | 1712733       | python3.11               | 107                     |
+===========================+===============+====================================================+
"""
NPU_SMI_TWO_DIES = """\
| npu-smi 25.2.0                   Version: 25.2.0                                               |
| 0     Ascend910           | OK            | 163.4       36                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3122 / 65536         |
| 0     Ascend910           | Warning       | -           36                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          2867 / 65536         |
"""


@pytest.mark.parametrize(
    ("cann", "torch", "torch_npu"),
    [("8.5.0", "2.9.0", "2.9.0"), ("9.0.0", "2.9.0+cpu", "2.9.0.post2"), ("9.1.0", "2.7.1", "2.7.1.post8")],
)
def test_versions_that_match(cann: str, torch: str, torch_npu: str):
    assert torch_npu in check_npu.check_match(cann, torch, torch_npu)


@pytest.mark.parametrize(
    ("cann", "torch", "torch_npu", "reason", "mend"),
    [
        ("9.0.0", "2.9.0", "2.9.0", "torch_npu 2.9.0 is for CANN 8.5.0, here is CANN 9.0.0", "torch_npu==2.9.0.post2"),
        ("9.0.0", "2.13.0+cpu", "2.9.0.post2", "torch_npu 2.9.0.post2 does not fit torch 2.13.0", "torch==2.9.0"),
        ("9.0.0", "2.9.0", None, "torch_npu is not installed", "torch_npu==2.9.0.post2"),
        (
            "9.0.0",
            "2.9.0",
            "2.9.0.post5",
            "torch_npu 2.9.0.post5 is not listed for CANN 9.0.0",
            "torch_npu==2.9.0.post2",
        ),
        ("8.4.0", "2.9.0", "2.9.0", "CANN 8.4.0 is not in the version table", "setup_ascend.sh --cann 8.5.0"),
        ("8.1.RC1", "2.7.1", "2.7.1", "CANN 8.1.RC1 is too old for this project", "install a newer CANN"),
    ],
)
def test_a_mismatch_is_explained_from_the_table(cann: str, torch: str, torch_npu: str | None, reason: str, mend: str):
    with pytest.raises(Fail, match=re.escape(reason)) as failure:
        check_npu.check_match(cann, torch, torch_npu)
    assert mend in failure.value.mend


@pytest.mark.parametrize(("cann", "torch"), [("9.1.0", "2.13.0"), ("9.9.0", "2.13.0"), (None, "2.9.0")])
def test_what_is_newer_than_the_table_is_not_judged(cann: str | None, torch: str):
    with pytest.raises(Skip):
        check_npu.check_match(cann, torch, torch)


def test_npu_smi_is_parsed():
    chip = Chip(0, "910B3", "OK", 65536)
    assert check_npu.parse_npu_smi(NPU_SMI) == ("24.1.rc2", [chip, Chip(1, "910B3", "OK", 65536)])
    version, dies = check_npu.parse_npu_smi(NPU_SMI_TWO_DIES)
    assert (version, [(die.name, die.health) for die in dies]) == (
        "25.2.0",
        [("Ascend910", "OK"), ("Ascend910", "Warning")],
    )
    assert check_npu.parse_npu_smi("no such table") == ("unknown", [])


def test_driver():
    machine = Machine(npu_smi="/usr/local/bin/npu-smi")
    assert check_npu.check_driver(machine, NPU_SMI) == "npu-smi 24.1.rc2, 2 x 910B3, 65536 MB each"
    for here, output, reason in (
        (Machine(), "", "npu-smi not found"),
        (machine, "", "lists no NPU"),
        (machine, NPU_SMI_TWO_DIES, "NPU 0 is Warning"),
    ):
        with pytest.raises(Fail, match=reason) as failure:
            check_npu.check_driver(here, output)
        assert failure.value.mend


def test_device_files_must_be_open_to_us(tmp_path: Path):
    with pytest.raises(Fail, match="no /dev/davinci"):
        check_npu.check_device_files(Machine(), tmp_path)
    machine = Machine(npu_files=("/dev/davinci0",))
    with pytest.raises(Fail, match="no permission to open /dev/davinci0") as failure:
        check_npu.check_device_files(machine, tmp_path)  # not there counts as closed
    assert "HwHiAiUser" in failure.value.mend
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "davinci0").touch()
    assert check_npu.check_device_files(machine, tmp_path) == "1: /dev/davinci0"


def test_sourced_means_home_and_libraries():
    home = "/usr/local/Ascend/cann"
    assert check_npu.is_sourced({"ASCEND_HOME_PATH": home, "LD_LIBRARY_PATH": f"/lib:{home}/lib64"})
    assert not check_npu.is_sourced({"ASCEND_HOME_PATH": home, "LD_LIBRARY_PATH": "/lib:"})
    assert not check_npu.is_sourced({"LD_LIBRARY_PATH": f"{home}/lib64"})
    assert not check_npu.is_sourced({})


def test_an_import_that_fails_for_want_of_cann_says_so(monkeypatch: pytest.MonkeyPatch):
    def import_module(name: str):
        try:
            raise ImportError("libascendcl.so: cannot open shared object file: No such file or directory")
        except ImportError as error:
            raise RuntimeError("Failed to load the backend extension: torch_npu. You can disable ...") from error

    monkeypatch.setattr(importlib, "import_module", import_module)
    machine = Machine(cann_environment="/usr/local/Ascend/cann/set_env.sh")
    with pytest.raises(Fail, match="libascendcl.so") as failure:
        check_npu.check_import("npu", machine)
    assert failure.value.mend == "source /usr/local/Ascend/cann/set_env.sh"
    with pytest.raises(Fail) as failure:
        check_npu.check_import("cpu", machine)
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in failure.value.mend


def test_torch_missing_or_old():
    with pytest.raises(Fail, match="not installed") as failure:
        check_npu.check_torch_version(None, "/usr/bin/python3")
    assert failure.value.mend in ("source .venv/bin/activate", "bash setup_ascend.sh")
    with pytest.raises(Fail, match=r"2\.1\.0 is older than 2\.7"):
        check_npu.check_torch_version("2.1.0")
    with pytest.raises(Fail, match="older than 3.10"):
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
    assert report.finish("cpu") == 0
    assert [report.check(f.__name__, f) for f in (bad, crashes)] == [False, False]
    assert report.finish("cpu") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "PASS good: fine",
        "SKIP skipped: not here",
        "1 passed, 0 failed, 1 skipped: this machine is ready to train on cpu",
        "FAIL bad: broken",
        "     mend: glue it",
    ]
    assert lines[5].startswith("FAIL crashes: KeyError: ") and lines[6].startswith("     mend: ")
    assert lines[-1] == "1 passed, 2 failed, 1 skipped: mend the FAIL lines from the top"


def test_the_whole_command_on_a_cpu():
    command = [sys.executable, str(ROOT / "check_npu.py"), "--device", "cpu"]
    answer = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=300)
    lines = answer.stdout.splitlines()
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert all(re.match(r"(PASS|SKIP) [\w -]+: \S", line) for line in lines[:-1])
    assert [line for line in lines if line.startswith("SKIP")] == [
        f"SKIP {name}: --device cpu"
        for name in ("device files", "driver", "CANN", "CANN environment", "versions match")
    ]
    assert "PASS all-reduce: 2 processes" in lines
    assert re.fullmatch(r"9 passed, 0 failed, 5 skipped: this machine is ready to train on cpu", lines[-1])


def test_an_npu_that_is_not_there_fails_with_mends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    assert check_npu.main(["--device", "npu", "--root", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    failures = [index for index, line in enumerate(lines) if line.startswith("FAIL")]
    assert {lines[index].split(":")[0] for index in failures} >= {"FAIL device files", "FAIL driver", "FAIL CANN"}
    assert all(lines[index + 1].startswith("     mend: ") for index in failures)


def test_the_plan_is_what_setup_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert (
        check_npu.main(["--plan", "--root", str(tmp_path), "--arch", "aarch64", "--device", "npu", "--cann", "8.3.RC1"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[-6:] == [
        "kind npu",
        "pythons 3.11 3.10",
        "install torch==2.7.1 torch_npu==2.7.1",
        "constraint torch==2.7.1",
        "constraint torch_npu==2.7.1",
        "extra npu",
    ]
