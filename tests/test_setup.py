"""setup_ascend.sh on made-up machines: a folder stands in for `/`, --dry_run prints what would be done."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OLD_HOME, NEW_HOME = "/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann"

# Written out by hand, apart from the table in check_npu.py: CANN -> torch, torch_npu.
PAIRS = {
    "8.3.RC1": ("2.7.1", "2.7.1"),
    "8.5.0": ("2.9.0", "2.9.0"),
    "9.0.0": ("2.9.0", "2.9.0.post2"),
    "9.1.0": ("2.12.0", "2.12.0"),
}


class FakeMachine:
    """Files below a folder, and a shell environment."""

    def __init__(self, root: Path):
        self.root = root / "machine"
        self.venv = root / "venv"
        self.environment: dict[str, str] = {}
        self.root.mkdir()

    def put(self, path: str, text: str = "") -> "FakeMachine":
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return self

    def with_npus(self, count: int = 8, driver: bool = True) -> "FakeMachine":
        for i in range(count):
            self.put(f"/dev/davinci{i}")
        self.put("/dev/davinci_manager")
        if driver:
            self.put("/usr/local/bin/npu-smi")
            self.put("/usr/local/Ascend/driver/version.info", "Version=24.1.rc2\npackage_version=24.1.rc2\n")
        return self

    def with_cann(self, version: str, arch: str = "aarch64", home: str = OLD_HOME) -> "FakeMachine":
        text = f"package_name=Ascend-cann-toolkit\nversion={version}\ninnerversion=V100R001C21\narch={arch}\nos=linux\n"
        self.put(f"{home}/{arch}-linux/ascend_toolkit_install.info", text)
        return self.put(f"{home if home == NEW_HOME else str(Path(home).parent)}/set_env.sh")

    def sourced(self, home: str = OLD_HOME) -> "FakeMachine":
        self.environment |= {"ASCEND_HOME_PATH": home, "LD_LIBRARY_PATH": f"{home}/lib64:/usr/lib"}
        return self

    def setup(self, *flags: str, arch: str = "aarch64", **environment: str) -> tuple[int, list[str], str]:
        """The exit code, the lines of the plan with folders shortened, and the error line."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("ASCEND", "LD_LIBRARY", "TORCH_", "PIP_"))}
        clean |= {"PYTHON": sys.executable, "VENV": str(self.venv), "ARCH": arch, "HOME": "/root"}
        command = ["bash", str(ROOT / "setup_ascend.sh"), "--dry_run", "--root", str(self.root), *flags]
        answer = subprocess.run(
            command,
            env=clean | self.environment | environment,
            cwd=self.root,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        lines = answer.stdout.replace(str(self.venv), "VENV").replace(sys.executable, "PYTHON").splitlines()
        return answer.returncode, [" ".join(line.split()) for line in lines], answer.stderr.strip()


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


def plan_of(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith(("plan", "or else"))]


def needs_python_for(torch: str) -> None:
    if torch == "2.7.1" and sys.version_info[:2] > (3, 11):
        pytest.skip("torch_npu 2.7.1 has no wheels for this Python")


@pytest.mark.parametrize("cann", PAIRS)
def test_plan_on_aarch64(machine: FakeMachine, cann: str):
    torch, torch_npu = PAIRS[cann]
    needs_python_for(torch)
    home = NEW_HOME if cann >= "8.5" else OLD_HOME
    code, lines, error = machine.with_npus().with_cann(cann, home=home).sourced(home).setup()
    plain, labelled = f"torch=={torch} torch_npu=={torch_npu}", f"torch=={torch}+cpu torch_npu=={torch_npu}"
    tries = [f"plan VENV/bin/pip install {plain}"]
    if torch == "2.12.0":  # from 2.11 on the aarch64 wheels of the package index are CUDA builds
        tries = [
            f"plan VENV/bin/pip install {labelled}",
            f"or else VENV/bin/pip install --extra-index-url {CPU_INDEX} {labelled}",
            f"or else VENV/bin/pip install {plain}",
        ]
    assert (code, error) == (0, "")
    assert lines == [
        "found Linux aarch64",
        "found NPU: 8 (/dev/davinci0 ...), driver 24.1.rc2",
        f"found CANN {cann} in {home}",
        f"found Python {sys.version_info[0]}.{sys.version_info[1]} (PYTHON)",
        "plan PYTHON -m venv VENV",
        *tries,
        f"plan VENV/bin/pip install -c VENV/constraints.txt -e .[npu] # {plain}",
    ]


@pytest.mark.parametrize("cann", PAIRS)
def test_plan_on_x86_64(machine: FakeMachine, cann: str):
    torch, torch_npu = PAIRS[cann]
    needs_python_for(torch)
    code, lines, error = machine.with_npus(1).with_cann(cann, "x86_64").sourced().setup("--extras=dev", arch="x86_64")
    plain, labelled = f"torch=={torch} torch_npu=={torch_npu}", f"torch=={torch}+cpu torch_npu=={torch_npu}"
    last_resort = [f"or else VENV/bin/pip install {plain}"] if torch == "2.12.0" else []  # older ones insist on +cpu
    assert (code, error) == (0, "")
    assert plan_of(lines) == [
        "plan PYTHON -m venv VENV",
        f"plan VENV/bin/pip install {labelled}",
        f"or else VENV/bin/pip install --extra-index-url {CPU_INDEX} {labelled}",
        *last_resort,
        f"plan VENV/bin/pip install -c VENV/constraints.txt -e .[dev,npu] # {plain}",
    ]


@pytest.mark.parametrize("arch", ["aarch64", "x86_64"])
@pytest.mark.parametrize(("cann", "torch"), [("8.1.RC1", "2.5.1"), ("8.2.RC1", "2.6.0")])
def test_a_cann_too_old_for_the_project_is_told(machine: FakeMachine, cann: str, torch: str, arch: str):
    code, lines, error = machine.with_npus().with_cann(cann, arch).setup(arch=arch)
    assert code == 1
    assert f"found CANN {cann} in {OLD_HOME}" in lines
    assert plan_of(lines) == []
    assert error == (
        f"error: CANN {cann} takes torch=={torch} torch_npu=={torch}, this project needs torch>=2.7: "
        "install CANN 8.3.RC1 or later (https://www.hiascend.com/cann/download)"
    )


@pytest.mark.parametrize(
    ("cann", "nearest"), [("8.4.0", "8.5.0"), ("8.5.1", "8.5.0"), ("9.3.0", "9.1.0"), ("8.0.RC3", "8.1.RC1")]
)
def test_an_unknown_cann_names_the_nearest_and_the_way_out(machine: FakeMachine, cann: str, nearest: str):
    code, lines, error = machine.with_npus().with_cann(cann).setup()
    assert code == 1
    assert plan_of(lines) == []
    assert error.count("\n") == 0
    assert f"CANN {cann} is not in the version table" in error
    assert f"the nearest is {nearest}: `bash setup_ascend.sh --cann {nearest}`" in error


def test_the_way_out_works(machine: FakeMachine):
    code, lines, _ = machine.with_npus().with_cann("8.4.0").setup("--cann", "8.5.0")
    assert code == 0
    assert "plan VENV/bin/pip install torch==2.9.0 torch_npu==2.9.0" in lines


def test_npu_without_driver_tool(machine: FakeMachine):
    code, lines, _ = machine.with_npus(driver=False).with_cann("9.0.0").sourced().setup()
    assert code == 0
    assert "found NPU: 8 (/dev/davinci0 ...), driver version not readable" in lines
    (missing,) = [line for line in lines if line.startswith("missing")]
    assert missing.startswith("missing npu-smi: install the driver (https://")
    assert "--device=/dev/davinci_manager" in missing


def test_driver_without_cann(machine: FakeMachine):
    code, lines, error = machine.with_npus().setup()
    assert code == 1
    assert plan_of(lines) == []
    assert error == (
        "error: an NPU but no CANN: install the CANN toolkit and kernels (https://www.hiascend.com/cann/download), "
        "or --device cpu"
    )


def test_cann_not_sourced(machine: FakeMachine):
    _, lines, _ = machine.with_npus().with_cann("9.0.0", home=NEW_HOME).setup()
    assert [line for line in lines if line.startswith("missing")] == [
        f"missing CANN's environment: before you train, `source {NEW_HOME}/set_env.sh`"
    ]
    assert "plan VENV/bin/pip install torch==2.9.0 torch_npu==2.9.0.post2" in lines


def test_cann_without_device_files_is_a_cpu_unless_asked(machine: FakeMachine):
    """As while a container image is built."""
    machine.with_cann("9.0.0").sourced()
    _, lines, _ = machine.setup()
    assert any(line.startswith("missing NPU device files (/dev/davinci*)") and "--device npu" in line for line in lines)
    assert "plan VENV/bin/pip install torch==2.13.0+cpu" in lines
    _, lines, _ = machine.setup("--device", "npu")
    assert "plan VENV/bin/pip install torch==2.9.0 torch_npu==2.9.0.post2" in lines


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (f"{OLD_HOME}/ascend_toolkit_install.info", "version=9.0.0\n"),
        (f"{OLD_HOME}/version.cfg", "# version: 1.0\nruntime_running_version=[7.7.0.1.238:9.0.0]\n"),
        (f"{OLD_HOME}/version.cfg", "runtime_running_version=[1:8.0.0]\ntoolkit_running_version=[9.0.0]\n"),
        ("/usr/local/Ascend/cann-9.0.0/set_env.sh", ""),
        ("/root/Ascend/cann/aarch64-linux/ascend_toolkit_install.info", "version=9.0.0\n"),
    ],
)
def test_where_the_cann_version_stands(machine: FakeMachine, path: str, text: str):
    _, lines, error = machine.with_npus().put(path, text).setup()
    assert error == ""
    assert "plan VENV/bin/pip install torch==2.9.0 torch_npu==2.9.0.post2" in lines


