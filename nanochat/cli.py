"""A dataclass in, a command line out; and one clear line for a user's mistake.

Every script ends with `run(main, Config)`. The dataclass's fields are the flags, the comment
behind a field is its help. Exit codes: 0 done, 1 the run failed (one line says what to do next),
2 bad flags. `NANOCHAT_TRACEBACK=1` shows the whole traceback of a failure.
"""

import errno
import os
import sys
from collections.abc import Callable
from typing import TypeVar

Config = TypeVar("Config")


class UserError(ValueError):
    """A mistake the user can mend; its text names the flag and the next step."""


def parse(config_type: type[Config], argv: list[str] | None = None) -> Config:
    """Read flags into the dataclass. Hyphens and underscores are alike; a `--` that torchrun
    hands on is skipped."""
    import tyro

    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--"]:
        argv = argv[1:]
    module = sys.modules[config_type.__module__]
    return tyro.cli(config_type, args=argv, description=module.__doc__, use_underscores=True)


def run(main: Callable[[Config], None], config_type: type[Config]) -> None:
    """Parse, run, and turn what a user can mend into one line on stderr and exit code 1."""
    config = parse(config_type)
    if os.environ.get("NANOCHAT_TRACEBACK") == "1":
        main(config)
        return
    try:
        main(config)
    except KeyboardInterrupt:
        fail("interrupted", code=130)
    except BrokenPipeError:  # the reader of a pipe left: not an error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except UserError as error:
        fail(str(error))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            where = error.filename or "no file named"
            fail(f"the disk is full ({where}): free space or point NANOCHAT_BASE_DIR elsewhere")
        raise
    except RuntimeError as error:  # every backend's out-of-memory error is a RuntimeError
        if "out of memory" in str(error).lower() or "not enough memory" in str(error).lower():
            first_line = str(error).splitlines()[0]
            fail(f"out of memory: lower --device_batch_size, --max_seq_len or --depth ({first_line})")
        raise


def fail(message: str, code: int = 1) -> None:
    """Print one line and leave."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    sys.exit(code)
