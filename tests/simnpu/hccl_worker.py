"""What each rank of `hccl_worker.py FOLDER` does for test_hccl.py: torch.distributed over the real
HCCL process group, one check after the other, every outcome written to FOLDER/<rank>.json ("" when it is well)."""

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

NPU = torch.device("npu", int(os.environ.get("LOCAL_RANK", "0")))


def values(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same on every rank, small whole numbers for integers."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(dtype) if dtype.is_floating_point else (numbers * 3).round().to(dtype)


def equal(got: Tensor, expected: Tensor) -> None:
    assert got.device.type == "npu"
    assert torch.equal(got.cpu(), expected), f"{got.flatten()[:8].cpu()} instead of {expected.flatten()[:8]}"


def refused(call: Callable[[], object], *texts: str) -> None:
    try:
        call()
    except RuntimeError as error:
        assert all(text in str(error) for text in texts), f"another error: {error}"
    else:
        raise AssertionError("not refused")


def all_reduce(rank: int, ranks: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int32, torch.int64):
        every = [values(other, 100, dtype=dtype) for other in range(ranks)]
        total = torch.zeros(100, dtype=torch.float32 if dtype.is_floating_point else dtype)
        for other in every:
            total += other
        mine = every[rank].to(NPU)
        dist.all_reduce(mine)
        equal(mine, total.to(dtype))
    every = torch.stack([values(other, 100) for other in range(ranks)])
    for operation, expected in ((ReduceOp.MAX, every.amax(0)), (ReduceOp.MIN, every.amin(0))):
        mine = every[rank].to(NPU)
        dist.all_reduce(mine, operation)
        equal(mine, expected)


def all_reduce_asynchronous(rank: int, ranks: int) -> None:
    tensors = [torch.full((5,), float(rank + i), device=NPU) for i in range(3)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for i, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        assert work is not None
        work.wait()
        assert work.is_completed()
        equal(tensor, torch.full((5,), sum(float(other + i) for other in range(ranks))))


def broadcast(rank: int, ranks: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        tensor = values(rank, 33, dtype=dtype).to(NPU)
        dist.broadcast(tensor, ranks - 1)
        equal(tensor, values(ranks - 1, 33, dtype=dtype))


def reduce_scatter_tensor(rank: int, ranks: int) -> None:
    out = torch.empty(7, device=NPU)
    dist.reduce_scatter_tensor(out, values(rank, 7 * ranks).to(NPU))
    total = values(0, 7 * ranks)
    for other in range(1, ranks):
        total += values(other, 7 * ranks)
    equal(out, total.chunk(ranks)[rank])
    out = torch.empty(7, device=NPU)
    dist.reduce_scatter(out, list(values(rank, 7 * ranks).to(NPU).chunk(ranks)))
    equal(out, total.chunk(ranks)[rank])


def all_gather_into_tensor(rank: int, ranks: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.bool):
        out = torch.empty(7 * ranks, dtype=dtype, device=NPU)
        dist.all_gather_into_tensor(out, values(rank, 7, dtype=dtype).to(NPU))
        equal(out, torch.cat([values(other, 7, dtype=dtype) for other in range(ranks)]))


def all_gather_list(rank: int, ranks: int) -> None:
    for count in (3, 8, 1000):  # torch_npu pads a short one
        out = [torch.empty(count, device=NPU) for _ in range(ranks)]
        dist.all_gather(out, values(rank, count).to(NPU))
        for other in range(ranks):
            equal(out[other], values(other, count))


def all_to_all(rank: int, ranks: int) -> None:
    out = torch.empty(4 * ranks, device=NPU)
    dist.all_to_all_single(out, values(rank, 4 * ranks).to(NPU))
    equal(out, torch.cat([values(other, 4 * ranks).chunk(ranks)[rank] for other in range(ranks)]))
    splits = list(range(1, ranks + 1))  # to rank r go r + 1
    out = torch.empty((rank + 1) * ranks, device=NPU)
    dist.all_to_all_single(out, values(rank, sum(splits)).to(NPU), [rank + 1] * ranks, splits)
    equal(out, torch.cat([values(other, sum(splits)).split(splits)[rank] for other in range(ranks)]))


def barrier(rank: int, ranks: int) -> None:
    dist.barrier()


def new_group(rank: int, ranks: int) -> None:
    everybody, pair = dist.new_group(list(range(ranks)), backend="hccl"), dist.new_group([0, ranks - 1])
    tensor = torch.full((3,), float(rank), device=NPU)
    dist.all_reduce(tensor, group=everybody)
    equal(tensor, torch.full((3,), float(sum(range(ranks)))))
    if rank in (0, ranks - 1):
        dist.all_reduce(tensor, group=pair)
        equal(tensor, torch.full((3,), 2.0 * sum(range(ranks))))
    objects = [None] * ranks
    dist.all_gather_object(objects, {"rank": rank, "name": "x" * rank}, group=everybody)
    assert objects == [{"rank": other, "name": "x" * other} for other in range(ranks)]


def documented_limits(rank: int, ranks: int) -> None:
    """Those of all_gather_into_tensor and reduce_scatter_tensor hold for these alone, and can be lifted."""
    code = "error code is 5"
    whole = torch.zeros(4 * ranks, dtype=torch.int64, device=NPU)
    part = torch.full((4,), rank, device=NPU)
    refused(lambda: dist.all_gather_into_tensor(whole, part), "HcclAllGather", code)
    refused(lambda: dist.reduce_scatter_tensor(part, whole), "HcclReduceScatter", code)
    dist.all_gather(list(whole.chunk(ranks)), part)  # HCCL's AllGather itself takes int64
    os.environ["SIMNPU_HCCL_LIMITS"] = "0"
    dist.all_gather_into_tensor(whole, part)
    equal(whole, torch.arange(ranks).repeat_interleave(4))
    del os.environ["SIMNPU_HCCL_LIMITS"]
    if ranks < 4:
        return
    three = dist.new_group([0, 1, 2])
    if rank < 3:
        numbers = torch.ones(12, device=NPU)
        refused(lambda: dist.all_gather_into_tensor(numbers, torch.ones(4, device=NPU), group=three), code)
        refused(lambda: dist.reduce_scatter_tensor(torch.ones(4, device=NPU), numbers, group=three), code)
        dist.all_reduce(numbers, group=three)
        equal(numbers, torch.full((12,), 3.0))


def data_types(rank: int, ranks: int) -> None:
    """torch_npu itself casts bool and uint8 for a sum, and refuses float64."""
    flags = torch.tensor([True, False], device=NPU) if rank == 0 else torch.zeros(2, dtype=torch.bool, device=NPU)
    dist.all_reduce(flags)
    equal(flags, torch.tensor([True, False]))
    octets = torch.full((4,), 3, dtype=torch.uint8, device=NPU)
    dist.all_reduce(octets)
    equal(octets, torch.full((4,), 3 * ranks, dtype=torch.uint8))
    doubles = torch.empty(4, dtype=torch.float64, device=NPU)
    refused(lambda: dist.all_reduce(doubles), "Unsupported data type at::kDouble")


def sharded(device: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 5)).to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return model


def trained(device: str, rank: int) -> tuple[nn.Module, list[float]]:
    model = sharded(device)
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(4):
        inputs, targets = values(100 * step + rank, 8, 12), values(1000 + 100 * step + rank, 8, 5)
        loss = (model(inputs.to(device)).float() - targets.to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def fsdp_equals_gloo(rank: int, ranks: int) -> None:
    """To rounding: gloo adds four addends in another order."""
    on_npu, losses = trained("npu", rank)
    on_cpu, expected = trained("cpu", rank)
    tolerance = 1e-5
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(on_npu.parameters(), on_cpu.parameters(), strict=True):
        whole = ours.full_tensor().cpu()  # pyright: ignore[reportAttributeAccessIssue]
        reference = theirs.full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
        torch.testing.assert_close(whole, reference, rtol=tolerance, atol=tolerance)


# What nanochat and FSDP call. test_hccl.py has the others, without torch.
CHECKS = (
    *(all_reduce, all_reduce_asynchronous, broadcast, reduce_scatter_tensor, all_gather_into_tensor, all_gather_list),
    *(all_to_all, barrier, new_group, documented_limits, data_types, fsdp_equals_gloo),
)

if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch 2.13 renames the collectives of one tensor
    torch.npu.set_device(NPU)  # pyright: ignore[reportAttributeAccessIssue]
    dist.init_process_group("cpu:gloo,npu:hccl")
    outcomes: dict[str, str] = {}
    for check in CHECKS:
        try:
            check(dist.get_rank(), dist.get_world_size())
            outcomes[check.__name__] = ""
        except Exception:
            outcomes[check.__name__] = traceback.format_exc()
        (FOLDER / f"{dist.get_rank()}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()
