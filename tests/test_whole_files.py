"""whole_files.py: the order of the files, and a worker that dies."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import whole_files
from runs import ROOT


def test_files_come_by_their_measured_seconds_and_unmeasured_ones_by_their_slow_tests(tmp_path, monkeypatch):
    monkeypatch.setattr(whole_files, "SECONDS", tmp_path / "seconds.json")
    junit = tmp_path / "junit.xml"
    times = {"tests.core.test_a": [1.5, 1.6], "tests.test_b": [9], "tests.test_c": [1.9]}
    cases = [f'<testcase classname="{name}" time="{time}"/>' for name, all_ in times.items() for time in all_]
    junit.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    whole_files.write_seconds(junit)
    assert (tmp_path / "seconds.json").read_text() == '{\n "tests/test_b.py": 9,\n "tests/core/test_a.py": 3\n}\n'

    def item(file: str, slow: bool = False):
        return SimpleNamespace(nodeid=f"{file}::test", path=Path(file), get_closest_marker=lambda name: slow or None)

    new = [item("tests/test_new.py", slow=True) for _ in range(3)]
    items = [item("tests/test_c.py"), item("tests/core/test_a.py"), *new, item("tests/test_b.py")]
    whole_files.longest_first(items)
    assert [one.path.stem for one in items] == ["test_b", *["test_new"] * 3, "test_a", "test_c"]


def test_a_worker_that_dies_costs_one_test_and_the_rest_runs(tmp_path):
    """Its other tests run elsewhere, and nothing waits: xdist's own scheduler hands out files that have ended."""
    body = "import os, pytest\n@pytest.mark.parametrize('i', range(4))\ndef test_one(i):\n    "
    for name, line in {"a": "pass", "b": "i != 2 or os._exit(1)", "c": "pass", "d": "pass"}.items():
        (tmp_path / f"test_{name}.py").write_text(body + line)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "xdist.plugin", "-p", "whole_files", "-p", "no:cacheprovider"]
    command += ["-n2", "--dist=loadfile", "--no-loadscope-reorder"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert "1 failed, 15 passed" in result.stdout, result.stdout + result.stderr
    assert "crashed while running 'test_b.py::test_one[2]'" in result.stdout
