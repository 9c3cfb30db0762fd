"""Tensors on the disk: files hashed and flushed as they are written, and sharded state that any number of ranks reads.

Every rank writes its part of the training state to `training.rank<r>.safetensors`, without talking to the others.
`training.json`, the index, holds for every tensor its dtype, its whole shape, and its chunks: which rank wrote which
box of it. A box is an offset and a size, one number per dimension. A reader cuts from these chunks the box that it
needs, so a state that 8 ranks wrote loads into 1, 2 or 16.

File format: https://huggingface.co/docs/safetensors (a length, a JSON header, the tensors' bytes). Unlike a pickle, it
cannot run anything when it is read.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanochat.ground.paths import naming
from nanochat.ground.sharding import held_box, is_dtensor, local

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
MAX_HEADER_BYTES = 16 << 20  # in a safetensors file: a tensor takes 100 bytes
PIECE_BYTES = 1 << 23  # hashed and written at once: still in the processor's cache when it is written

# ---------------------------------------------------------------------- files


def write_file(path: Path, parts: Iterable[Any]) -> dict[str, Any]:
    """Write buffers one after the other through to the disk; returns the file's `bytes` and `sha256`.

    The hash covers the bytes in memory. A file that differs from them later is damaged, whatever damaged it.
    """
    digest = hashlib.sha256()
    size = 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    with naming(path):
        try:
            for part in parts:
                view = memoryview(part)
                size += len(view)
                for start in range(0, len(view), PIECE_BYTES):
                    piece = view[start : start + PIECE_BYTES]
                    digest.update(piece)
                    while piece:  # os.write may write less than it is given
                        written = os.write(handle, piece)
                        piece = piece[written:]
            os.fsync(handle)  # without it the bytes may still be in the page cache when the power fails
        finally:
            os.close(handle)
    return {"bytes": size, "sha256": digest.hexdigest()}


def write_json(path: Path, content: Any) -> dict[str, Any]:
    """`write_file` of a JSON document."""
    return write_file(path, [json.dumps(content, indent=1).encode()])


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> dict[str, Any]:
    """`write_file` of tensors, as safetensors."""
    # The widest dtypes first: then every tensor starts at a multiple of its element's size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name in names:
        tensor = tensors[name]
        offsets = [end, end + tensor.nbytes]
        header[name] = {"dtype": DTYPES[dtype_name(tensor)], "shape": list(tensor.shape), "data_offsets": offsets}
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data start at a multiple of 8 bytes

    # Each tensor is written directly from memory, a device's tensor through the host, without a second copy of the
    # state.
    def parts() -> Iterator[Any]:
        yield len(text).to_bytes(8, "little")
        yield text
        for name in names:
            if tensors[name].numel():
                yield tensors[name].cpu().contiguous().reshape(-1).view(torch.uint8).numpy()

    return write_file(path, parts())


def torch_dtype(code: str) -> torch.dtype:
    """The dtype of a safetensors code, such as torch.float32 of F32. Raises KeyError: for others than DTYPES has."""
    return {theirs: getattr(torch, ours) for ours, theirs in DTYPES.items()}[code]


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def facts(path: Path) -> dict[str, Any]:
    """A file's `bytes` and `sha256` as they are on the disk."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    with naming(path):
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def header(path: Path) -> dict[str, tuple[list[int], str]]:
    """The shape and the dtype, a value of DTYPES, of each tensor in a safetensors file.

    Raises ValueError: when its header is too large to be one. Raises SafetensorError: when it cannot be read.
    """
    with path.open("rb") as file:
        if int.from_bytes(file.read(8), "little") > MAX_HEADER_BYTES:
            raise ValueError(f"{path.name}: its header is too large")
    with safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (piece.get_shape(), piece.get_dtype()) for name, piece in slices.items()}


# ---------------------------------------------------------------------- sharded state


def share_name(rank: int) -> str:
    return f"training.rank{rank}.safetensors"


