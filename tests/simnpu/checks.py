"""What a simulated NPU must do, computed inside one for test_simulator.py: a check raises an error, or does not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

npu: Any = getattr(torch, "npu", None)  # torch_npu adds it


def what_hardware_cannot_do_is_refused() -> None:
    half = torch.rand(2, 4).to("npu").bfloat16()
    one = torch.ones(3, device="npu:0")
    for call, word in (
        (lambda: torch.multinomial(half, 1), "multinomial"),
        (lambda: half.logsumexp(1), "logsumexp"),
        (lambda: torch.zeros(2, dtype=torch.float64, device="npu"), "zeros"),
        (lambda: torch.tensor([1.0], dtype=torch.float64).to("npu") + 1, "DT_DOUBLE"),
        (lambda: torch.special.bessel_j0(one), "special_bessel_j0"),
        (lambda: one.add(torch.ones(3)), "same device"),
        (lambda: one.mul(torch.ones(3, device="npu:1")), "npu:0 and npu:1"),
    ):
        with pytest.raises(RuntimeError, match=word):
            call()
    kept = torch.tensor([1.5], dtype=torch.float64).to("npu")  # storing and fetching needs no kernel
    assert kept.dtype == torch.float64 and kept.cpu().item() == 1.5
    assert (one * torch.tensor(2.0)).tolist() == [2.0] * 3 and torch.empty(1 << 22, device="npu").isnan().all()


def a_copy_arrives_when_waited_for() -> None:
    """And a pinned buffer that is overwritten before it has left is found."""
    x = torch.arange(4, device="npu").float()
    side = npu.Stream()
    for wait in (npu.synchronize, npu.current_stream().synchronize, lambda: torch.ones(1, device="npu").item()):
        host = x.to("cpu", non_blocking=True)
        assert host.isnan().all()
        wait()
        assert host.tolist() == [0.0, 1.0, 2.0, 3.0]
    with npu.stream(side):
        host = x.to("cpu", non_blocking=True)
    npu.current_stream().synchronize()
    assert host.isnan().all()  # another stream's copy
    npu.current_stream().wait_stream(side)
    npu.current_stream().synchronize()
    assert host.tolist() == [0.0, 1.0, 2.0, 3.0]
    pinned = torch.ones(4).pin_memory()
    pinned.to("npu", non_blocking=True)
    pinned.zero_()
    with pytest.raises(RuntimeError, match="overwritten while a non_blocking copy"):
        npu.synchronize()
    for step in range(40):  # a pinned buffer that is freed at once is no mistake
        x = torch.full((1000,), float(step)).pin_memory().to("npu", non_blocking=True)
        assert (x == step).all()
    npu.synchronize()


def waiting_while_capturing_is_refused() -> None:
    x = torch.ones(4, device="npu")
    bodies: tuple[Callable[[], Any], ...] = (
        *(lambda: x.sum().item(), lambda: (x * 2).cpu(), npu.synchronize, lambda: x[x > 0]),
        lambda: x.copy_(torch.ones(4), non_blocking=True),
    )
    npu.set_task_queue_enable(1)  # torch_npu records nothing on the second level
    for body in bodies:
        with pytest.raises(RuntimeError, match="captur"), npu.graph(npu.NPUGraph()):
            body()
        assert x.sum().item() == 4.0  # and all goes on
    npu.set_task_queue_enable(2)
    with pytest.raises(RuntimeError, match="TASK_QUEUE_ENABLE = 2"), npu.graph(npu.NPUGraph()):
        pass


def dropout_follows_the_seed() -> None:
    drawn = []
    for _ in range(2):
        torch.manual_seed(7)
        drawn.append([torch.nn.functional.dropout(torch.ones(4000, device="npu"), 0.25) for _ in range(2)])
    assert torch.equal(drawn[0][0], drawn[1][0]) and not torch.equal(*drawn[0])
    assert 0.7 < (drawn[0][0] > 0).float().mean().item() < 0.8
