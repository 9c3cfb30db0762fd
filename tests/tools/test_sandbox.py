"""nanochat.tools.sandbox: what programs and their checks can do and exchange. S9 has what they cannot do."""

import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_s09_code_stays_in_its_jail import CHECKS, HAS_A_JAIL, SQUARE, descendants

from nanochat.tools import jail, sandbox
from nanochat.tools.sandbox import run_checks

pytestmark = pytest.mark.skipif(not HAS_A_JAIL, reason="the jail refuses to run here")


def test_output():
    run = run_checks("import sys\nprint('é', 1 + 1)\nprint('err', file=sys.stderr)\n" + SQUARE, CHECKS)
    assert (run.ok, run.error) == (True, "")
    assert run.output == "é 2\nerr\n"
    run = run_checks("import os\nprint('\\ud800', end='')\n" + SQUARE, CHECKS)
    assert run.ok and run.output == "\\ud800"
    assert run_checks("import os\nos.write(2, b'a\\xffb')", "f()").output == "a?b"


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("def f(x):\n    return 1 / 0\nf(0)", "ZeroDivisionError: division by zero (line 2)"),
        ("def f(:", "SyntaxError"),
        ("class Odd(Exception):\n    def __str__(self): raise self\nraise Odd", "Odd (line 3)"),
        ("import numpy", "ModuleNotFoundError"),
        ("'\ud800'", "Error"),
    ],
)
def test_a_program_that_fails_at_its_start(program: str, error: str):
    run = run_checks(program, CHECKS)
    assert not run.ok and error in run.error and "\n" not in run.error


def test_what_can_be_imported():
    code = """
import hashlib, random, datetime, time
print(hashlib.md5(b"a").hexdigest(), datetime.datetime.strptime("2024-02-03", "%Y-%m-%d").day)
assert time.time() > 1e9 and random.Random().random() < 1 and len(random.sample(range(9), 3)) == 3
"""
    run = run_checks(f"import {', '.join(jail.MODULES)}\n{code}{SQUARE}", CHECKS)
    assert run.ok and run.output == "0cc175b9c0f1b6a831c399e269772661 3\n", run


def test_each_run_is_fresh(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CANARY", "canary")
    code = "import os, random, sys\nprint(random.random(), os.environ, sys.argv, sys.path, sys.stdin.read())"
    outputs = {run_checks(code, "f()").output for _ in range(2)}
    assert len(outputs) == 2
    assert all(output.endswith(" environ({}) [''] [] \n") for output in outputs)


def test_right_programs_pass():
    run = run_checks(SQUARE, CHECKS)
    assert (run.ok, run.error, run.output) == (True, "", "")
    assert run_checks("f = lambda x, *, n=2: x ** n", "assert f(3) == 9 and f(2, n=3) == 8").ok
    assert run_checks(SQUARE + "\nif __name__ == '__main__': print(input())", CHECKS).ok
    assert run_checks(SQUARE, "\nassert f(2) == 5, 'not five'").error == "AssertionError: not five (line 2)"


VALUES = (
    *("None", "True", "0", "-7", "10**5000", "-(2**2000)", "1.5", "-0.0", "float('inf')", "1e-300"),
    *("''", "'é\\n\"\\ud800'", "b'\\x00\\xff'"),
    *("[]", "[1, [2, (3, {4: {5, 6}})]]", "()", "(1,)", "{}", "{'a': [1], (1, 2): None, 3: {}}"),
    *("set()", "{1, 'a'}", "frozenset({1})", "[{'tuple': [1]}]", "{'dict': 1}"),
)


def test_values_travel_unchanged():
    checks = "def check(value):\n    assert same(value) == value and type(same(value)) is type(value), value\n"
    checks += "    assert repr(same(value)) == repr(value) or isinstance(value, set), value\n"
    checks += "\n".join(f"check({value})" for value in VALUES)
    assert run_checks("def same(x): return x", checks).error == ""


def test_what_travels_otherwise():
    program = """
import collections
class Mine(ValueError): pass
def fails(): raise Mine("no good")
def counts(): return collections.Counter("aab")
def gives_class(): return Mine
def takes(x): return type(x).__name__
def changes(x):
    x.append(1)
    return x
Point = collections.namedtuple("Point", "x y")
"""
    checks = """
def raised(function, kind):
    try:
        function()
    except kind as error:
        return str(error)
assert raised(fails, RuntimeError) == "Mine: no good"
assert counts() == {"a": 2, "b": 1}
assert "type" in raised(gives_class, RuntimeError)
assert "function" in raised(lambda: takes(raised), TypeError)
assert "Error" in raised(missing, RuntimeError)
assert takes(True) == "bool" and takes((1,)) == "tuple"
mine = [0]
assert changes(mine) == [0, 1] and mine == [0]
assert Point(1, y=2) == (1, 2)
"""
    assert run_checks(program, checks).error == ""


@pytest.mark.parametrize("role", ["program", "checks"])
def test_a_jail_killed_at_its_start_costs_one_run(monkeypatch: pytest.MonkeyPatch, role: str):
    """As the kernel kills it when memory is short; a machine that cannot isolate is another matter."""
    start, receive = sandbox._Jail.__init__, sandbox._Jail.receive

    def start_and_die(self, its_role, *arguments):
        start(self, its_role, *arguments)
        if its_role == role:
            self.process.kill()
            self.process.wait()

    def received(self, seconds):  # what it may have reported before the kill is lost with it
        return b"" if self.process.poll() else receive(self, seconds)

    with monkeypatch.context() as patch:
        patch.setattr(sandbox._Jail, "__init__", start_and_die)
        patch.setattr(sandbox._Jail, "receive", received)
        run = run_checks(SQUARE, CHECKS)
    assert not run.ok and "killed at its start" in run.error
    assert run_checks(SQUARE, CHECKS).ok


@pytest.mark.slow
def test_the_kernel_takes_a_jail_before_its_parent():
    code = "import time\ntime.sleep(30)"
    with ThreadPoolExecutor(1) as pool:
        mine = Path("/proc/self/oom_score_adj").read_text()
        running = pool.submit(run_checks, code, CHECKS, timeout_seconds=1)
        seen: set[str] = set()
        while not running.done():
            for pid in descendants(os.getpid()):
                with contextlib.suppress(OSError):
                    seen.add(Path(f"/proc/{pid}/oom_score_adj").read_text().strip())
            time.sleep(0.02)
    assert "1000" in seen and Path("/proc/self/oom_score_adj").read_text() == mine


def test_bad_limits_are_refused():
    for seconds in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="timeout_seconds"):
            run_checks("1", "1", timeout_seconds=seconds)
