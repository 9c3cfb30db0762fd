"""Check what this machine has and whether it works: one PASS, FAIL or SKIP line per check, a fix under each FAIL.

    python check_npu.py                 # an Ascend server, a GPU machine or a laptop
    python check_npu.py --device cpu    # do not use the accelerator
    python check_npu.py --full          # ten minutes: everything that we want to know of a card, in report.json

It first inspects the machine with only the standard library (device files, driver, CANN, versions). Then it imports
torch and computes: a matrix product, attention, one training step of this project's model, an all-reduce.
The exit code is 0 when nothing failed, else 1.

The version table exists only here. `setup_ascend.sh` reads it through `check_npu.py --plan`, which prints what to
install, one `key value` per line.
"""

import argparse
import errno
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# CANN release -> the (torch, torch_npu) pairs built for it. The first pair is the one to install; the oldest release
# comes first. A `.postN` belongs to one CANN release: a matching torch is not enough. Source: COMPATIBILITY.md of
# torch_npu.
RELEASES = {
    "8.1.RC1": (("2.5.1", "2.5.1"),),
    "8.2.RC1": (("2.6.0", "2.6.0"),),
    "8.3.RC1": (("2.7.1", "2.7.1"), ("2.8.0", "2.8.0")),
    "8.5.0": (("2.9.0", "2.9.0"), ("2.8.0", "2.8.0.post2"), ("2.7.1", "2.7.1.post2")),
    "9.0.0": (("2.9.0", "2.9.0.post2"), ("2.10.0", "2.10.0"), ("2.8.0", "2.8.0.post4"), ("2.7.1", "2.7.1.post4")),
    "9.1.0": (
        ("2.12.0", "2.12.0"),
        ("2.12.0", "2.12.0.post2"),
        ("2.11.0", "2.11.0"),
        ("2.11.0", "2.11.0.post2"),
        ("2.10.0", "2.10.0.post4"),
        ("2.10.0", "2.10.0.post6"),
        ("2.9.0", "2.9.0.post6"),
        ("2.9.0", "2.9.0.post8"),
        ("2.7.1", "2.7.1.post8"),
        ("2.7.1", "2.7.1.post10"),
    ),
}
# The vendor's dependency lists (instg_0045) require numpy up to 1.24 for CANN 8.0 and below 2 for 8.5.0; from 9.0.0 on
# they have no upper bound. With numpy 2, users of 8.2 saw set_device fail with error code 500001; below 2 it worked.
NUMPY_2_FROM = "9.0.0"
# CANN release -> the oldest driver series (HDK) in its release notes. We found no such page for 8.3.RC1.
# Sources: releasenote_0000 of CANN 8.5.0; the compatibility table in the release notes of 9.1.0.
OLDEST_DRIVERS = {"8.5.0": "25.0", "9.0.0": "25.0", "9.1.0": "25.2"}
TORCH = "2.13.0"  # without an NPU: the newest torch this project is tested with
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ROOT = Path(__file__).resolve().parent
WORKERS_SECONDS = 240  # time limit for all processes of the all-reduce together

CANN_PAGE = "https://www.hiascend.com/cann/download"
DRIVER_PAGE = "https://www.hiascend.com/hardware/firmware-drivers"
MANAGERS = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")  # next to /dev/davinci<number>
GET_DRIVER = (
    f"install the driver ({DRIVER_PAGE}), or start the container with "
    f"--device=/dev/davinci0 {' '.join(f'--device={path}' for path in MANAGERS)} "
    "-v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro -v /usr/local/dcmi:/usr/local/dcmi:ro "
    "-v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi:ro -v /etc/ascend_install.info:/etc/ascend_install.info:ro"
)


class Fail(Exception):
    """A failed check: what is wrong, and how to fix it."""

    def __init__(self, reason: str, fix: str):
        super().__init__(reason)
        self.fix = fix


class Skip(Exception):
    """A check that was left out, and why."""


# ---------------------------------------------------------------------------------------------------------
# The version table


def version_key(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparison: "8.3.RC1" -> (8, 3, 1), "2.9.0+cpu" -> (2, 9, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0]))


def release_of(cann: str) -> str:
    """The release in the table for this CANN: the same version, or its series (8.5.2 -> "8.5.0").

    Raises Fail: when the table has none, or its torch is too old for this project.
    """
    if not version_key(cann):
        raise Fail(
            "the version of CANN cannot be read",
            f"`bash setup_ascend.sh --cann VERSION` names it, one of {', '.join(RELEASES)}",
        )
    needed = minimum_torch()
    oldest = next(name for name, pairs in RELEASES.items() if version_key(pairs[0][0]) >= version_key(needed))
    release = release_of_series(cann)
    if version_key(release or cann) < version_key(oldest):
        takes = f"takes {pinned(RELEASES[release][0])}" if release else "is too old"
        raise Fail(
            f"CANN {cann} {takes}, this project needs torch>={needed}",
            f"install CANN {oldest} or later ({CANN_PAGE})",
        )
    if release is None:
        near = [name for name in RELEASES if version_key(name) < version_key(cann)][-1]
        raise Fail(
            f"CANN {cann} is not in the version table ({', '.join(RELEASES)})",
            f"`bash setup_ascend.sh --cann {near}` takes {pinned(RELEASES[near][0])}, the pair of the nearest older "
            f"one, or install a CANN of the table ({CANN_PAGE})",
        )
    return release


def release_of_series(cann: str) -> str | None:
    return next((name for name in RELEASES if version_key(name)[:2] == version_key(cann)[:2]), None)


def pinned(pair: tuple[str, str]) -> str:
    return f"torch=={pair[0]} torch_npu=={pair[1]}"


