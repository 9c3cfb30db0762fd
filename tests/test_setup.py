"""setup_ascend.sh on made-up machines: a folder stands in for `/`, --dry_run prints what would be done."""

import importlib.metadata
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from check_npu import GET_DRIVER

ROOT = Path(__file__).resolve().parent.parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OLD_HOME, NEW_HOME = "/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann"

CANN_PAGE = "https://www.hiascend.com/cann/download"
PYTHON_LINE = f"found Python {sys.version_info[0]}.{sys.version_info[1]} (PYTHON)"

# Written out by hand, apart from the table in check_npu.py: CANN -> torch, torch_npu.
PAIRS = {
    "8.3.RC1": ("2.7.1", "2.7.1"),
    "8.5.0": ("2.9.0", "2.9.0"),
    "9.0.0": ("2.9.0", "2.9.0.post2"),
    "9.1.0": ("2.12.0", "2.12.0"),
}
TABLE = "8.1.RC1, 8.2.RC1, 8.3.RC1, 8.5.0, 9.0.0, 9.1.0"

# What the files hold on machines in use.
TOOLKIT_INFO = """\
package_name=Ascend-cann-toolkit
version={version}
innerversion=V100R001C23SPC002B210
compatible_version=[V100R001C15],[V100R001C18],[V100R001C19],[V100R001C20],[V100R001C21],[V100R001C23]
arch={arch}
os=linux
path=/usr/local/Ascend/ascend-toolkit/{version}/{arch}-linux
"""
VERSION_CFG = """\
# version: 1.0
runtime_running_version=[7.6.0.1.220:{version}]
compiler_running_version=[7.6.0.1.220:{version}]
hccl_running_version=[7.6.0.1.220:{version}]
opp_running_version=[7.6.0.1.220:{version}]
toolkit_running_version=[7.6.0.1.220:{version}]
opp_kernel_running_version=[7.5.0.1.129:8.0.RC3]
runtime_upgrade_version=[7.6.0.1.220:8.0.0]
toolkit_upgrade_version=[7.6.0.1.220:8.0.0]
"""
DRIVER_INFO = """\
Version=25.2.0
ascendhal_version=7.35.23
aicpu_version=1.0
tsfw_version=1.0
Innerversion=V100R001C22SPC001B231
compatible_version=[V100R001C19],[V100R001C20],[V100R001C21],[V100R001C22],[V100R001C23]
compatible_version_fw=[7.0.0,8.9.9]
package_version=25.2.0
"""


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
        for name in ("davinci_manager", "devmm_svm", "hisi_hdc"):
            self.put(f"/dev/{name}")
        return self.with_driver() if driver else self

    def with_driver(self) -> "FakeMachine":
        return self.put("/usr/local/bin/npu-smi").put("/usr/local/Ascend/driver/version.info", DRIVER_INFO)

    def with_cann(self, version: str, arch: str = "aarch64", home: str = OLD_HOME) -> "FakeMachine":
        text = TOOLKIT_INFO.format(version=version, arch=arch)
        self.put(f"{home}/{arch}-linux/ascend_toolkit_install.info", text)
        return self.put(f"{Path(home).parent if home == OLD_HOME else home}/set_env.sh")

    def link(self, path: str, target: str) -> "FakeMachine":
        """A relative link, as the installer makes them."""
        link = self.root / path.lstrip("/")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
        return self

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


def tries(torch: str, torch_npu: str, arch: str) -> list[str]:
    """The installs of the pair, in their order, as one who knows the indexes would try them."""
    plain, labelled = f"torch=={torch} torch_npu=={torch_npu}", f"torch=={torch}+cpu torch_npu=={torch_npu}"
    if arch == "aarch64" and torch != "2.12.0":  # below 2.11 the package index has CPU builds for aarch64
        return [f"plan VENV/bin/pip install {plain}"]
    last = [f"or else VENV/bin/pip install {plain}"] if torch == "2.12.0" else []  # older torch_npu insist on +cpu here
    return [
        f"plan VENV/bin/pip install {labelled}",
        f"or else VENV/bin/pip install --extra-index-url {CPU_INDEX} {labelled}",
        *last,
    ]


