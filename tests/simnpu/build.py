"""Builds the simulated CANN and says which environment a simulated process needs.

The real torch_npu wheel is taken from the package index (or from `SIMNPU_WHEEL`, a wheel or a folder with wheels),
unpacked, and given C libraries of our own in place of CANN's: `cann.c` is libascendcl, `hccl.c` is libhccl, and what
the wheel links beside those becomes a stub that says its name and fails. Everything lies in a cache folder
(`SIMNPU_CACHE`, default ~/.cache/nanochat_simnpu) under names made of contents and versions; two processes may build
at once. `environment()` is all that the others need.
"""

import compileall
import ctypes
import fcntl
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
# torch_npu links the first four and loads the others itself (and libhcomm). What it looks for in them stands in
# libascendcl (in libhccl).
EMPTY = (
    *("libacl_op_compiler.so", "libge_runner.so", "libgraph.so", "libacl_tdt_channel.so"),
    *("libopapi.so", "libmsprofiler.so", "libmspti.so", "libascend_hal.so"),
)
HEADERS = "2.13.0"  # the C sources are written against this wheel's headers; older ones lack some of their names
DEFAULT_MEMORY = "64GiB"
DEFAULT_SOC = "Ascend910B3"
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class Unavailable(Exception):
    """The simulator cannot be had here; the text says why."""


def environment(
    *, devices: int = 1, memory: str = DEFAULT_MEMORY, soc: str = DEFAULT_SOC, hccl_fail: str | None = None,
    hccl_hang: str | None = None, adapters: str | None = None,
) -> dict[str, str]:  # fmt: skip
    """Environment variables to set for a simulated process; builds what is not built yet.

    `memory` is bytes a device, with KiB, MiB or GiB. The faults are OPERATION:N@RANK. With `adapters`, a file to append
    to, the wheel's own adapters run over operators that log their arguments there and compute nothing: see adapters.py.
    Raises Unavailable: when the wheel or a compiler cannot be had."""
    if not 1 <= devices <= 64:
        raise ValueError(f"{devices} devices: from 1 to 64")
    if not 0 < parse_size(memory) < 1 << 50:
        raise ValueError(f"{memory} of memory: more than nothing, less than a PiB")
    for fault in filter(None, f"{hccl_fail or ''},{hccl_hang or ''}".split(",")):
        match = re.fullmatch(r"(\w+):(\d+)(?:@(\d+))?", fault)
        if not match or match[1] not in _collectives() or int(match[2]) < 1 or int(match[3] or 0) >= devices:
            raise ValueError(
                f"{fault!r}: such as all_reduce:3@1, the third on rank 1 of {devices}; "
                f"kinds: {', '.join(_collectives())}"
            )
    wheel, libraries = build()
    home = libraries / "home"
    # As `device.init` sets it: a wheel before 2.13 records nothing at the second level.
    queue = "2" if tuple(map(int, _version().split(".")[:2])) >= (2, 13) else "1"
    variables = {
        "SIMNPU_DEVICES": str(devices),
        "SIMNPU_MEMORY": str(parse_size(memory)),
        "SIMNPU_SOC": soc,
        "SIMNPU_LIBRARY": str(libraries / "libascendcl.so"),
        "ASCEND_HOME_PATH": str(home),
        "ASCEND_TOOLKIT_HOME": str(home),
        "ASCEND_OPP_PATH": str(home / "opp"),
        "LD_LIBRARY_PATH": _prepend("LD_LIBRARY_PATH", *([libraries / "adapters"] if adapters else []), libraries),
        "PYTHONPATH": _prepend("PYTHONPATH", HERE / "site", wheel),
        # The user's, else as `device.init` sets it. Several devices have none: a queued collective would run after the
        # kernels that follow it, which compute at once here.
        "TASK_QUEUE_ENABLE": os.environ.get("TASK_QUEUE_ENABLE", queue) if adapters or devices == 1 else "0",
        "CPU_AFFINITY_CONF": "0",  # nothing here to bind threads to
        "TORCH_DEVICE_BACKEND_AUTOLOAD": os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1"),
        "TORCH_NPU_FALLBACK_CPU_DISABLE": "1",  # what has no NPU kernel is an error
    }
    optional = {
        "SIMNPU_HCCL_FAIL": hccl_fail,
        "SIMNPU_HCCL_HANG": hccl_hang,
        "SIMNPU_ADAPTERS": adapters and str(Path(adapters).resolve()),
    }
    return variables | {name: value for name, value in optional.items() if value is not None}


