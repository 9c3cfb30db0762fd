"""check_npu.py: each judgement on made-up values, and the whole command on simulated NPUs.

promises/test_p10_an_owners_ten_minutes.py has the command on this machine's CPU."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from on_device import quick
from simnpu import build
from simnpu.forks import simulated
from test_setup import KNOWN

import check_npu
from check_npu import Fail, Machine, Report, Skip

ROOT = Path(__file__).resolve().parent.parent

# What machines print, and what is to be made of it.
TABLES = KNOWN["npu_smi"]
A2 = TABLES["A2"]
ERRORS = KNOWN["errors"]
RAISED = {"FAIL": Fail, "SKIP": Skip}


def on(cann: str | None, **facts: Any) -> Machine:
    return Machine(**{"arch": "aarch64", "cann": cann, "cann_home": "/usr/local/Ascend/cann", **facts})


# ---------------------------------------------------------------------- one judgement

JUDGED = [  # a check and its arguments; the outcome, what it says, and the fix
    *(
        (check_npu.check_match, (on(cann or None), torch, npu or None, *numpy), *rest)
        for (cann, torch, npu, *numpy), *rest in KNOWN["versions"]["judged"]
    ),
    *(
        (check_npu.check_driver, (on(cann or None, npu_smi="smi", npu_driver=version), TABLES.get(text, text)), *rest)
        for (cann, version, text), *rest in KNOWN["drivers"]["judged"]
    ),
    (check_npu.check_driver, (Machine(), ""), "FAIL", "npu-smi", "--device=/dev/davinci0"),
    (check_npu.check_torch_version, ("2.13.1+cpu",), "PASS", "2.13.1", ""),
    (check_npu.check_torch_version, (None,), "FAIL", "not installed", ""),
    (check_npu.check_torch_version, ("2.1.0",), "FAIL", "2.1.0 .*2.7", "setup_ascend.sh"),
    (check_npu.check_torch_version, ("2.14.0",), "FAIL", "2.14.0 .*2.14", "setup_ascend.sh"),
    (check_npu.check_torch_version, ("2.15.0+cpu",), "FAIL", "2.15.0.* 2.14", "setup_ascend.sh"),
]


@pytest.mark.parametrize(("check", "arguments", "outcome", "says", "fix"), JUDGED)
def test_judged(check: Any, arguments: tuple, outcome: str, says: str, fix: str):
    if outcome == "PASS":
        assert says in check(*arguments)
        return
    with pytest.raises(RAISED[outcome], match=says) as failure:
        check(*arguments)
    assert fix in getattr(failure.value, "fix", "")


def test_the_pip_line_is_for_this_architecture_and_index(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCH_INDEX_URL", "https://mirror.example")
    with pytest.raises(Fail) as failure:
        check_npu.check_match(on("8.5.0", arch="x86_64"), "2.9.0+cpu", "2.9.0.post2")
    pair = "torch==2.9.0+cpu torch_npu==2.9.0"
    assert failure.value.fix == f"pip install --extra-index-url https://mirror.example {pair}"


def test_packages_are_those_of_the_extra():
    """check_npu.py may be the only file on a machine, so it has the list too."""
    text = (ROOT / "pyproject.toml").read_text()
    extra = re.findall(r'"([\w-]+)"', text[text.index("npu = [") : text.index("track = [")])
    assert extra == ["torch_npu", *check_npu.PACKAGES.split(), "pytest"]


def test_the_version_table_is_in_order():
    keys = [check_npu.version_key(release) for release in check_npu.RELEASES]
    assert keys == sorted(keys)
    for pairs in check_npu.RELEASES.values():
        assert len(set(pairs)) == len(pairs)
        assert all(check_npu.version_key(torch_npu)[:3] == check_npu.version_key(torch) for torch, torch_npu in pairs)


def test_device_files_must_be_open_to_us(tmp_path: Path):
    machine = Machine(npu_files=("/dev/davinci0",))
    steps = (  # what is there from now on, what then is missing, and the fix
        ((), Machine(), "/dev/davinci", "--device=/dev/davinci0"),
        (("davinci_manager",), machine, "/dev/devmm_svm .*/dev/hisi_hdc", "--device=/dev/devmm_svm"),
        (("devmm_svm", "hisi_hdc"), machine, "permission.*/dev/davinci0", "HwHiAiUser"),  # not there counts as closed
    )
    (tmp_path / "dev").mkdir()
    for names, here, missing, fix in steps:
        for name in names:
            (tmp_path / "dev" / name).touch()
        with pytest.raises(Fail, match=missing) as failure:
            check_npu.check_device_files(here, tmp_path)
        assert fix in failure.value.fix
    (tmp_path / "dev" / "davinci0").touch()
    assert check_npu.check_device_files(machine, tmp_path) == "1: /dev/davinci0"


def test_sourced_means_home_and_libraries():
    home = "/usr/local/Ascend/cann"
    for variables, is_sourced in (
        ({"ASCEND_HOME_PATH": home, "LD_LIBRARY_PATH": f"/lib:{home}/lib64"}, True),
        ({"ASCEND_HOME_PATH": home, "LD_LIBRARY_PATH": "/lib:"}, False),
        ({"LD_LIBRARY_PATH": f"{home}/lib64"}, False),
    ):
        assert check_npu.is_sourced(variables) == is_sourced


# ---------------------------------------------------------------------- errors and their fixes


@pytest.mark.parametrize(("error", "fix"), ERRORS["of_imports"])
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
    assert fix in failure.value.fix
    with pytest.raises(Fail) as failure:
        check_npu.check_import("cpu", machine)
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in failure.value.fix


@pytest.mark.parametrize(
    ("text", "line", "fix"),
    [
        *ERRORS["judged"],
        (ERRORS["socket_timeout"], "HcclAllreduce, error code is 6 | EI0006: [PID: 1292363]", "HCCL_IF_IP"),
        *((ERRORS["operator"].format(code), code, fix) for code, fix in KNOWN["operator_codes"].items()),
    ],
)
def test_known_errors_end_in_one_line_and_their_fix(capsys: pytest.CaptureFixture[str], text: str, line: str, fix: str):
    def check() -> None:
        raise RuntimeError(text)

    assert not Report("npu").check("it", check)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("FAIL it: RuntimeError: ") and line in first
    assert second.startswith("     fix: ") and fix in second


def all_reduce_error(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the all-reduce fails when its workers do this."""
    worker = tmp_path / "worker.py"
    worker.write_text(f"import os, time\nrank = int(os.environ['RANK'])\n{script}")
    monkeypatch.setattr(quick, "RANKS", worker)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(RuntimeError) as failure:
        quick.all_reduce("cpu")
    text = str(failure.value)
    assert text.startswith("2 processes over gloo: ")
    assert "GLOO_SOCKET_IFNAME" in (check_npu.fix_for(text, "cpu", "") or "")
    return check_npu.summary(text)


