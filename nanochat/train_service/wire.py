"""Protocol buffers for tensors: the tinker client and the server exchange them in addition to JSON.

The client sends forward_backward in this form, and accepts results with tensors only in this form. The messages are the
ones of its package; here are their bounds, and what they mean.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanochat.ground.cli import UserError

CONTENT_TYPE = "application/x-protobuf"
MASKED_LOGPROB = -99999.0  # for a place without a token in a table of the most likely tokens
MAX_TOPK = 100  # the most likely tokens of a place, as targets and in results
MAX_DATUMS = 4096  # in a request; the client sends at most 1,024 by default
MAX_PARTS = 64  # in a datum: pieces of its input, and what its loss reads; also the settings of a loss
MAX_DIMS = 4
NOT_A_REQUEST = "the body is not a forward_backward request in the form of protocol buffers"

_DTYPES = {1: "<f4", 2: "<i8", 3: "<i4"}
_FLOAT32 = 1


def messages() -> Any:
    """The client's messages, by name. The import takes a second where torch is in memory."""
    from tinker.proto import tinker_public_pb2

    return tinker_public_pb2


# ---------------------------------------------------------------------- requests


@dataclass(frozen=True)
class Datum:
    """One sequence of a batch, with T tokens."""

    tokens: np.ndarray  # (T,)
    inputs: dict[str, np.ndarray]  # the loss's inputs by name, in the shapes that the client sent


@dataclass(frozen=True)
class ForwardBackward:
    """The request of forward and of forward_backward."""

    data: list[Datum]
    loss: str
    settings: dict[str, float]
    has_backward: bool


@dataclass(frozen=True)
class Outline:
    """What a request's bytes say before they are parsed."""

    model_id: str
    number: int  # its number among the client's requests to this model
    mistake: str = ""  # it has more parts than a request may have; what follows them was not looked at


def outline(content: bytes) -> Outline:
    """Count the parts of a request: each becomes objects when it is parsed, 2 bytes of it up to 250.

    It walks over the fields in Python, and so, unlike the parser, it never keeps other threads waiting.

    Raises UserError: when the bytes are not such a request.
    """
    model_id, number = "", 0
    datums = settings = 0
    view = memoryview(content)
    for field, value in _fields(view):
        if field == 1 and isinstance(value, memoryview):
            model_id = bytes(value[:200]).decode(errors="replace")
        elif field == 2 and isinstance(value, int):
            number = value
        elif field == 3 and isinstance(value, memoryview):
            datums += 1
            for parts, _ in enumerate(_fields(value), 1):
                if parts > MAX_PARTS:
                    return Outline(model_id, number, f"datum {datums - 1} has more than {MAX_PARTS} parts")
        else:
            settings += 1
        if datums > MAX_DATUMS:
            return Outline(model_id, number, f"the request has more than {MAX_DATUMS:,} data: send it in several")
        if settings > MAX_PARTS:
            return Outline(model_id, number, f"the request has more than {MAX_PARTS} settings")
    return Outline(model_id, number)