@pytest.mark.parametrize("arch", ["aarch64", "x86_64"])
@pytest.mark.parametrize("cann", PAIRS)
def test_the_plan_for_every_cann(machine: FakeMachine, cann: str, arch: str):
    torch, torch_npu = PAIRS[cann]
    needs_python_for(torch)
    home = NEW_HOME if cann >= "8.5" else OLD_HOME
    code, lines, error = machine.with_npus().with_cann(cann, arch, home).sourced(home).setup(arch=arch)
    assert (code, error) == (0, "")
    assert lines == [
        f"found Linux {arch}",
        "found NPU: 8 (/dev/davinci0 ...), driver 25.2.0",
        f"found CANN {cann} in {home}",
        PYTHON_LINE,
        "plan PYTHON -m venv VENV",
        *tries(torch, torch_npu, arch),
        f"plan VENV/bin/pip install -c VENV/constraints.txt -e .[npu] # torch=={torch} torch_npu=={torch_npu}",
    ]


def test_extras_are_added(machine: FakeMachine):
    _, lines, _ = machine.with_npus(1).with_cann("9.0.0").sourced().setup("--extras=dev")
    assert plan_of(lines)[-1] == (
        "plan VENV/bin/pip install -c VENV/constraints.txt -e .[dev,npu] # torch==2.9.0 torch_npu==2.9.0.post2"
    )


@pytest.mark.parametrize("arch", ["aarch64", "x86_64"])
@pytest.mark.parametrize(
    ("cann", "what"),
    [
        ("8.0.RC3", "is too old"),
        ("8.1.RC1", "takes torch==2.5.1 torch_npu==2.5.1"),
        ("8.2.RC1", "takes torch==2.6.0 torch_npu==2.6.0"),
    ],
)
def test_a_cann_too_old_for_the_project_is_told(machine: FakeMachine, cann: str, what: str, arch: str):
    code, lines, error = machine.with_npus().with_cann(cann, arch).sourced().setup(arch=arch)
    assert code == 1
    assert lines == [
        f"found Linux {arch}",
        "found NPU: 8 (/dev/davinci0 ...), driver 25.2.0",
        f"found CANN {cann} in {OLD_HOME}",
    ]
    assert error == (
        f"error: CANN {cann} {what}, this project needs torch>=2.7: install CANN 8.3.RC1 or later ({CANN_PAGE})"
    )


@pytest.mark.parametrize(("cann", "nearest"), [("8.4.0", "8.3.RC1"), ("9.3.0", "9.1.0"), ("10.0.RC1", "9.1.0")])
def test_an_unknown_cann_names_the_nearest_and_the_way_out(machine: FakeMachine, cann: str, nearest: str):
    code, lines, error = machine.with_npus().with_cann(cann).sourced().setup()
    torch, torch_npu = PAIRS[nearest]
    assert code == 1
    assert lines == [
        "found Linux aarch64",
        "found NPU: 8 (/dev/davinci0 ...), driver 25.2.0",
        f"found CANN {cann} in {OLD_HOME}",
    ]
    assert error == (
        f"error: CANN {cann} is not in the version table ({TABLE}): `bash setup_ascend.sh --cann {nearest}` takes "
        f"torch=={torch} torch_npu=={torch_npu}, the pair of the nearest older one, or install a CANN of the table "
        f"({CANN_PAGE})"
    )


@pytest.mark.parametrize(
    ("cann", "release"),
    [
        ("8.3.RC2", "8.3.RC1"),
        ("8.3.RC1.alpha001", "8.3.RC1"),
        ("8.5.2", "8.5.0"),
        ("9.0.0-beta.2", "9.0.0"),
        ("9.1.1", "9.1.0"),
    ],
)
def test_a_cann_of_a_known_series_takes_its_row_and_says_so(machine: FakeMachine, cann: str, release: str):
    torch, torch_npu = PAIRS[release]
    needs_python_for(torch)
    code, lines, error = machine.with_npus().with_cann(cann).sourced().setup()
    assert (code, error) == (0, "")
    assert lines == [
        "found Linux aarch64",
        "found NPU: 8 (/dev/davinci0 ...), driver 25.2.0",
        f"found CANN {cann} in {OLD_HOME}",
        f"found CANN {release} in the version table, which stands for {cann}",
        PYTHON_LINE,
        "plan PYTHON -m venv VENV",
        *tries(torch, torch_npu, "aarch64"),
        f"plan VENV/bin/pip install -c VENV/constraints.txt -e .[npu] # torch=={torch} torch_npu=={torch_npu}",
    ]


