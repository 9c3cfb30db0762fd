"""What is on this machine, and does it work: one PASS, FAIL or SKIP line a check, a mend under each FAIL.

    python check_npu.py                 # an Ascend server, a GPU machine or a laptop
    python check_npu.py --device cpu    # leave the accelerator alone

It first looks around with the standard library only (device files, driver, CANN, versions), then imports
torch and computes: a matrix product, attention, one training step of this project's model, an all-reduce.
Exit code 0 when nothing failed, else 1.

The version table and the look at the machine stand here and nowhere else: `setup_ascend.sh` asks for them
with `check_npu.py --plan`, which prints what to install, one `key value` a line.
"""

import argparse
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# CANN release -> (torch, torch_npu) pairs that work on it, the one to install first. The `.postN` picks the
# CANN release: a matching torch is not enough. Source: COMPATIBILITY.md of the torch_npu repository.
RELEASES = {
    "8.1.RC1": (("2.5.1", "2.5.1"),),
    "8.2.RC1": (("2.6.0", "2.6.0"),),
    "8.3.RC1": (("2.7.1", "2.7.1"), ("2.8.0", "2.8.0")),
    "8.5.0": (("2.9.0", "2.9.0"), ("2.8.0", "2.8.0.post2"), ("2.7.1", "2.7.1.post2")),
    "9.0.0": (("2.9.0", "2.9.0.post2"), ("2.8.0", "2.8.0.post4"), ("2.7.1", "2.7.1.post4")),
    "9.1.0": (
        ("2.12.0", "2.12.0"),
        ("2.11.0", "2.11.0"),
        ("2.10.0", "2.10.0.post4"),
        ("2.9.0", "2.9.0.post6"),
        ("2.7.1", "2.7.1.post8"),
    ),
}
TORCH = "2.13.0"  # without an NPU: the newest torch this project is tested with
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ROOT = Path(__file__).resolve().parent

CANN_PAGE = "https://www.hiascend.com/cann/download"
DRIVER_PAGE = "https://www.hiascend.com/hardware/firmware-drivers"
GET_DRIVER = (
    f"install the driver ({DRIVER_PAGE}), or start the container with "
    "--device=/dev/davinci0 --device=/dev/davinci_manager --device=/dev/devmm_svm --device=/dev/hisi_hdc "
    "-v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi:ro"
)

# ---------------------------------------------------------------------------------------------------------
# The version table


def version_key(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparing: "8.3.RC1" -> (8, 3, 1), "2.9.0+cpu" -> (2, 9, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0]))


def nearest_release(cann: str) -> str:
    """The known CANN release closest to `cann`, the older one when two are as close."""

    def distance(known: str) -> tuple[int, ...]:
        here, there = (key + (0,) * (6 - len(key)) for key in (version_key(cann), version_key(known)))
        return tuple(abs(a - b) for a, b in zip(here, there, strict=True))

    return min(RELEASES, key=distance)


