"""CANN's rules for its operators (cann_rules.toml), applied to the calls of a log: where does each of them run?"""

import functools
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from simnpu import tomllib
from simnpu.adapters import Record, Tensor

TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
RELEASES = ("8.5.0", "9.0.0", "9.1.0")
# What a 910B's vector core holds of the axis of a scatter, in bytes, and how often it may be filled.
SCATTER_BYTES = 192 * 1024 // 2
SCATTER_LOOPS = 50


def where(record: Record, release: str) -> str:
    """ "cores", "AI CPU", or why CANN refuses an operator's call. "not in the table": no rule is known."""
    name = record.what.removeprefix("aclnn")
    if name in TABLE["casts"]:
        return _cast(record, TABLE["casts"][name], release)
    kernel = _kernels().get(name)
    if kernel is None:
        return "not in the table"
    if release < kernel.get("from", release):
        return f"only from {kernel['from']} on"
    cores = kernel["cores"].split()
    for first, more in kernel.get("since", {}).items():
        cores += more.split() if release >= first else []
    dtype = deciding_dtype(record, kernel)
    if dtype not in _long(cores):
        return "AI CPU" if dtype in _long(kernel.get("cpu", "").split()) else f"{dtype} is refused"
    rules = {"scatter": _scatter_fits, "index": _index_fits}
    return "cores" if "rule" not in kernel or rules[kernel["rule"]](record) else "AI CPU"


@functools.cache
def _kernels() -> dict[str, dict[str, Any]]:
    return {name: kernel for kernel in TABLE["kernel"] for name in kernel["calls"].split()}


def _long(names: Iterable[str]) -> set[str]:
    return {TABLE["dtypes"][name] for name in names}


def deciding_dtype(record: Record, kernel: dict[str, Any]) -> str:
    """The dtype that an operator computes in. In CANN's promotion a tensor without dimensions counts as any other."""
    tensors = [tensor for tensor in record.tensors if tensor.shape != (0,)] or list(record.tensors)
    by = kernel.get("by", "promoted")
    if by != "promoted":
        return tensors[0 if by == "first" else -1].dtype
    inputs = tensors[kernel.get("skip", 0) :]
    if not record.what.startswith("aclnnInplace"):
        inputs = inputs[:-1]
    names = {tensor.dtype for tensor in inputs}
    has_scalar = any(isinstance(one, dict) and "scalar" in one for one in record.arguments)
    if has_scalar and "scalar" in kernel:
        names |= _long([kernel["scalar"]])
    promoted = functools.reduce(torch.promote_types, [getattr(torch, name) for name in names])
    return str(promoted).removeprefix("torch.")


def _cast(record: Record, casts: dict[str, Any], release: str) -> str:
    """Of each pair of tensors; equal dtypes are a copy."""
    sides = [one if isinstance(one, tuple) else (one,) for one in record.arguments[:2]]
    targets, sources = sides if casts["result"] == 0 else sides[::-1]
    short = {long: name for name, long in TABLE["dtypes"].items()}
    for target, source in zip(targets, sources, strict=True):
        there = casts.get(short[source.dtype], "") if release >= casts.get("from", release) else ""
        if target.dtype not in {source.dtype, *_long(there.split())}:
            return f"from {source.dtype} to {target.dtype} is refused"
    return "cores"


def _scatter_fits(record: Record) -> bool:
    """The axis is the first or the last one, no other axis but these two is longer than the indices, and the axis is
    not too long for ScatterElementsV2."""
    data, axis, indices = record.arguments[:3]
    last = len(data.shape) - 1
    axis %= len(data.shape)
    differing = {place for place, sizes in enumerate(zip(data.shape, indices.shape, strict=True)) if len({*sizes}) > 1}
    size = {"float32": 4, "int32": 4, "bfloat16": 6, "float16": 6}.get(data.dtype, 1)
    fills = math.ceil(data.shape[axis] / (SCATTER_BYTES // size))
    return axis in (0, last) and differing <= {axis, 0, last} and fills <= SCATTER_LOOPS


def _index_fits(record: Record) -> bool:
    """The indices are neighbours, of one shape, whole numbers; what the cores cannot write atomically is small."""
    target, indices = record.arguments[:2]
    defined: list[Tensor] = [index for index in indices if index.numel]
    # x[rows, :, columns] is "x-x": its indices are not adjacent.
    given = "".join("x" if index.numel else "-" for index in indices)
    if not defined or "x-x" in re.sub("-+", "-", given):
        return False
    if any(index.dtype not in ("int32", "int64") or index.shape != defined[0].shape for index in defined):
        return False
    if record.what == "aclnnIndex" or target.dtype not in ("int64", "uint8"):
        return True
    tail = math.prod(target.shape[len(indices) :])
    is_large = target.numel > 5_400_000 and tail <= 100
    return not (defined[0].numel > 100 or 70 < tail <= 100 or tail > 128 or is_large)
