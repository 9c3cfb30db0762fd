"""What a simulated NPU must do, checked inside one: `python tests/simnpu/checks.py` on two devices of 2 GiB.

It prints a line of JSON, the name of each check and its traceback, or null when it held. test_simulator.py runs it."""

# pyright: reportPrivateImportUsage=false

import contextlib
import ctypes
import inspect
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from simnpu import counts  # noqa: E402
from simnpu.operators import OPERATORS  # noqa: E402

npu: Any = getattr(torch, "npu")  # noqa: B009  # torch_npu adds it
GIB = 1 << 30


@contextlib.contextmanager
def raises(*words: str, error: type[Exception] = RuntimeError) -> Iterator[None]:
    try:
        yield
    except error as raised:
        missing = [word for word in words if word not in str(raised)]
        assert not missing, f"{missing} not in {raised}"
        return
    raise AssertionError(f"nothing raised; expected {words}")


# ---- operators ----

COMPUTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {  # of x (4, 6), y (4, 6), i (4, 6) integers
    "in place": lambda x, y, i: (x.add_(y).mul_(2).clamp_(-1, 1).relu_(), x.t().copy_(y.t()), x[:, ::2].zero_(), x),
    "in place, expanded": lambda x, y, i: (x.sub_(y[:1].expand(4, 6)), x[1:].mul_(y[0]), x),
    "out": lambda x, y, i: (
        torch.mul(x, y, out=torch.empty_like(x)),
        torch.add(x, y, out=torch.empty(6, 4, device=x.device).t()),
        torch.cat([x, y], out=torch.empty(0, device=x.device)),
        torch.max(x, 1, out=(x.new_empty(0), i.new_empty(0))),
    ),
    "strided": lambda x, y, i: (x[:, ::2] + y[:, 1::2], x.t().contiguous(), x[1:3, 2:5].clone(), x.t().reshape(-1)),
    "reductions": lambda x, y, i: (x.sum(), x.std(1), x.amax(0), x.argmax(1), x.logsumexp(1), x.norm(), x.cumsum(0)),
    "indexing": lambda x, y, i: (
        x[i[:, 0] % 4], x[x > 0], x.gather(1, i % 6), x.index_put((i[:, 0] % 4,), y, accumulate=True),
        x.scatter(1, i % 6, y), x.masked_fill(x > 0, 7.0), F.embedding(i % 4, x), torch.topk(x, 2), x.sort(1),
    ),
    "made": lambda x, y, i: (
        torch.arange(5, device=x.device), torch.zeros(2, device=x.device), torch.full((2,), 3.5, device=x.device),
        torch.ones_like(x), torch.eye(3, device=x.device), torch.linspace(0, 1, 5, device=x.device),
    ),
    "lists": lambda x, y, i: (
        torch._foreach_add([x, y], 1.0), torch._foreach_mul([x, y], [2.0, 3.0]), torch._foreach_norm([x, y]),
        torch._foreach_add_([x, y], [y.clone(), x.clone()]), x, y, x.split(2), torch.stack([x, y]), x.chunk(3, 1),
    ),
    "types": lambda x, y, i: (x.to(torch.bfloat16), x.half().float(), x.long(), i.float(), x > y, i.int().bool()),
    "halves": lambda x, y, i: (x.bfloat16() @ y.bfloat16().t(), x.bfloat16().softmax(1), x.half() * 2, x.half().sum()),
    "empty": lambda x, y, i: (x[:0] + 1, x[:0].sum(), torch.cat([x[:0], x]), x.new_empty(0, 3).t()),
}  # fmt: skip


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in flat(item)] if isinstance(value, list | tuple) else []


def same(on_cpu: Any, on_npu: Any) -> None:
    ours, theirs = flat(on_npu), flat(on_cpu)
    assert len(ours) == len(theirs)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one.device.type == "npu" and other.device.type == "cpu"
        assert one.dtype == other.dtype and one.shape == other.shape, (number, one, other)
        assert torch.equal(one.cpu(), other), (number, one, other)