def minimum_torch() -> str:
    """The oldest torch the project takes, from pyproject.toml."""
    match = re.search(r'"torch>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    return match[1] if match else "0"


def pythons_for(torch: str) -> tuple[str, ...]:
    """Python versions that have wheels, the one to prefer first."""
    return ("3.11", "3.10") if version_key(torch) < (2, 9) else ("3.11", "3.12", "3.10")


def torch_attempts(kind: str, torch: str, torch_npu: str | None, system: str, arch: str, index: str) -> list[str]:
    """What to hand to `pip install`, to be tried in this order.

    On Linux the package index holds CUDA builds (x86_64 always, aarch64 from 2.11), gigabytes that only an
    NVIDIA GPU needs. `+cpu` cannot be one of those: it is asked for as pip is configured, then at the CPU
    index, and the plain version is the last resort. torch_npu insists on `+cpu` on x86_64 below 2.12.
    """
    with_npu = f" torch_npu=={torch_npu}" if torch_npu else ""
    plain, labelled = f"torch=={torch}{with_npu}", f"torch=={torch}+cpu{with_npu}"
    if kind == "cuda":
        return [f"--extra-index-url {index} {plain}" if index else plain]
    if system != "Linux" or (arch == "aarch64" and version_key(torch) < (2, 11)):
        return [plain]
    attempts = [labelled, f"--extra-index-url {index or CPU_INDEX} {labelled}"]
    needs_label = torch_npu and arch == "x86_64" and version_key(torch) < (2, 12)
    return attempts if needs_label else [*attempts, plain]


# ---------------------------------------------------------------------------------------------------------
# The look at the machine: files and environment only


@dataclass(frozen=True)
class Machine:
    """What was found. Paths are as programs on the machine see them, without the root they were read under."""

    system: str = "Linux"
    arch: str = "x86_64"
    npu_files: tuple[str, ...] = ()
    npu_smi: str | None = None
    npu_driver: str | None = None  # version
    cann: str | None = None  # version; "unknown" when there is a CANN folder that does not tell
    cann_home: str | None = None
    cann_environment: str = "/usr/local/Ascend/ascend-toolkit/set_env.sh"
    cann_sourced: bool = False
    gpus: int = 0
    nvidia_smi: str | None = None

    @property
    def kind(self) -> str:
        return "npu" if self.npu_files else "cuda" if self.gpus else "cpu"


def look(root: Path = Path("/"), arch: str | None = None) -> Machine:
    """Read what the files below `root` and the environment say."""
    home = find_cann(root)
    cann = read_cann_version(root, home) if home else None
    scripts = [f"{folder}/set_env.sh" for folder in (home, str(Path(home).parent))] if home else []
    environment = next((script for script in scripts if below(root, script).is_file()), Machine.cann_environment)
    driver_info = below(root, "/usr/local/Ascend/driver/version.info")
    nvidia_smi = find_program(root, "nvidia-smi")
    gpu_files = list_devices(root, "nvidia")
    gpus = len(gpu_files)
    if nvidia_smi and not gpus:  # WSL has a GPU without device files
        gpus = len(re.findall(r"^GPU \d+:", run_program([str(below(root, nvidia_smi)), "-L"]), re.MULTILINE))
    return Machine(
        system=platform.system(),
        arch={"arm64": "aarch64", "amd64": "x86_64"}.get(arch or "", arch) or platform.machine(),
        npu_files=tuple(list_devices(root, "davinci")),
        npu_smi=find_program(root, "npu-smi"),
        npu_driver=first_match(r"^\s*[Vv]ersion\s*=\s*(\S+)", driver_info),
        cann=cann,
        cann_home=home,
        cann_environment=environment,
        cann_sourced=is_sourced(os.environ),
        gpus=gpus,
        nvidia_smi=nvidia_smi,
    )


def below(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def list_devices(root: Path, prefix: str) -> list[str]:
    names = (path.name for path in below(root, "/dev").glob(f"{prefix}*"))
    numbers = sorted(int(name[len(prefix) :]) for name in names if name[len(prefix) :].isdigit())
    return [f"/dev/{prefix}{number}" for number in numbers]


def find_program(root: Path, name: str) -> str | None:
    folders = ("/usr/local/bin", "/usr/local/sbin", "/usr/bin", "/usr/sbin", "/usr/lib/wsl/lib")
    found = next((f"{folder}/{name}" for folder in folders if below(root, f"{folder}/{name}").is_file()), None)
    return found or (shutil.which(name) if root == Path("/") else None)


def run_program(command: list[str], timeout: float = 30) -> str:
    """What the program prints; nothing when it cannot run, fails or hangs."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def first_match(pattern: str, file: Path) -> str | None:
    try:
        match = re.search(pattern, file.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return match[1].strip() if match else None


def find_cann(root: Path) -> str | None:
    """The folder of the CANN toolkit: the one that is sourced, else the default places, newest layout first."""
    user = os.environ.get("HOME", "/root")
    named = [os.environ.get("ASCEND_HOME_PATH"), os.environ.get("ASCEND_TOOLKIT_HOME")]
    usual = [
        f"{base}/{name}"
        for base in ("/usr/local/Ascend", f"{user}/Ascend")
        for name in ("cann", "ascend-toolkit/latest")
    ]
    versioned = [f"/usr/local/Ascend/{path.name}" for path in below(root, "/usr/local/Ascend").glob("cann-*")]
    candidates = [*named, *usual, *sorted(versioned, key=version_key, reverse=True)]
    return next((path for path in candidates if path and below(root, path).is_dir()), None)


def read_cann_version(root: Path, home: str) -> str:
    """From ascend_toolkit_install.info, else version.cfg, else the folder's name, else "unknown"."""
    folder = below(root, home)
    infos = [folder / "ascend_toolkit_install.info", *sorted(folder.glob("*/ascend_toolkit_install.info"))]
    for info in infos:
        if version := first_match(r"^version\s*=\s*(\S+)", info):
            return version
    for part in ("toolkit", r"\w+"):  # toolkit_running_version=[7.7.0.1.238:8.1.RC1]
        if version := first_match(rf"^{part}_running_version\s*=\s*\[(?:[^\]]*:)?([^\]:]+)\]", folder / "version.cfg"):
            return version
    named = re.search(r"(?:cann-|ascend-toolkit/)(\d+\.\d+\.\w+(?:\.\w+)?)$", str(folder.resolve()))
    return named[1] if named else "unknown"


def is_sourced(environment: Any) -> bool:
    """Whether set_env.sh has run in this shell: CANN's home is set and its libraries are on the search path."""
    home, paths = environment.get("ASCEND_HOME_PATH"), environment.get("LD_LIBRARY_PATH", "").split(":")
    homes = tuple({str(home), os.path.realpath(home)}) if home else ()
    return any(path.startswith(homes) or os.path.realpath(path).startswith(homes) for path in paths if path and homes)


# ---------------------------------------------------------------------------------------------------------
# The plan for setup_ascend.sh


def plan(machine: Machine, device: str, cann: str | None, index: str) -> list[str]:
    """Lines of `key value`: found, missing, problem (nothing can be installed), kind, pythons, install
    (arguments of `pip install`, to be tried in order), constraint, extra."""
    kind = machine.kind if device == "auto" else device
    lines = describe(machine, kind)
    torch, torch_npu = TORCH, None
    if kind == "npu":
        release = cann or machine.cann
        if release is None:
            return [
                *lines,
                f"problem an NPU but no CANN: install the CANN toolkit and kernels ({CANN_PAGE}), or --device cpu",
            ]
        if release not in RELEASES:
            near = nearest_release(release)
            pair = " ".join(
                f"{name}=={version}" for name, version in zip(("torch", "torch_npu"), RELEASES[near][0], strict=True)
            )
            return [
                *lines,
                f"problem CANN {release} is not in the version table ({', '.join(RELEASES)}); the nearest is {near}: "
                f"`bash setup_ascend.sh --cann {near}` takes its {pair}, or install a CANN of the table ({CANN_PAGE})",
            ]
        torch, torch_npu = RELEASES[release][0]
        if version_key(torch) < version_key(minimum_torch()):
            oldest = next(
                name for name in RELEASES if version_key(RELEASES[name][0][0]) >= version_key(minimum_torch())
            )
            return [
                *lines,
                f"problem CANN {release} takes torch=={torch} torch_npu=={torch_npu}, this project needs "
                f"torch>={minimum_torch()}: install CANN {oldest} or later ({CANN_PAGE})",
            ]
    lines += [f"kind {kind}", f"pythons {' '.join(pythons_for(torch))}"]
    lines += [f"install {text}" for text in torch_attempts(kind, torch, torch_npu, machine.system, machine.arch, index)]
    lines += [f"constraint torch=={torch}"]
    if torch_npu:
        lines += [f"constraint torch_npu=={torch_npu}", "extra npu"]
    return lines


def describe(machine: Machine, kind: str) -> list[str]:
    """What is here, and for each thing that is missing what to do."""
    lines = [f"found {machine.system} {machine.arch}"]
    if machine.npu_files:
        driver = f"driver {machine.npu_driver}" if machine.npu_driver else "driver version not readable"
        lines.append(f"found NPU: {len(machine.npu_files)} ({machine.npu_files[0]} ...), {driver}")
        if not machine.npu_smi:
            lines.append(f"missing npu-smi: {GET_DRIVER}")
    elif kind == "npu" or machine.cann or machine.npu_smi or machine.npu_driver:
        all_the_same = "" if kind == "npu" else "; --device npu installs for an NPU all the same"
        lines.append(f"missing NPU device files (/dev/davinci*): {GET_DRIVER}{all_the_same}")
    if machine.cann:
        lines.append(f"found CANN {machine.cann} in {machine.cann_home}")
        if kind == "npu" and not machine.cann_sourced:
            lines.append(f"missing CANN's environment: before you train, `source {machine.cann_environment}`")
    if machine.gpus:
        lines.append(f"found NVIDIA GPU: {machine.gpus}")
        if not machine.nvidia_smi:
            lines.append("missing nvidia-smi: install NVIDIA's driver, or start the container with --gpus all")
    elif machine.nvidia_smi:
        lines.append("missing NVIDIA GPU: nvidia-smi is here but lists none; mend the driver, or go on without")
    if kind == "cpu" and not (machine.npu_files or machine.gpus):
        lines.append(
            "missing accelerator: no NPU (/dev/davinci*) and no NVIDIA GPU (/dev/nvidia*); the CPU trains small models"
        )
    return lines


# ---------------------------------------------------------------------------------------------------------
# The checks: each returns its detail, or raises Fail with the mend, or Skip with the reason


class Fail(Exception):
    """What is wrong, and how to mend it."""

    def __init__(self, reason: str, mend: str):
        super().__init__(reason)
        self.mend = mend


class Skip(Exception):
    """Why there was nothing to check."""


class Report:
    """Prints a line a check and counts them. A check that raises anything else is a FAIL, never a traceback."""

    def __init__(self) -> None:
        self.counts = {"PASS": 0, "FAIL": 0, "SKIP": 0}

    def check(self, name: str, function: Callable[..., Any], *arguments: Any) -> bool:
        """Run one check; whether it passed."""
        mend = ""
        try:
            outcome, detail = "PASS", str(function(*arguments))
        except Skip as skip:
            outcome, detail = "SKIP", str(skip)
        except Fail as fail:
            outcome, detail, mend = "FAIL", str(fail), fail.mend
        except Exception as error:
            outcome, detail = "FAIL", f"{type(error).__name__}: {last_line(error)}"
            mend = "mend the first FAIL above; if there is none, run `bash setup_ascend.sh` again and report this line"
        self.counts[outcome] += 1
        print(f"{outcome} {name}: {detail}", flush=True)
        if mend:
            print(f"     mend: {mend}", flush=True)
        return outcome == "PASS"

    def finish(self, kind: str) -> int:
        """Print the counts; the exit code."""
        failed = self.counts["FAIL"]
        verdict = "mend the FAIL lines from the top" if failed else f"this machine is ready to train on {kind}"
        print(f"{self.counts['PASS']} passed, {failed} failed, {self.counts['SKIP']} skipped: {verdict}", flush=True)
        return 1 if failed else 0


def last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else "no message")[:300]


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_python(version: tuple[int, ...]) -> str:
    text = ".".join(map(str, version[:3]))
    if version[:2] < (3, 10):
        raise Fail(f"{text} is older than 3.10", "install Python 3.11, then `bash setup_ascend.sh`")
    return f"{text} ({sys.executable})"


def check_device_files(machine: Machine, root: Path) -> str:
    if not machine.npu_files:
        raise Fail("no /dev/davinci*", GET_DRIVER)
    closed = [path for path in machine.npu_files if not os.access(below(root, path), os.R_OK | os.W_OK)]
    if closed:
        raise Fail(f"no permission to open {closed[0]}", "`sudo usermod -aG HwHiAiUser $USER`, then log in again")
    return f"{len(machine.npu_files)}: {' '.join(machine.npu_files)}"


def check_driver(machine: Machine, npu_smi_output: str) -> str:
    if not machine.npu_smi:
        raise Fail("npu-smi not found", GET_DRIVER)
    version, chips = parse_npu_smi(npu_smi_output)
    if not chips:
        raise Fail(
            f"`{machine.npu_smi} info` lists no NPU", "run it by hand; most often the driver needs a reboot or root"
        )
    sick = [f"NPU {chip.npu} is {chip.health}" for chip in chips if chip.health != "OK"]
    if sick:
        raise Fail(", ".join(sick), "`npu-smi info -t health -i <NPU>` says more; reboot, or leave that NPU out "
                   "with ASCEND_RT_VISIBLE_DEVICES")  # fmt: skip
    return f"npu-smi {version}, {len(chips)} x {chips[0].name}, {chips[0].memory_megabytes} MB each"


@dataclass(frozen=True)
class Chip:
    """One chip (a die of a 910C) as npu-smi lists it."""

    npu: int
    name: str
    health: str
    memory_megabytes: int


def parse_npu_smi(text: str) -> tuple[str, list[Chip]]:
    """The tool's version and the chips in the table of `npu-smi info`: two lines a chip, name and health in
    the first, bus address and memory (used / total, HBM last) in the second."""
    version = re.search(r"npu-smi\s+(\S+)", text)
    chips, first = [], None
    for line in text.splitlines():
        if match := re.match(r"\|\s*(\d+)\s+(\S*\d\S*)\s*\|\s*([A-Za-z]+)\s*\|", line):
            first = match
        elif first and (match := re.match(r"\|[\s\d]+\|\s*[0-9A-Fa-f]{4}:\S+\s*\|.*?(\d+)\s*/\s*(\d+)\s*\|\s*$", line)):
            chips.append(Chip(int(first[1]), first[2], first[3], int(match[2])))
            first = None
    return (version[1] if version else "unknown"), chips


def check_cann(machine: Machine) -> str:
    if not machine.cann:
        raise Fail(
            "no CANN toolkit", f"install the CANN toolkit and kernels ({CANN_PAGE}), then `bash setup_ascend.sh`"
        )
    return f"{machine.cann} in {machine.cann_home}"


def check_cann_environment(machine: Machine) -> str:
    if not machine.cann_sourced:
        what = (
            "LD_LIBRARY_PATH lacks CANN's libraries"
            if os.environ.get("ASCEND_HOME_PATH")
            else "ASCEND_HOME_PATH is not set"
        )
        raise Fail(what, f"source {machine.cann_environment}")
    return f"ASCEND_HOME_PATH={os.environ['ASCEND_HOME_PATH']}"


def check_torch_version(torch: str | None, executable: str = sys.executable) -> str:
    if torch is None:
        activate = ROOT / ".venv" / "bin" / "activate"
        mend = "bash setup_ascend.sh"
        if activate.exists() and not executable.startswith(str(ROOT / ".venv")):
            mend = "source .venv/bin/activate"
        raise Fail(f"not installed for {executable}", mend)
    if version_key(torch) < version_key(minimum_torch()):
        raise Fail(f"{torch} is older than {minimum_torch()}", "bash setup_ascend.sh")
    return torch


def check_match(cann: str | None, torch: str | None, torch_npu: str | None) -> str:
    """Whether the three versions belong together, by the table."""
    if not cann or not torch:
        raise Skip("needs CANN and torch")
    if cann not in RELEASES:
        near = nearest_release(cann)
        if torch_npu and version_key(cann) > max(map(version_key, RELEASES)):
            raise Skip(f"CANN {cann} is newer than the table's {near}; torch {torch}, torch_npu {torch_npu} not judged")
        raise Fail(
            f"CANN {cann} is not in the version table ({', '.join(RELEASES)})",
            f"`bash setup_ascend.sh --cann {near}` takes the pair of the nearest; or install a CANN of the table",
        )
    torch_wanted, npu_wanted = RELEASES[cann][0]
    mend = f"`bash setup_ascend.sh` installs torch=={torch_wanted} torch_npu=={npu_wanted}, the pair for CANN {cann}"
    if version_key(torch_wanted) < version_key(minimum_torch()):
        raise Fail(
            f"CANN {cann} is too old for this project (torch>={minimum_torch()})", f"install a newer CANN ({CANN_PAGE})"
        )
    if torch_npu is None:
        raise Fail(f"torch_npu is not installed; torch is {torch}", mend)
    plain_torch = torch.partition("+")[0]
    if (plain_torch, torch_npu) in RELEASES[cann]:
        return f"torch_npu {torch_npu} is for torch {plain_torch} on CANN {cann}"
    if version_key(torch_npu)[:3] != version_key(torch)[:3]:
        raise Fail(f"torch_npu {torch_npu} does not fit torch {torch}: the first three numbers must be equal", mend)
    owners = [release for release, pairs in RELEASES.items() if (plain_torch, torch_npu) in pairs]
    if owners:
        raise Fail(
            f"torch_npu {torch_npu} is for CANN {owners[0]}, here is CANN {cann}: the .postN picks the CANN", mend
        )
    if version_key(torch_npu) > max(version_key(pair[1]) for pairs in RELEASES.values() for pair in pairs):
        raise Skip(
            f"torch_npu {torch_npu} is newer than the version table: not judged (listed for CANN {cann}: {npu_wanted})"
        )
    raise Fail(f"torch_npu {torch_npu} is not listed for CANN {cann}", mend)


def check_import(kind: str, machine: Machine) -> str:
    """`import torch`, which since 2.5 loads torch_npu by itself wherever that is installed."""
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        chain: list[BaseException] = [error]
        while cause := chain[-1].__cause__ or chain[-1].__context__:
            chain.append(cause)
        text = " | ".join(dict.fromkeys(last_line(link) for link in chain))
        if "torch_npu" in text or any("torch_npu" in str(link) for link in chain) or "libascend" in text:
            mend = f"source {machine.cann_environment}"
            if kind != "npu":
                mend = (
                    "torch_npu cannot load here: `pip uninstall torch_npu`, or export TORCH_DEVICE_BACKEND_AUTOLOAD=0"
                )
            raise Fail(text, mend) from None
        raise Fail(text, "rm -r .venv && bash setup_ascend.sh") from None
    return f"torch {torch.__version__}"


def check_devices(kind: str, machine: Machine, torch: str) -> tuple[Any, str]:
    """The project's Device and what to say about it."""
    devices = importlib.import_module("nanochat.device")
    cli = importlib.import_module("nanochat.cli")
    try:
        device = devices.init(kind)
    except cli.UserError as error:
        mends = {
            "npu": f"source {machine.cann_environment}; ASCEND_RT_VISIBLE_DEVICES must not hide what npu-smi shows",
            "cuda": "CUDA_VISIBLE_DEVICES must not hide what nvidia-smi shows; for an older driver find the index of "
            "a build that fits it at https://pytorch.org/get-started/locally and run "
            "rm -r .venv && TORCH_INDEX_URL=<index> bash setup_ascend.sh",
        }
        mend = mends.get(kind, "bash setup_ascend.sh")
        if kind == "cuda" and "+cpu" in torch:
            mend = "torch is a CPU build: rm -r .venv && bash setup_ascend.sh --device cuda"
        raise Fail(str(error), mend) from None
    count = 1 if kind == "cpu" else device.module.device_count()
    return device, f"{count} x {device.name}, computes in {str(device.dtype).removeprefix('torch.')}"


def check_memory(device: Any) -> str:
    if device.kind == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        available = first_match(r"^MemAvailable:\s+(\d+)", Path("/proc/meminfo"))
        free = int(available) * 1024 if available else total
    else:
        free, total = device.module.mem_get_info()
    detail = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if free < 2**30:
        tool = {"npu": "npu-smi info", "cuda": "nvidia-smi", "cpu": "top"}[device.kind]
        raise Fail(detail, f"another process holds it: `{tool}` shows which")
    return detail


def relative_error(value: Any, reference: Any) -> float:
    value, reference = value.detach().float().cpu(), reference.detach().float().cpu()
    return float((value - reference).norm() / reference.norm())


def within(error: float, limit: float, what: str) -> str:
    if not error <= limit:  # NaN fails too
        raise Fail(
            f"{what} is off by {error:.2%} (limit {limit:.0%})",
            "the versions of driver, CANN and torch do not fit: see above",
        )
    return f"{what} within {error:.2%} of fp32"


def check_matmul(device: Any) -> str:
    torch = importlib.import_module("torch")
    if device.kind == "npu" and device.dtype != torch.bfloat16:
        raise Skip(f"{device.name} does not do bfloat16; training uses {device.dtype}")
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 512, generator=generator) for _ in range(2))
    product = a.to(device.torch_device, torch.bfloat16) @ b.to(device.torch_device, torch.bfloat16)
    device.synchronize()
    return within(relative_error(product, a @ b), 0.01, "512 x 512 bfloat16 product")