def _is_written_by(rank: int, name: str, tensor: Tensor) -> bool:
    """Whether this rank writes the tensor, out of all ranks that hold a copy of the same part."""
    if is_dtensor(tensor):  # a shard that several replicas hold: the first replica's
        copies = [dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
        return all(tensor.device_mesh.get_local_rank(dim) == 0 for dim in copies)
    if name.startswith("rank"):  # what one rank holds: its generators, its loader
        return name.startswith(f"rank{rank}/")
    return rank == 0  # the same on all ranks


def share_of(state: dict[str, Tensor], rank: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors that this rank writes of a state (they alias it), and each one's entry for the index."""
    tensors = {}
    entries = {}
    for name, tensor in state.items():
        if not _is_written_by(rank, name, tensor):
            continue
        offset, size = held_box(tensor)
        if tensor.numel() and not math.prod(size):  # more ranks than rows: this one holds none
            continue
        tensors[name] = local(tensor)
        chunk = {"rank": rank, "offset": offset, "size": size}
        entries[name] = {"dtype": dtype_name(tensor), "shape": list(tensor.shape), "chunks": [chunk]}
    return tensors, entries


def merge(shares: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Join the entries of all ranks into the index.

    Raises ValueError: when they do not belong to one state.
    """
    index: dict[str, Any] = {}
    for entries in shares:
        for name, entry in entries.items():
            known = index.setdefault(name, {**entry, "chunks": []})
            if (known["dtype"], known["shape"]) != (entry["dtype"], entry["shape"]):
                raise ValueError(f"the ranks hold {name} in different shapes")
            known["chunks"] += entry["chunks"]
    check(index)
    return index


def check(index: dict[str, Any]) -> None:
    """Raises ValueError: when a tensor's chunks cannot be the whole tensor."""
    for name, entry in index.items():
        shape = entry["shape"]
        filled = 0
        for chunk in entry["chunks"]:
            offset, size = chunk["offset"], chunk["size"]
            numbers = [*shape, *offset, *size, chunk["rank"]]
            if not len(shape) == len(offset) == len(size) or not all(isinstance(n, int) and n >= 0 for n in numbers):
                raise ValueError(f"a part of {name} is not a box")
            if any(start + length > whole for start, length, whole in zip(offset, size, shape, strict=True)):
                raise ValueError(f"a part of {name} lies outside of it")
            filled += math.prod(size)
        if filled != math.prod(shape) or entry["dtype"] not in DTYPES:
            raise ValueError(f"parts of {name} are missing")


def read(folder: Path, index: dict[str, Any], state: dict[str, Tensor]) -> None:
    """Fill a state in place. Each rank reads what it holds: its shard of a DTensor, and any other tensor whole.

    Raises ValueError: when the index has no such tensor, or the files are not what it describes.
    """
    # First compare all names, shapes and dtypes: a state of another model changes nothing here.
    writers = set()
    for name, tensor in state.items():
        entry = index.get(name)
        if entry is None or entry["shape"] != list(tensor.shape) or entry["dtype"] != dtype_name(tensor):
            raise ValueError(f"the training state has no such {name}: it belongs to another model or optimizer")
        writers |= {chunk["rank"] for chunk in entry["chunks"]}
    for writer in sorted(writers):
        try:
            with safe_open(folder / share_name(writer), framework="pt") as file:
                for name, tensor in state.items():
                    for chunk in index[name]["chunks"]:
                        if chunk["rank"] == writer:
                            _copy_overlap(file, name, chunk, tensor)
        except (SafetensorError, OSError, IndexError) as error:
            raise ValueError(f"{folder / share_name(writer)} cannot be used ({error})") from error


def _copy_overlap(file: Any, name: str, chunk: dict[str, Any], tensor: Tensor) -> None:
    """Copy the overlap of a chunk in a file and the part of the tensor that this process holds."""
    # Boxes overlap where they overlap in every dimension: from the later start to the earlier end.
    held_offset, held_size = held_box(tensor)
    from_chunk = []
    to_held = []
    for dim, (start, held_start) in enumerate(zip(chunk["offset"], held_offset, strict=True)):
        first = max(start, held_start)
        end = min(start + chunk["size"][dim], held_start + held_size[dim])
        if first >= end:
            return  # nothing in common
        from_chunk.append(slice(first - start, end - start))
        to_held.append(slice(first - held_start, end - held_start))
    # Only the overlap is read. It is checked against the index before it is copied.
    stored = file.get_slice(name)
    if stored.get_shape() != chunk["size"]:
        raise ValueError(f"{share_name(chunk['rank'])} holds {name} in another shape than training.json")
    part = stored[tuple(from_chunk)] if from_chunk else file.get_tensor(name)  # a slice cannot read a single number
    if part.dtype != tensor.dtype:
        raise ValueError(f"{share_name(chunk['rank'])} holds {name} in another dtype than training.json")
    local(tensor)[tuple(to_held)].copy_(part)
