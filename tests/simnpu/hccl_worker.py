"""What each rank of `hccl_worker.py FOLDER` does for test_hccl.py: each collective over the real HCCL process group
gives what gloo gives with the same numbers. FOLDER/<rank>.json gets the outcomes, "" where all is well."""

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

NPU = torch.device("npu", int(os.environ.get("LOCAL_RANK", "0")))
RANKS = 4
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# HCCL documents neither int64 nor 3 ranks for all_gather_into_tensor and reduce_scatter_tensor.
WHOLE = (torch.int32, torch.int8)


def values(rank: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers: their sums are exact in any order."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 8, (10_000 * RANKS,), generator=generator).to(dtype)


def reduced(operation: Any) -> Callable[[Tensor, int], Tensor]:
    def run(x: Tensor, rank: int) -> Tensor:
        dist.all_reduce(x, operation)
        return x

    return run


def asynchronous(x: Tensor, rank: int) -> Tensor:
    works = [dist.all_reduce(part, async_op=True) for part in x.chunk(3)]
    for work in works:
        assert work is not None
        work.wait()
        assert work.is_completed()
    return x


def broadcast(x: Tensor, rank: int) -> Tensor:
    dist.broadcast(x, RANKS - 1)
    return x


def reduce(x: Tensor, rank: int) -> Tensor:
    dist.reduce(x, RANKS - 1)
    return x if rank == RANKS - 1 else x[:0]


def scatter(x: Tensor, rank: int) -> Tensor:
    part = x.new_empty(len(x) // RANKS)
    dist.scatter(part, list(x.chunk(RANKS)) if rank == 1 else None, 1)
    return part


def reduce_scatter(x: Tensor, rank: int) -> Tensor:
    part = x.new_empty(len(x) // RANKS)
    dist.reduce_scatter_tensor(part, x)
    return part


def all_gather(x: Tensor, rank: int) -> Tensor:
    whole = x.new_empty(len(x) * RANKS)
    dist.all_gather_into_tensor(whole, x)
    return whole


def all_gather_of_a_list(x: Tensor, rank: int) -> Tensor:
    parts = [x.new_empty(3) for _ in range(RANKS)]  # torch_npu pads a short one
    dist.all_gather(parts, x[:3])
    return torch.cat(parts)


def all_to_all(x: Tensor, rank: int) -> Tensor:
    """Rank r gets r + 1 rows of a thousand from each."""
    rows = list(range(1000, 1000 * (RANKS + 1), 1000))
    arrived = x.new_empty(1000 * (rank + 1) * RANKS)
    dist.all_to_all_single(arrived, x[: sum(rows)], [1000 * (rank + 1)] * RANKS, rows)
    even = torch.empty_like(x)
    dist.all_to_all_single(even, x)
    return torch.cat([arrived, even])


def ring(x: Tensor, rank: int) -> Tensor:
    arrived = torch.empty_like(x)
    sent = dist.P2POp(dist.isend, x, (rank + 1) % RANKS)
    received = dist.P2POp(dist.irecv, arrived, (rank - 1) % RANKS)
    for work in dist.batch_isend_irecv([sent, received]):
        work.wait()
    return arrived


def pair(x: Tensor, rank: int) -> Tensor:
    """A sum of the first and the last rank between two of everybody."""
    group = dist.new_group([0, RANKS - 1])
    dist.all_reduce(x, ReduceOp.MAX)
    if rank in (0, RANKS - 1):
        dist.all_reduce(x, group=group)
    dist.barrier()
    return x


COLLECTIVES: dict[str, tuple[Callable[[Tensor, int], Tensor], tuple[torch.dtype, ...]]] = {
    "sum": (reduced(ReduceOp.SUM), (*FLOATS, *WHOLE, torch.int64)),
    "largest": (reduced(ReduceOp.MAX), (torch.float32, torch.int64)),
    "smallest": (reduced(ReduceOp.MIN), (torch.float32, torch.int64)),
    "asynchronous": (asynchronous, (torch.float32,)),
    "broadcast": (broadcast, (*FLOATS, *WHOLE, torch.int64)),
    "reduce": (reduce, (torch.float32,)),
    "scatter": (scatter, (torch.float32, torch.int64)),
    "reduce_scatter": (reduce_scatter, (*FLOATS, torch.int32)),
    "all_gather": (all_gather, (*FLOATS, *WHOLE)),
    "all_gather of a list": (all_gather_of_a_list, (torch.float32, torch.int64)),
    "all_to_all": (all_to_all, (torch.float32, torch.int64)),
    "ring": (ring, (torch.float32,)),
    "pair": (pair, (torch.float32,)),
}


def equal(name: str, dtype: torch.dtype, rank: int) -> None:
    run = COLLECTIVES[name][0]
    expected = run(values(rank, dtype), rank)
    found = run(values(rank, dtype).to(NPU), rank)
    assert found.device == NPU and torch.equal(found.cpu(), expected), f"{found[:8]} instead of {expected[:8]}"


def what_is_not_documented_is_refused(rank: int) -> None:
    three = dist.new_group([0, 1, 2])
    ones = torch.ones(4, device=NPU)
    for name, part, group in (("int64", ones.long(), None), ("3 ranks", ones, three)):
        if group is None or rank < 3:
            whole = part.new_empty(len(part) * (RANKS if group is None else 3))
            try:
                dist.all_gather_into_tensor(whole, part, group=group)
            except RuntimeError as error:
                assert "HcclAllGather" in str(error) and "error code is 5" in str(error), error
            else:
                raise AssertionError(name)


def main(folder: Path) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch 2.13 renames the collectives of one tensor
    torch.npu.set_device(NPU)  # pyright: ignore[reportAttributeAccessIssue]
    dist.init_process_group("cpu:gloo,npu:hccl")
    rank = dist.get_rank()
    checks: dict[str, Callable[[], None]] = {
        f"{name} of {dtype}": lambda name=name, dtype=dtype: equal(name, dtype, rank)
        for name, (_, dtypes) in COLLECTIVES.items()
        for dtype in dtypes
    }
    checks["limits"] = lambda: what_is_not_documented_is_refused(rank)
    outcomes: dict[str, str] = {}
    for name, check in checks.items():
        try:
            check()
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
