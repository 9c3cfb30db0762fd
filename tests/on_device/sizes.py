"""How much the tests of this folder compute, on which device, and how long it takes."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from nanochat import device as devices
from nanochat.device import Device
from nanochat.ground.cli import UserError

REPEATS = 7


@dataclass(frozen=True)
class Sizes:
    depth: int
    rows: int
    tokens: int  # in a row
    vocab_size: int
    matrix: tuple[int, int]  # outputs and inputs of a matrix in 4 bits
    documents: tuple[int, int, int]  # in all rows together
    steps: int  # training steps
    judges_speed: bool  # at small sizes the host's launches take the time


# The matrix is one of a 7B model. The vendor's page names two limits of documents in a call, 1,024 and 2,048.
CARD = Sizes(12, 16, 2048, 32768, matrix=(4096, 11008), documents=(256, 1024, 2048), steps=5, judges_speed=True)
SMALL = Sizes(2, 2, 256, 2048, matrix=(512, 1376), documents=(16, 64, 128), steps=2, judges_speed=False)


def init(kind: str, dtype: str) -> Device:
    """The device, with matrix products in `dtype`; the test is skipped if the device has no bf16."""
    plain = devices.init(kind, "float32")  # a device that cannot start fails here
    if dtype == "float32":
        return plain
    try:
        return devices.init(kind, dtype)
    except UserError as error:
        pytest.skip(str(error))


def draw(*shape: int) -> Tensor:
    """Random numbers on the host, the same for every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def relative_error(result: Tensor, expected: Tensor) -> float:
    """The norm of the difference, as a share of the expected norm."""
    result = result.detach().float().cpu()
    expected = expected.detach().float().cpu()
    return float((result - expected).norm() / expected.norm())


def median_ms(device: Device, work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(1 if device.kind == "cpu" else REPEATS):
        device.synchronize()
        began = time.perf_counter()
        work()
        device.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e3