def _collectives() -> list[str]:
    """The kinds that hccl.c counts, by their names there."""
    text = (HERE / "hccl.c").read_text()
    table = text[text.index("KIND[KINDS] = {") :]
    return re.findall(r'\] = "(\w+)"', table[: table.index("};")])


def parse_size(text: str) -> int:
    """Bytes: "2GiB" is 2147483648."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|KiB|MiB|GiB)", text)
    if not match:
        raise ValueError(f"{text!r} is not a size such as 512MiB or 2GiB")
    return int(float(match[1]) * UNITS[match[2]])


def cache() -> Path:
    return Path(os.environ.get("SIMNPU_CACHE", "~/.cache/nanochat_simnpu")).expanduser()


def build() -> tuple[Path, Path]:
    """The folder of the unpacked wheel and the folder of the libraries."""
    if sys.platform != "linux":
        raise Unavailable(f"torch_npu has wheels for Linux alone, this is {sys.platform}")
    if not shutil.which("gcc") or not shutil.which("nm"):
        raise Unavailable("gcc and nm (binutils) are needed to build the simulated CANN")
    cache().mkdir(parents=True, exist_ok=True)
    wheel = _wheel(_version())
    return wheel, _libraries(wheel, _wheel(HEADERS))


def _prepend(name: str, *folders: Path) -> str:
    added = [str(folder) for folder in folders]
    before = [folder for folder in os.environ.get(name, "").split(os.pathsep) if folder and folder not in added]
    return os.pathsep.join(added + before)


def _version() -> str:
    """The torch of this environment, and so the torch_npu: 2.13.0."""
    return importlib.metadata.version("torch").partition("+")[0]


@contextmanager
def _lock() -> Iterator[None]:
    with (cache() / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def download(version: str, folder: Path, *options: str) -> Path:
    """The wheel of torch_npu with the number of its torch; a .postN is for another CANN, which plays no part here.

    Raises Unavailable: when pip finds none."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", f"--dest={folder}"]
    command += ["--disable-pip-version-check", f"torch_npu=={version}", *options]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    found = list(folder.glob("*.whl"))
    if done.returncode or not found:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line] or [done.stderr[-300:]]
        place = f"cp{sys.version_info.major}{sys.version_info.minor} on {platform.machine()}"
        raise Unavailable(f"no torch_npu {version} wheel for {place}: {errors[-1].strip()}")
    return found[0]


def _wheel(version: str) -> Path:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    folder = cache() / f"torch_npu-{version}-{python}-{platform.machine()}"
    if folder.is_dir():
        return folder
    with _lock(), tempfile.TemporaryDirectory(dir=cache()) as temporary:
        if folder.is_dir():  # another process was faster
            return folder
        local = os.environ.get("SIMNPU_WHEEL")
        if local and Path(local).is_file():
            archive = Path(local)
        else:
            archive = download(version, Path(temporary), *(["--no-index", "--find-links", local] if local else []))
        if not zipfile.is_zipfile(archive) or not archive.name.startswith(f"torch_npu-{version}"):
            raise Unavailable(f"{archive} is not a wheel of torch_npu {version}")
        unpacked = Path(temporary) / "unpacked"
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(unpacked)
        compileall.compile_dir(unpacked, quiet=2)  # each simulated process starts sooner
        unpacked.rename(folder)
    return folder