@pytest.mark.slow
def test_a_worker_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    line = all_reduce_error(
        f"if rank == 1:\n    raise RuntimeError({ERRORS['socket_timeout']!r})\n", tmp_path, monkeypatch
    )
    assert "InnerRunOpApi:" in line and "| EI0006: [PID: 1292363]" in line and "\n" not in line


@pytest.mark.slow
def test_a_collective_that_never_ends_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its launcher is killed, which leaves no worker behind (T7)."""
    monkeypatch.setattr(quick, "WORKERS_SECONDS", 0.1)
    assert all_reduce_error("time.sleep(600)", tmp_path, monkeypatch).endswith("no answer in 0.1 s")


def test_report(capsys: pytest.CaptureFixture[str]):
    def run(outcome: Exception | None) -> str:
        if outcome:
            raise outcome
        return "fine"

    report = Report()
    assert report.check("good", run, None) and not report.check("absent", run, Skip("not here"))
    assert report.finish() == 0
    for outcome in (Fail("broken", "glue it"), AssertionError("7 of 8"), KeyError("first line\nsecond line")):
        assert not report.check("bad", run, outcome)
    assert report.finish() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["PASS good: fine", "SKIP absent: not here"] and lines[2].startswith("1 passed, 0 failed")
    assert lines[3:6] == ["FAIL bad: broken", "     fix: glue it", "FAIL bad: 7 of 8"]
    assert lines[7].startswith("FAIL bad: KeyError: ") and lines[6][:10] == lines[8][:10] == "     fix: "


# ---------------------------------------------------------------------- the whole command


@pytest.mark.slow
def test_a_copy_without_the_project_looks_around(tmp_path: Path):
    """The file is often all that someone copies to a machine."""
    shutil.copy(ROOT / "check_npu.py", tmp_path)
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(tmp_path / "check_npu.py"), "--device", "cpu"]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=outside, timeout=300)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "SKIP computation: " in answer.stdout and "3 passed, 0 failed, 6 skipped" in answer.stdout
    full = subprocess.run([*command, "--full"], capture_output=True, text=True, cwd=tmp_path, env=outside, timeout=300)
    assert full.returncode == 2 and "tests/on_device" in full.stderr and full.stdout == ""


def test_an_npu_that_is_not_there_fails_with_fixes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    assert check_npu.main(["--device", "npu", "--root", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    failures = [index for index, line in enumerate(lines) if line.startswith("FAIL")]
    assert {lines[index].split(":")[0] for index in failures} >= {"FAIL device files", "FAIL driver", "FAIL CANN"}
    assert all(lines[index + 1].startswith("     fix: ") for index in failures)


# ---------------------------------------------------------------------- on simulated NPUs


def check_simulated(root: Path, is_sourced: bool = True, **options: Any) -> tuple[int, list[str]]:
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
    command = [str(ROOT / "check_npu.py"), "--root", str(root)]
    if is_sourced:
        answer = simulated(command, env=environment, **options)
    else:
        bare = {name: value for name, value in environment.items() if not name.startswith(("ASCEND", "LD_"))}
        env = {**os.environ, **bare}
        answer = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env, timeout=1500)
    assert "Traceback" not in answer.stdout + answer.stderr
    lines = answer.stdout.splitlines()
    failures = [index for index, line in enumerate(lines) if line.startswith("FAIL")]
    assert all(lines[index + 1].startswith("     fix: ") for index in failures)
    return answer.returncode, lines


@pytest.mark.slow
def test_the_whole_command_on_simulated_npus(tmp_path: Path):
    code, lines = check_simulated(tmp_path, devices=2)
    assert code == 0, "\n".join(lines)
    found = dict(line.split(": ", 1) for line in lines)
    assert found["PASS device files"] == "2: /dev/davinci0 /dev/davinci1"
    assert found["PASS driver"] == "npu-smi 25.2.0, 2 x 910B3/910B4-1"
    assert found["PASS CANN"].startswith("9.1.0 in ")
    assert found["PASS npu devices"] == "2 x Ascend910B3, computes in bfloat16"
    assert found["PASS memory"] == "64.0 GiB free of 64.0"
    assert "bfloat16" in found["PASS training step"] and found["PASS all-reduce"] == "2 processes"


@pytest.mark.slow
def test_a_collective_that_fails_on_simulated_chips_for_inference(tmp_path: Path):
    """The one failure of such chips, of which no training step is asked."""
    code, lines = check_simulated(tmp_path, devices=1, soc="Ascend310P3", hccl_fail="all_reduce:1@0")
    assert code == 1
    assert any(line.startswith("SKIP training step: Ascend310P3") for line in lines)
    (index,) = (index for index, line in enumerate(lines) if line.startswith("FAIL"))
    assert re.match(r"FAIL all-reduce: RuntimeError: 1 process .*HcclAllreduce", lines[index])
    assert "HCCL_SOCKET_IFNAME" in lines[index + 1]


@pytest.mark.slow
def test_a_cann_that_is_not_sourced_under_the_real_torch_npu(tmp_path: Path):
    code, lines = check_simulated(tmp_path, is_sourced=False)
    assert code == 1
    index = next(index for index, line in enumerate(lines) if line.startswith("FAIL import torch"))
    assert lines[index + 1] == "     fix: source /usr/local/Ascend/cann/set_env.sh"
    assert any(line.startswith("SKIP computation") for line in lines)
