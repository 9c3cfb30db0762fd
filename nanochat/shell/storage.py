"""Tensors on the disk: files flushed and hashed as they are written, and sharded state that any number of ranks reads.

A rank writes its share of the training state to `training.rank<r>.safetensors`; `training.json`, the index, says for
every tensor its dtype, its whole shape, and which rank wrote which box of it. What a rank writes and reads is planned
by torch.distributed.checkpoint, whose planners know how a DTensor lies on its mesh; the files are ours, so that none
is a pickle. Ranks need not talk to each other to plan: a tensor that all hold alike is rank 0's to write, a replica
of a shard is the first one's, and a tensor of one rank alone has its name begin with `rank<r>/`.

The file format: https://huggingface.co/docs/safetensors (a length, a JSON header, the tensors' bytes).
"""

import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
PIECE_BYTES = 1 << 23  # hashed and written at once: still in the processor's cache when it is written


def write_file(path: Path, parts: Iterable[Any]) -> dict[str, Any]:
    """Write buffers one after the other through to the disk; returns the file's `bytes` and `sha256`.

    The hash is of what was to be written, so a file that differs from it is damaged however that came about.
    """
    digest, size = hashlib.sha256(), 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for part in parts:
            view = memoryview(part)
            size += len(view)
            for start in range(0, len(view), PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                digest.update(piece)
                while piece:
                    piece = piece[os.write(handle, piece) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    return {"bytes": size, "sha256": digest.hexdigest()}


def write_json(path: Path, content: Any) -> dict[str, Any]:
    """`write_file` of a JSON document."""
    return write_file(path, [json.dumps(content, indent=1).encode()])


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> dict[str, Any]:
    """`write_file` of tensors on the host, as safetensors."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))  # so each is aligned
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        dtype = DTYPES[dtype_name(tensor)]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = (t.contiguous().reshape(-1).view(torch.uint8).numpy() for _, t in ordered if t.numel())
    return write_file(path, itertools.chain([len(text).to_bytes(8, "little"), text], data))


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def share_name(rank: int) -> str:
    return f"training.rank{rank}.safetensors"


def share_of(state: dict[str, Tensor], rank: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What this rank writes of a state: tensors (they alias the state), and each one's entry for the index."""
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan  # half a second to import
    from torch.distributed.tensor import DTensor, Replicate

    def is_mine(name: str, tensor: Tensor) -> bool:
        if isinstance(tensor, DTensor):
            place = tensor.device_mesh.get_coordinate()
            return place is not None and not any(
                i for i, kind in zip(place, tensor.placements, strict=True) if isinstance(kind, Replicate)
            )
        return rank == 0 or name.startswith(f"rank{rank}/")

    mine = {name: tensor for name, tensor in state.items() if is_mine(name, tensor)}
    tensors, entries = {}, {}
    for item in create_default_local_save_plan(mine, rank == 0).items:
        name, data = item.index.fqn, item.tensor_data
        assert data is not None
        if data.size.numel() and not data.chunk.sizes.numel():  # more ranks than rows
            continue
        tensor = mine[name]
        tensors[name] = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        entries[name] = {
            "dtype": dtype_name(tensor), "shape": list(data.size),
            "chunks": [{"rank": rank, "offset": list(data.chunk.offsets), "size": list(data.chunk.sizes)}],
        }  # fmt: skip
    return tensors, entries


def merge(entries: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The index out of what `share_of` gave on every rank.

    Raises ValueError: when the shares are not those of one state.
    """
    index: dict[str, Any] = {}
    for name, entry in itertools.chain.from_iterable(share.items() for share in entries):
        known = index.setdefault(name, {**entry, "chunks": []})
        if (known["dtype"], known["shape"]) != (entry["dtype"], entry["shape"]):
            raise ValueError(f"the ranks hold {name} in different shapes")
        known["chunks"] += entry["chunks"]
    return check(index)


def check(index: dict[str, Any]) -> dict[str, Any]:
    """The index itself. Raises ValueError: when some tensor's boxes cannot be the whole of it."""
    for name, entry in index.items():
        shape, filled = entry["shape"], 0
        for chunk in entry["chunks"]:
            offset, size = chunk["offset"], chunk["size"]
            numbers = (*shape, *offset, *size, chunk["rank"])
            fits = len(shape) == len(offset) == len(size) and all(isinstance(n, int) and n >= 0 for n in numbers)
            if not fits or any(o + s > whole for o, s, whole in zip(offset, size, shape, strict=True)):
                raise ValueError(f"a part of {name} lies outside it")
            filled += math.prod(size)
        if filled != math.prod(shape) or entry["dtype"] not in DTYPES:
            raise ValueError(f"parts of {name} are missing")
    return index


def read(folder: Path, index: dict[str, Any], state: dict[str, Tensor]) -> None:
    """Fill a state in place, each rank by itself: DTensors on any mesh take their part, other tensors the whole.

    Raises ValueError: when the index has no such tensor, or the files are not what it says.
    """
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    wanted, writers = {}, {}
    for name, tensor in state.items():
        entry = index.get(name)
        if entry is None:
            raise ValueError(f"the training state has no {name}: it belongs to another model or optimizer")
        if entry["shape"] != list(tensor.shape) or entry["dtype"] != dtype_name(tensor):
            raise ValueError(f"the training state's {name} has another shape: it belongs to another model")
        chunks = [ChunkStorageMetadata(torch.Size(c["offset"]), torch.Size(c["size"])) for c in entry["chunks"]]
        wanted[name] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, chunks)
        writers |= {(name, tuple(c["offset"])): c["rank"] for c in entry["chunks"]}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(state, Metadata(wanted), is_coordinator=True)
    by_writer: dict[int, list[Any]] = {}
    for item in planner.create_local_plan().items:
        assert item.storage_index.offset is not None
        writer = writers[item.storage_index.fqn, tuple(item.storage_index.offset)]
        by_writer.setdefault(writer, []).append(item)
    for writer, items in sorted(by_writer.items()):
        try:
            with safe_open(folder / share_name(writer), framework="pt") as file:
                for item in items:
                    name, box = item.storage_index.fqn, zip(item.storage_offsets, item.lengths, strict=True)
                    slices = tuple(slice(start, start + length) for start, length in box)
                    part = file.get_slice(name)[slices] if slices else file.get_tensor(name)
                    target = planner.resolve_tensor(item)
                    if part.shape != target.shape or part.dtype != target.dtype:
                        raise ValueError(f"{share_name(writer)} holds another {name} than the index says")
                    target.detach().copy_(part)
        except (SafetensorError, OSError, IndexError) as error:
            raise ValueError(f"{folder / share_name(writer)} cannot be used ({error})") from error


def facts(path: Path) -> dict[str, Any]:
    """A file's `bytes` and `sha256` as they are on the disk."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