def test_the_sourced_cann_counts(machine: FakeMachine):
    machine.with_npus().with_cann("8.5.0").with_cann("9.1.0", home="/opt/cann").sourced("/opt/cann")
    _, lines, _ = machine.setup()
    assert "found CANN 9.1.0 in /opt/cann" in lines


@pytest.mark.parametrize("arch", ["aarch64", "x86_64"])
def test_neither(machine: FakeMachine, arch: str):
    code, lines, error = machine.setup(arch=arch)
    assert (code, error) == (0, "")
    assert lines == [
        f"found Linux {arch}",
        "missing accelerator: no NPU (/dev/davinci*) and no NVIDIA GPU (/dev/nvidia*); the CPU trains small models",
        f"found Python {sys.version_info[0]}.{sys.version_info[1]} (PYTHON)",
        "plan PYTHON -m venv VENV",
        "plan VENV/bin/pip install torch==2.13.0+cpu",
        f"or else VENV/bin/pip install --extra-index-url {CPU_INDEX} torch==2.13.0+cpu",
        "or else VENV/bin/pip install torch==2.13.0",
        "plan VENV/bin/pip install -c VENV/constraints.txt -e . # torch==2.13.0",
    ]


def test_cuda(machine: FakeMachine):
    machine.put("/dev/nvidia0").put("/dev/nvidia1").put("/dev/nvidiactl").put("/usr/bin/nvidia-smi")
    _, lines, _ = machine.setup(arch="x86_64")
    assert lines == [
        "found Linux x86_64",
        "found NVIDIA GPU: 2",
        f"found Python {sys.version_info[0]}.{sys.version_info[1]} (PYTHON)",
        "plan PYTHON -m venv VENV",
        "plan VENV/bin/pip install torch==2.13.0",
        "plan VENV/bin/pip install -c VENV/constraints.txt -e . # torch==2.13.0",
    ]
    _, lines, _ = machine.setup("--device=cpu", arch="x86_64")
    assert "plan VENV/bin/pip install torch==2.13.0+cpu" in lines


