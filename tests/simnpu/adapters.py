"""Reads what torch_npu's own adapters ask of CANN: the log of a process with `build.environment(adapters=FILE)`.

kernels.py replaces torch_npu's kernels at the dispatcher, so what lies below it is hidden there: which operators of
CANN an adapter calls, with which strides, from which memory. Here the wheel's own C++ runs, with its task queue and its
allocator, over a libopapi that computes nothing (opapi.c) and memory that is addresses alone (cann.c). So a step of any
size runs on a small host, its calls are those of a real card, and so is the allocator's peak, less what CANN takes for
itself: operators' workspaces, HCCL's buffers, the runtime. Whatever the host reads from the device is 0, so operators
whose output's shape depends on data, and control flow that depends on it, are not those of a real run.

    tests/simnpu/run --adapters calls.jsonl python my_program.py      # with section("step"): around what is of interest
    python tests/simnpu/adapters.py calls.jsonl                       # prints the sections, or:
    for record in adapters.sections("calls.jsonl")["step"]: ...

What a call costs below its name is CANN's affair and follows rules, written down once: `copied_inputs`, cann_rules.py.
"""

import contextlib
import ctypes
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
from simnpu import tomllib

DTYPES = tomllib.loads(Path(__file__).with_name("torch_npu.toml").read_text("utf-8"))["types"]


@dataclass(frozen=True)
class Tensor:
    """A tensor as an operator sees it. An undefined one in a list has the shape (0,)."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: tuple[int, ...]
    offset: int  # elements from the storage's first
    dtype: str
    at: int  # address of the storage

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return True

    @property
    def is_transposed(self) -> bool:
        """A matrix, or a batch of them, that is contiguous once its last two dimensions change places."""
        if len(self.shape) < 2 or self.is_contiguous:
            return False
        swapped = [(*values[:-2], values[-1], values[-2]) for values in (self.shape, self.strides)]
        return Tensor(swapped[0], swapped[1], self.storage, self.offset, self.dtype, self.at).is_contiguous


@dataclass(frozen=True)
class Record:
    """A line of the log."""

    kind: str  # operator, copy, memset, collective, replay (of a recorded graph) or wait (of the host)
    what: str  # aclnnMatmul, device_to_host, hccl::all_reduce, stream, ...
    arguments: tuple[
        Any, ...
    ] = ()  # an operator's: Tensor, tuples of them, {"scalar": "1"}, {"integers": [...]}, numbers
    bytes: int = 0  # of a copy
    blocking: bool = False  # a copy for which the host stands still (torch_npu waits for the stream first)
    # A copy whose host memory is CANN's own. Others must block: aclrtMemcpyAsync leaves open what happens to them (its
    # page of CANN 8.0: no error from the call, an unpredictable one from the task).
    pinned: bool = True

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors among the arguments, those of lists too."""
        found: list[Tensor] = []
        for argument in self.arguments:
            found += [
                one for one in (argument if isinstance(argument, tuple) else [argument]) if isinstance(one, Tensor)
            ]
        return tuple(found)

    @property
    def launches(self) -> bool:
        """Whether the device has something to do."""
        return self.kind != "wait"


@contextlib.contextmanager
def section(name: str) -> Iterator[None]:
    """What the device is asked for inside gets this name in the log; sections follow one another."""
    import torch

    torch.npu.synchronize()  # the queue of launches is empty
    _mark(f"begin {name}")
    yield
    torch.npu.synchronize()  # `sections` leaves this wait out
    _mark(f"end {name}")


def _mark(text: str) -> None:
    ctypes.CDLL(os.environ["SIMNPU_LIBRARY"]).simnpu_log(b"mark", text.encode(), b"")


def sections(path: Path | str, begin: int = 0) -> dict[str, list[Record]]:
    """The log from this byte on by sections, "" for all outside of any."""
    found: dict[str, list[Record]] = {"": []}
    name = ""
    for line in Path(path).read_bytes()[begin:].decode().splitlines():
        record = _record(json.loads(line))
        if record.kind != "mark":
            found.setdefault(name, []).append(record)
        elif record.what.startswith("begin "):
            name = record.what.removeprefix("begin ")
            found.setdefault(name, [])
        else:
            assert found[name].pop().kind == "wait"
            name = ""
    return found


def _record(line: dict[str, Any]) -> Record:
    return Record(**{**line, "arguments": tuple(map(_argument, line.get("arguments", ())))})


def _argument(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_argument, value))
    if isinstance(value, dict) and "shape" in value:
        place = (tuple(value["shape"]), tuple(value["strides"]), tuple(value["storage"]))
        return Tensor(*place, value["offset"], DTYPES.get(str(value["dtype"]), str(value["dtype"])), value["at"])
    return value


# ---------------------------------------------------------------------- what CANN does with a call


def copied_inputs(record: Record) -> list[Tensor]:
    """The tensors that the operator copies before it can begin, because they are not contiguous.

    Source: CANN's operators, github.com/hicann. Nearly all call l0op::Contiguous on every input, for example Add
    (ops-math, math/add/op_api/aclnn_add.cpp) and attention (ops-transformer, aclnn_flash_attention_score.cpp). Matrix
    products read a transposed matrix as it is (ops-nn, matmul/common/op_host/op_api/matmul_util.cpp), and a copy is
    what aclnnInplaceCopy is for.
    """
    if record.kind != "operator" or record.what in ("aclnnInplaceCopy", "aclnnCast"):
        return []
    takes_transposed = re.fullmatch(r"aclnn(Batch|Inplace)?(Matmul|Mm|MatMul|Addmm|Baddbmm|Addbmm)", record.what)
    return [t for t in record.tensors if not t.is_contiguous and not (takes_transposed and t.is_transposed)]


def transposed_gradients(records: list[Record]) -> tuple[int, int]:
    """How often a transposed matrix is cast (into another transposed one), and copied into a contiguous one.

    The gradient of a weight (out, in) is computed as (inputs.T @ gradients).T. It leaves its product transposed, its
    cast to the weight's dtype too, and autograd then copies it into the weight's layout: twice all of its bytes.
    """
    copies = [record.tensors for record in records if record.what == "aclnnInplaceCopy"]
    casts = sum(target.is_transposed and source.is_transposed for target, source in copies)
    return casts, sum(target.is_contiguous and source.is_transposed for target, source in copies)


def main() -> None:
    """Print the sections of a log: what was called how often, and what CANN makes of it."""
    from simnpu.cann_rules import RELEASES, where  # which imports this file

    for name, records in sections(sys.argv[1]).items():
        called = Counter(f"{record.kind} {record.what}" for record in records)
        copied = Counter(f"{record.kind} {record.what}" for record in records for _ in copied_inputs(record))
        slow = Counter(f"{record.kind} {record.what}" for record in records if where(record, RELEASES[0]) == "AI CPU")
        print(f"{name or 'outside of sections'}: {sum(record.launches for record in records)} launches, ", end="")
        print(f"{copied.total()} inputs copied first, {slow.total()} on the AI CPU")
        for what, count in called.most_common():
            notes = f", {copied[what]} inputs copied first" if copied[what] else ""
            notes += f", {slow[what]} on the AI CPU" if slow[what] else ""
            print(f"  {count:6d} {what}{notes}")


if __name__ == "__main__":
    main()