def numpy_for(cann: str) -> str:
    """The numpy for this CANN, as a pip requirement; "" for any."""
    return "numpy<2" if version_key(cann)[:2] < version_key(NUMPY_2_FROM)[:2] else ""


def minimum_torch() -> str:
    """The oldest torch that the project supports, from pyproject.toml; "0" (any) if that file is missing."""
    return first_match(r'"torch>=([\d.]+)', ROOT / "pyproject.toml") or "0"


def first_unsupported_torch() -> str | None:
    """The oldest torch that is too new for the project, from pyproject.toml; None if that file is missing."""
    return first_match(r'"torch>=[\d.]+,<([\d.]+)"', ROOT / "pyproject.toml")


def pythons_for(torch: str, torch_npu: str | None) -> tuple[str, ...]:
    """Python versions with wheels, the preferred one first."""
    if torch_npu is None:
        return ("3.11", "3.12", "3.13", "3.14", "3.10")
    if version_key(torch_npu) < (2, 9):
        return ("3.11", "3.10")
    return ("3.11", "3.12", "3.10") if torch_npu == "2.9.0" else ("3.11", "3.12", "3.13", "3.10")


def torch_attempts(kind: str, torch: str, torch_npu: str | None, system: str, arch: str, index: str) -> list[str]:
    """Arguments of `pip install`, to be tried in this order.

    On Linux the package index holds CUDA builds (x86_64 always, aarch64 from 2.11): gigabytes that only an
    NVIDIA GPU needs. A `+cpu` version is never a CUDA build. The attempts are: `+cpu` from pip's configured index,
    `+cpu` from the CPU index, and at last the plain version. torch_npu requires `+cpu` on x86_64 below 2.12.
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
# Inspecting the machine: only files and environment


@dataclass(frozen=True)
class Machine:
    """What was found. Paths are as programs on the machine see them, without the `root` of the search."""

    system: str = "Linux"
    arch: str = "x86_64"
    npu_files: tuple[str, ...] = ()
    npu_smi: str | None = None
    npu_driver: str | None = None  # version
    cann: str | None = None  # version; "unknown" when no file in the CANN folder names it
    cann_home: str | None = None
    cann_environment: str = "/usr/local/Ascend/ascend-toolkit/set_env.sh"
    cann_sourced: bool = False
    gpus: int = 0
    nvidia_smi: str | None = None

    @property
    def kind(self) -> str:
        return "npu" if self.npu_files else "cuda" if self.gpus else "cpu"


def look(root: Path = Path("/"), arch: str | None = None) -> Machine:
    """Inspect the files below `root` and the environment."""
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
    numbers = []
    for path in below(root, "/dev").glob(f"{prefix}*"):
        number = path.name.removeprefix(prefix)
        if number.isdigit():  # not a manager such as /dev/davinci_manager
            numbers.append(int(number))
    return [f"/dev/{prefix}{number}" for number in sorted(numbers)]


def find_program(root: Path, name: str) -> str | None:
    for folder in ("/usr/local/bin", "/usr/local/sbin", "/usr/bin", "/usr/sbin", "/usr/lib/wsl/lib"):
        if below(root, f"{folder}/{name}").is_file():
            return f"{folder}/{name}"
    return shutil.which(name) if root == Path("/") else None


def run_program(command: list[str], timeout: float = 30) -> str:
    """The program's output, also when it fails; the error if it could not run or did not end."""
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return answer.stdout + answer.stderr