def test_mirrors(machine: FakeMachine):
    index = "https://mirror.example/cpu"
    _, lines, _ = machine.setup(TORCH_INDEX_URL=index)
    assert f"or else VENV/bin/pip install --extra-index-url {index} torch==2.13.0+cpu" in lines
    machine.put("/dev/nvidia0")
    _, lines, _ = machine.setup(TORCH_INDEX_URL=index)
    assert f"plan VENV/bin/pip install --extra-index-url {index} torch==2.13.0" in lines


def test_stubs_of_a_version_manager_are_passed_over(machine: FakeMachine, tmp_path: Path):
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("python3.10", "python3.11", "python3.12", "python"):
        (folder / name).write_text("#!/bin/sh\necho not installed >&2\nexit 127\n")
        (folder / name).chmod(0o755)
    (folder / "python3").symlink_to(sys.executable)
    path = f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin"
    code, lines, error = machine.setup(PYTHON="", PATH=path)
    assert (code, error) == (0, "")
    assert "plan python3 -m venv VENV" in lines
    (folder / "python3").unlink()
    (folder / "python3").symlink_to(folder / "python")
    code, _, error = machine.setup(PYTHON="", PATH=path)
    assert code == 1
    assert error.startswith("error: no Python 3.10, 3.11 or 3.12") and error.count("\n") == 0


