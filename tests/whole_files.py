"""Whole files to workers, as pytest-xdist's `--dist loadfile`. When a worker dies, others run what it has left.

xdist 3.8's own scheduler gives the finished files of a dead worker to a new one, which then waits for their end for
ever. It also hangs when a new worker gets a single test.

tests/seconds.json has the seconds of each file that takes over two. After a quiet run
`bash tests/run.sh --junitxml=junit.xml` this command writes it: `python tests/whole_files.py junit.xml`
"""

import contextlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

SECONDS = Path(__file__).with_name("seconds.json")
SLOW_TEST = 2.0  # seconds; counts for each slow test of a file that was not measured


def longest_first(items: list[pytest.Item]) -> None:
    """Sort the files of tests. Two workers that take file after file then end at about the same time."""
    measured = json.loads(SECONDS.read_text())
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))

    def seconds(item: pytest.Item) -> float:
        return measured.get(item.nodeid.partition("::")[0], SLOW_TEST * slow[item.path])

    items.sort(key=seconds, reverse=True)


def write_seconds(junit: Path) -> None:
    """Sum the times of the tests by file, setup and teardown included."""
    sums: Counter[str] = Counter()
    for test in ElementTree.parse(junit).iter("testcase"):
        sums[test.attrib["classname"].replace(".", "/") + ".py"] += float(test.attrib["time"])
    files = {file: round(seconds) for file, seconds in sums.most_common() if seconds > 2}
    SECONDS.write_text(json.dumps(files, indent=1) + "\n")


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist nothing calls it
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def remove_node(self, node: Any) -> str | None:
            units = self.assigned_work.pop(node).items()
            left = [(file, test) for file, tests in units for test, has_ended in tests.items() if not has_ended]
            if not left:
                return None
            for file, test in left[1:]:
                self.workqueue.setdefault(file, {})[test] = False
            for other in self.nodes:
                self._reschedule(other)
            return left[0][1]  # the test that the worker died of

        def _assign_work_unit(self, node: Any) -> None:
            with contextlib.suppress(OSError):  # the worker has just died: `remove_node` passes its file on
                super()._assign_work_unit(node)

        def _reschedule(self, node: Any) -> None:
            super()._reschedule(node)
            # A worker holds its last test back until it knows the next one, or that there is none.
            if not node.shutting_down and self._pending_of(self.assigned_work[node]) == 1:
                super()._reschedule(node)

    return Files(config, log)


if __name__ == "__main__":
    write_seconds(Path(sys.argv[1]))