def _fields(view: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The numbers and values of a message's fields. https://protobuf.dev/programming-guides/encoding/"""
    place = 0
    while place < len(view):
        key, place = _varint(view, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(view, place)
            yield key >> 3, value
            continue
        if kind == 2:
            size, place = _varint(view, place)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise UserError(NOT_A_REQUEST)
        if place + size > len(view):
            raise UserError(NOT_A_REQUEST)
        yield key >> 3, view[place : place + size]
        place += size


def _varint(view: memoryview, place: int) -> tuple[int, int]:
    """A number, 7 bits a byte, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(view):
            break
        byte = view[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise UserError(NOT_A_REQUEST)


def read_forward_backward(content: bytes) -> ForwardBackward:
    """Raises UserError: when the bytes are not such a request, or contain something other than text tokens."""
    from google.protobuf.message import DecodeError

    try:
        message = messages().ForwardBackwardRequest.FromString(content)
    except DecodeError:
        raise UserError(NOT_A_REQUEST) from None
    settings = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.text:
            raise UserError(f"loss_fn_config {name[:50]!r}: a number, and this is a text")
        settings[name] = value.number
    data = [_read_datum(datum, place) for place, datum in enumerate(message.data)]
    return ForwardBackward(data, message.loss_fn, settings, has_backward=not message.forward_only)


def _read_datum(message: Any, place: int) -> Datum:
    pieces = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise UserError(f"datum {place}: this model reads only text, and its input has an image or sound")
        pieces.append(_array(chunk.encoded_text.tokens, "<i4", f"datum {place}: model_input"))
    inputs = {name: _tensor(value, f"datum {place}: {name[:50]!r}") for name, value in message.loss_fn_inputs.items()}
    return Datum(np.concatenate(pieces).astype(np.int64) if pieces else np.empty(0, np.int64), inputs)


def _tensor(message: Any, what: str) -> np.ndarray:
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise UserError(f"{what} has a dtype that is neither float32 nor int64")
    if len(message.shape) > MAX_DIMS:
        raise UserError(f"{what} has {len(message.shape)} dimensions: at most {MAX_DIMS}")
    if message.HasField("sparse_csr"):
        return _dense(message.sparse_csr, tuple(message.shape), dtype, what)
    values = _array(message.dense, dtype, what)
    shape = tuple(message.shape) or (len(values),)
    if min(shape, default=0) < 0 or math.prod(shape) != len(values):
        raise UserError(f"{what} has {len(values)} values, which do not fill its shape {list(shape)[:8]}")
    return values.reshape(shape)


def _dense(message: Any, shape: tuple[int, ...], dtype: str, what: str) -> np.ndarray:
    """A matrix in compressed rows: the client sends this form if most elements are zeros."""
    values = _array(message.values, dtype, what)
    starts = _array(message.crow_indices, "<i8", what)
    columns = _array(message.col_indices, "<i8", what)
    if len(shape) != 2 or not 0 <= shape[0] == len(starts) - 1 or not 0 <= shape[1] <= MAX_TOPK:
        raise UserError(f"{what} is a sparse matrix of the shape {list(shape)[:8]}: at most {MAX_TOPK} columns")
    counts = np.diff(starts)
    is_whole = len(columns) == len(values) and starts[0] == 0 and (counts >= 0).all() and starts[-1] == len(values)
    if not is_whole or not ((columns >= 0) & (columns < shape[1])).all():
        raise UserError(f"{what} is not a sparse matrix: its rows and columns do not fit its values")
    matrix = np.zeros(shape, dtype)
    matrix[np.repeat(np.arange(shape[0]), counts), columns] = values
    return matrix


def _array(content: bytes, dtype: str, what: str) -> np.ndarray:
    size = np.dtype(dtype).itemsize
    if len(content) % size:
        raise UserError(f"{what} has {len(content)} bytes, not a multiple of {size}")
    return np.frombuffer(content, dtype).copy()  # a copy that torch may write to


# ---------------------------------------------------------------------- results


def write_forward_backward(outputs: Sequence[dict[str, np.ndarray]], metrics: dict[str, float]) -> bytes:
    """The result of a batch: for each datum the same fields, each a float32 array of any length."""
    message = messages().ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(outputs))
    for name in outputs[0] if outputs else ():
        # All arrays of a field one after the other, and the start of each, in bytes.
        arrays = [np.ascontiguousarray(one[name], "<f4") for one in outputs]
        offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8")
        batch = record.fields[name]
        batch.data = b"".join(array.tobytes() for array in arrays)
        batch.offsets = offsets.tobytes()
        batch.dtype = _FLOAT32
        batch.trailing_shape.extend(arrays[0].shape[1:])
    return message.SerializeToString()


def topk(ids: np.ndarray, logprobs: np.ndarray) -> Any:
    """The message for the k most likely tokens at n places, the most likely first: their ids and logprobs (n, k)."""
    length, k = ids.shape
    fields = {"token_ids": ids.astype("<i4").tobytes(), "logprobs": logprobs.astype("<f4").tobytes()}
    return messages().TopkLogprobs(**fields, k=k, length=length)