@pytest.mark.parametrize(
    ("flags", "word"), [(["--devise"], "--devise"), (["--device", "tpu"], "tpu"), (["--cann"], "--cann needs a value")]
)
def test_bad_flags(machine: FakeMachine, flags: list[str], word: str):
    code, _, error = machine.setup(*flags)
    assert code == 2
    assert word in error and error.count("\n") == 0


def test_a_finished_setup_is_left_alone(machine: FakeMachine):
    """The stamp of the same plan, with the same or fewer extras, leaves nothing to do; another stamp does."""
    python = machine.venv / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    _, lines, _ = machine.setup("--device=cpu", "--extras=dev", arch="x86_64")
    assert plan_of(lines)[0] == "plan VENV/bin/pip install torch==2.13.0+cpu"  # no venv: the user's folder is used

    with (ROOT / "pyproject.toml").open() as file:
        checksum = subprocess.run(["cksum"], stdin=file, capture_output=True, text=True).stdout.strip()
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    text = f"project {ROOT}\nkind cpu\npython {version}\ntorch torch==2.13.0\nextras dev\npyproject {checksum}\n"
    stamp = machine.venv / "nanochat_setup.txt"
    stamp.write_text(text)
    if importlib.metadata.version("torch").startswith("2.13.0"):
        for flags in (["--extras=dev"], []):
            _, lines, _ = machine.setup("--device=cpu", *flags, arch="x86_64")
            assert lines[-1] == "ready VENV is up to date; nothing to install"
    _, lines, _ = machine.setup("--device=cpu", "--extras=track", arch="x86_64")
    assert plan_of(lines)[-1] == "plan VENV/bin/pip install -c VENV/constraints.txt -e .[dev,track] # torch==2.13.0"
    stamp.write_text(text.replace(checksum, "0 0"))
    _, lines, _ = machine.setup("--device=cpu", arch="x86_64")
    assert plan_of(lines)[0] == "plan VENV/bin/pip install torch==2.13.0+cpu"
    stamp.write_text(text.replace("kind cpu", "kind cuda"))
    _, lines, _ = machine.setup("--device=cpu", arch="x86_64")
    assert plan_of(lines)[:2] == [f"plan rm -r VENV # made for cuda with Python {version}", "plan PYTHON -m venv VENV"]
    assert plan_of(lines)[-1].endswith("-e . # torch==2.13.0")  # the old folder's extras went with it
