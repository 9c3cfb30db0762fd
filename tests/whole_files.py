"""Whole files to workers, as pytest-xdist's `--dist loadfile`. When a worker dies, others run what it has left.

xdist 3.8's own scheduler gives the finished files of a dead worker to a new one, which then waits for their end for
ever. It also hangs when a new worker gets a single test.
"""

import contextlib
from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist nobody calls it
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
