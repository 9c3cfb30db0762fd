"""setup_ascend.sh on made-up machines: a folder takes the place of `/`.

What is found and planned is check_npu.py's part (--plan), and runs in this process. What the script does with a plan is
seen by --dry_run.
"""

import contextlib
import functools
import importlib.metadata
import io
import itertools
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from packaging.requirements import Requirement

import check_npu
from nanochat.ground import extras

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OLD_HOME, NEW_HOME = "/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann"
KNOWN = tomllib.loads((ROOT / "tests/npu_machines.toml").read_text(encoding="utf-8"))
PAIRS = KNOWN["pairs"]
FILES = KNOWN["files"]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
DRIVER = {"/usr/local/bin/npu-smi": "", "/usr/local/Ascend/driver/version.info": FILES["driver_info"]}
NPUS = dict.fromkeys(f"/dev/{name}" for name in ("davinci12", "davinci5", "davinci_manager", "devmm_svm", "hisi_hdc"))
GPUS = dict.fromkeys(("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/usr/bin/nvidia-smi"))


def cann(version: str, home: str = OLD_HOME, arch: str = "aarch64") -> dict[str, str]:
    environment = f"{Path(home).parent if home == OLD_HOME else home}/set_env.sh"
    info = FILES["toolkit_info"].format(version)
    return {f"{home}/{arch}-linux/ascend_toolkit_install.info": info, environment: ""}


def sourced(home: str = OLD_HOME) -> dict[str, str]:
    return {"ASCEND_HOME_PATH": home, "LD_LIBRARY_PATH": f"{home}/lib64:/usr/lib"}