def check_attention(device: Any) -> str:
    """The project's attention, forward and backward, against softmax(q k^T) v written out in fp32 on the host."""
    torch = importlib.import_module("torch")
    attention = importlib.import_module("nanochat.attention")
    B, T, H, K, D = 2, 128, 4, 2, 64  # K key/value heads serve H query heads
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(B, T, heads, D, generator=generator) for heads in (H, K, K)]
    distance = torch.arange(T)[:, None] - torch.arange(T)[None, :]
    worst = 0.0
    for window in (0, 48):
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        hidden = (distance < 0) | (distance >= (window or T))
        scores = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(H // K, dim=2)) / D**0.5
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)  # (B, H, T, T)
        expected = torch.einsum("bhts,bshd->bthd", weights, v.repeat_interleave(H // K, dim=2))
        expected.square().sum().backward()

        here = [x.to(device.torch_device, device.dtype).requires_grad_() for x in inputs]
        output = attention.causal_attention(*here, scale=D**-0.5, window=window)  # (B, T, H, D)
        output.float().square().sum().backward()
        device.synchronize()
        pairs = ((output, expected), *((x.grad, reference.grad) for x, reference in zip(here, (q, k, v), strict=True)))
        worst = max(worst, *(relative_error(value, reference) for value, reference in pairs))
    return within(worst, 0.03, "forward and backward, whole and windowed,")


def check_training(device: Any) -> str:
    """Two steps of the project's own model on one batch: the second loss must be lower."""
    torch = importlib.import_module("torch")
    gpt = importlib.import_module("nanochat.gpt")
    config = gpt.GPTConfig(vocab_size=256, n_layer=2, width=128, n_head=2, n_kv_head=2, sequence_len=64)
    model = gpt.GPT(config)
    model.init_weights(0)
    model.to(device.torch_device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (4, 65), generator=torch.Generator().manual_seed(0)).to(device.torch_device)
    losses = []
    for _ in range(2):
        with device.autocast():
            loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) / (4 * 64)  # nats a token
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if not losses[1] < losses[0] < 10:
        raise Fail(
            f"the loss went from {losses[0]:.4f} to {losses[1]:.4f}", "the matmul and attention lines above say more"
        )
    return f"loss {losses[0]:.4f} -> {losses[1]:.4f}, peak memory {device.peak_memory() / 2**20:.0f} MiB"


def check_all_reduce(device: Any) -> str:
    """torchrun starts this file again as workers that add up their numbers."""
    processes = 2 if device.kind == "cpu" else min(2, device.module.device_count())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += [str(Path(__file__).resolve()), f"--device={device.kind}", "--all_reduce_worker"]
    mends = {
        "npu": "on one node export HCCL_IF_IP=127.0.0.1, on several HCCL_SOCKET_IFNAME; `hccn_tool -i 0 -link -g`",
        "cuda": "run again with NCCL_DEBUG=INFO; in a container start it with --ipc=host",
        "cpu": "the loopback interface must be up; GLOO_SOCKET_IFNAME=lo picks it",
    }
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=180, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise Fail("no answer within 180 s", mends[device.kind]) from None
    if answer.returncode != 0 or answer.stdout.count("all_reduce ok") != processes:
        errors = re.findall(r"^(?:\[rank\d+\]: *)?(\w*(?:Error|Exception): .+)$", answer.stderr, re.MULTILINE)
        raise Fail(errors[0][:300] if errors else f"exit code {answer.returncode}", mends[device.kind])
    return f"{processes} process{'es' if processes > 1 else ''}"


def all_reduce_worker(kind: str) -> None:
    torch = importlib.import_module("torch")
    devices = importlib.import_module("nanochat.device")
    device = devices.init(kind)
    if not torch.distributed.is_initialized():  # one process has no group of its own
        torch.distributed.init_process_group(devices.BACKENDS[kind])
    numbers = torch.full((1024,), float(device.rank + 1), device=device.torch_device)
    torch.distributed.all_reduce(numbers)
    expected = device.world_size * (device.world_size + 1) / 2
    assert bool((numbers == expected).all()), f"all_reduce gave {numbers[0].item()}, expected {expected}"
    print("all_reduce ok", flush=True)
    devices.shutdown(device)


# ---------------------------------------------------------------------------------------------------------


def check_everything(asked: str, machine: Machine, root: Path, report: Report) -> int:
    """Run every check that makes sense for the kind of device; the exit code."""
    kind = machine.kind if asked == "auto" else asked
    torch, torch_npu = installed("torch"), installed("torch_npu")
    reason = "no NPU here (/dev/davinci*)" if asked == "auto" else f"--device {asked}"

    def npu_check(name: str, function: Callable[..., Any], *arguments: Any) -> None:
        report.check(name, function if kind == "npu" else skip_because(reason), *arguments)

    report.check("python", check_python, sys.version_info[:3])
    npu_check("device files", check_device_files, machine, root)
    npu_check("driver", lambda: check_driver(machine, run_program([str(below(root, machine.npu_smi or "/")), "info"])))
    npu_check("CANN", check_cann, machine)
    npu_check("CANN environment", check_cann_environment, machine)
    report.check("torch", check_torch_version, torch)
    npu_check("versions match", check_match, machine.cann, torch, torch_npu)
    if kind == "cuda" and not machine.nvidia_smi:
        report.check("nvidia-smi", skip_because("not found; torch may work all the same"))

    found: list[Any] = []

    def find_device() -> str:
        device, detail = check_devices(kind, machine, torch or "")
        found.append(device)
        return detail

    usable = report.check("import torch", check_import, kind, machine)
    usable = report.check(f"{kind} devices", find_device if usable else skip_because("needs torch")) and usable
    for name, function in (
        ("memory", check_memory),
        ("matrix product", check_matmul),
        ("attention", check_attention),
        ("training step", check_training),
        ("all-reduce", check_all_reduce),
    ):
        report.check(name, function if usable else skip_because(f"needs a {kind} device that works"), *found)
    return report.finish(kind)


def skip_because(reason: str) -> Callable[..., str]:
    def skip(*_: Any) -> str:
        raise Skip(reason)

    return skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What is on this machine, and does it work?")
    parser.add_argument("--device", choices=("auto", "npu", "cuda", "cpu"), default="auto", help="what to check")
    parser.add_argument("--plan", action="store_true", help="print what setup_ascend.sh should install, and stop")
    parser.add_argument("--root", type=Path, default=Path("/"), help="look for files below this folder")
    parser.add_argument("--arch", help="with --plan: x86_64 or aarch64, instead of this machine's")
    parser.add_argument("--cann", help="with --plan: take this row of the version table")
    parser.add_argument("--all_reduce_worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.all_reduce_worker:
        all_reduce_worker(options.device)
        return 0
    machine = look(options.root, options.arch)
    if options.plan:
        print("\n".join(plan(machine, options.device, options.cann, os.environ.get("TORCH_INDEX_URL", ""))))
        return 0
    return check_everything(options.device, machine, options.root, Report())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
