"""Check what this machine has and whether it works: one PASS, FAIL or SKIP line per check, a fix under each FAIL.

    python check_npu.py                 # an Ascend server, a GPU machine or a laptop
    python check_npu.py --device cpu    # do not use the accelerator
    python check_npu.py --full          # ten minutes: everything that we want to know of a card, in report.json

It first inspects the machine with only the standard library (device files, driver, CANN, versions). Then it imports
torch and computes on the device (tests/on_device/quick.py). The exit code is 0 when nothing failed, else 1.

The version table exists only here. `setup_ascend.sh` reads it through `check_npu.py --plan`, which prints what to
install, one `key value` per line.
"""

import sys

# Before imports that an older Python does not have. Python 3.6 can read the whole file.
if sys.version_info < (3, 10):  # noqa: UP036
    print(f"FAIL python: {sys.executable} is Python {sys.version.split()[0]}, older than 3.10", file=sys.stderr)
    sys.exit(
        "     fix: `bash setup_ascend.sh` finds a newer one or says how to get it, then `source .venv/bin/activate`"
    )

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import SkipTest as Skip

# CANN release -> the torch_npu built for it, each for the torch of its first three numbers. The first one is the one to
# install; the oldest release comes first. A `.postN` belongs to one CANN release: a matching torch is not enough.
# Source: COMPATIBILITY.md of torch_npu.
WHEELS = {
    "8.1.RC1": "2.5.1",
    "8.2.RC1": "2.6.0",
    "8.3.RC1": "2.7.1 2.8.0",
    "8.5.0": "2.9.0 2.8.0.post2 2.7.1.post2",
    "9.0.0": "2.9.0.post2 2.10.0 2.8.0.post4 2.7.1.post4",
    "9.1.0": "2.12.0 2.12.0.post2 2.11.0 2.11.0.post2 2.10.0.post4 2.10.0.post6 2.9.0.post6 2.9.0.post8 2.7.1.post8 "
    "2.7.1.post10",
}
# CANN release -> its (torch, torch_npu) pairs.
RELEASES = {
    release: tuple((".".join(wheel.split(".")[:3]), wheel) for wheel in wheels.split())
    for release, wheels in WHEELS.items()
}
NUMPY_2_FROM = "9.0.0"
# CANN release -> the oldest driver series (HDK) in its release notes. We found no such page for 8.3.RC1.
# Sources: releasenote_0000 of CANN 8.5.0; the compatibility table in the release notes of 9.1.0.
OLDEST_DRIVERS = {"8.5.0": "25.0", "9.0.0": "25.0", "9.1.0": "25.2"}
TORCH = "2.13.0"  # without an NPU: the newest torch this project is tested with
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ROOT = Path(__file__).resolve().parent

CANN_PAGE = "https://www.hiascend.com/cann/download"
GET_CANN = f"install the CANN toolkit and kernels ({CANN_PAGE})"
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


# ---------------------------------------------------------------------- the version table


def version_key(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparison: "8.3.RC1" -> (8, 3, 1), "2.9.0+cpu" -> (2, 9, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0]))


def release_of(cann: str) -> str:
    """The release in the table for this CANN: the same version, or its series (8.5.2 -> "8.5.0").

    Raises Fail: when the table has none, or its torch is too old for this project.
    """
    known = ", ".join(RELEASES)
    if not version_key(cann):
        raise Fail("the version of CANN cannot be read", f"`bash setup_ascend.sh --cann VERSION`, one of {known}")
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
            f"CANN {cann} is not in the version table ({known})",
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


def pythons_for(torch_npu: str | None) -> tuple[str, ...]:
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

    @property
    def kind(self) -> str:
        return "npu" if self.npu_files else "cuda" if self.gpus else "cpu"


def look(root: Path = Path("/"), arch: str | None = None) -> Machine:
    """Inspect the files below `root` and the environment."""
    home = find_cann(root)
    cann = read_cann_version(root, home) if home else None
    scripts = [f"{folder}/set_env.sh" for folder in (home, str(Path(home).parent))] if home else []
    environment = next((script for script in scripts if below(root, script).is_file()), Machine.cann_environment)
    nvidia_smi = find_program(root, "nvidia-smi")
    gpus = len(list_devices(root, "nvidia"))
    if nvidia_smi and not gpus:  # WSL has a GPU without device files
        gpus = len(re.findall(r"^GPU \d+:", run_program([str(below(root, nvidia_smi)), "-L"]), re.MULTILINE))
    return Machine(
        system=platform.system(),
        arch={"arm64": "aarch64", "amd64": "x86_64"}.get(arch or "", arch) or platform.machine(),
        npu_files=tuple(list_devices(root, "davinci")),
        npu_smi=find_program(root, "npu-smi"),
        npu_driver=first_match(r"^\s*[Vv]ersion\s*=\s*(\S+)", below(root, "/usr/local/Ascend/driver/version.info")),
        cann=cann,
        cann_home=home,
        cann_environment=environment,
        cann_sourced=is_sourced(os.environ),
        gpus=gpus,
    )