class FakeMachine:
    """Files below a folder."""

    def __init__(self, root: Path):
        self.root = root / "machine"
        self.venv = root / "venv"
        self.root.mkdir()

    def put(self, files: dict[str, str]) -> "FakeMachine":
        for path, text in files.items():
            file = self.root / path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text or "")
        return self

    def link(self, path: str, target: str) -> None:
        """A relative link, as the installer makes them."""
        link = self.root / path.lstrip("/")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)

    def clean_environment(self) -> dict[str, str]:
        ours = ("ASCEND", "LD_LIBRARY", "TORCH_", "PIP_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return {**kept, "HOME": "/root"}

    def plan(self, *flags: str, arch: str = "aarch64", **environment: str) -> dict[str, list[str]]:
        """The lines of the plan by their first word."""
        out = io.StringIO()
        variables = {**self.clean_environment(), **environment}
        with mock.patch.dict(os.environ, variables, clear=True), contextlib.redirect_stdout(out):
            assert check_npu.main(["--plan", "--root", str(self.root), "--arch", arch, *flags]) == 0
        plan: dict[str, list[str]] = {"problem": [], "missing": [], "install": [], "constraint": []}
        for line in out.getvalue().splitlines():
            key, _, value = line.partition(" ")
            plan.setdefault(key, []).append(value)
        return plan

    def cann(self, **environment: str) -> str:
        (line,) = [line for line in self.plan(**environment)["found"] if line.startswith("CANN")]
        return line

    def setup(self, *flags: str, arch: str = "aarch64", **environment: str) -> tuple[int, list[str], str]:
        """The exit code, the lines of a dry run of the script with folders shortened, and the error line."""
        variables = {"PYTHON": sys.executable, "VENV": str(self.venv), "ARCH": arch}
        command = ["bash", "--posix", str(ROOT / "setup_ascend.sh"), "--dry_run", "--root", str(self.root), *flags]
        answer = subprocess.run(
            command,
            env={**self.clean_environment(), **variables, **environment},
            cwd=self.root,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        lines = answer.stdout.replace(str(self.venv), "VENV").replace(sys.executable, "PYTHON").splitlines()
        return answer.returncode, [" ".join(line.split()) for line in lines], answer.stderr.strip()

    def steps(self, *flags: str, **options: str) -> list[str]:
        """What a dry run would do; nothing may go wrong."""
        code, lines, error = self.setup(*flags, **options)
        assert (code, error) == (0, "")
        return [line for line in lines if line.startswith(("plan", "or else"))]


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


def put_program(file: Path, script: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return file


def pip_arguments(cann: str, arch: str = "aarch64") -> list[str]:
    """The installs of the pair, in their order, as one who knows the indexes would try them."""
    torch, torch_npu, _ = PAIRS[cann]
    plain = f"torch=={torch} torch_npu=={torch_npu}"
    labelled = f"torch=={torch}+cpu torch_npu=={torch_npu}"
    if arch == "aarch64" and torch != "2.12.0":  # below 2.11 the package index has CPU builds for aarch64
        return [plain]
    last = [plain] if torch == "2.12.0" else []  # older torch_npu insist on +cpu here
    return [labelled, f"--extra-index-url {CPU_INDEX} {labelled}", *last]


CPU_INSTALL = ["torch==2.13.0+cpu", f"--extra-index-url {CPU_INDEX} torch==2.13.0+cpu", "torch==2.13.0"]


# ---------------------------------------------------------------------- what is found and planned


@pytest.mark.parametrize("arch", ["aarch64", "x86_64"])
@pytest.mark.parametrize("version", PAIRS)
def test_the_plan_for_every_cann(machine: FakeMachine, version: str, arch: str):
    torch, torch_npu, pythons = PAIRS[version]
    home = NEW_HOME if version >= "8.5" else OLD_HOME
    plan = machine.put(NPUS | DRIVER | cann(version, home, arch)).plan(arch=arch, **sourced(home))
    numpy = ["numpy<2"] if version < "9" else []  # the vendor's lists of dependencies
    assert plan == {
        "found": [f"Linux {arch}", "NPU: 2 (/dev/davinci5 ...), driver 25.2.0", f"CANN {version} in {home}"],
        "missing": [],
        "problem": [],
        "kind": ["npu"],
        "pythons": [pythons],
        "install": pip_arguments(version, arch),
        "constraint": [f"torch=={torch}", f"torch_npu=={torch_npu}", *numpy],
        "extra": ["npu"],
    }


GROUPS = {
    "npus": NPUS, "driver": DRIVER, "gpus": GPUS, "unreadable CANN": {f"{NEW_HOME}/lib64/libascendcl.so": ""},
}  # fmt: skip
HOMES = {"old": OLD_HOME, "new": NEW_HOME}
INSTALLS = {"cpu": CPU_INSTALL, **{release: pip_arguments(release) for release in PAIRS}}


def files_of(names: list[str]) -> dict[str, str]:
    files: dict[str, str] = {}
    for name in names:
        what, *rest = name.split()
        files |= cann(rest[0], HOMES[(*rest, "old")[1]]) if what == "cann" else GROUPS[name]
    return files


@pytest.mark.parametrize("case", KNOWN["machines"])
def test_a_machine_has_its_plan(machine: FakeMachine, case: dict[str, Any]):
    variables = sourced(HOMES[case["sourced"]]) if "sourced" in case else {}
    variables |= {"TORCH_INDEX_URL": case["index"]} if "index" in case else {}
    plan = machine.put(files_of(case["files"])).plan(*case.get("flags", []), **variables)
    for key, value in ({"problem": [], "missing": [], "install": []} | case["plan"]).items():
        lines = INSTALLS.get(value) if key == "install" and isinstance(value, str) else None
        if isinstance(value, str) and lines is None:
            assert all(word in "\n".join(plan[key]) for word in value.split()), plan
        else:
            assert plan.get(key, []) == (lines or value), plan


@pytest.mark.parametrize(("home", "file", "text"), KNOWN["cann"]["places"])
def test_where_the_cann_version_is_read(machine: FakeMachine, home: str, file: str, text: str):
    machine.put(NPUS | {f"{home}/{file}": FILES.get(text, text).replace("{}", "9.0.0")})
    assert machine.cann(HOME="/home/me2") == f"CANN 9.0.0 in {home}"


def test_which_of_several_canns_counts(machine: FakeMachine):
    machine.put(NPUS)
    for version in ("8.5.0", "9.0.0", "10.0.0"):
        machine.put(cann(version, f"/usr/local/Ascend/cann-{version}"))
    base = "/usr/local/Ascend/ascend-toolkit"
    for version in ("8.3.RC1", "9.0.0"):
        machine.put(cann(version, f"{base}/{version}"))
    assert machine.cann() == "CANN 10.0.0 in /usr/local/Ascend/cann-10.0.0"  # the newest
    # Below ascend-toolkit `latest` says what is in use: a folder of links, or a link itself.
    machine.link(f"{base}/latest/aarch64-linux", "../8.3.RC1/aarch64-linux")
    assert machine.cann() == f"CANN 8.3.RC1 in {OLD_HOME}"
    shutil.rmtree(machine.root / base[1:] / "latest")
    machine.link(f"{base}/latest", "./9.0.0")
    assert machine.cann() == f"CANN 9.0.0 in {OLD_HOME}"
    machine.link(NEW_HOME, "cann-8.5.0")
    assert machine.cann() == f"CANN 8.5.0 in {NEW_HOME}"
    machine.put(cann("9.1.0", "/opt/cann"))
    assert machine.cann(**sourced("/opt/cann")) == "CANN 9.1.0 in /opt/cann"
    # Left over from a CANN that was removed.
    assert machine.cann(**sourced("/opt/gone")) == f"CANN 8.5.0 in {NEW_HOME}"


# ---------------------------------------------------------------------- what the script does with a plan


ROOMS = ("chat", "families", "hub", "report", "samplers", "serve")
EXTRAS = "chat,dev,families,hub,report,samplers,serve"
LOCKED = "plan VENV/bin/pip install --require-hashes --no-deps --no-build-isolation --only-binary :all: -r "
THIS = f"{sys.version_info[0]}.{sys.version_info[1]}"


def locked(*extras: str) -> list[str]:
    return [f"{LOCKED}locks/{name}.lock" for name in ("core", *extras)]


def checksum_of(*names: str) -> str:
    text = b"".join((ROOT / name).read_bytes() for name in names)
    return subprocess.run(["cksum"], input=text, capture_output=True).stdout.decode().strip()


def test_a_plan_is_carried_out(machine: FakeMachine):
    evil = "toolkit_running_version=[9.0.0\ninstall evil\nkind cpu]\n"  # adds no line to the plan
    machine.put(NPUS | {f"{OLD_HOME}/version.cfg": evil})
    pair = "torch==2.9.0+cpu torch_npu==2.9.0.post2"
    assert machine.steps("--extras=dev", arch="x86_64") == [
        "plan PYTHON -m venv VENV",
        *locked(*ROOMS, "dev"),
        f"plan VENV/bin/pip install {pair}",
        f"or else VENV/bin/pip install --extra-index-url {CPU_INDEX} {pair}",
        f"plan VENV/bin/pip install -c VENV/constraints.txt -e .[{EXTRAS.replace('hub', 'hub,npu')}] "
        "# torch==2.9.0 torch_npu==2.9.0.post2",
    ]
    steps = machine.steps("--cann", "8.5.0", "--rooms=none")
    assert steps[-1] == (
        "plan VENV/bin/pip install -c VENV/constraints.txt -e .[npu] # torch==2.9.0 torch_npu==2.9.0 numpy<2"
    )
    # Some clients need older packages than the rest: the lock that is installed last decides.
    steps = machine.steps("--device=cpu", "--rooms=serve,chat", "--extras=dev,clients,ray,track")
    assert steps[1:7] == locked("chat", "serve", "ray", "dev", "clients")


@pytest.mark.parametrize(
    ("flags", "word", "expected"),
    [
        (["--devise"], "--devise", 2),
        (["--device", "tpu"], "tpu", 2),
        (["--cann"], "--cann", 2),
        (["--rooms", "hub,x"], "--rooms x", 2),
        (["--cann", "8.4.0"], "--cann 8.3.RC1", 1),  # a problem of the plan
    ],
)
def test_bad_flags(machine: FakeMachine, flags: list[str], word: str, expected: int):
    code, lines, error = machine.put(NPUS).setup(*flags)
    assert code == expected and not any(line.startswith("plan") for line in lines)
    assert word in error and error.count("\n") == 0


def test_stubs_of_a_version_manager_are_passed_over(machine: FakeMachine, tmp_path: Path):
    folder = tmp_path / "bin"
    for name in (*(f"python{version}" for version in PYTHONS), "python"):
        put_program(folder / name, "echo not installed >&2\nexit 127")
    (folder / "python3").symlink_to(sys.executable)
    path = f"{folder}:/usr/bin:/bin"
    assert machine.steps(PYTHON="", PATH=path)[0] == "plan python3 -m venv VENV"
    (folder / "python3").unlink()
    (folder / "python3").symlink_to(folder / "python")
    code, _, error = machine.setup(PYTHON="", PATH=path)
    assert code == 1
    assert error.startswith("error: no Python 3.10 to 3.14 that") and error.count("\n") == 0


@pytest.mark.parametrize(("version", "refused"), [("3.12", "8.3.RC1"), ("3.14", "9.1.0")])
def test_a_python_without_wheels_of_torch_npu_is_refused(machine: FakeMachine, tmp_path: Path, version, refused):
    """The version is made up, the rest is this interpreter's."""
    lie = f'if [ "$1" = -c ]; then echo {version}; else exec {sys.executable} "$@"; fi'
    python = str(put_program(tmp_path / "python", lie))
    assert machine.steps("--device=cpu", PYTHON=python)[1] == locked()[0]
    code, _, error = machine.put(NPUS | cann(refused)).setup(PYTHON=python)
    assert code == 1 and "3.11" in error


def test_a_finished_setup_is_left_as_it_is(machine: FakeMachine):
    """The stamp of the same plan, with the same or fewer extras, leaves nothing to do; another stamp does."""
    put_program(machine.venv / "bin/python", f'exec {sys.executable} "$@"')
    first = "plan VENV/bin/pip install torch==2.13.0+cpu"
    checksum = checksum_of("pyproject.toml")
    text = f"project {ROOT}\nkind cpu\npython {THIS}\ntorch torch==2.13.0\nextras {EXTRAS}\npyproject {checksum}\n"
    text += f"locks {checksum_of(*(f'locks/{name}.lock' for name in ('core', *ROOMS, 'dev')))}\n"
    stamp = machine.venv / "nanochat_setup.txt"
    stamp.write_text(text)
    if importlib.metadata.version("torch").startswith("2.13.0"):
        _, lines, _ = machine.setup("--device=cpu", "--rooms=hub,serve", arch="x86_64")
        assert lines[-1].startswith("ready VENV")
    assert machine.steps("--device=cpu", "--unlocked", arch="x86_64")[0] == first
    steps = machine.steps("--device=cpu", "--extras=track", arch="x86_64")
    assert steps[-1].endswith(f"-e .[{EXTRAS},track] # torch==2.13.0")
    stamp.write_text(text.replace(checksum, "0 0"))
    assert machine.steps("--device=cpu", arch="x86_64")[:9] == [*locked(*ROOMS, "dev"), first]
    stamp.write_text(text.replace("kind cpu", "kind cuda"))
    steps = machine.steps("--device=cpu", "--rooms=none", arch="x86_64")
    assert steps[0].startswith("plan rm -r VENV") and steps[1] == "plan PYTHON -m venv VENV"
    assert steps[-1].endswith("-e . # torch==2.13.0")  # the old folder's extras went with it


def test_a_venv_of_another_kind_does_not_make_the_one_that_replaces_it(machine: FakeMachine):
    """Its interpreter goes with it; the one it was made with stays."""
    venv.create(machine.venv, with_pip=False)
    (machine.venv / "nanochat_setup.txt").write_text(f"project x\nkind cpu\npython {THIS}\n")
    removal, making, *_ = machine.put(NPUS | cann("8.5.0")).steps(PYTHON="")
    maker = making.removeprefix("plan ").removesuffix(" -m venv VENV")
    assert removal.startswith("plan rm -r VENV") and Path(maker).is_file() and not maker.startswith("VENV")


# ---------------------------------------------------------------------- locks

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDS = {"core": [*PROJECT["dependencies"], "sympy", "networkx"], **PROJECT["optional-dependencies"]}  # torch's own too
UNLOCKED = {"npu", "track", "modelscope"}  # what an accelerator or an account of the user decides
PLACES = list(itertools.product(PYTHONS, (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"))))


@functools.cache
def requirements(name: str) -> list[Requirement]:
    lines = (ROOT / f"locks/{name}.lock").read_text().splitlines()
    return [Requirement(line.rstrip(" \\")) for line in lines if "==" in line]


def pins(name: str, python: str, machine: tuple[str, str]) -> dict[str, str]:
    """package -> version, on one Python, system and processor."""
    system, processor = machine
    place = {"python_version": python, "python_full_version": f"{python}.4", "sys_platform": system}
    place["platform_machine"] = processor
    found = [one for one in requirements(name) if not one.marker or one.marker.evaluate(place)]
    return {one.name: str(one.specifier)[2:] for one in found}


def test_locks_have_what_the_extras_need_with_hashes_and_agree():
    """Every package but torch, in a version that pyproject.toml allows, on every Python, system and processor; one
    package has one version in all locks, but for the clients, whose lock comes last."""
    names = sorted(path.stem for path in (ROOT / "locks").glob("*.lock"))
    assert set(names) == NEEDS.keys() - UNLOCKED
    for name in names:
        packages = re.split(r"^(?=[a-z0-9])", (ROOT / f"locks/{name}.lock").read_text(), flags=re.MULTILINE)[1:]
        assert packages and all("--hash=sha256:" in package for package in packages)
        assert not [one.name for one in requirements(name) if re.match("(torch$|triton$|nvidia|cuda)", one.name)]
    for python, machine in PLACES:
        agreed: dict[str, str] = {}
        for name in names:
            chosen = pins(name, python, machine)
            for package, version in chosen.items() if name != "clients" else ():
                assert agreed.setdefault(package, version) == version, f"{package} in {name}.lock"
            chosen = pins("core", python, machine) | chosen
            for need in map(Requirement, NEEDS[name]):
                here = not need.marker or need.marker.evaluate({"python_version": python, "sys_platform": machine[0]})
                if here and need.name != "torch":
                    assert need.specifier.contains(chosen[need.name.replace("_", "-")]), f"{need} on Python {python}"
    assert [f"Programming Language :: Python :: {version}" for version in PYTHONS] == PROJECT["classifiers"]
    assert set(extras.EXTRAS) <= NEEDS.keys() and set(ROOMS) <= set(extras.EXTRAS)