def test_the_way_out_works(machine: FakeMachine):
    code, lines, _ = machine.with_npus().with_cann("8.4.0").setup("--cann", "8.5.0")
    assert code == 0
    assert "plan VENV/bin/pip install torch==2.9.0 torch_npu==2.9.0" in lines


PLAN_OF_9_0 = [
    PYTHON_LINE,
    "plan PYTHON -m venv VENV",
    "plan VENV/bin/pip install torch==2.9.0 torch_npu==2.9.0.post2",
    "plan VENV/bin/pip install -c VENV/constraints.txt -e .[npu] # torch==2.9.0 torch_npu==2.9.0.post2",
]
PLAN_OF_A_CPU = [
    PYTHON_LINE,
    "plan PYTHON -m venv VENV",
    "plan VENV/bin/pip install torch==2.13.0+cpu",
    f"or else VENV/bin/pip install --extra-index-url {CPU_INDEX} torch==2.13.0+cpu",
    "or else VENV/bin/pip install torch==2.13.0",
    "plan VENV/bin/pip install -c VENV/constraints.txt -e . # torch==2.13.0",
]


def test_npu_without_driver_tool(machine: FakeMachine):
    """As in a container that was given the devices but not the driver's folders."""
    code, lines, error = machine.with_npus(driver=False).with_cann("9.0.0").sourced().setup()
    assert (code, error) == (0, "")
    assert lines == [
        "found Linux aarch64",
        "found NPU: 8 (/dev/davinci0 ...), driver version not readable",
        f"missing npu-smi: {GET_DRIVER}",
        f"found CANN 9.0.0 in {OLD_HOME}",
        *PLAN_OF_9_0,
    ]
    for part in ("https://", "--device=/dev/davinci_manager", "--device=/dev/hisi_hdc", "-v /usr/local/dcmi"):
        assert part in GET_DRIVER


def test_driver_without_cann(machine: FakeMachine):
    code, lines, error = machine.with_npus().setup()
    assert code == 1
    assert lines == ["found Linux aarch64", "found NPU: 8 (/dev/davinci0 ...), driver 25.2.0"]
    assert error == (f"error: an NPU but no CANN: install the CANN toolkit and kernels ({CANN_PAGE}), or --device cpu")
    code, lines, _ = machine.setup("--device", "cpu")
    assert code == 0
    assert lines[2:] == PLAN_OF_A_CPU


@pytest.mark.parametrize("home", [OLD_HOME, NEW_HOME])
def test_cann_not_sourced(machine: FakeMachine, home: str):
    _, lines, error = machine.with_npus().with_cann("9.0.0", home=home).setup()
    script = {OLD_HOME: "/usr/local/Ascend/ascend-toolkit/set_env.sh", NEW_HOME: f"{NEW_HOME}/set_env.sh"}[home]
    assert error == ""
    assert lines == [
        "found Linux aarch64",
        "found NPU: 8 (/dev/davinci0 ...), driver 25.2.0",
        f"found CANN 9.0.0 in {home}",
        f"missing CANN's environment: before you train, `source {script}`",
        *PLAN_OF_9_0,
    ]


@pytest.mark.parametrize("driver", [False, True])
def test_cann_without_device_files_is_a_cpu_unless_asked(machine: FakeMachine, driver: bool):
    """As while a container image is built, or where the driver's kernel module is not loaded."""
    machine.with_cann("9.0.0").sourced()
    if driver:
        machine.with_driver()
    _, lines, _ = machine.setup()
    assert lines == [
        "found Linux aarch64",
        f"missing NPU device files (/dev/davinci*): {GET_DRIVER}; --device npu installs for an NPU all the same",
        f"found CANN 9.0.0 in {OLD_HOME}",
        "missing accelerator: no NPU (/dev/davinci*) and no NVIDIA GPU (/dev/nvidia*); the CPU trains small models",
        *PLAN_OF_A_CPU,
    ]
    _, lines, _ = machine.setup("--device", "npu")
    assert lines == [
        "found Linux aarch64",
        f"missing NPU device files (/dev/davinci*): {GET_DRIVER}",
        f"found CANN 9.0.0 in {OLD_HOME}",
        *PLAN_OF_9_0,
    ]


