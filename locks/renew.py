"""Renew the locks: the versions, with their sha256, of what the core and each extra of pyproject.toml install.

    pip install uv
    python locks/renew.py              # after a change of the dependencies: other versions stay as they are
    python locks/renew.py --upgrade    # the newest versions; run the tests in a fresh .venv afterwards

core.lock has the eight packages of the core and what they need, but for torch, which setup_ascend.sh chooses. Any other
lock has what its extra adds to the core. One package has one version in all of them. The extra `clients` is an
exception: some clients insist on older packages, so setup_ascend.sh installs its lock last.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PROJECT = FOLDER.parent / "pyproject.toml"
EXTRAS = ["chat", "families", "hub", "report", "samplers", "serve", "ray", "service", "dev"]
# The package index has these only as source. lm-eval needs them; setuptools, which builds them, is in core.lock.
SOURCES = {"rouge-score", "sqlitedict", "word2number"}


def resolve(extras: list[str], versions: str, *flags: str) -> str:
    """A lock of the core and some extras. The versions of another lock, `versions`, are preferred."""
    with tempfile.TemporaryDirectory() as temporary:
        lock = Path(temporary) / "lock"
        lock.write_text(versions)
        words = [word for extra in extras for word in ("--extra", extra)]
        command = ["uv", "pip", "compile", str(PROJECT), "--quiet", "--output-file", str(lock)]
        subprocess.run([*command, *words, *flags], check=True, cwd=FOLDER.parent)
        return lock.read_text()


def packages(lock: str) -> list[str]:
    """The packages of a lock, each with the lines of its hashes."""
    parts = re.split(r"^(?=[a-z0-9])", lock, flags=re.MULTILINE)
    return [part for part in parts if "==" in part.partition("\n")[0]]


def read(name: str) -> str:
    """The packages of a lock of ours; the first lock of a new extra begins with none."""
    path = FOLDER / f"{name}.lock"
    return "".join(packages(path.read_text())) if path.exists() else ""


def write(name: str, lock: list[str]) -> None:
    sources = sorted(SOURCES & {package.partition("==")[0] for package in lock})
    head = "# Written by `python locks/renew.py`.\n" + (f"--no-binary {','.join(sources)}\n" if sources else "")
    (FOLDER / f"{name}.lock").write_text(head + "".join(lock))
    print(f"{name:9} {len(lock)} packages")


def main(flags: list[str]) -> None:
    # One set of versions that fits all extras, which each lock then takes its packages from.
    everything = resolve(EXTRAS, "".join(read(name) for name in ["core", *EXTRAS]), *flags)
    core = packages(resolve([], everything))
    write("core", core)
    for extra in EXTRAS:
        write(extra, [package for package in packages(resolve([extra], everything)) if package not in core])
    with_clients = resolve([*EXTRAS, "clients"], read("clients") + everything, *flags)
    write("clients", [package for package in packages(resolve(["clients"], with_clients)) if package not in core])


if __name__ == "__main__":
    main(sys.argv[1:])