def _libraries(wheel: Path, headers: Path) -> Path:
    sources = [HERE / name for name in ("cann.c", "hccl.c", "opapi.c", "objects.h")]
    digest = hashlib.sha256(wheel.name.encode() + Path(__file__).read_bytes())
    for source in sources:
        digest.update(source.read_bytes())
    folder = cache() / f"cann-{digest.hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    with _lock(), tempfile.TemporaryDirectory(dir=cache()) as temporary:
        if folder.is_dir():
            return folder
        made = Path(temporary) / "made"
        for sub in ("runtime", "compiler", "opp"):
            (made / "home" / sub).mkdir(parents=True)
        empty = made / "empty.c"
        empty.touch()
        _compile(headers, sources[0], made / "libascendcl.so")
        _compile(headers, sources[1], made / "libhccl.so", "-lrt")
        (made / "libhcomm.so").symlink_to("libhccl.so")  # torch_npu looks HcclGroupStart up there
        stubs = made / "stubs.c"
        stubs.write_text(_stubs(wheel, made))
        runtime = (f"-L{made}", "-Wl,--no-as-needed", "-lascendcl")
        _compile(headers, empty, made / "libhcomm.so", f"-L{made}", "-Wl,--no-as-needed", "-lhccl")
        for name in EMPTY:
            _compile(headers, stubs if name == "libge_runner.so" else empty, made / name, *runtime)
        (made / "adapters").mkdir()
        (made / "adapters/operators.h").write_text(_operators(wheel))
        _compile(headers, sources[2], made / "adapters/libopapi.so", f"-I{made / 'adapters'}", *runtime)
        made.rename(folder)
    return folder


def _compile(headers: Path, source: Path, target: Path, *options: str) -> None:
    include = headers / "torch_npu/include/third_party"
    command = ["gcc", "-O2", "-g", "-Wall", "-Wextra", "-shared", "-fPIC", f"-I{include}/acl/inc"]
    command += [f"-I{include}/hccl/inc", str(source), "-o", str(target), f"-Wl,-soname,{target.name}", "-pthread"]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    if done.returncode:
        hello = subprocess.run(
            ["gcc", "-xc", "-", "-shared", "-fPIC", "-o", str(target)], input="#include <stdio.h>\n", text=True,
            capture_output=True,
        )  # fmt: skip
        if hello.returncode:
            raise Unavailable(f"gcc compiles nothing here, not even stdio.h: {hello.stderr.strip()[-300:]}")
        raise RuntimeError(f"{source.name} does not compile:\n{done.stderr}")


def _stubs(wheel: Path, made: Path) -> str:
    """C source of a function for each symbol that torch_npu links and nobody here has."""
    import torch

    users = [wheel / "torch_npu/lib" / name for name in ("libtorch_npu.so", "libtensorpipe.so", "libnpu_profiler.so")]
    users += wheel.glob("torch_npu/_C*.so")
    providers = [*users, *(Path(torch.__file__).parent / "lib").glob("lib*.so"), *made.glob("lib*.so")]
    # weak symbols need nobody; versioned ones (name@GLIBC_2.2.5) and those of this process are the C library's
    wanted = {name for path in users for kind, name in _symbols(path, "--undefined-only") if kind == "U"}
    have = {name for path in providers for _, name in _symbols(path, "--defined-only")}
    process = ctypes.CDLL(None)
    missing = sorted(name for name in wanted - have if "@" not in name and not hasattr(process, name))
    lines = ["int simnpu_missing(const char *name);"]
    lines += [f'long {name}(void) {{ return simnpu_missing("{name}"); }}' for name in missing]
    return "\n".join(lines) + "\n"


def _operators(wheel: Path) -> str:
    """A line for each operator of CANN that the wheel looks up: aclnnX, with or without GetWorkspaceSize."""
    text = b"".join(path.read_bytes() for path in (wheel / "torch_npu/lib").glob("lib*.so"))
    names = {name.decode().removesuffix("GetWorkspaceSize") for name in re.findall(rb"\0(aclnn[A-Z]\w+)(?=\0)", text)}
    return "".join(f"OPERATOR({name})\n" for name in sorted(names))


def _symbols(path: Path, which: str) -> list[tuple[str, str]]:
    lines = subprocess.run(["nm", "-D", which, str(path)], capture_output=True, text=True, check=True).stdout
    return [(fields[-2], fields[-1]) for fields in map(str.split, lines.splitlines()) if len(fields) >= 2]