def test_a_container_with_some_of_the_devices(machine: FakeMachine):
    for number in (12, 5):
        machine.put(f"/dev/davinci{number}")
    _, lines, _ = machine.put("/dev/davinci_manager").with_driver().with_cann("9.0.0").sourced().setup()
    assert "found NPU: 2 (/dev/davinci5 ...), driver 25.2.0" in lines


@pytest.mark.parametrize(
    ("path", "text", "home"),
    [
        (f"{OLD_HOME}/ascend_toolkit_install.info", "version=9.0.0\n", OLD_HOME),
        (f"{OLD_HOME}/aarch64-linux/ascend_toolkit_install.info", TOOLKIT_INFO, OLD_HOME),
        (f"{OLD_HOME}/x86_64-linux/ascend_toolkit_install.info", TOOLKIT_INFO, OLD_HOME),
        (f"{OLD_HOME}/version.cfg", VERSION_CFG, OLD_HOME),
        (f"{OLD_HOME}/version.cfg", "runtime_running_version=[1:8.0.0]\ntoolkit_running_version=[9.0.0]\n", OLD_HOME),
        (f"{OLD_HOME}/version.cfg", "# version: 1.0\nruntime_running_version=[7.7.0.1.238:9.0.0]\n", OLD_HOME),
        (f"{NEW_HOME}/aarch64-linux/ascend_toolkit_install.info", TOOLKIT_INFO, NEW_HOME),
        (f"{NEW_HOME}/version.cfg", VERSION_CFG, NEW_HOME),
        ("/usr/local/Ascend/cann-9.0.0/set_env.sh", "", "/usr/local/Ascend/cann-9.0.0"),
        ("/usr/local/Ascend/ascend-toolkit/9.0.0/opp/x", "", "/usr/local/Ascend/ascend-toolkit/9.0.0"),
        ("/home/me2/Ascend/cann/aarch64-linux/ascend_toolkit_install.info", TOOLKIT_INFO, "/home/me2/Ascend/cann"),
        ("/home/me2/Ascend/ascend-toolkit/latest/version.cfg", VERSION_CFG, "/home/me2/Ascend/ascend-toolkit/latest"),
        ("/home/me2/Ascend/cann-9.0.0/set_env.sh", "", "/home/me2/Ascend/cann-9.0.0"),
    ],
)
def test_where_the_cann_version_stands(machine: FakeMachine, path: str, text: str, home: str):
    machine.with_npus().put(path, text.format(version="9.0.0", arch="aarch64"))
    _, lines, error = machine.setup(HOME="/home/me2")
    assert error == ""
    assert f"found CANN 9.0.0 in {home}" in lines
    assert lines[-4:] == PLAN_OF_9_0


def test_a_cann_that_does_not_tell_its_version(machine: FakeMachine):
    code, lines, error = machine.with_npus().put(f"{NEW_HOME}/lib64/libascendcl.so").sourced(NEW_HOME).setup()
    assert code == 1
    assert f"found CANN unknown in {NEW_HOME}" in lines
    assert error == (
        f"error: the version of CANN cannot be read: `bash setup_ascend.sh --cann VERSION` names it, one of {TABLE}"
    )
    code, lines, _ = machine.setup("--cann=9.0.0")
    assert code == 0
    assert lines[-4:] == PLAN_OF_9_0