def check_operators_give_what_the_cpus_give() -> None:
    for name, compute in COMPUTATIONS.items():
        generator = torch.Generator().manual_seed(3)
        x, y = torch.randn(2, 4, 6, generator=generator)
        i = torch.randint(0, 20, (4, 6), generator=generator)
        given = [tensor.to("npu") for tensor in (x, y, i)]
        try:
            same(compute(x, y, i), compute(*given))
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


def check_modelled_operators_take_arguments_of_torch_npus_schemas() -> None:
    for name, function in OPERATORS.items():
        schema = getattr(torch.ops.npu, name.removeprefix("npu::")).default._schema
        arguments = {argument.name: argument for argument in schema.arguments}
        for parameter in inspect.signature(function).parameters.values():
            argument = arguments[parameter.name]
            default = parameter.default if parameter.default is not inspect.Parameter.empty else None
            assert default == argument.default_value, (name, parameter.name)
    x = torch.ones(1, 2, 2, 16, device="npu")
    for options in ({"keep_prob": 0.9}, {"padding_mask": x[0, 0]}, {"sink": x[0, 0, 0]}, {"inner_precise": 2}):
        with raises("npu_fusion_attention", next(iter(options))):
            torch.ops.npu.npu_fusion_attention(x, x, x, 2, "BSND", **options)


def check_new_tensors_are_contiguous() -> None:
    x = torch.randn(3, 4, 5, device="npu").transpose(0, 2)
    assert not x.is_contiguous()
    assert all(tensor.is_contiguous() for tensor in (x + 1, x.exp(), x.clone(), x * x))
    assert torch.equal((x + 1).view(-1).cpu(), (x.cpu().contiguous() + 1).view(-1))


def check_0d_numbers_of_the_host_and_mixed_devices() -> None:
    x = torch.ones(3, device="npu:0")
    assert (x * torch.tensor(2.0)).tolist() == [2.0, 2.0, 2.0]
    assert torch.where(x > 0, x, 0.5).tolist() == [1.0] * 3 and (x**2 - 1).tolist() == [0.0] * 3
    with raises("aten::add.Tensor", "same device"):
        x.add(torch.ones(3))
    with raises("aten::mul.Tensor", "npu:0 and npu:1"):
        x.mul(torch.ones(3, device="npu:1"))
    with raises("aten::pow.Tensor_Tensor", "same device"):
        x.pow(torch.tensor(2.0))


# ---- limits ----


def check_what_hardware_cannot_do_is_refused() -> None:
    half = torch.rand(2, 4, device="npu").bfloat16()
    for call, word in (
        (lambda: torch.multinomial(half, 1), "multinomial"),
        (lambda: half.logsumexp(1), "logsumexp"),
        (lambda: half.lerp(half, 0.5), "lerp"),
        (lambda: torch.zeros(2, dtype=torch.float64, device="npu"), "zeros"),
        (lambda: torch.view_as_complex(torch.ones(2, 2, device="npu")) * 2, "mul"),
        (lambda: torch.tensor([1.0], dtype=torch.float64).to("npu") + 1, "DT_DOUBLE"),
        (lambda: torch.special.bessel_j0(torch.ones(2, device="npu")), "special_bessel_j0"),
    ):
        with raises(word):
            call()
    kept = torch.tensor([1.5], dtype=torch.float64).to("npu")  # storing and fetching needs no kernel
    assert kept.dtype == torch.float64 and kept.cpu().item() == 1.5
    assert torch.multinomial(half.float(), 1).shape == (2, 1)


