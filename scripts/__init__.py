"""One flat file a command: `python -m scripts.NAME --help`."""

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

# Elsewhere than in its environment a script would end with a traceback about the first package that is missing.
if sys.version_info < (3, 10) or find_spec("torch") is None or find_spec("tyro") is None:
    activate = Path(__file__).resolve().parent.parent / ".venv" / "bin" / "activate"
    makes_it = "" if activate.exists() else "`bash setup_ascend.sh`, then "
    sys.exit(
        f"error: {sys.executable} does not have the packages of this project: run {makes_it}"
        f"`source {shlex.quote(str(activate))}` in this shell"
    )
