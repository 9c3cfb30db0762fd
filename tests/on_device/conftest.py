"""The device that the tests of this folder compare with the CPU, and a line of JSON for each test.

`check_npu.py --full` sets three variables: ON_DEVICE (npu, cuda or cpu; otherwise the accelerator that is here, or the
CPU), ON_DEVICE_SIZES=card for sizes of a depth-12 model, and ON_DEVICE_LINES, the file to which the lines go.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat import device as devices
from nanochat.device import Device
from on_device.sizes import CARD, SMALL, Sizes, init

TAIL = 3000  # characters of a traceback
OUTCOMES = {"passed": "PASS", "failed": "FAIL", "skipped": "SKIP"}


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """The suite leaves these tests to promises/test_p10_an_owners_ten_minutes.py, which makes the report of a CPU."""
    return None if any("on_device" in argument for argument in config.args) else True


@pytest.fixture(scope="session")
def kind() -> str:
    return devices.kind_of(os.environ.get("ON_DEVICE", "auto"))


@pytest.fixture(scope="session")
def sizes() -> Sizes:
    return CARD if os.environ.get("ON_DEVICE_SIZES") == "card" else SMALL


@pytest.fixture
def trains(kind: str) -> Device:
    """The device, with the dtype that it trains in."""
    device = init(kind, "auto")
    if not device.can_train:
        pytest.skip(f"{device.name} is made for inference")
    return device


@pytest.fixture(autouse=True)
def one_thread_and_seed(kind: str) -> None:
    """As in all tests, but the CPU that computes what a card must give may use all of its cores."""
    torch.manual_seed(0)
    if kind == "cpu":
        torch.set_num_threads(1)


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Adds numbers to the test's line: `measured(token_ms=3.1)`."""

    def add(**numbers: float | str) -> None:
        for name, number in numbers.items():
            record_property(name, number)

    return add


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    report: pytest.TestReport = outcome.get_result()
    file = os.environ.get("ON_DEVICE_LINES")
    if not file or (report.when != "call" and report.passed):
        return
    numbers: dict[str, Any] = dict(report.user_properties)
    table = numbers.pop("table", "")
    details = [f"{name} {value:.4g}" for name, value in numbers.items()]
    traceback = ""
    if report.skipped and isinstance(report.longrepr, tuple):
        details = [report.longrepr[2].removeprefix("Skipped: ")]
    elif report.failed:
        crash: Any = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash else str(report.longrepr)
        details.insert(0, message.splitlines()[0][:300])
        traceback = report.longreprtext[-TAIL:]
    function: Any = item.obj  # type: ignore[attr-defined]
    line = {
        "name": item.name.removeprefix("test_"),
        "outcome": OUTCOMES[report.outcome],
        "detail": "; ".join(details),
        "what": (function.__doc__ or "").partition("\n")[0],
        "numbers": numbers,
        "seconds": round(call.duration, 2),
        "table": table,
        "traceback": traceback,
    }
    with Path(file).open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(line) + "\n")
