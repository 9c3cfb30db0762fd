"""A schema becomes llguidance's matcher, first in this child process, which has limits, then in the server.

llguidance counts some of its work and not all of it: `{"type": "integer", "multipleOf": 429496729}` builds a lexer of
as many states at 20 MB a second. No list of keywords is complete, so the kernel sets the limits. The work does not
depend on the vocabulary; the child's tokens are the 256 bytes.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import llguidance

CPU_SECONDS = 0.1  # of the schema; the start of the process takes as long
MEMORY_BYTES = 512 << 20  # address space, including 30 MB of the interpreter
WALL_SECONDS = 30.0  # on a machine that is very busy


def make_matcher(tokenizer: Any, text: str, options: Any) -> Any:
    """Raises ValueError: with llguidance's complaint about the schema."""
    limits = llguidance.LLParserLimits(
        initial_lexer_fuel=200_000, step_lexer_fuel=100_000, step_max_items=20_000, max_lexer_states=50_000,
        max_grammar_size=50_000, verbose_errors=False,
    )  # fmt: skip
    source = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=options)
    return llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)


def try_out(text: str, options: str) -> None:
    """Make a matcher in a child process. `options` are JSON. Raises SubprocessError: when it takes more than the
    limits."""
    package_folder = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package_folder, os.environ.get("PYTHONPATH")]))
    subprocess.run(
        [sys.executable, "-m", "nanochat.serve.grammar_trial", options], input=text.encode(), check=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=WALL_SECONDS, start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def main() -> None:
    # Either limit ends the process, also in the middle of llguidance's own code.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        make_matcher(llguidance.LLTokenizer("byte"), sys.stdin.read(), json.loads(sys.argv[1])).compute_bitmask()
    except ValueError:  # the parent meets it again, and explains it
        return


if __name__ == "__main__":
    main()