@pytest.mark.parametrize("latest", ["8.5.0", "9.0.0"])
def test_of_several_canns_the_linked_one_counts(machine: FakeMachine, latest: str):
    """Below ascend-toolkit `latest` is a folder of links, or a link itself."""
    base = "/usr/local/Ascend/ascend-toolkit"
    for version in ("8.5.0", "9.0.0"):
        machine.with_cann(version, home=f"{base}/{version}")
    machine.with_npus().link(f"{base}/latest/aarch64-linux", f"../{latest}/aarch64-linux")
    _, lines, _ = machine.setup()
    assert f"found CANN {latest} in {base}/latest" in lines
    (machine.root / base[1:] / "latest/aarch64-linux").unlink()
    (machine.root / base[1:] / "latest").rmdir()
    machine.link(f"{base}/latest", f"./{latest}")
    _, lines, _ = machine.setup()
    assert f"found CANN {latest} in {base}/latest" in lines


def test_of_several_canns_in_the_new_layout_the_linked_one_counts(machine: FakeMachine):
    machine.with_npus().with_cann("8.3.RC1")
    for version in ("8.5.0", "9.0.0"):
        machine.with_cann(version, home=f"/usr/local/Ascend/cann-{version}")
    _, lines, _ = machine.setup()
    assert f"found CANN 8.3.RC1 in {OLD_HOME}" in lines  # `latest` says that it is in use, the others say nothing
    machine.link(NEW_HOME, "cann-8.5.0")
    _, lines, _ = machine.setup()
    assert f"found CANN 8.5.0 in {NEW_HOME}" in lines
    assert f"missing CANN's environment: before you train, `source {NEW_HOME}/set_env.sh`" in lines


def test_of_several_canns_without_a_link_the_newest_counts(machine: FakeMachine):
    machine.with_npus()
    for version in ("8.5.0", "9.0.0", "10.0.0"):
        machine.with_cann(version, home=f"/usr/local/Ascend/cann-{version}")
    machine.with_cann("8.3.RC1", home="/usr/local/Ascend/ascend-toolkit/8.3.RC1")
    _, lines, _ = machine.setup()
    assert "found CANN 10.0.0 in /usr/local/Ascend/cann-10.0.0" in lines


def test_the_sourced_cann_counts(machine: FakeMachine):
    machine.with_npus().with_cann("8.5.0").with_cann("9.1.0", home="/opt/cann").sourced("/opt/cann")
    _, lines, _ = machine.setup()
    assert "found CANN 9.1.0 in /opt/cann" in lines
    assert not [line for line in lines if line.startswith("missing")]
    machine.sourced("/opt/gone")  # left over from a CANN that was removed
    _, lines, _ = machine.setup()
    assert f"found CANN 8.5.0 in {OLD_HOME}" in lines


@pytest.mark.parametrize("arch", ["aarch64", "x86_64"])
def test_neither(machine: FakeMachine, arch: str):
    code, lines, error = machine.setup(arch=arch)
    assert (code, error) == (0, "")
    assert lines == [
        f"found Linux {arch}",
        "missing accelerator: no NPU (/dev/davinci*) and no NVIDIA GPU (/dev/nvidia*); the CPU trains small models",
        *PLAN_OF_A_CPU,
    ]


def test_cuda(machine: FakeMachine):
    machine.put("/dev/nvidia0").put("/dev/nvidia1").put("/dev/nvidiactl").put("/usr/bin/nvidia-smi")
    _, lines, _ = machine.setup(arch="x86_64")
    assert lines == [
        "found Linux x86_64",
        "found NVIDIA GPU: 2",
        PYTHON_LINE,
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


def test_a_venv_of_another_kind_does_not_make_the_one_that_replaces_it(machine: FakeMachine):
    """Its interpreter goes with it; the one it came from stays."""
    venv.create(machine.venv, with_pip=False)
    (machine.venv / "nanochat_setup.txt").write_text(
        f"project x\nkind cpu\npython {sys.version_info[0]}.{sys.version_info[1]}\n"
    )
    code, lines, error = machine.with_npus().with_cann("8.5.0").setup(PYTHON="")
    assert code == 0, error
    removal = next(i for i, line in enumerate(lines) if line.startswith("plan rm -r VENV"))
    maker = lines[removal + 1].removeprefix("plan ").removesuffix(" -m venv VENV")
    assert Path(maker).is_file() and not maker.startswith("VENV")