def first_match(pattern: str, file: Path) -> str | None:
    try:
        match = re.search(pattern, file.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return match[1].strip() if match else None


def find_cann(root: Path) -> str | None:
    """The folder of the CANN toolkit: the sourced one, else the default places, newest layout first."""
    candidates = [os.environ.get("ASCEND_HOME_PATH"), os.environ.get("ASCEND_TOOLKIT_HOME")]
    bases = ("/usr/local/Ascend", f"{os.environ.get('HOME', '/root')}/Ascend")
    candidates += [f"{base}/{name}" for base in bases for name in ("cann", "ascend-toolkit/latest")]
    for base in bases:  # without a link to the version in use: the newest folder
        names = [path.name for path in below(root, base).glob("cann-[0-9]*")]
        names += [f"ascend-toolkit/{path.name}" for path in below(root, base).glob("ascend-toolkit/[0-9]*")]
        candidates += [f"{base}/{name}" for name in sorted(names, key=version_key, reverse=True)]
    for path in candidates:
        if path and below(root, path).is_dir():
            return path
    return None


def read_cann_version(root: Path, home: str) -> str:
    """The version from ascend_toolkit_install.info, else version.cfg, else the folder's name, else "unknown"."""
    folder = below(root, home)
    name = "ascend_toolkit_install.info"
    for info in [folder / name, *sorted(folder.glob(f"*-linux/{name}")), *sorted(folder.glob(f"*/{name}"))]:
        if version := first_match(r"^version\s*=\s*(\S+)", info):
            return version
    for part in ("toolkit", r"\w+"):  # toolkit_running_version=[7.7.0.1.238:8.1.RC1]
        if version := first_match(rf"^{part}_running_version\s*=\s*\[(?:[^\]]*:)?([^\]:]+)\]", folder / "version.cfg"):
            return version
    named = re.search(r"(?:cann-|ascend-toolkit/)(\d+\.\d+[\w.-]*)$", str(folder.resolve()))
    return named[1] if named else "unknown"


def is_sourced(environment: Any) -> bool:
    """Whether set_env.sh has run in this shell: CANN's home is set and its libraries are on the search path."""
    home = environment.get("ASCEND_HOME_PATH")
    if not home:
        return False
    homes = (home, os.path.realpath(home))  # one of the two may be a link
    for path in environment.get("LD_LIBRARY_PATH", "").split(":"):
        if path and (path.startswith(homes) or os.path.realpath(path).startswith(homes)):
            return True
    return False


# ---------------------------------------------------------------------------------------------------------
# The plan for setup_ascend.sh


def plan(machine: Machine, device: str, cann: str | None, index: str) -> list[str]:
    """Lines of `key value`: found, missing, problem (nothing can be installed), kind, pythons, install
    (arguments of `pip install`, to be tried in order), constraint, extra."""
    # A line break in a value would start another line, and a space in an address another argument.
    if cann is not None and not re.fullmatch(r"[\w.+-]+", cann):
        return [f"problem --cann {cann!r} is not a version: for example --cann 9.0.0"]
    if re.search(r"\s", index) or index.startswith("-"):
        return [f"problem TORCH_INDEX_URL={index!r} is not one address: it starts with https://"]
    kind = machine.kind if device == "auto" else device
    lines = describe(machine, kind)
    torch, torch_npu, numpy = TORCH, None, ""
    if kind == "npu":
        found = cann or machine.cann
        if found is None:
            return [
                *lines,
                f"problem an NPU but no CANN: install the CANN toolkit and kernels ({CANN_PAGE}), or --device cpu",
            ]
        try:
            release = release_of(found)
        except Fail as fail:
            return [*lines, f"problem {fail}: {fail.fix}"]
        if release != found:
            lines.append(f"found CANN {release} in the version table, used for {found}")
        torch, torch_npu = RELEASES[release][0]
        numpy = numpy_for(release)
    lines += [f"kind {kind}", f"pythons {' '.join(pythons_for(torch, torch_npu))}"]
    lines += [f"install {text}" for text in torch_attempts(kind, torch, torch_npu, machine.system, machine.arch, index)]
    lines += [f"constraint torch=={torch}"]
    if torch_npu:
        lines += [f"constraint torch_npu=={torch_npu}"]
        lines += [f"constraint {numpy}"] if numpy else []
        lines += ["extra npu"]
    return lines


def describe(machine: Machine, kind: str) -> list[str]:
    """What was found, and what to do about each missing part."""
    lines = [f"found {machine.system} {machine.arch}"]
    if machine.npu_files:
        driver = f"driver {machine.npu_driver}" if machine.npu_driver else "driver version not readable"
        lines.append(f"found NPU: {len(machine.npu_files)} ({machine.npu_files[0]} ...), {driver}")
        if not machine.npu_smi:
            lines.append(f"missing npu-smi: {GET_DRIVER}")
    elif kind == "npu" or machine.cann or machine.npu_smi or machine.npu_driver:
        anyway = "" if kind == "npu" else "; --device npu installs for an NPU anyway"
        lines.append(f"missing NPU device files (/dev/davinci*): {GET_DRIVER}{anyway}")
    if machine.cann:
        lines.append(f"found CANN {machine.cann} in {machine.cann_home}")
        if kind == "npu" and not machine.cann_sourced:
            lines.append(f"missing CANN's environment: before you train, `source {machine.cann_environment}`")
    if machine.gpus:
        lines.append(f"found NVIDIA GPU: {machine.gpus}")
        if not machine.nvidia_smi:
            lines.append("missing nvidia-smi: install NVIDIA's driver, or start the container with --gpus all")
    elif machine.nvidia_smi:
        lines.append("missing NVIDIA GPU: nvidia-smi is here but lists none; repair the driver, or use the CPU")
    if kind == "cpu" and not (machine.npu_files or machine.gpus):
        lines.append(
            "missing accelerator: no NPU (/dev/davinci*) and no NVIDIA GPU (/dev/nvidia*); the CPU trains small models"
        )
    return lines


# ---------------------------------------------------------------------------------------------------------
# The checks: each returns its detail, or raises Fail with the fix, or Skip with the reason

# Patterns in errors of torch, torch_npu, CANN and HCCL, each with its fix; the first match counts. Sources: the
# messages of torch_npu and CANN, and users' reports.
FIXES = (
    (r"out of memory|\bEL0004\b|\b207018\b", "stop what holds the memory: `{tool}` shows it"),
    (r"static TLS block", "export LD_PRELOAD=<the library named in this line>; it is loaded before the others then"),
    (r"set_env\.sh|lib(ascend|hccl|acl|ge_|graph)\w*\.so|No module named '(te|tbe|acl)'", "source {environment}"),
    (r"No module named '(absl|attrs?|cffi|cloudpickle|Cython|decorator|google|ml_dtypes)'", "pip install {packages}"),
    (r"No module named '(pathlib2|psutil|requests|scipy|sympy|tornado|yaml)'", "pip install {packages}"),
    # CANN's general failure, when the message has nothing more precise.
    (
        r"\b500001\b",
        'before CANN 9.0 `pip install "numpy<2"`; then `pip install {packages}`; then `source {environment}`',
    ),
    (r"undefined symbol|Two accelerators", "torch, torch_npu and CANN do not fit: see `versions match`"),
    (r"EI000[26]|Hccl\w+, error code is 9\b|operation timeout", "a device did not answer in time; {network}"),
    (r"\b5070(46|48)\b", "a device did not answer in time; {network}"),
    (r"(?i)EI\d{4}|hccl|nccl|gloo", "{network}"),
    (r"\b507(014|015|017|018|034|035)\b", "an operator failed on the card: ASCEND_LAUNCH_BLOCKING=1 shows which"),
    (r"\b50705[34]\b", "the card's memory has errors: `npu-smi info -t ecc -i 0 -c 0`; leave the card out"),
    (r"\bEZ\d{4}|\bE[45]\d{4}", f"the kernels of this CANN for this chip must be installed ({CANN_PAGE})"),
    (r"\bE[EL]\d{4}|\b[15]07\d{3}\b", "`{tool}` must list the device as OK; reboot after an upgrade of the driver"),
)
# The packages that CANN's Python parts import; the extra `npu` of pyproject.toml lists the same. Sources: the vendor's
# page on dependencies (instg_0045) and the last three public guides to torch_npu. The page lists protobuf 3.20.x.
PACKAGES = (
    "attrs cffi cython decorator pathlib2 protobuf psutil pyyaml requests scipy sympy absl-py cloudpickle ml-dtypes "
    "tornado"
)
WORDS = {
    "npu": {
        "tool": "npu-smi info",
        "network": "on one node export HCCL_IF_IP=127.0.0.1, on several HCCL_SOCKET_IFNAME; `hccn_tool -i 0 -link -g`",
    },
    "cuda": {
        "tool": "nvidia-smi",
        "network": "run again with NCCL_DEBUG=INFO; in a container start it with --ipc=host",
    },
    "cpu": {
        "tool": "top",
        "network": "the loopback interface must be up; GLOO_SOCKET_IFNAME=lo picks it",
    },
}


def fix_for(text: str, kind: str, environment: str) -> str | None:
    """The fix for an error with this text, if it is known."""
    for pattern, fix in FIXES:
        if re.search(pattern, text):
            return fix.format(environment=environment, packages=PACKAGES, **WORDS[kind])
    return None


def summary(text: str) -> str:
    """An error in one line: its first line, and the first line with a CANN error code, which is more precise."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    coded = next((line for line in lines[1:] if re.search(r"\bE[A-Z]\d{4}\b", line)), "")
    return " | ".join(line[:300] for line in (lines[0], coded) if line)


class Report:
    """Prints one line per check and counts the results. An unexpected error is a FAIL, never a traceback.

    With `record` each line is also appended to that file as JSON, with the end of the traceback, for --full.
    """

    def __init__(
        self, kind: str = "cpu", environment: str = Machine.cann_environment, record: Path | None = None
    ) -> None:
        self.kind = kind
        self.environment = environment
        self.record = record
        self.counts = {"PASS": 0, "FAIL": 0, "SKIP": 0}

    def check(self, name: str, function: Callable[..., Any], *arguments: Any) -> bool:
        """Run one check; returns whether it passed."""
        fix = ""
        outcome = "FAIL"
        trace = ""
        try:
            detail = str(function(*arguments))
            outcome = "PASS"
        except Skip as skip:
            detail = str(skip)
            outcome = "SKIP"
        except Fail as fail:
            detail = str(fail)
            fix = fail.fix
        except Exception as error:
            detail = f"{type(error).__name__}: {summary(str(error))}"
            trace = traceback.format_exc()[-3000:]
            fix = fix_for(str(error), self.kind, self.environment) or (
                "fix the first FAIL above; if there is none, run `bash setup_ascend.sh` again and report this line"
            )
        self.counts[outcome] += 1
        print(f"{outcome} {name}: {detail}", flush=True)
        if fix:
            print(f"     fix: {fix}", flush=True)
        if self.record:
            line = {"name": name, "outcome": outcome, "detail": detail, "fix": fix, "traceback": trace}
            with self.record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        return outcome == "PASS"

    def finish(self) -> int:
        """Print the counts; returns the exit code."""
        failed = self.counts["FAIL"]
        verdict = "fix the FAIL lines from the top" if failed else f"this machine is ready to train on {self.kind}"
        print(f"{self.counts['PASS']} passed, {failed} failed, {self.counts['SKIP']} skipped: {verdict}", flush=True)
        return 1 if failed else 0


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
    missing = [path for path in MANAGERS if not below(root, path).exists()]
    if missing:
        raise Fail(f"no {' and no '.join(missing)}", GET_DRIVER)
    closed = [path for path in machine.npu_files if not os.access(below(root, path), os.R_OK | os.W_OK)]
    if closed:
        raise Fail(f"no permission to open {closed[0]}", "`sudo usermod -aG HwHiAiUser $USER`, then log in again")
    return f"{len(machine.npu_files)}: {' '.join(machine.npu_files)}"


def check_driver(machine: Machine, npu_smi_output: str) -> str:
    if not machine.npu_smi:
        raise Fail("npu-smi not found", GET_DRIVER)
    version, chips, _ = parse_npu_smi(npu_smi_output)
    if not chips:
        last = npu_smi_output.strip().splitlines()[-1:] or ["it prints nothing"]
        raise Fail(
            f"`{machine.npu_smi} info` lists no NPU: {last[0].strip()[:300]}",
            "reboot after an upgrade of driver or firmware; run it as root or a member of HwHiAiUser; in a container "
            "mount /usr/local/dcmi and /usr/local/Ascend/driver",
        )
    sick = [f"NPU {chip.npu} is {chip.health}" for chip in chips if chip.health != "OK"]
    if sick:
        raise Fail(
            ", ".join(sick),
            "`npu-smi info -t health -i <NPU>` shows why; reboot, or leave that NPU out with ASCEND_RT_VISIBLE_DEVICES",
        )
    release = release_of_series(machine.cann or "")
    oldest = OLDEST_DRIVERS.get(release or "")
    driver = machine.npu_driver or version
    if oldest and version_key(driver) and version_key(driver)[:2] < version_key(oldest):
        raise Fail(
            f"driver {driver}, but CANN {machine.cann} takes {oldest} or later",
            f"install a driver of CANN {machine.cann}'s release notes ({DRIVER_PAGE}), or an older CANN ({CANN_PAGE})",
        )
    used = sorted(chip.used_megabytes for chip in chips)
    names = "/".join(dict.fromkeys(chip.name for chip in chips))
    return f"npu-smi {version}, {len(chips)} x {names}, {used[0]} to {used[-1]} of {chips[0].megabytes} MB in use"


@dataclass(frozen=True)
class Chip:
    """One chip (on a 910C, one die) in the list of npu-smi."""

    npu: int
    name: str
    health: str
    used_megabytes: int
    megabytes: int


@dataclass(frozen=True)
class Holder:
    """A process that holds memory of an NPU."""

    npu: int
    pid: int
    name: str  # "" if npu-smi does not list it
    megabytes: int

    def __str__(self) -> str:
        return f"{self.name or 'process'} {self.pid} {self.megabytes} MB of NPU {self.npu}"


def parse_npu_smi(text: str) -> tuple[str, list[Chip], list[Holder]]:
    """The tool's version, the chips and the processes in the output of `npu-smi info`.

    A chip has two lines: the first has number, name and health, the second ends with used / total memory. A process
    has one line: NPU, chip (missing on a 950), process id, name, memory. The other columns differ by chip and release.
    """
    version = re.search(r"npu-smi\s+(\S+)", text)
    chips, holders, first = [], [], None
    for line in text.splitlines():
        if match := re.match(r"\|\s*(\d+)\s*\|?\s*(?=\S*[A-Za-z])(\S+)\s*\|\s*([A-Za-z]+)\s*\|", line):
            first = match
        elif first and (match := re.search(r"(\d+)\s*/\s*(\d+)\s*\|\s*$", line)):
            chips.append(Chip(int(first[1]), first[2], first[3], int(match[1]), int(match[2])))
            first = None
        elif match := re.match(r"\|\s*(\d+)(?:\s+\d+)?\s*\|\s*(\d+)\s*\|\s*([^|]*?)\s*\|\s*(\d+)\s*\|", line):
            holders.append(Holder(int(match[1]), int(match[2]), match[3], int(match[4])))
    return (version[1] if version else "unknown"), chips, holders


def check_cann(machine: Machine) -> str:
    if not machine.cann:
        raise Fail(
            "no CANN toolkit", f"install the CANN toolkit and kernels ({CANN_PAGE}), then `bash setup_ascend.sh`"
        )
    return f"{machine.cann} in {machine.cann_home}"


def check_cann_environment(machine: Machine) -> str:
    if not machine.cann_sourced:
        what = "ASCEND_HOME_PATH is not set"
        if os.environ.get("ASCEND_HOME_PATH"):
            what = "LD_LIBRARY_PATH lacks CANN's libraries"
        raise Fail(what, f"source {machine.cann_environment}")
    return f"ASCEND_HOME_PATH={os.environ['ASCEND_HOME_PATH']}"


def check_torch_version(torch: str | None, executable: str = sys.executable) -> str:
    if torch is None:
        activate = ROOT / ".venv" / "bin" / "activate"
        fix = "bash setup_ascend.sh"
        if activate.exists() and not executable.startswith(str(ROOT / ".venv")):
            fix = "source .venv/bin/activate"
        raise Fail(f"not installed for {executable}", fix)
    if version_key(torch) < version_key(minimum_torch()):
        raise Fail(f"{torch} is older than {minimum_torch()}", "bash setup_ascend.sh")
    too_new = first_unsupported_torch()
    if too_new and version_key(torch) >= version_key(too_new):
        raise Fail(f"{torch} is too new: this project is tested with torch below {too_new}", "bash setup_ascend.sh")
    return torch


def check_match(machine: Machine, torch: str | None, torch_npu: str | None, numpy: str | None = None) -> str:
    """Check by the table that the versions belong together."""
    cann = machine.cann
    if not cann or not torch:
        raise Skip("needs CANN and torch")
    here = f"CANN {cann}, torch {torch}, torch_npu {torch_npu}"
    if not version_key(cann):
        raise Skip(f"the version of CANN in {machine.cann_home} cannot be read; torch {torch}, torch_npu {torch_npu}")
    if torch_npu and version_key(cann)[:2] > version_key(max(RELEASES, key=version_key))[:2]:
        raise Skip(f"newer than the version table, not judged: {here}")
    release = release_of(cann)
    if numpy and numpy_for(release) and version_key(numpy) >= (2,):
        raise Fail(
            f"numpy {numpy}, but CANN {cann} takes numpy below 2: set_device fails with error code 500001",
            f'pip install "{numpy_for(release)}"',
        )
    pairs = RELEASES[release]
    plain_torch = torch.partition("+")[0]  # without +cpu
    plain_npu = (torch_npu or "").partition("+")[0]
    if (plain_torch, plain_npu) in pairs:
        return f"torch_npu {torch_npu} is for torch {plain_torch} on CANN {cann}"

    pair = next((pair for pair in pairs if pair[0] == plain_torch), pairs[0])  # the pair that keeps torch, if any
    attempts = torch_attempts(
        "npu", pair[0], pair[1], machine.system, machine.arch, os.environ.get("TORCH_INDEX_URL", "")
    )
    fix = f"pip install {attempts[min(1, len(attempts) - 1)]}"  # prefer the attempt that names an index
    takes = f"CANN {cann} takes {' or '.join(pinned(other) for other in pairs if other[0] == pair[0])}"
    if not torch_npu:
        raise Fail(f"torch_npu is not installed, torch is {torch}; {takes}", fix)
    if version_key(plain_npu)[:3] != version_key(plain_torch)[:3]:
        raise Fail(f"torch_npu {torch_npu} is not for torch {torch}: their first three numbers differ; {takes}", fix)
    owners = [name for name, others in RELEASES.items() if (plain_torch, plain_npu) in others]
    if owners:
        raise Fail(f"torch_npu {torch_npu} is for CANN {' and '.join(owners)}, here is CANN {cann}; {takes}", fix)
    raise Skip(f"torch_npu {torch_npu} is not in the version table, not judged: {here}; {takes}")


def check_import(kind: str, machine: Machine) -> str:
    """Run `import torch`. Since 2.5 it also loads torch_npu if that is installed."""
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        texts = []  # messages of the error and its causes, the first cause last
        link: BaseException | None = error
        while link is not None:
            texts.append(str(link))
            link = link.__cause__ or link.__context__
        text = " | ".join(dict.fromkeys(summary(text) for text in texts))
        if kind != "npu" and any("torch_npu" in text for text in texts):
            fix = "torch_npu cannot load here: `pip uninstall torch_npu`, or export TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        else:
            known = (fix_for(text, kind, machine.cann_environment) for text in reversed(texts))
            fix = next(filter(None, known), "rm -r .venv && bash setup_ascend.sh")
        raise Fail(text, fix) from None
    return f"torch {torch.__version__}"


def check_devices(kind: str, machine: Machine, torch: str) -> tuple[Any, str]:
    """The project's Device, and a description of it."""
    if not (ROOT / "nanochat").is_dir():
        raise Skip("the next checks need the project: run this file in its folder")
    devices = importlib.import_module("nanochat.device")
    cli = importlib.import_module("nanochat.cli")
    try:
        device = devices.init(kind)
    except cli.UserError as error:
        fixes = {
            "npu": f"source {machine.cann_environment}; ASCEND_RT_VISIBLE_DEVICES must not hide what npu-smi shows",
            "cuda": "CUDA_VISIBLE_DEVICES must not hide what nvidia-smi shows; for an older driver find the index of "
            "a build that fits it at https://pytorch.org/get-started/locally and run "
            "rm -r .venv && TORCH_INDEX_URL=<index> bash setup_ascend.sh",
        }
        fix = fixes.get(kind, "bash setup_ascend.sh")
        if kind == "cuda" and "+cpu" in torch:
            fix = "torch is a CPU build: rm -r .venv && bash setup_ascend.sh --device cuda"
        raise Fail(str(error), fix) from None
    count = 1 if kind == "cpu" else device.module.device_count()
    return device, f"{count} x {device.name}, computes in {str(device.dtype).removeprefix('torch.')}"


def check_memory(device: Any, holders: list[Holder]) -> str:
    if device.kind == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        available = first_match(r"^MemAvailable:\s+(\d+)", Path("/proc/meminfo"))
        free = int(available) * 1024 if available else total
    else:
        free, total = device.module.mem_get_info()
    free_gib, total_gib = free / 2**30, total / 2**30
    detail = f"{free_gib:.1f} of {total_gib:.1f} GiB free, {total_gib - free_gib:.1f} in use already"
    biggest = sorted(holders, key=lambda holder: -holder.megabytes)
    if biggest:
        more = f" and {len(biggest) - 4} more" if len(biggest) > 4 else ""
        detail += f": {', '.join(map(str, biggest[:4]))}{more}"
    if free < 2**30:
        raise Fail(detail, f"stop what holds the memory: `{WORDS[device.kind]['tool']}` shows it")
    return detail


def relative_error(value: Any, reference: Any) -> float:
    value = value.detach().float().cpu()
    reference = reference.detach().float().cpu()
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
    """Compare the project's attention on this device with softmax(q k^T) v, written out in fp32 on the host.

    On an NPU it is npu_fusion_attention. The check runs forward and backward, on whole rows, windows and packed
    documents.
    """
    torch = importlib.import_module("torch")
    attention = importlib.import_module("nanochat.attention")
    B, T, H, K, D = 2, 128, 4, 2, 64  # K key/value heads serve H query heads
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(B, T, heads, D, generator=generator) for heads in (H, K, K)]
    distance = torch.arange(T)[:, None] - torch.arange(T)[None, :]
    worst = 0.0
    numbers = (torch.rand(B, T, generator=generator) < 0.05).cumsum(1)  # documents of 20 tokens
    packed = attention.Segments.from_numbers(numbers).to(device.to_device)
    for window, segments in ((0, None), (48, None), (0, packed), (16, packed)):
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        mask = (distance >= 0) & (distance < (window or T))  # True: the query attends to the key
        if segments is not None:
            mask = mask & (numbers[:, None, :, None] == numbers[:, None, None, :])  # (B, 1, T, T)
        scores = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(H // K, dim=2)) / D**0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)  # (B, H, T, T)
        expected = torch.einsum("bhts,bshd->bthd", weights, v.repeat_interleave(H // K, dim=2))
        expected.square().sum().backward()

        here = [x.clone().to(device.torch_device, device.dtype).requires_grad_() for x in inputs]
        output = device.kernels.attention(*here, scale=D**-0.5, window=window, segments=segments)  # (B, T, H, D)
        output.float().square().sum().backward()
        device.synchronize()
        worst = max(worst, relative_error(output, expected))
        for x, reference in zip(here, (q, k, v), strict=True):
            worst = max(worst, relative_error(x.grad, reference.grad))
    kernel = device.kernels.name.partition(",")[0]
    return within(worst, 0.03, f"{kernel}: forward and backward, whole, windowed and packed,")


def small_run(device: Any) -> tuple[Any, Any, Any]:
    """A small model and optimizer of this project, and a batch for them."""
    if not device.can_train:
        raise Skip(f"{device.name} is made for inference")
    torch = importlib.import_module("torch")
    gpt = importlib.import_module("nanochat.gpt")
    scaling = importlib.import_module("nanochat.scaling")
    train = importlib.import_module("nanochat.train")
    config = gpt.GPTConfig(vocab_size=256, n_layer=2, width=128, n_head=2, n_kv_head=2, sequence_len=64)
    model = gpt.GPT(config, device.kernels)
    model.init_weights(0)
    model.to(device.torch_device)
    optimizer = train.make_optimizer(model, scaling.rates(config, 256, 256_000), device)
    tokens = torch.randint(0, 256, (4, 65), generator=torch.Generator().manual_seed(0)).to(device.torch_device)
    return model, optimizer, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def check_training(device: Any) -> str:
    """Two training steps on one batch: the second loss must be lower."""
    model, optimizer, batch = small_run(device)
    train = importlib.import_module("nanochat.train")
    losses = []
    for _ in range(2):
        stats = train.train_step(model, optimizer, [batch], train.next_token_loss, device=device)
        losses.append(float(stats.loss))
    if not losses[1] < losses[0] < 10:
        raise Fail(
            f"the loss went from {losses[0]:.4f} to {losses[1]:.4f}", "see the matrix product and attention lines above"
        )
    return f"loss {losses[0]:.4f} -> {losses[1]:.4f}, peak memory {device.peak_memory() / 2**20:.0f} MiB"


def check_skipped_step(device: Any) -> str:
    """A step whose loss is not a number must not change any weight or optimizer state."""
    model, optimizer, batch = small_run(device)
    torch = importlib.import_module("torch")
    train = importlib.import_module("nanochat.train")

    def bad_loss(model: Any, batch: Any) -> tuple[Any, Any]:
        loss, targets = train.next_token_loss(model, batch)
        return loss * float("nan"), targets

    def everything() -> list[Any]:
        tensors = [*model.parameters(), *optimizer.state_dict().values()]
        return [tensor.detach().cpu().clone() for tensor in tensors]

    train.train_step(model, optimizer, [batch], train.next_token_loss, device=device)
    before = everything()
    train.train_step(model, optimizer, [batch], bad_loss, device=device)
    changed = sum(not torch.equal(one, other) for one, other in zip(before, everything(), strict=True))
    if changed:
        raise Fail(f"a step whose loss is NaN changed {changed} of {len(before)} tensors", "please report this line")
    return f"a skipped step changes nothing ({len(before)} tensors)"


def check_all_reduce(device: Any, gigabytes: dict[int, float]) -> str:
    """Start this file through the launcher on every device (twice on a CPU): workers that add up their numbers.

    `gigabytes` receives the bandwidths that they measure.
    """
    processes = 2 if device.kind == "cpu" else device.module.device_count()
    command = [sys.executable, "-m", "nanochat.run.launch", f"--nproc_per_node={processes}"]
    command += [str(Path(__file__).resolve()), f"--device={device.kind}", "--all_reduce_worker"]
    # HCCL gives up before this process does, so that its error is printed; 120 s is the least that it accepts.
    environment = os.environ | {"HCCL_CONNECT_TIMEOUT": "120", "HCCL_EXEC_TIMEOUT": "120"}
    network = WORDS[device.kind]["network"]
    code = Path(str(importlib.import_module("nanochat").__file__)).parents[1]  # where -m finds the launcher
    running = subprocess.Popen(
        command, env=environment, cwd=code, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        output, errors = running.communicate(timeout=WORKERS_SECONDS)
    except subprocess.TimeoutExpired:
        running.terminate()  # the launcher stops its workers; after a kill they would keep running
        try:
            running.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            running.kill()
        raise Fail(f"{processes} processes: no answer within {WORKERS_SECONDS} s", network) from None
    if running.returncode != 0 or output.count("all_reduce ok") != processes:
        found = re.search(r"^(?:\[rank\d+\]: *)?([\w.]*(?:Error|Exception): [\s\S]+)", errors, re.MULTILINE)
        reason = re.sub(r"^\[rank\d+\]: *", "", found[1], flags=re.MULTILINE) if found else errors
        fix = fix_for(reason, device.kind, Machine.cann_environment) or network
        raise Fail(f"{processes} processes: {summary(reason)}", fix)
    for size, rate in re.findall(r"bandwidth (\d+) (\d+\.\d{4})", output):  # workers may print into one line
        gigabytes[int(size)] = float(rate)
    return f"{processes} process{'es' if processes > 1 else ''}"


def check_bandwidth(device: Any, gigabytes: dict[int, float]) -> str:
    if not gigabytes:
        alone = device.kind != "cpu" and device.module.device_count() == 1
        raise Skip("one device: nothing to send" if alone else "needs the all-reduce")
    rates = ", ".join(f"{rate:.3g} GB/s at {size} MiB" for size, rate in gigabytes.items())
    return f"{rates} (size of the tensor over the time of one all-reduce)"


def all_reduce_worker(kind: str) -> None:
    torch = importlib.import_module("torch")
    devices = importlib.import_module("nanochat.device")
    device = devices.init(kind)
    if not torch.distributed.is_initialized():  # init makes no group for one process
        torch.distributed.init_process_group(devices.BACKENDS[kind])
    numbers = torch.full((1024,), float(device.rank + 1), device=device.torch_device)
    torch.distributed.all_reduce(numbers)
    expected = device.world_size * (device.world_size + 1) / 2
    assert bool((numbers == expected).all()), f"all_reduce gave {numbers[0].item()}, expected {expected}"
    sizes = (1, 16) if kind == "cpu" else (1, 16, 128)
    for mebibytes in sizes if device.world_size > 1 else ():
        tensor = torch.zeros(mebibytes * 2**20 // 4, device=device.torch_device)  # fp32
        for repeats in (2, 5):  # the first round warms up
            device.synchronize()
            start = time.perf_counter()
            for _ in range(repeats):
                torch.distributed.all_reduce(tensor)
            device.synchronize()
            seconds = (time.perf_counter() - start) / repeats
        if device.is_main:
            print(f"bandwidth {mebibytes} {mebibytes * 2**20 / 1e9 / seconds:.4f}", flush=True)
    print("all_reduce ok", flush=True)
    devices.shutdown(device)


# ---------------------------------------------------------------------------------------------------------


def check_everything(requested: str, machine: Machine, root: Path, record: Path | None = None) -> int:
    """Run every check that applies to the kind of device; returns the exit code."""
    kind = machine.kind if requested == "auto" else requested
    torch, torch_npu = installed("torch"), installed("torch_npu")
    reason = "no NPU here (/dev/davinci*)" if requested == "auto" else f"--device {requested}"
    smi = run_program([str(below(root, machine.npu_smi)), "info"]) if kind == "npu" and machine.npu_smi else ""
    report = Report(kind, machine.cann_environment, record)

    def npu_check(name: str, function: Callable[..., Any], *arguments: Any) -> None:
        report.check(name, function if kind == "npu" else skip_because(reason), *arguments)

    report.check("python", check_python, sys.version_info[:3])
    npu_check("device files", check_device_files, machine, root)
    npu_check("driver", check_driver, machine, smi)
    npu_check("CANN", check_cann, machine)
    npu_check("CANN environment", check_cann_environment, machine)
    report.check("torch", check_torch_version, torch)
    npu_check("versions match", check_match, machine, torch, torch_npu, installed("numpy"))
    if kind == "cuda" and not machine.nvidia_smi:
        report.check("nvidia-smi", skip_because("not found; torch may work anyway"))

    found: list[Any] = []

    def find_device() -> str:
        device, detail = check_devices(kind, machine, torch or "")
        found.append(device)
        return detail

    usable = report.check("import torch", check_import, kind, machine)
    usable = report.check(f"{kind} devices", find_device if usable else skip_because("needs torch")) and usable
    gigabytes: dict[int, float] = {}
    for name, function, *more in (
        ("memory", check_memory, parse_npu_smi(smi)[2]),
        ("matrix product", check_matmul),
        ("attention", check_attention),
        ("training step", check_training),
        ("skipped step", check_skipped_step),
        ("all-reduce", check_all_reduce, gigabytes),
        ("bandwidth", check_bandwidth, gigabytes),
    ):
        works = function if usable else skip_because(f"needs a {kind} device that works")
        report.check(name, works, *found, *more)
    return report.finish()


# --full reports the variables that begin so: they change what the vendor's libraries and torch do.
VARIABLES = {
    "npu": (
        "ASCEND", "ACL", "HCCL", "NPU", "TASK_QUEUE", "CPU_AFFINITY", "COMBINED_ENABLE", "MULTI_STREAM", "INF_NAN",
        "CLOSE_MATMUL", "ATB", "TE_", "HCCN",
    ),
    "cuda": ("CUDA", "NCCL", "NVIDIA", "CUBLAS", "CUDNN"),
    "cpu": (),
}  # fmt: skip
SHARED_VARIABLES = (
    "TORCH", "PYTORCH", "OMP_", "MKL_", "GLOO", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "NANOCHAT", "RANK",
    "LOCAL_RANK", "WORLD_SIZE", "MASTER_",
)  # fmt: skip
DESCRIBE = {"npu": ("npu-smi", "info"), "cuda": ("nvidia-smi",), "cpu": ("lscpu",)}  # the vendor's view of the device


def full(requested: str, machine: Machine, root: Path, out: Path, is_small: bool) -> int:
    """Run these checks and the parts of nanochat/run/full_check.py in separate processes, and write `out`."""
    if not (ROOT / "nanochat").is_dir():
        print("FAIL full: it needs the project\n     fix: run this file in its folder", flush=True)
        return 1
    full_report = importlib.import_module("nanochat.run.full_report")
    provenance = importlib.import_module("nanochat.provenance")
    kind = machine.kind if requested == "auto" else requested
    name, *arguments = DESCRIBE[kind]
    tool = find_program(root, name)
    about = {
        "commit": provenance.commit(),
        "device": kind,
        "machine": asdict(machine),
        "versions": provenance.versions() | {"numpy": installed("numpy"), "CANN": machine.cann},
        "vendor_tool": {
            "command": " ".join(DESCRIBE[kind]),
            "output": run_program([str(below(root, tool)), *arguments]) if tool else f"{name} not found",
        },
        "environment": full_report.environment((*VARIABLES[kind], *SHARED_VARIABLES), os.environ),
    }
    report = full_report.FullReport(
        out, about, lambda text: fix_for(text, kind, machine.cann_environment), is_accelerator=kind != "cpu"
    )
    try:  # before ten minutes of work
        if out.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        report.write()
    except OSError as error:
        print(f"FAIL full: {out}: {error.strerror}\n     fix: --out names a file that can be written", flush=True)
        return 1
    checks = [sys.executable, str(Path(__file__).resolve()), "--device", kind, "--root", str(root)]
    with full_report.stoppable():
        return full_report.run_parts(report, kind, checks, works=f"{kind} devices", is_small=is_small)


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
    parser.add_argument("--full", action="store_true", help="also try and time what training and decoding need")
    parser.add_argument("--out", type=Path, default=Path("report.json"), help="with --full: the report's file")
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)  # with --full, on a simulated device
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--all_reduce_worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.plan and options.full:
        print("error: --plan and --full exclude each other: a plan measures nothing", file=sys.stderr)
        return 2
    if options.all_reduce_worker:
        all_reduce_worker(options.device)
        return 0
    machine = look(options.root, options.arch)
    if options.plan:
        for line in plan(machine, options.device, options.cann, os.environ.get("TORCH_INDEX_URL", "")):
            print(" ".join(line.split()))  # one line, whatever a file of this machine contains
        return 0
    if options.full:
        return full(options.device, machine, options.root, options.out.resolve(), options.small)
    return check_everything(options.device, machine, options.root, options.record)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