def check_memory_has_a_ceiling() -> None:
    free, total = npu.mem_get_info(1)
    assert total == 2 * GIB == npu.get_device_properties(1).total_memory
    block = torch.empty(GIB, dtype=torch.uint8, device="npu:1")
    assert npu.memory_allocated(1) >= GIB and npu.mem_get_info(1)[0] <= free - GIB
    with raises("out of memory", "2.00 GiB total capacity", error=torch.OutOfMemoryError):
        torch.empty(GIB + (64 << 20), dtype=torch.uint8, device="npu:1")
    assert npu.mem_get_info(0)[0] > GIB  # the other device has its own
    del block
    npu.empty_cache()
    assert npu.mem_get_info(1)[0] >= free
    torch.empty(GIB + (64 << 20), dtype=torch.uint8, device="npu:1")
    npu.empty_cache()


def check_fresh_memory_is_not_zero() -> None:
    npu.empty_cache()
    assert torch.empty(1 << 22, device="npu").isnan().all()


# ---- random numbers ----


def check_random_numbers_follow_seed_and_state() -> None:
    torch.manual_seed(7)
    first, second = (torch.randn(4, device="npu") for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    assert torch.equal(torch.randn(4, device="npu"), first)
    state = npu.get_rng_state()
    drawn = torch.rand(4, device="npu"), torch.randint(0, 100, (9,), device="npu"), torch.randperm(9, device="npu")
    npu.set_rng_state(state)
    again = torch.rand(4, device="npu"), torch.randint(0, 100, (9,), device="npu"), torch.randperm(9, device="npu")
    assert all(torch.equal(*pair) for pair in zip(drawn, again, strict=True))
    torch.manual_seed(7)  # seeds every device
    assert torch.equal(torch.randn(4, device="npu:1").cpu(), first.cpu())


def check_generators_are_their_own() -> None:
    generator = torch.Generator("npu")
    drawn = []
    for _ in range(2):
        generator.manual_seed(3)
        uniform = torch.rand(5, generator=generator, device="npu")
        chosen = torch.multinomial(torch.ones(2, 9, device="npu"), 3, generator=generator)
        drawn.append([*uniform.tolist(), *chosen.flatten().tolist()])
    assert drawn[0] == drawn[1] and generator.get_state().view(torch.int64).tolist()[1] > 0
    kept = F.dropout(torch.ones(4000, device="npu"), 0.25)
    assert 0.7 < (kept > 0).float().mean().item() < 0.8 and abs(kept.max().item() - 4 / 3) < 1e-6
    with raises("NPU generator"):
        torch.rand(5, generator=torch.Generator(), device="npu")


# ---- time ----


def check_a_copy_to_the_host_arrives_when_waited_for() -> None:
    x = torch.arange(4, device="npu").float()
    for wait in (
        npu.synchronize,
        lambda: npu.current_stream().synchronize(),
        lambda: torch.ones(1, device="npu").item(),
    ):
        host = x.to("cpu", non_blocking=True)
        assert host.isnan().all()
        wait()
        assert host.tolist() == [0.0, 1.0, 2.0, 3.0]
    host = x.to("cpu", non_blocking=True)
    event = npu.Event()
    event.record()
    x.add_(1)  # after the copy, in the stream's order
    assert host.isnan().all()
    event.synchronize()
    assert host.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert x.to("cpu").tolist() == [1.0, 2.0, 3.0, 4.0]


def check_an_event_does_not_cover_what_comes_after_it() -> None:
    x = torch.ones(2, device="npu")
    event = npu.Event()
    event.record()
    host = x.to("cpu", non_blocking=True)
    event.synchronize()
    assert host.isnan().all()
    npu.synchronize()
    assert host.tolist() == [1.0, 1.0]


def check_a_stream_waits_for_another() -> None:
    side, x = npu.Stream(), torch.ones(2, device="npu")
    with npu.stream(side):
        host = x.to("cpu", non_blocking=True)
    npu.current_stream().synchronize()
    assert host.isnan().all()  # another stream's copy
    npu.current_stream().wait_stream(side)
    npu.current_stream().synchronize()
    assert host.tolist() == [1.0, 1.0]


def check_a_pinned_buffer_overwritten_too_early_is_found() -> None:
    host = torch.ones(4).pin_memory()
    assert host.is_pinned() and not torch.ones(4).is_pinned()
    host.to("npu", non_blocking=True)
    host.zero_()
    with raises("overwritten while a non_blocking copy"):
        npu.synchronize()
    x = host.to("npu", non_blocking=True)
    npu.synchronize()
    host.fill_(5)
    npu.synchronize()
    assert x.tolist() == [0.0] * 4


def check_pinned_buffers_that_are_freed_are_no_mistake() -> None:
    for step in range(40):
        x = torch.full((1000,), float(step)).pin_memory().to("npu", non_blocking=True)
        assert (x == step).all()
        torch.full((1000,), -1.0).pin_memory()  # would take the freed buffer, if that were free already
    npu.synchronize()


def check_copies_between_devices_and_layouts() -> None:
    x = torch.arange(12.0).view(3, 4)
    on_npu = x.to("npu")
    assert torch.equal(on_npu.to("npu:1").cpu(), x) and on_npu.to("npu:1").device.index == 1
    assert torch.equal(on_npu.t().cpu(), x.t()) and torch.equal(on_npu[:, ::2].cpu(), x[:, ::2])
    target = torch.zeros(4, 6, device="npu")[:, ::2].t()
    target.copy_(x)
    assert torch.equal(target.cpu(), x)
    target.copy_(x.long())
    assert torch.equal(target.cpu(), x)
    host = torch.zeros(3, 4, dtype=torch.int64)
    host.copy_(on_npu)
    assert torch.equal(host, x.long())
    host.t().copy_(on_npu.t() * 2)
    assert torch.equal(host, x.long() * 2)
    assert on_npu.tolist() == x.tolist() and float(on_npu[1, 1]) == 5.0


# ---- graphs ----


@contextlib.contextmanager
def recording(graph: Any) -> Iterator[None]:
    """On the first level of the task queue: torch_npu records nothing on the second."""
    level = npu.get_task_queue_enable()
    npu.set_task_queue_enable(min(level, 1))
    try:
        with npu.graph(graph):
            yield
    finally:
        npu.set_task_queue_enable(level)


def check_nothing_is_recorded_on_the_second_level_of_the_queue() -> None:
    level = npu.get_task_queue_enable()
    npu.set_task_queue_enable(2)
    try:
        with raises("TASK_QUEUE_ENABLE = 2"), npu.graph(npu.NPUGraph()):
            pass
    finally:
        npu.set_task_queue_enable(level)


def check_a_captured_graph_runs_at_its_replay() -> None:
    x = torch.ones(4, device="npu")
    graph = npu.NPUGraph()
    with recording(graph):
        y = x * 2 + 1
        total = y.sum()
        x.add_(1)
        x[2:].zero_()
    assert y.isnan().all() and total.isnan() and x.tolist() == [1.0] * 4  # nothing has run
    for expected, after in (([3.0] * 4, [2.0, 2.0, 0.0, 0.0]), ([5.0, 5.0, 1.0, 1.0], [3.0, 3.0, 0.0, 0.0])):
        with counts.counted() as counted:
            graph.replay()
        assert (counted.launches, counted.waits) == (1, 0)
        assert y.tolist() == expected and total.item() == sum(expected) and x.tolist() == after


def check_a_graph_copies_from_pinned_memory_at_each_replay() -> None:
    host, x = torch.tensor([1.0, 2.0]).pin_memory(), torch.zeros(2, device="npu")
    graph = npu.NPUGraph()
    with recording(graph):
        x.copy_(host, non_blocking=True)
        y = x + 1
    for number in (3.0, 4.0):
        host.fill_(number)
        graph.replay()
        npu.synchronize()
        assert y.tolist() == [number + 1] * 2


def check_random_numbers_in_a_graph_are_those_without() -> None:
    torch.manual_seed(1)
    graph = npu.NPUGraph()
    with recording(graph):
        a, b = torch.rand(3, device="npu"), torch.rand(3, device="npu")
    replays = []
    for _ in range(2):
        graph.replay()
        replays += [a.tolist(), b.tolist()]
    torch.manual_seed(1)
    assert [torch.rand(3, device="npu").tolist() for _ in range(4)] == replays


def check_waiting_while_capturing_is_refused() -> None:
    x = torch.ones(4, device="npu")

    def refused(body: Callable[[], Any]) -> None:
        with raises("captur"), recording(npu.NPUGraph()):
            body()
        assert x.sum().item() == 4.0  # and all goes on

    refused(lambda: (x * 2).sum().item())
    refused(lambda: (x * 2).cpu())
    refused(lambda: npu.synchronize())
    refused(lambda: x[x > 0])
    refused(lambda: x.copy_(torch.ones(4), non_blocking=True))


# ---- counts ----


def check_launches_and_waits_are_counted() -> None:
    x, host, index = torch.randn(4, 4, device="npu"), torch.ones(4).pin_memory(), torch.arange(4, device="npu")
    for call, launches, waits in (
        (lambda: x + 1, 1, 0),
        (lambda: x.view(2, 8).t()[1:], 0, 0),
        (lambda: torch.empty(3, device="npu"), 0, 0),
        (lambda: torch.zeros(3, device="npu"), 1, 0),
        (lambda: x.sum().item(), 2, 1),
        (lambda: x.cpu(), 1, 1),
        (lambda: x.t().cpu(), 2, 1),
        (lambda: host.to("npu"), 1, 1),
        (lambda: host.to("npu", non_blocking=True), 1, 0),
        (lambda: x.copy_(x.clone()), 2, 0),
        (lambda: x[x > 0], 2, 1),
        (lambda: x[index], 1, 0),
        (lambda: x.nonzero(), 1, 1),
        (lambda: torch.equal(x, x), 1, 1),
        (lambda: npu.synchronize(), 0, 1),
        (lambda: npu.current_stream().synchronize(), 0, 1),
        (lambda: torch._foreach_add([x, x], 1), 1, 0),
        (lambda: x.to(torch.bfloat16), 1, 0),
    ):
        with counts.counted() as counted:
            call()
        assert (counted.launches, counted.waits) == (launches, waits), (call.__code__.co_firstlineno, counted)


# ---- the rest of torch.npu ----


def check_device_properties() -> None:
    assert npu.device_count() == 2 and npu.is_available() and npu.is_bf16_supported()
    assert npu.get_device_name(1) == npu.get_device_properties(1).name == "Ascend910B3"
    assert npu.current_device() == 0
    with npu.device(1):
        assert npu.current_device() == 1 and torch.ones(1, device="npu").device.index == 1
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    with raises("6"):
        npu.set_device(6)


def check_a_missing_function_of_cann_fails_loudly() -> None:
    libraries = Path(os.environ["SIMNPU_LIBRARY"]).parent
    assert ctypes.CDLL(str(libraries / "libge_runner.so")).aclopCompileAndExecute() == 200006


def check_autograd_threads_and_inference_mode() -> None:
    with torch.inference_mode():
        assert (torch.ones(2, 2, device="npu") @ torch.ones(2, 2, device="npu")).sum().item() == 8.0
    w = torch.ones(3, device="npu:1", requires_grad=True)
    (w * 2).sum().backward()
    assert w.grad is not None and w.grad.device.index == 1 and w.grad.tolist() == [2.0] * 3


def main() -> None:
    warnings.simplefilter("ignore")
    results: dict[str, str | None] = {}
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            try:
                check()
                results[name] = None
            except Exception:
                results[name] = traceback.format_exc()
                with contextlib.suppress(RuntimeError):
                    npu.synchronize()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