def below(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def list_devices(root: Path, prefix: str) -> list[str]:
    names = [path.name.removeprefix(prefix) for path in below(root, "/dev").glob(f"{prefix}*")]
    numbers = sorted(int(name) for name in names if name.isdigit())  # not a manager such as /dev/davinci_manager
    return [f"/dev/{prefix}{number}" for number in numbers]


def find_program(root: Path, name: str) -> str | None:
    for folder in ("/usr/local/bin", "/usr/local/sbin", "/usr/bin", "/usr/sbin", "/usr/lib/wsl/lib"):
        if below(root, f"{folder}/{name}").is_file():
            return f"{folder}/{name}"
    return shutil.which(name) if root == Path("/") else None


def run_program(command: list[str]) -> str:
    """The program's output, also when it fails; the error if it could not run or did not end."""
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=30, stdin=subprocess.DEVNULL
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
        version = first_match(r"^version\s*=\s*(\S+)", info)
        if version:
            return version
    for part in ("toolkit", r"\w+"):  # toolkit_running_version=[7.7.0.1.238:8.1.RC1]
        version = first_match(rf"^{part}_running_version\s*=\s*\[(?:[^\]]*:)?([^\]:]+)\]", folder / "version.cfg")
        if version:
            return version
    named = re.search(r"(?:cann-|ascend-toolkit/)(\d+\.\d+[\w.-]*)$", str(folder.resolve()))
    return named[1] if named else "unknown"


def is_sourced(environment: Any) -> bool:
    """Whether set_env.sh has run in this shell: CANN's home is set and its libraries are on the search path."""
    home = environment.get("ASCEND_HOME_PATH")
    if not home:
        return False
    homes = (home, os.path.realpath(home))  # one of the two may be a link
    paths = filter(None, environment.get("LD_LIBRARY_PATH", "").split(":"))
    return any(path.startswith(homes) or os.path.realpath(path).startswith(homes) for path in paths)


# ---------------------------------------------------------------------- the plan for setup_ascend.sh


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
            return [*lines, f"problem an NPU but no CANN: {GET_CANN}, or --device cpu"]
        try:
            release = release_of(found)
        except Fail as fail:
            return [*lines, f"problem {fail}: {fail.fix}"]
        if release != found:
            lines.append(f"found CANN {release} in the version table, used for {found}")
        torch, torch_npu = RELEASES[release][0]
        numpy = numpy_for(release)
    lines += [f"kind {kind}", f"pythons {' '.join(pythons_for(torch_npu))}", f"constraint torch=={torch}"]
    lines += [f"install {text}" for text in torch_attempts(kind, torch, torch_npu, machine.system, machine.arch, index)]
    if torch_npu:
        lines += [f"constraint torch_npu=={torch_npu}", "extra npu"]
        lines += [f"constraint {numpy}"] if numpy else []
    return lines


def describe(machine: Machine, kind: str) -> list[str]:
    """What was found, and what to do about each missing part."""
    lines = [f"found {machine.system} {machine.arch}"]
    if machine.npu_files:
        driver = machine.npu_driver or "unknown"
        lines.append(f"found NPU: {len(machine.npu_files)} ({machine.npu_files[0]} ...), driver {driver}")
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
    if kind == "cpu" and not (machine.npu_files or machine.gpus):
        lines.append("missing accelerator: no NPU (/dev/davinci*), no GPU (/dev/nvidia*); the CPU trains small models")
    return lines


# ---------------------------------------------------------------------- the checks
# Each returns its detail, or raises Fail with the fix, or Skip with the reason.

# Patterns in errors of torch, torch_npu, CANN and HCCL, each with its fix; the first match counts. Sources: the
# messages of torch_npu and CANN, and users' reports.
FIXES = (
    (r"--device npu: none", "source {environment}; ASCEND_RT_VISIBLE_DEVICES must not hide what npu-smi shows"),
    (r"--device cuda: none", "`{tool}` must list it; rm -r .venv && bash setup_ascend.sh --device cuda"),
    (r"out of memory|\bEL0004\b|\b207018\b", "stop what holds the memory: `{tool}` shows it"),
    (r"static TLS block", "export LD_PRELOAD=<the library named in this line>; it is loaded before the others then"),
    (r"set_env\.sh|lib(ascend|hccl|acl|ge_|graph)\w*\.so|No module named '(te|tbe|acl)'", "source {environment}"),
    (r"No module named '(absl|attrs?|cffi|cloudpickle|Cython|decorator|google|ml_dtypes)'", "pip install {packages}"),
    (r"No module named '(pathlib2|psutil|requests|scipy|sympy|tornado|yaml)'", "pip install {packages}"),
    # CANN's general failure, when the message has nothing more precise.
    (r"\b500001\b", 'before CANN 9.0 `pip install "numpy<2"`; `pip install {packages}`; `source {environment}`'),
    (r"undefined symbol|Two accelerators", "torch, torch_npu and CANN do not fit: see `versions match`"),
    (r"EI000[26]|Hccl\w+, error code is 9\b|operation timeout|\b5070(46|48)\b", "a device did not answer; {network}"),
    (r"(?i)EI\d{4}|hccl|nccl|gloo", "{network}"),
    (r"\b507(014|015|017|018|034|035)\b", "an operator failed: start again, ASCEND_LAUNCH_BLOCKING=1 shows which"),
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
TOOLS = {"npu": "npu-smi info", "cuda": "nvidia-smi", "cpu": "top"}
NETWORKS = {
    "npu": "on one node export HCCL_IF_IP=127.0.0.1, on several HCCL_SOCKET_IFNAME; `hccn_tool -i 0 -link -g`",
    "cuda": "run again with NCCL_DEBUG=INFO; in a container start it with --ipc=host",
    "cpu": "the loopback interface must be up; GLOO_SOCKET_IFNAME=lo picks it",
}


def fix_for(text: str, kind: str, environment: str) -> str | None:
    """The fix for an error with this text, if it is known."""
    for pattern, fix in FIXES:
        if re.search(pattern, text):
            return fix.format(environment=environment, packages=PACKAGES, tool=TOOLS[kind], network=NETWORKS[kind])
    return None


def summary(text: str) -> str:
    """An error in one line: its first line, and the first line with a CANN error code, which is more precise."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    coded = next((line for line in lines[1:] if re.search(r"\bE[A-Z]\d{4}\b", line)), "")
    return " | ".join(line[:300] for line in (lines[0], coded) if line)


class Report:
    """Prints one line per check and counts the results. An unexpected error is a FAIL, never a traceback."""

    def __init__(self, kind: str = "cpu", environment: str = Machine.cann_environment) -> None:
        self.kind = kind
        self.environment = environment
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
        except AssertionError as wrong:  # a computation differs
            detail = str(wrong)
            fix = "the versions of driver, CANN and torch do not fit: see above; --full finds the operator"
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
        record = os.environ.get("ON_DEVICE_LINES")  # for --full
        if record:
            line = {"name": name, "outcome": outcome, "detail": detail, "fix": fix, "traceback": trace}
            with Path(record).open("a", encoding="utf-8") as file:
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
    version, chips = parse_npu_smi(npu_smi_output)
    if not chips:
        last = npu_smi_output.strip().splitlines()[-1:] or ["it prints nothing"]
        fix = "reboot after an upgrade; run it as root or in the group HwHiAiUser; in a container mount the driver"
        raise Fail(f"`{machine.npu_smi} info` lists no NPU: {last[0].strip()[:300]}", fix)
    sick = [f"NPU {number} is {health}" for number, _, health in chips if health != "OK"]
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
    return f"npu-smi {version}, {len(chips)} x {'/'.join(dict.fromkeys(name for _, name, _ in chips))}"


def parse_npu_smi(text: str) -> tuple[str, list[tuple[str, str, str]]]:
    """The tool's version, and number, name and health of each chip, from `npu-smi info`; a 910C has two a number."""
    version = re.search(r"npu-smi\s+(\S+)", text)
    row = r"^\|\s*(\d+)\s*\|?\s*(?=\S*[A-Za-z])(\S+)\s*\|\s*([A-Za-z]+)\s*\|"
    return (version[1] if version else "unknown"), re.findall(row, text, re.MULTILINE)


def check_cann(machine: Machine) -> str:
    if not machine.cann:
        raise Fail("no CANN toolkit", f"{GET_CANN}, then `bash setup_ascend.sh`")
    return f"{machine.cann} in {machine.cann_home}"


def check_cann_environment(machine: Machine) -> str:
    if not machine.cann_sourced:
        raise Fail("ASCEND_HOME_PATH or LD_LIBRARY_PATH lacks CANN", f"source {machine.cann_environment}")
    return f"ASCEND_HOME_PATH={os.environ['ASCEND_HOME_PATH']}"


def check_torch_version(torch: str | None) -> str:
    if torch is None:
        is_there = (ROOT / ".venv/bin/activate").exists()
        fix = "source .venv/bin/activate" if is_there and sys.prefix == sys.base_prefix else "bash setup_ascend.sh"
        raise Fail(f"not installed for {sys.executable}", fix)
    if version_key(torch) < version_key(minimum_torch()):
        raise Fail(f"{torch} is older than {minimum_torch()}", "bash setup_ascend.sh")
    too_new = first_match(r'"torch>=[\d.]+,<([\d.]+)"', ROOT / "pyproject.toml")
    if too_new and version_key(torch) >= version_key(too_new):
        raise Fail(f"{torch} is too new: this project is tested with torch below {too_new}", "bash setup_ascend.sh")
    return torch


def check_match(machine: Machine, torch: str | None, torch_npu: str | None, numpy: str | None = None) -> str:
    """Check by the table that the versions belong together."""
    cann = machine.cann
    if not cann or not torch:
        raise Skip("needs CANN and torch")
    here = f"CANN {cann}, torch {torch}, torch_npu {torch_npu}"
    is_newer = torch_npu and version_key(cann)[:2] > version_key(max(RELEASES, key=version_key))[:2]
    if is_newer or not version_key(cann):
        raise Skip(f"not in the version table, not judged: {here}")
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


# ---------------------------------------------------------------------- the commands


def check_everything(requested: str, machine: Machine, root: Path) -> int:
    """Run every check that applies to the kind of device; returns the exit code."""
    kind = machine.kind if requested == "auto" else requested
    reason = "no NPU here (/dev/davinci*)" if requested == "auto" else f"--device {requested}"
    smi = run_program([str(below(root, machine.npu_smi)), "info"]) if kind == "npu" and machine.npu_smi else ""
    report = Report(kind, machine.cann_environment)

    def npu_check(name: str, function: Callable[..., Any], *arguments: Any) -> None:
        if kind == "npu":
            report.check(name, function, *arguments)
        else:
            report.check(name, skip, reason)

    report.check("python", lambda: f"{sys.version.split()[0]} ({sys.executable})")
    npu_check("device files", check_device_files, machine, root)
    npu_check("driver", check_driver, machine, smi)
    npu_check("CANN", check_cann, machine)
    npu_check("CANN environment", check_cann_environment, machine)
    report.check("torch", check_torch_version, installed("torch"))
    npu_check("versions match", check_match, machine, *map(installed, ("torch", "torch_npu", "numpy")))
    if not report.check("import torch", check_import, kind, machine):
        report.check("computation", skip, "needs torch")
    elif not (ROOT / "tests").is_dir():
        report.check("computation", skip, "needs the project: run this file in its folder")
    else:
        for name, check in from_tests("quick").checks(kind).items():
            if not report.check(name, check, kind) and name == f"{kind} devices":
                break
    return report.finish()


def from_tests(name: str) -> Any:
    """A module of tests/on_device, which finds the project's code."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    return importlib.import_module(f"on_device.{name}")


def skip(reason: str) -> None:
    raise Skip(reason)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What is on this machine, and does it work?")
    parser.add_argument("--device", choices=("auto", "npu", "cuda", "cpu"), default="auto", help="what to check")
    parser.add_argument("--root", type=Path, default=Path("/"), help="look for files below this folder")
    parser.add_argument("--arch", help="with --plan: x86_64 or aarch64, instead of this machine's")
    parser.add_argument("--cann", help="with --plan: take this row of the version table")
    parser.add_argument("--out", type=Path, help="with --full: the report's file (default: report.json)")
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)  # with --full, on a simulated device
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--plan", action="store_true", help="print what setup_ascend.sh should install, and stop")
    what.add_argument("--full", action="store_true", help="also try and time what training and decoding need")
    options = parser.parse_args(arguments)
    for name, mode in (("arch", "plan"), ("cann", "plan"), ("out", "full"), ("small", "full")):
        if getattr(options, name) and not getattr(options, mode):
            parser.error(f"--{name} needs --{mode}: add it, or leave --{name} out")
    if not options.root.is_dir():
        parser.error(f"--root {options.root}: not a folder")
    machine = look(options.root, options.arch)
    if options.plan:
        for line in plan(machine, options.device, options.cann, os.environ.get("TORCH_INDEX_URL", "")):
            print(" ".join(line.split()))  # one line, whatever a file of this machine contains
        return 0
    if options.full:
        if not (ROOT / "tests").is_dir():
            parser.error("--full runs tests/on_device: clone the whole project, or leave --full out")
        return from_tests("report").run(sys.modules[__name__], machine, options)
    return check_everything(options.device, machine, options.root)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
