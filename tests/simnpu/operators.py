"""What torch_npu's custom operators compute, written from the vendor's documentation as plain functions on CPU tensors.

`OPERATORS` maps a dispatcher name ("npu::npu_rms_norm", with ".overload" where there is one) to a function that has
the schema's argument names in the schema's order. A simulated NPU registers them; nothing here needs torch_npu. The
sums are done in fp32 and the result is cast as the operator documents: this says what an operator means and nothing of
how a real kernel rounds. What the documentation refuses, and what is not modelled, raises RuntimeError naming the
operator and the argument, so a caller that works here follows the documented conventions.

It is written without sight of its callers on purpose: a convention misread once is then not misread on both sides.

Sources, named in the docstrings by the word before the colon; [I] marks an inference:
  wheel: torch_npu 2.13.0 itself (docstrings in _op_plugin_docs.py, op_plugin/meta, schemas in libtorch_npu.so)
  op-plugin: gitcode.com/Ascend/op-plugin, docs/context/torch_npu-npu_*.md and op_plugin/ops/opapi/*.cpp
  aclnn: CANN's operator pages (aclnnFlashAttentionScore, aclnnRmsNorm, ...), with gitcode.com/cann/ops-transformer,
    ops-nn (docs/en/context/sparse_mode_introduction.md, <operator>/docs/aclnn*.md, tests/assets/golden.py)
  tiling: the host checks there: flash_attention_score/op_host/arch22/flash_attention_score_tiling_general.cpp,
    rotary_position_embedding/op_host/rope_rotate_half_tiling.cpp
  kernel: the mask reads there: attention/common/op_kernel/attenmask_gs1.h, flash_attention_score/op_kernel

Letters: B batch, N query heads, M key and value heads, S query tokens, K key tokens, D head dim, T packed tokens.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

OPERATORS: dict[str, Callable[..., Any]] = {}

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HALVES = (torch.float16, torch.bfloat16)
INDICES = (torch.int32, torch.int64)
UNBOUNDED = 2147483647  # the default of every token window: no limit
LARGEST = torch.finfo(torch.float32).max  # a masked score is its negative (kernel: NEGATIVE_MIN_VALUE_FP32)
COMPRESSED = 2048  # side of the triangle that stands for any causal or band mask
PREFIX_ROWS = 3072  # rows of the compressed mask of sparse mode 6
STATISTICS = 8  # softmax_max and softmax_sum repeat each value eight times
LAYOUTS = {"BSH": 3, "SBH": 3, "BSND": 4, "BNSD": 4, "TND": 3}  # and how many dimensions each has
LARGEST_HEAD = 768
MOST_HEADS = 256
TILE_ROWS, TILE_COLUMNS = 128, 1024  # one read of a compressed mask (kernel: 128 queries, eight times 128 keys) [I]
VECTOR_CORES = 40  # of an Ascend910B3


def operator(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter the function below into `OPERATORS` as npu::`name`."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        OPERATORS[f"npu::{name}"] = function
        return function

    return enter


def refuse(name: str, argument: str, reason: str) -> NoReturn:
    raise RuntimeError(f"{name}: {argument}: {reason}")


def refuse_given(name: str, **arguments: Any) -> None:
    """Refuse those of `arguments` that are not None: documented as unsupported, or not modelled here."""
    for argument, value in arguments.items():
        if value is not None:
            refuse(name, argument, "not supported, or not modelled: pass None")


def check_dtype(name: str, allowed: Sequence[torch.dtype], **tensors: Tensor | None) -> None:
    for argument, tensor in tensors.items():
        if tensor is None:
            refuse(name, argument, "is missing")
        if tensor.dtype not in allowed:
            refuse(name, argument, f"{tensor.dtype} is not one of {', '.join(str(dtype) for dtype in allowed)}")


def check_same_dtype(name: str, **tensors: Tensor) -> None:
    if len({tensor.dtype for tensor in tensors.values()}) > 1:
        refuse(name, ", ".join(tensors), f"dtypes differ: {', '.join(str(t.dtype) for t in tensors.values())}")


def check_shape(name: str, argument: str, tensor: Tensor, *allowed: Sequence[int]) -> None:
    if tuple(tensor.shape) not in {tuple(shape) for shape in allowed}:
        shapes = " or ".join(str(tuple(shape)) for shape in allowed)
        refuse(name, argument, f"shape {tuple(tensor.shape)}, where {shapes} is documented")


# ---------------------------------------------------------------------------------------------------------------------
# Masks


def outside_band(rows: int, columns: int, before: int | None, after: int) -> Tensor:
    """True where key j is none of i - before ... i + after for query i, both counted from the top left.

    So a query sees `before` keys in front of its own position, itself, and `after` keys behind it: the operator pages'
    own reference masks triu(diagonal=after + 1) and tril(diagonal=-before - 1), and the kernel's two mask reads at
    after + i - j and i - before - 1 - j, say the same. before=None: no limit.
    """
    distance = torch.arange(columns) - torch.arange(rows).unsqueeze(1)  # (rows, columns), j - i
    outside = distance > after
    return outside if before is None else outside | (distance < -before)


def blocked_by_tiles(mask: Tensor, rows: int, columns: int, before: int | None, after: int) -> Tensor:
    """What a compressed mask of any content blocks, True being blocked.

    A tile of the scores that the band crosses reads the window of the mask that starts `delta` rows down (or -delta
    columns right), where delta is how far the tile's corner lies inside the band; the left edge of a band reads a
    second window, inverted. A tile wholly inside the band reads nothing and one wholly outside is never computed.
    So a mask of the wrong content goes wrong near the edges of the band only. (kernel: attenmask_gs1.h,
    ComputeAttenMaskOffsetCompress, ComputeAttenMaskOffsetCompressPre, IsSkipAttentionmask. The tile size is [I].)
    """
    i, j = torch.arange(rows).unsqueeze(1), torch.arange(columns)
    top, left = i // TILE_ROWS * TILE_ROWS, j // TILE_COLUMNS * TILE_COLUMNS
    bottom, right = (top + TILE_ROWS).clamp(max=rows), (left + TILE_COLUMNS).clamp(max=columns)  # first ones beyond

    def window(delta: Tensor) -> Tensor:
        return mask[i - top + delta.clamp(0, TILE_COLUMNS), j - left + (-delta).clamp(0, TILE_ROWS)]

    blocked = window(after + top - left) & (right > top + after)
    blocked |= left > bottom - 1 + after
    if before is not None:
        blocked |= ~window(top - left - before - 1) & (left + before < bottom)
        blocked |= right - 1 < top - before
    return blocked


@functools.cache
def triangle() -> Tensor:
    """The compressed mask as documented."""
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(diagonal=1)


def blocked_by_triangle(mask: Tensor, rows: int, columns: int, before: int | None, after: int) -> Tensor:
    """What the compressed `mask` blocks: the band itself where it is the documented triangle, True above the diagonal.

    The real operator does not look at the content, and neither does this refuse another: see `blocked_by_tiles`.
    """
    if torch.equal(mask.contiguous().view(torch.int64), triangle().view(torch.int64)):  # eight bytes at a time
        return outside_band(rows, columns, before, after)
    return blocked_by_tiles(mask, rows, columns, before, after)


def check_band(name: str, rows: int, columns: int, before: int, after: int) -> None:
    """Refuse a band (from the top left) that holds nothing (tiling: SparseBandModeCheck)."""
    empty = (before < 0 and (after < -before or -before >= columns)) or (
        after < 0 and (-after > before or -after >= rows)
    )
    if empty:
        refuse(
            name, "pre_tockens, next_tockens", f"{before}, {after} from the top left leave nothing of {rows}x{columns}"
        )


def check_inside(name: str, blocked: Tensor, rows: int, columns: int, before: int, after: int) -> None:
    """Refuse a full mask that lets through what the token window leaves out.

    The operator skips whole blocks outside the window and reads the mask inside, so such a key counts or not by where
    the blocks fall: "atten_mask and pre_tockens, next_tockens must agree, or the result is wrong".
    """
    if bool((outside_band(rows, columns, before, after) & ~blocked).any()):
        refuse(name, "atten_mask", f"lets through keys outside pre_tockens={before}, next_tockens={after}")


# ---------------------------------------------------------------------------------------------------------------------
# Layouts


def split_heads(name: str, argument: str, tensor: Tensor, layout: str, heads: int) -> Tensor:
    """View of a batched `tensor` as (B, N, S, D)."""
    if layout == "BNSD":
        return tensor
    if layout == "BSND":
        return tensor.transpose(1, 2)
    if tensor.size(2) % heads:
        refuse(name, argument, f"width {tensor.size(2)} is no multiple of {heads} heads")
    tensor = tensor.unflatten(2, (heads, -1))
    return tensor.transpose(1, 2) if layout == "BSH" else tensor.permute(1, 2, 0, 3)


def merge_heads(tensor: Tensor, layout: str) -> Tensor:
    """(B, N, S, D) back in `layout`, contiguous."""
    if layout == "BNSD":
        return tensor.contiguous()
    if layout == "BSND":
        return tensor.transpose(1, 2).contiguous()
    order = (0, 2, 1, 3) if layout == "BSH" else (2, 0, 1, 3)
    return tensor.permute(order).flatten(2).contiguous()


def packed_lengths(name: str, argument: str, ends: Sequence[int], tokens: int) -> list[int]:
    """Lengths of packed sequences from their cumulative ends; zeros at the end of the list are sequences left out."""
    lengths, last, over = [], 0, False
    for position, end in enumerate(ends):
        over = over or (position > 0 and end == 0 and last > 0)
        if end < 0 or (over and end) or (not over and end < last):
            refuse(name, argument, f"{list(ends)} does not grow: give cumulative ends")
        lengths.append(0 if over else end - last)
        last = last if over else end
    if sum(lengths) > tokens:
        refuse(name, argument, f"{list(ends)} ends beyond the {tokens} tokens there are")
    return lengths


# ---------------------------------------------------------------------------------------------------------------------
# Attention itself, on (B, N, S, D)


def attention_scores(q: Tensor, k: Tensor, scale: float, pse: Tensor | None, add_first: bool) -> Tensor:
    """Scaled scores (B, N, S, K) in fp32; query head n reads key head n // (N / M)."""
    groups = q.size(1) // k.size(1)
    grouped = q.float().unflatten(1, (k.size(1), groups))  # (B, M, N / M, S, D)
    scores = (grouped @ k.float().unsqueeze(2).transpose(-1, -2)).flatten(1, 2)  # (B, N, S, K)
    if pse is None:
        return scores * scale
    return (scores + pse.float()) * scale if add_first else scores * scale + pse.float()


def attend(scores: Tensor, v: Tensor, blocked: Tensor | None, zero_rows: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over `scores` with what is `blocked` (True) left out: the output, the largest score, the sum.

    A query with every key blocked: zeros if `zero_rows` (and a sum so large that the gradient is zero too), otherwise
    the mean of all values, every score being the same most negative number. The operator pages only say that precision
    suffers there; both are what the kernels' constants give (NEGATIVE_MIN_VALUE_FP32, POSITIVE_MAX_VALUE_FP32) [I].
    """
    if scores.size(-1) == 0:
        largest = torch.full((*scores.shape[:-1], 1), -LARGEST)
        return torch.zeros(*scores.shape[:-1], v.size(-1)), largest, -largest
    if blocked is not None:
        scores = scores.masked_fill(blocked, -LARGEST)
    largest = scores.amax(-1, keepdim=True)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    if blocked is not None and zero_rows:
        empty = largest == -LARGEST
        weights, total = weights.masked_fill(empty, 0.0), total.masked_fill(empty, LARGEST)
    grouped = (weights / total).unflatten(1, (v.size(1), -1))  # (B, M, N / M, S, K)
    return (grouped @ v.float().unsqueeze(2)).flatten(1, 2), largest, total


# ---------------------------------------------------------------------------------------------------------------------
# npu_fusion_attention


@dataclass
class Piece:
    """A part of a fusion attention that is computed at once: the whole batch, or one packed sequence."""

    q: Tensor  # (B, N, S, D)
    k: Tensor  # (B, M, K, D)
    v: Tensor  # (B, M, K, Dv)
    blocked: Tensor | None  # True: out; broadcasts to (B, N, S, K)
    zero_rows: bool


@dataclass
class FusionAttention:
    """The checked arguments that the fusion attention operators share, cut into pieces."""

    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    head_num: int
    layout: str
    pse: Tensor | None
    padding_mask: Tensor | None
    atten_mask: Tensor | None
    scale: float
    keep_prob: float
    pre_tockens: int
    next_tockens: int
    inner_precise: int
    prefix: Sequence[int] | None
    actual_seq_qlen: Sequence[int] | None
    actual_seq_kvlen: Sequence[int] | None
    sparse_mode: int
    softmax_layout: str
    sink: Tensor | None
    dropout_mask: Tensor | None = None
    pse_type: int = 1

    def __post_init__(self) -> None:
        self.layout = self.layout.upper()  # op-plugin: case-insensitive
        self.packed = self.layout == "TND"
        self._check_options()
        check_dtype(self.name, FLOATS, query=self.query, key=self.key, value=self.value)
        check_same_dtype(self.name, query=self.query, key=self.key, value=self.value)
        for argument in ("query", "key", "value"):
            tensor = getattr(self, argument)
            if tensor.dim() != LAYOUTS[self.layout]:
                refuse(self.name, argument, f"{tensor.dim()} dimensions do not fit input_layout {self.layout}")
        self.pieces = self._cut_packed() if self.packed else [self._whole_batch()]

    def _check_options(self) -> None:
        name = self.name
        refuse_given(name, padding_mask=self.padding_mask, sink=self.sink, dropout_mask=self.dropout_mask)
        if self.layout not in LAYOUTS:
            refuse(name, "input_layout", f"{self.layout} is not one of {', '.join(LAYOUTS)}")
        if not 0 < self.head_num <= MOST_HEADS:
            refuse(name, "head_num", f"{self.head_num} is not in 1 ... {MOST_HEADS}")
        if not 0 < self.keep_prob <= 1:
            refuse(name, "keep_prob", f"{self.keep_prob} is not in (0, 1]")
        if self.keep_prob != 1:
            refuse(name, "keep_prob", "dropout is not modelled")
        modes = (0, 1, 2, 3, 4, 6, 7, 8) if self.packed else range(7)
        if self.sparse_mode not in modes:
            refuse(name, "sparse_mode", f"{self.sparse_mode} is not one of {list(modes)} for layout {self.layout}")
        if self.inner_precise not in (0, 1, 2):
            refuse(name, "inner_precise", f"{self.inner_precise} is not one of 0, 1, 2")
        if self.softmax_layout not in ("", "TND") or (self.softmax_layout and not self.packed):
            refuse(name, "softmax_layout", "takes '' and, for input_layout TND, 'TND'")
        if self.pse_type not in (0, 1):
            refuse(name, "pse_type", "0 (multiply, then add) and 1 (add, then multiply) are modelled, 2 and 3 are not")
        if self.pse is None and self.pse_type != 1:
            refuse(name, "pse_type", "must be 1 without pse")

    def _check_heads(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """q (..., N, S, D), k and v (..., M, K, D)."""
        name = self.name
        if q.size(-3) != self.head_num:
            refuse(name, "head_num", f"{self.head_num}, but query has {q.size(-3)} heads")
        if k.size(-3) == 0 or q.size(-3) % k.size(-3):
            refuse(name, "key", f"{q.size(-3)} query heads are no multiple of {k.size(-3)} key heads")
        if k.shape[:-1] != v.shape[:-1]:
            refuse(name, "value", f"shape {tuple(self.value.shape)} does not go with key's {tuple(self.key.shape)}")
        if q.size(-1) != k.size(-1) or not 0 < v.size(-1) <= k.size(-1):
            refuse(name, "value", f"head dims {q.size(-1)}, {k.size(-1)}, {v.size(-1)}: Dq = Dk >= Dv is needed")
        if q.size(-1) > LARGEST_HEAD:
            refuse(name, "query", f"head dim {q.size(-1)} is above {LARGEST_HEAD}")

    def _whole_batch(self) -> Piece:
        if self.actual_seq_qlen or self.actual_seq_kvlen:
            refuse(self.name, "actual_seq_qlen, actual_seq_kvlen", "belong to input_layout TND")
        q = split_heads(self.name, "query", self.query, self.layout, self.head_num)
        kv_heads = self.key.size(2) // max(q.size(3), 1) if self.layout in ("BSH", "SBH") else 1  # 1: not used
        k = split_heads(self.name, "key", self.key, self.layout, max(kv_heads, 1))
        v = split_heads(self.name, "value", self.value, self.layout, max(kv_heads, 1))
        self._check_heads(q, k, v)
        if q.size(0) != k.size(0):
            refuse(self.name, "key", f"batch {k.size(0)}, where query has {q.size(0)}")
        if 0 in (q.size(0), q.size(2), k.size(2)):
            refuse(self.name, "query, key", "empty tensors are not modelled")
        if self.pse is not None:
            batch, heads, rows, columns = q.size(0), q.size(1), q.size(2), k.size(2)
            check_dtype(self.name, (self.query.dtype,), pse=self.pse)
            shapes = [(b, heads, s, columns) for b in (batch, 1) for s in (rows, 1)]
            check_shape(self.name, "pse", self.pse, *shapes)  # the compressed form, 1024 rows, is not modelled
        blocked, zero_rows = self._mask(q.size(0), q.size(2), k.size(2), self.sparse_mode, range(q.size(0)))
        return Piece(q, k, v, blocked, zero_rows)

    def _cut_packed(self) -> list[Piece]:
        name = self.name
        q_ends, k_ends = list(self.actual_seq_qlen or []), list(self.actual_seq_kvlen or [])
        if not q_ends or len(q_ends) != len(k_ends):
            refuse(name, "actual_seq_qlen, actual_seq_kvlen", "TND needs both, with as many entries")
        refuse_given(name, pse=self.pse)
        self._check_heads(self.query.transpose(0, 1), self.key.transpose(0, 1), self.value.transpose(0, 1))
        self.q_lengths = packed_lengths(name, "actual_seq_qlen", q_ends, self.query.size(0))
        self.k_lengths = packed_lengths(name, "actual_seq_kvlen", k_ends, self.key.size(0))
        spare = (self.query.size(0) > sum(self.q_lengths), self.key.size(0) > sum(self.k_lengths))
        if all(spare) and (q_ends[-1] or k_ends[-1]):
            refuse(name, "actual_seq_qlen, actual_seq_kvlen", "tokens left out at the end need zeros at the end")
        used = [index for index, length in enumerate(self.q_lengths) if length]
        if not used:
            refuse(name, "actual_seq_qlen", "every sequence is empty")
        banded = {7: used[-1], 8: used[0]}.get(self.sparse_mode)  # the sequence that was cut between devices
        pieces, q_start, k_start = [], 0, 0
        for index, (rows, columns) in enumerate(zip(self.q_lengths, self.k_lengths, strict=True)):
            # (1, N, S, D)
            q = self.query[q_start : q_start + rows].transpose(0, 1).unsqueeze(0)
            k = self.key[k_start : k_start + columns].transpose(0, 1).unsqueeze(0)
            v = self.value[k_start : k_start + columns].transpose(0, 1).unsqueeze(0)
            mode = self.sparse_mode
            if mode in (7, 8):
                mode = 4 if index == banded else {7: 3, 8: 2}[mode]
            blocked = None
            if rows and columns:
                blocked, _ = self._mask(1, rows, columns, mode, (index,))
                if blocked is not None and bool(blocked.all(-1).any()):
                    refuse(
                        name, "atten_mask", f"blocks every key of a query of sequence {index}; TND does not take that"
                    )
            pieces.append(Piece(q, k, v, blocked, True))
            q_start, k_start = q_start + rows, k_start + columns
        return pieces

    def _mask(
        self, batch: int, rows: int, columns: int, mode: int, members: Sequence[int]
    ) -> tuple[Tensor | None, bool]:
        """What is blocked of `rows` queries and `columns` keys, and whether queries that see nothing give zeros.

        Without a mask nothing is, whatever sparse_mode says. Modes: 0 the mask as given, inside the token window; 1 the
        mask as given; 2 causal from the top left; 3 causal from the bottom right; 4 a band from the bottom right; 5 the
        mask as given, with prefixes; 6 causal from the bottom right and every key before the sequence's prefix.
        """
        name, mask = self.name, self.atten_mask
        if mask is None:
            return None, False
        check_dtype(name, (torch.bool, torch.uint8), atten_mask=mask)
        mask = mask.bool()
        zero_rows = self.inner_precise == 2
        if mode in (0, 1, 5):
            mask = self._full_mask(mask, batch, rows, columns)
            if mode == 0:
                zero_rows |= self._check_window(mask, rows, columns)
            if mode == 5:
                zero_rows |= self._check_prefixed(mask, batch, rows, columns, members)
            return mask, zero_rows
        if mode == 6:
            return self._prefixed_mask(mask, rows, columns, members, zero_rows)
        check_shape(name, f"atten_mask (sparse_mode {mode})", mask, (COMPRESSED, COMPRESSED))
        if mode == 2:
            return blocked_by_triangle(mask, rows, columns, None, 0), zero_rows
        shift = columns - rows  # from the bottom right to the top left
        if mode == 3:
            if self.packed and rows > columns:
                refuse(name, "actual_seq_qlen", f"sparse_mode 3 needs S <= K in every sequence, got {rows} > {columns}")
            return blocked_by_triangle(mask, rows, columns, None, shift), zero_rows or shift < 0
        before, after = self.pre_tockens - shift, self.next_tockens + shift
        if self.sparse_mode == 7 and not (self.pre_tockens >= columns and rows - columns <= self.next_tockens <= 0):
            refuse(name, "pre_tockens, next_tockens", "mode 7 needs pre >= K, S - K <= next <= 0 of the last sequence")
        if self.sparse_mode == 8 and not (self.pre_tockens >= columns and self.next_tockens >= rows - columns):
            refuse(name, "pre_tockens, next_tockens", "mode 8 needs pre >= K and next >= S - K of the first sequence")
        check_band(name, rows, columns, before, after)
        blocked = blocked_by_triangle(mask, rows, columns, before, after)
        return blocked, zero_rows or before < rows - columns or after < 0

    def _full_mask(self, mask: Tensor, batch: int, rows: int, columns: int) -> Tensor:
        if self.packed:  # one mask for all, as large as the longest; a sequence takes its top left corner
            check_shape(self.name, "atten_mask", mask, (max(self.q_lengths), max(self.k_lengths)))
            return mask[:rows, :columns]
        last = (rows, columns)
        shapes = [last, (1, 1, *last), (batch, 1, *last), (batch, self.head_num, *last)]
        check_shape(self.name, "atten_mask", mask, *shapes)
        return mask

    def _check_window(self, mask: Tensor, rows: int, columns: int) -> bool:
        """For mode 0, whose window counts from the top left: whether it leaves queries without a key."""
        before, after = self.pre_tockens, self.next_tockens
        if before >= rows and (after == 0 or after >= columns):
            check_inside(self.name, mask, rows, columns, before, after)
            return False
        check_band(self.name, rows, columns, before, after)
        check_inside(self.name, mask, rows, columns, before, after)
        return before < rows - columns or after < 0

    def _prefixes(self, rows: int, columns: int, members: Sequence[int]) -> list[int]:
        entries = len(self.actual_seq_qlen or ()) if self.packed else len(members)
        if self.prefix is None or len(self.prefix) != entries:
            refuse(self.name, "prefix", f"sparse modes 5 and 6 need one entry a sequence, {entries}")
        if entries > 32:
            refuse(self.name, "prefix", f"{entries} sequences, where prefix takes 32")
        prefixes = [self.prefix[member] for member in members]
        if any(not max(columns - rows, 0) <= prefix <= columns for prefix in prefixes):
            refuse(self.name, "prefix", f"{prefixes} is not within {max(columns - rows, 0)} ... {columns}")
        return prefixes

    def _outside_prefix(self, rows: int, columns: int, prefixes: list[int]) -> Tensor:
        """(B, 1, S, K), True beyond both the causal triangle from the bottom right and the prefix."""
        causal = outside_band(rows, columns, None, columns - rows)
        beyond = torch.arange(columns) >= torch.tensor(prefixes).view(-1, 1, 1, 1)
        return causal & beyond

    def _check_prefixed(self, mask: Tensor, batch: int, rows: int, columns: int, members: Sequence[int]) -> bool:
        if batch > 1 and (mask.dim() != 4 or mask.size(0) != batch):
            refuse(self.name, "atten_mask", "sparse_mode 5 takes (B, N, S, K) or (B, 1, S, K)")
        prefixes = self._prefixes(rows, columns, members)
        if bool((self._outside_prefix(rows, columns, prefixes) & ~mask).any()):
            refuse(self.name, "atten_mask", f"lets through keys that are neither causal nor in prefix {prefixes}")
        return rows > columns and 0 in prefixes

    def _prefixed_mask(
        self, mask: Tensor, rows: int, columns: int, members: Sequence[int], zero_rows: bool
    ) -> tuple[Tensor, bool]:
        check_shape(self.name, "atten_mask (sparse_mode 6)", mask, (PREFIX_ROWS, COMPRESSED))
        right_half = (torch.arange(COMPRESSED) >= COMPRESSED // 2).expand(PREFIX_ROWS - COMPRESSED, -1)
        if not torch.equal(mask, torch.cat((triangle(), right_half))):
            refuse(self.name, "atten_mask", "for sparse_mode 6 only the documented content is modelled")
        prefixes = self._prefixes(rows, columns, members)
        return self._outside_prefix(rows, columns, prefixes), zero_rows or (rows > columns and 0 in prefixes)

    def scores(self, piece: Piece) -> Tensor:
        return attention_scores(piece.q, piece.k, self.scale, self.pse, self.pse_type == 1)

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output in the layout, softmax_max and softmax_sum."""
        outputs, largest, totals = [], [], []
        for piece in self.pieces:
            output, high, total = attend(self.scores(piece), piece.v, piece.blocked, piece.zero_rows)
            outputs.append(output)
            largest.append(high)
            totals.append(total)
        return self._merge(outputs, self.query.size(0)), self._statistics(largest), self._statistics(totals)

    def _merge(self, parts: list[Tensor], tokens: int) -> Tensor:
        """Parts (B, N, S, D) in the layout and dtype of the query; tokens of no sequence get zeros [I]."""
        if not self.packed:
            return merge_heads(parts[0], self.layout).to(self.query.dtype)
        merged = torch.zeros(tokens, parts[0].size(1), parts[0].size(3), dtype=self.query.dtype)
        filled = torch.cat([part.squeeze(0).transpose(0, 1) for part in parts])
        merged[: filled.size(0)] = filled
        return merged

    def _statistics(self, parts: list[Tensor]) -> Tensor:
        """(B, N, S, 8), or for TND a (T, N, 8) that holds, unless softmax_layout is TND, one (N, S, 8) a sequence.

        (wheel, aclnnFlashAttentionVarLenScoreV4: the shape stays, the order is NTD by default. One block a sequence
        is [I], from how ring attention code takes it apart.)
        """
        repeated = [part.expand(*part.shape[:-1], STATISTICS) for part in parts]
        if not self.packed:
            return repeated[0].contiguous()
        if self.softmax_layout:
            repeated = [part.transpose(1, 2) for part in repeated]
        merged = torch.zeros(self.query.size(0) * self.head_num, STATISTICS)
        filled = torch.cat([part.reshape(-1, STATISTICS) for part in repeated])
        merged[: filled.size(0)] = filled
        return merged.view(self.query.size(0), self.head_num, STATISTICS)

    def _take_statistics(self, argument: str, merged: Tensor | None) -> list[Tensor]:
        """The inverse of `_statistics`, (B, N, S, 1) a piece."""
        check_dtype(self.name, (torch.float32,), **{argument: merged})
        assert merged is not None
        if not self.packed:
            q = self.pieces[0].q
            check_shape(self.name, argument, merged, (*q.shape[:3], STATISTICS))
            return [merged[..., :1]]
        check_shape(self.name, argument, merged, (self.query.size(0), self.head_num, STATISTICS))
        parts, start = [], 0
        for rows in self.q_lengths:
            part = merged.reshape(-1, STATISTICS)[start : start + rows * self.head_num, :1]
            if self.softmax_layout:
                part = part.view(rows, self.head_num, 1).transpose(0, 1)
            parts.append(part.reshape(1, self.head_num, rows, 1))
            start += rows * self.head_num
        return parts

    def backward(
        self, dy: Tensor, softmax_max: Tensor | None, softmax_sum: Tensor | None, attention_in: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv from what the forward kept.

        P = exp(score - max) / sum, dV = P^T dY, dS = P * (dY V^T - sum(dY * Y)), dQ = scale dS K, dK = scale dS^T Q
        (aclnnFlashAttentionScoreGrad).
        """
        largest, totals = (
            self._take_statistics("softmax_max", softmax_max),
            self._take_statistics("softmax_sum", softmax_sum),
        )
        check_dtype(self.name, (self.query.dtype,), dy=dy, attention_in=attention_in)
        assert attention_in is not None
        grads, outputs = self._output_pieces("dy", dy), self._output_pieces("attention_in", attention_in)
        d_queries, d_keys, d_values = [], [], []
        for piece, grad, output, high, total in zip(self.pieces, grads, outputs, largest, totals, strict=True):
            kv_heads = piece.k.size(1)
            scores = self.scores(piece)
            if piece.blocked is not None:
                scores = scores.masked_fill(piece.blocked, -LARGEST)
            weights = ((scores - high).exp() / total).unflatten(1, (kv_heads, -1))  # (B, M, N / M, S, K)
            grad, output = grad.float().unflatten(1, (kv_heads, -1)), output.float().unflatten(1, (kv_heads, -1))
            q = piece.q.float().unflatten(1, (kv_heads, -1))
            k, v = piece.k.float().unsqueeze(2), piece.v.float().unsqueeze(2)
            d_weights = grad @ v.transpose(-1, -2)
            d_scores = weights * (d_weights - (grad * output).sum(-1, keepdim=True)) * self.scale
            d_queries.append((d_scores @ k).flatten(1, 2))
            d_keys.append((d_scores.transpose(-1, -2) @ q).sum(2))
            d_values.append((weights.transpose(-1, -2) @ grad).sum(2))
        keys = self.key.size(0)
        return self._merge(d_queries, self.query.size(0)), self._merge(d_keys, keys), self._merge(d_values, keys)

    def _output_pieces(self, argument: str, tensor: Tensor) -> list[Tensor]:
        """A tensor of the output's shape as (B, N, S, Dv) pieces."""
        width = self.pieces[0].v.size(3)
        if self.packed:
            check_shape(self.name, argument, tensor, (self.query.size(0), self.head_num, width))
            parts = tensor[: sum(self.q_lengths)].split(self.q_lengths)
            return [part.transpose(0, 1).unsqueeze(0) for part in parts]
        q = self.pieces[0].q
        check_shape(self.name, argument, tensor, merge_heads(q[..., :width], self.layout).shape)
        return [split_heads(self.name, argument, tensor, self.layout, self.head_num)]

    def dropped(self) -> int:
        """numels: how many elements a dropout mask would have."""
        return sum(piece.q.size(0) * self.head_num * piece.q.size(2) * piece.k.size(2) for piece in self.pieces)

    def pse_gradient(self) -> Tensor | None:
        """The page calls dpse reserved: there is one when there is a pse, and nothing is said of its content."""
        return None if self.pse is None else torch.full_like(self.pse, math.nan)


@operator("npu_fusion_attention")
def npu_fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, pse: Tensor | None = None,
    padding_mask: Tensor | None = None, atten_mask: Tensor | None = None, scale: float = 1.0, keep_prob: float = 1.0,
    pre_tockens: int = UNBOUNDED, next_tockens: int = UNBOUNDED, inner_precise: int = 0,
    prefix: Sequence[int] | None = None, actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None, sparse_mode: int = 0, gen_mask_parallel: bool = True,
    sync: bool = False, softmax_layout: str = "", sink: Tensor | None = None, dropout_mask: Tensor | None = None,
    seed: int = 0, offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:  # fmt: skip
    """softmax(mask(scale * (query key^T + pse))) value, and what the gradient needs of it.

    A True or 1 in atten_mask means left out. With atten_mask=None sparse_mode and the token windows are ignored and
    every query sees every key. Modes 2, 3, 4, 7 and 8 take the 2048 x 2048 triangle, True above the diagonal.
    pre_tockens and next_tockens count keys besides the query's own (`outside_band`), for modes 4, 7 and 8 from the
    bottom right (query i stands at key i + K - S), for mode 0 from the top left. Dropout, sink and the compressed pse
    are not modelled.
    Source: wheel (torch_npu.npu_fusion_attention), op-plugin (the page and FlashAttentionKernelNpuOpApi.cpp), aclnn
    (aclnnFlashAttentionScore, aclnnFlashAttentionVarLenScore, sparse_mode_introduction), tiling, kernel.
    """
    attention = FusionAttention(
        "npu_fusion_attention", query, key, value, head_num, input_layout, pse, padding_mask, atten_mask, scale,
        keep_prob, pre_tockens, next_tockens, inner_precise, prefix, actual_seq_qlen, actual_seq_kvlen, sparse_mode,
        softmax_layout, sink, dropout_mask,
    )  # fmt: skip
    output, softmax_max, softmax_sum = attention.forward()
    return output, softmax_max, softmax_sum, query.new_empty(0), seed, offset, attention.dropped()


@operator("npu_fusion_attention_grad")
def npu_fusion_attention_grad(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, *,
    pse: Tensor | None = None, padding_mask: Tensor | None = None, atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None, softmax_sum: Tensor | None = None, softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None, scale_value: float = 1.0, keep_prob: float = 1.0,
    pre_tockens: int = UNBOUNDED, next_tockens: int = UNBOUNDED, inner_precise: int = 0, seed: int = 0,
    offset: int = 0, numels: int = 0, prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None, actual_seq_kvlen: Sequence[int] | None = None, sparse_mode: int = 0,
    gen_mask_parallel: bool = True, sync: bool = False, softmax_layout: str = "", sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """dq, dk, dv, dpse (None without pse) and dsink (empty without sink) of `npu_fusion_attention`.

    Source: wheel (meta registration), aclnnFlashAttentionScoreGrad, aclnnFlashAttentionUnpaddingScoreGrad.
    """
    attention = FusionAttention(
        "npu_fusion_attention_grad", query, key, value, head_num, input_layout, pse, padding_mask, atten_mask,
        scale_value, keep_prob, pre_tockens, next_tockens, inner_precise, prefix, actual_seq_qlen, actual_seq_kvlen,
        sparse_mode, softmax_layout, sink,
    )  # fmt: skip
    gradients = attention.backward(dy, softmax_max, softmax_sum, attention_in)
    return *gradients, attention.pse_gradient(), query.new_empty(0)


@operator("npu_fusion_attention_v2")
def npu_fusion_attention_v2(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *, pse: Tensor | None = None,
    padding_mask: Tensor | None = None, atten_mask: Tensor | None = None, query_rope: Tensor | None = None,
    key_rope: Tensor | None = None, scale: float = 1.0, keep_prob: float = 1.0, pre_tokens: int = UNBOUNDED,
    next_tokens: int = UNBOUNDED, inner_precise: int = 0, prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None, actual_seq_kvlen: Sequence[int] | None = None, sparse_mode: int = 0,
    gen_mask_parallel: bool = True, sync: bool = False, pse_type: int = 1, q_start_idx: Sequence[int] | None = None,
    kv_start_idx: Sequence[int] | None = None, softmax_layout: str = "", sink: Tensor | None = None,
    dropout_mask: Tensor | None = None, seed: int = 0, offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:  # fmt: skip
    """`npu_fusion_attention` with pse_type: 1 as there, 0 scale * (query key^T) + pse. Rope inputs are not modelled.

    Source: wheel (torch_npu.npu_fusion_attention_v2), aclnnFlashAttentionScoreV2.
    """
    name = "npu_fusion_attention_v2"
    refuse_given(name, query_rope=query_rope, key_rope=key_rope, q_start_idx=q_start_idx, kv_start_idx=kv_start_idx)
    attention = FusionAttention(
        name, query, key, value, head_num, input_layout, pse, padding_mask, atten_mask, scale, keep_prob, pre_tokens,
        next_tokens, inner_precise, prefix, actual_seq_qlen, actual_seq_kvlen, sparse_mode, softmax_layout, sink,
        dropout_mask, pse_type,
    )  # fmt: skip
    output, softmax_max, softmax_sum = attention.forward()
    return output, softmax_max, softmax_sum, query.new_empty(0), seed, offset, attention.dropped()


@operator("npu_fusion_attention_grad_v2")
def npu_fusion_attention_grad_v2(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, *,
    pse: Tensor | None = None, padding_mask: Tensor | None = None, atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None, softmax_sum: Tensor | None = None, softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None, query_rope: Tensor | None = None, key_rope: Tensor | None = None,
    scale_value: float = 1.0, keep_prob: float = 1.0, pre_tokens: int = UNBOUNDED, next_tokens: int = UNBOUNDED,
    inner_precise: int = 0, seed: int = 0, offset: int = 0, numels: int = 0, prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None, actual_seq_kvlen: Sequence[int] | None = None, sparse_mode: int = 0,
    gen_mask_parallel: bool = True, sync: bool = False, pse_type: int = 1, q_start_idx: Sequence[int] | None = None,
    kv_start_idx: Sequence[int] | None = None, softmax_layout: str = "", sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """dq, dk, dv, dpse, dq_rope and dk_rope (empty) and dsink (None) of `npu_fusion_attention_v2`.

    Source: wheel (meta registration), aclnnFlashAttentionScoreGradV2.
    """
    name = "npu_fusion_attention_grad_v2"
    refuse_given(name, query_rope=query_rope, key_rope=key_rope, q_start_idx=q_start_idx, kv_start_idx=kv_start_idx)
    attention = FusionAttention(
        name, query, key, value, head_num, input_layout, pse, padding_mask, atten_mask, scale_value, keep_prob,
        pre_tokens, next_tokens, inner_precise, prefix, actual_seq_qlen, actual_seq_kvlen, sparse_mode, softmax_layout,
        sink, None, pse_type,
    )  # fmt: skip
    gradients = attention.backward(dy, softmax_max, softmax_sum, attention_in)
    return *gradients, attention.pse_gradient(), query.new_empty(0), query.new_empty(0), None


def whole_numbers(tensor: Tensor | None) -> list[int] | None:
    return None if tensor is None else [int(number) for number in tensor.tolist()]


@operator("npu_fusion_attention_v3")
def npu_fusion_attention_v3(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, pse: Tensor | None = None,
    padding_mask: Tensor | None = None, atten_mask: Tensor | None = None, scale: float = 1.0, keep_prob: float = 1.0,
    pre_tockens: int = UNBOUNDED, next_tockens: int = UNBOUNDED, inner_precise: int = 0,
    prefix: Sequence[int] | None = None, actual_seq_qlen: Tensor | None = None,
    actual_seq_kvlen: Tensor | None = None, sparse_mode: int = 0, gen_mask_parallel: bool = True, sync: bool = False,
    softmax_layout: str = "", sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`npu_fusion_attention` with the sequence ends, the seed and the offset as int64 tensors, and no numels.

    Source: wheel (op_plugin/meta/_fake_registrations.py; "actual_seq_qlen must use int64 dtype").
    """
    name = "npu_fusion_attention_v3"
    for argument, ends in (("actual_seq_qlen", actual_seq_qlen), ("actual_seq_kvlen", actual_seq_kvlen)):
        if ends is not None:
            check_dtype(name, (torch.int64,), **{argument: ends})
    attention = FusionAttention(
        name, query, key, value, head_num, input_layout, pse, padding_mask, atten_mask, scale, keep_prob, pre_tockens,
        next_tockens, inner_precise, prefix, whole_numbers(actual_seq_qlen), whole_numbers(actual_seq_kvlen),
        sparse_mode, softmax_layout, sink,
    )  # fmt: skip
    output, softmax_max, softmax_sum = attention.forward()
    nothing = torch.zeros(1, dtype=torch.int64)
    return output, softmax_max, softmax_sum, query.new_empty(0), nothing, nothing.clone()


@operator("npu_fusion_attention_grad_v3")
def npu_fusion_attention_grad_v3(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, *,
    pse: Tensor | None = None, padding_mask: Tensor | None = None, atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None, softmax_sum: Tensor | None = None, softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None, scale_value: float = 1.0, keep_prob: float = 1.0,
    pre_tockens: int = UNBOUNDED, next_tockens: int = UNBOUNDED, inner_precise: int = 0, seed: Tensor | None = None,
    offset: Tensor | None = None, prefix: Sequence[int] | None = None, actual_seq_qlen: Tensor | None = None,
    actual_seq_kvlen: Tensor | None = None, sparse_mode: int = 0, gen_mask_parallel: bool = True, sync: bool = False,
    softmax_layout: str = "", sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """dq, dk, dv, dpse and dsink of `npu_fusion_attention_v3`."""
    return npu_fusion_attention_grad(
        query, key, value, dy, head_num, input_layout, pse=pse, padding_mask=padding_mask, atten_mask=atten_mask,
        softmax_max=softmax_max, softmax_sum=softmax_sum, attention_in=attention_in, scale_value=scale_value,
        keep_prob=keep_prob, pre_tockens=pre_tockens, next_tockens=next_tockens, inner_precise=inner_precise,
        prefix=prefix, actual_seq_qlen=whole_numbers(actual_seq_qlen), actual_seq_kvlen=whole_numbers(actual_seq_kvlen),
        sparse_mode=sparse_mode, softmax_layout=softmax_layout, sink=sink,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Attention for inference: prompt, incremental and fused


@dataclass
class InferAttention:
    """The checked arguments of the inference attention operators, which share one meaning.

    Source: wheel (torch_npu.npu_fused_infer_attention_score, npu_prompt_flash_attention, npu_incre_flash_attention),
    aclnnFusedInferAttentionScoreV5 (what TND takes with grouped heads, and lse), kernel (attenmask_gs1.h).
    """

    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    layout: str
    heads: int
    kv_heads: int
    scale: float
    atten_mask: Tensor | None
    pse_shift: Tensor | None = None
    query_lengths: Sequence[int] | None = None
    key_lengths: Sequence[int] | None = None
    sparse_mode: int = 0
    pre_tokens: int = UNBOUNDED
    next_tokens: int = UNBOUNDED
    inner_precise: int = 0
    block_table: Tensor | None = None
    block_size: int = 0
    lengths_argument: str = "actual_seq_lengths_kv"

    def __post_init__(self) -> None:
        name = self.name
        self.kv_heads = self.kv_heads or self.heads
        if self.layout not in ("BSH", "BSND", "BNSD", "BNSD_BSND", "TND"):
            refuse(name, "input_layout", f"{self.layout} is not one of BSH, BSND, BNSD, BNSD_BSND, TND")
        self.packed = self.layout == "TND"
        self.layout, self.layout_out = self.layout[:4], self.layout[-4:]  # BNSD_BSND: what comes in, what goes out
        check_dtype(name, HALVES, query=self.query, key=self.key, value=self.value)
        check_same_dtype(name, query=self.query, key=self.key, value=self.value)
        for argument in ("query", "key", "value", "atten_mask", "pse_shift"):
            tensor = getattr(self, argument)
            if tensor is not None and not tensor.is_contiguous():
                refuse(name, argument, "must be contiguous")
        if self.query.dim() != LAYOUTS[self.layout]:
            refuse(name, "query", f"{self.query.dim()} dimensions do not fit input_layout {self.layout}")
        if not 0 < self.heads <= MOST_HEADS or self.kv_heads < 0 or self.heads % self.kv_heads:
            refuse(name, "num_heads, num_key_value_heads", f"{self.heads} heads are no multiple of {self.kv_heads}")
        if self.heads // self.kv_heads > 64:
            refuse(name, "num_key_value_heads", f"{self.heads} / {self.kv_heads} is above 64")
        if self.inner_precise not in range(4):
            refuse(name, "inner_precise", f"{self.inner_precise} is not one of 0, 1, 2, 3")
        if self.sparse_mode not in range(5):
            refuse(name, "sparse_mode", f"{self.sparse_mode} is not one of 0, 1, 2, 3, 4")
        self._take_query()
        self._take_keys()

    def _take_query(self) -> None:
        """One (N, S, D) a sequence, with the queries in use."""
        name = self.name
        if self.packed:
            if not self.query_lengths:
                refuse(name, "actual_seq_lengths", "TND needs the cumulative ends of the sequences")
            lengths = packed_lengths(name, "actual_seq_lengths", self.query_lengths, self.query.size(0))
            self.q_parts = list(self.query[: sum(lengths)].transpose(0, 1).split(lengths, dim=1))
            self.most_rows = max(lengths)
        else:
            q = split_heads(name, "query", self.query, self.layout, self.heads)  # (B, N, S, D)
            self.most_rows = q.size(2)
            given = self.query_lengths if self.most_rows > 1 else None  # one query a sequence: has no effect
            lengths = self._lengths("actual_seq_lengths", given, q.size(0), q.size(2))
            self.q_parts = [part[:, :length] for part, length in zip(q, lengths, strict=True)]
            if self.layout in ("BSH", "BSND") and self.most_rows > 1 and q.size(1) * q.size(3) >= 65535:
                refuse(name, "query", "heads times head dim must stay below 65535 in BSH and BSND")
        if self.layout_out != self.layout and self.most_rows == 1:
            refuse(name, "input_layout", "BNSD_BSND needs more than one query a sequence")
        heads, _, width = self.q_parts[0].shape
        if heads != self.heads:
            refuse(name, "num_heads", f"{self.heads}, but query has {heads} heads")
        if width > 512 or (self.most_rows > 1 and width % 16):
            refuse(name, "query", f"head dim {width} is above 512 or no multiple of 16")

    def _lengths(self, argument: str, lengths: Sequence[int] | None, batch: int, most: int) -> list[int]:
        if lengths is None or len(lengths) == 0:
            return [most] * batch
        if len(lengths) != 1 and len(lengths) < batch:
            refuse(self.name, argument, f"{len(lengths)} entries for a batch of {batch}: give one or one each")
        taken = list(lengths) * batch if len(lengths) == 1 else list(lengths)[:batch]
        if any(not 0 <= length <= most for length in taken):
            refuse(self.name, argument, f"{taken} is not within 0 ... {most}")
        return taken

    def _take_keys(self) -> None:
        """One (M, K, D) key and value a sequence, with the keys in use."""
        name, batch = self.name, len(self.q_parts)
        if self.key.shape != self.value.shape:
            refuse(name, "value", f"shape {tuple(self.value.shape)} is not key's {tuple(self.key.shape)}")
        if self.block_table is not None:
            self.k_parts, self.v_parts = self._paged(self.key), self._paged(self.value)
        elif self.key.dim() != self.query.dim():
            refuse(name, "key", f"{self.key.dim()} dimensions, where query has {self.query.dim()}")
        elif self.packed:
            if not self.key_lengths or len(self.key_lengths) != batch:
                refuse(name, self.lengths_argument, "TND needs the cumulative ends, one a sequence")
            lengths = packed_lengths(name, self.lengths_argument, self.key_lengths, self.key.size(0))
            self.k_parts = list(self.key[: sum(lengths)].transpose(0, 1).split(lengths, dim=1))
            self.v_parts = list(self.value[: sum(lengths)].transpose(0, 1).split(lengths, dim=1))
            self.most_columns = max(lengths)
        else:
            k = split_heads(name, "key", self.key, self.layout, self.kv_heads)
            v = split_heads(name, "value", self.value, self.layout, self.kv_heads)
            if k.size(0) != batch:
                refuse(name, "key", f"batch {k.size(0)}, where query has {batch}")
            lengths = self._lengths(self.lengths_argument, self.key_lengths, batch, k.size(2))
            self.k_parts = [part[:, :length] for part, length in zip(k, lengths, strict=True)]
            self.v_parts = [part[:, :length] for part, length in zip(v, lengths, strict=True)]
            self.most_columns = k.size(2)
        if self.k_parts[0].size(0) != self.kv_heads:
            refuse(name, "num_key_value_heads", f"{self.kv_heads}, but key has {self.k_parts[0].size(0)} heads")
        if self.k_parts[0].size(2) != self.q_parts[0].size(2):
            refuse(name, "key", f"head dim {self.k_parts[0].size(2)}, where query has {self.q_parts[0].size(2)}")

    def _paged(self, cache: Tensor) -> list[Tensor]:
        """Keys or values (M, K, D) of each sequence from the blocks that the block table names.

        The cache is (blocks, block_size, H) or, for BNSD and TND, (blocks, M, block_size, D); the lengths are those of
        the sequences, never cumulative.
        """
        name, table = self.name, self.block_table
        assert table is not None
        check_dtype(name, (torch.int32,), block_table=table)
        if table.dim() != 2 or table.size(0) != len(self.q_parts):
            refuse(
                name, "block_table", f"shape {tuple(table.shape)}, where ({len(self.q_parts)}, blocks) is documented"
            )
        step = 128 if self.most_rows > 1 else 16
        if not 0 < self.block_size <= 512 or self.block_size % step:
            refuse(name, "block_size", f"{self.block_size} is no multiple of {step} up to 512")
        if not self.key_lengths:
            refuse(name, self.lengths_argument, "is needed with a block_table")
        self.most_columns = table.size(1) * self.block_size
        lengths = self._lengths(self.lengths_argument, self.key_lengths, len(self.q_parts), self.most_columns)
        if cache.dim() == 3:
            if cache.size(1) != self.block_size or cache.size(2) % self.kv_heads:
                refuse(name, "key, value", f"shape {tuple(cache.shape)} is not (blocks, {self.block_size}, H)")
            cache = cache.unflatten(2, (self.kv_heads, -1)).transpose(1, 2)  # (blocks, M, block_size, D)
        elif cache.dim() != 4 or self.layout not in ("BNSD", "TND") or cache.size(2) != self.block_size:
            refuse(name, "key, value", f"shape {tuple(cache.shape)} is no paged cache that layout {self.layout} takes")
        parts = []
        for row, length in zip(table, lengths, strict=True):
            blocks = row[: -(-length // self.block_size)].long()
            if bool(((blocks < 0) | (blocks >= cache.size(0))).any()):
                refuse(name, "block_table", f"{blocks.tolist()} are not all among the {cache.size(0)} blocks")
            parts.append(cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length])
        return parts

    def _whole_mask(self) -> Tensor | None:
        """A mask that is no compressed one, as (B or 1, S, K)."""
        name, mask = self.name, self.atten_mask
        if mask is None:
            return None
        check_dtype(name, (torch.bool, torch.int8, torch.uint8), atten_mask=mask)
        if self.packed:
            refuse(name, "atten_mask", "TND takes none, or the compressed one with sparse_mode 2, 3 or 4")
        batch, rows, columns = len(self.q_parts), self.most_rows, self.most_columns
        if mask.dim() == 4 and mask.size(1) == 1:
            mask = mask.squeeze(1)
        elif mask.dim() == 2:
            mask = mask.unsqueeze(1 if rows == 1 else 0)  # (B, K) for one query a sequence, else (S, K)
        fits = mask.dim() == 3 and mask.size(0) in (1, batch)
        fits = fits and rows <= mask.size(1) <= -(-rows // 16) * 16 and columns <= mask.size(2)
        if not fits or (self.block_table is None and mask.size(2) > -(-columns // 32) * 32):
            shape = tuple(self.atten_mask.shape) if self.atten_mask is not None else ()
            refuse(name, "atten_mask", f"shape {shape} does not fit {batch} x {rows} queries and {columns} keys")
        return mask.bool()

    def _blocked(self, index: int, rows: int, columns: int) -> tuple[Tensor | None, bool]:
        """What is blocked for sequence `index`, and whether queries that see nothing give zeros."""
        mask, zero_rows = self.atten_mask, self.inner_precise >= 2
        if self.sparse_mode < 2 or (self.most_rows == 1 and not self.packed):
            whole = self._whole_mask()
            if whole is None:
                if self.sparse_mode == 1 and self.most_rows > 1:
                    refuse(self.name, "atten_mask", "sparse_mode 1 needs one")
                return None, zero_rows
            blocked = whole[index if whole.size(0) > 1 else 0, :rows, :columns]
            if self.sparse_mode == 0 and self.most_rows > 1:
                before, after = self.pre_tokens, self.next_tokens
                if before + after < 0:
                    refuse(self.name, "pre_tokens, next_tokens", f"{before} + {after} is below 0")
                check_inside(self.name, blocked, rows, columns, before, after)
                zero_rows |= before < rows - columns or after < 0
            return blocked, zero_rows
        if mask is None:
            refuse(self.name, "atten_mask", f"sparse_mode {self.sparse_mode} needs the compressed mask")
        check_dtype(self.name, (torch.bool, torch.int8, torch.uint8), atten_mask=mask)
        side = (COMPRESSED, COMPRESSED)
        check_shape(self.name, f"atten_mask (sparse_mode {self.sparse_mode})", mask, side, (1, *side), (1, 1, *side))
        compressed = mask.bool().view(side)
        shift = columns - rows
        if self.sparse_mode == 2:
            return blocked_by_triangle(compressed, rows, columns, None, 0), zero_rows
        if self.sparse_mode == 3:
            return blocked_by_triangle(compressed, rows, columns, None, shift), zero_rows or shift < 0
        if self.pre_tokens + self.next_tokens < 0:
            refuse(self.name, "pre_tokens, next_tokens", f"{self.pre_tokens} + {self.next_tokens} is below 0")
        before, after = self.pre_tokens - shift, self.next_tokens + shift
        blocked = blocked_by_triangle(compressed, rows, columns, before, after)
        return blocked, zero_rows or before < rows - columns or after < 0

    def _pse(self, index: int, rows: int, columns: int) -> Tensor | None:
        pse = self.pse_shift
        if pse is None:
            return None
        check_dtype(self.name, (self.query.dtype,), pse_shift=pse)
        if self.packed or self.q_parts[0].size(2) % 16:
            refuse(self.name, "pse_shift", "is not for TND, and needs a head dim that is a multiple of 16")
        fits = pse.dim() == 4 and pse.size(0) in (1, len(self.q_parts)) and pse.size(1) == self.heads
        if not fits or pse.size(2) < self.most_rows or pse.size(3) < self.most_columns:
            refuse(self.name, "pse_shift", f"shape {tuple(pse.shape)} is not (B or 1, {self.heads}, >= S, >= K)")
        return pse[index if pse.size(0) > 1 else 0, :, :rows, :columns].unsqueeze(0)

    def forward(self) -> tuple[Tensor, Tensor]:
        """The output in the layout, and lse (B, N, S, 1) or (T, N, 1): log of the sum of the exponentials.

        Queries beyond the lengths, and those of a sequence without keys, get zeros, and inf for lse [I].
        """
        outputs, sums = [], []
        for index, (q, k, v) in enumerate(zip(self.q_parts, self.k_parts, self.v_parts, strict=True)):
            rows, columns = q.size(1), k.size(1)
            spare = 0 if self.packed else self.most_rows - rows
            blocked, zero_rows = self._blocked(index, rows, columns) if rows and columns else (None, True)
            scores = attention_scores(q[None], k[None], self.scale, self._pse(index, rows, columns), add_first=False)
            output, largest, total = attend(scores, v[None], blocked, zero_rows)
            lse = torch.where(total == LARGEST, math.inf, largest + total.log())
            outputs.append(torch.nn.functional.pad(output, (0, 0, 0, spare)))
            sums.append(torch.nn.functional.pad(lse, (0, 0, 0, spare), value=math.inf))
        if not self.packed:
            return merge_heads(torch.cat(outputs).to(self.query.dtype), self.layout_out), torch.cat(sums)
        tokens = self.query.size(0)
        output = torch.cat([part.squeeze(0).transpose(0, 1) for part in outputs]).to(self.query.dtype)  # (T, N, D)
        lse = torch.cat([part.squeeze(0).transpose(0, 1) for part in sums])
        spare = tokens - output.size(0)
        pad = torch.nn.functional.pad
        return pad(output, (0, 0, 0, 0, 0, spare)), pad(lse, (0, 0, 0, 0, 0, spare), value=math.inf)


@operator("npu_fused_infer_attention_score")
def npu_fused_infer_attention_score(
    query: Tensor, key: Tensor, value: Tensor, *, pse_shift: Tensor | None = None, atten_mask: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None, actual_seq_lengths_kv: Sequence[int] | None = None,
    dequant_scale1: Tensor | None = None, quant_scale1: Tensor | None = None, dequant_scale2: Tensor | None = None,
    quant_scale2: Tensor | None = None, quant_offset2: Tensor | None = None, antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None, key_antiquant_scale: Tensor | None = None,
    key_antiquant_offset: Tensor | None = None, value_antiquant_scale: Tensor | None = None,
    value_antiquant_offset: Tensor | None = None, block_table: Tensor | None = None,
    query_padding_size: Tensor | None = None, kv_padding_size: Tensor | None = None,
    key_shared_prefix: Tensor | None = None, value_shared_prefix: Tensor | None = None,
    actual_shared_prefix_len: Sequence[int] | None = None, query_rope: Tensor | None = None,
    key_rope: Tensor | None = None, key_rope_antiquant_scale: Tensor | None = None, num_heads: int = 1,
    scale: float = 1.0, pre_tokens: int = UNBOUNDED, next_tokens: int = UNBOUNDED, input_layout: str = "BSH",
    num_key_value_heads: int = 0, sparse_mode: int = 0, inner_precise: int = 0, block_size: int = 0,
    antiquant_mode: int = 0, key_antiquant_mode: int = 0, value_antiquant_mode: int = 0,
    softmax_lse_flag: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(scale * query key^T + pse, masked) value for inference, without a gradient, and lse (empty if not asked).

    fp16 and bf16, contiguous. A True or 1 in atten_mask means left out. Modes 2, 3 and 4 need the 2048 x 2048 triangle
    and refuse None; mode 0 without a mask sees every key. With one query a sequence (not TND) sparse_mode, the token
    windows and actual_seq_lengths have no effect and a mask is (B, K). The bottom right that modes 3 and 4 count from
    is that of the lengths in use. Lengths are plain for batched layouts and cumulative for TND, except that the keys'
    are plain with a block_table. Quantisation, rope inputs, shared prefixes and left padding are not modelled.
    """
    name = "npu_fused_infer_attention_score"
    refuse_given(
        name, dequant_scale1=dequant_scale1, quant_scale1=quant_scale1, dequant_scale2=dequant_scale2,
        quant_scale2=quant_scale2, quant_offset2=quant_offset2, antiquant_scale=antiquant_scale,
        antiquant_offset=antiquant_offset, key_antiquant_scale=key_antiquant_scale,
        key_antiquant_offset=key_antiquant_offset, value_antiquant_scale=value_antiquant_scale,
        value_antiquant_offset=value_antiquant_offset, query_padding_size=query_padding_size,
        kv_padding_size=kv_padding_size, key_shared_prefix=key_shared_prefix, value_shared_prefix=value_shared_prefix,
        actual_shared_prefix_len=actual_shared_prefix_len, query_rope=query_rope, key_rope=key_rope,
        key_rope_antiquant_scale=key_rope_antiquant_scale,
    )  # fmt: skip
    output, lse = InferAttention(
        name, query, key, value, input_layout, num_heads, num_key_value_heads, scale, atten_mask, pse_shift,
        actual_seq_lengths, actual_seq_lengths_kv, sparse_mode, pre_tokens, next_tokens, inner_precise, block_table,
        block_size,
    ).forward()  # fmt: skip
    return output, lse if softmax_lse_flag else torch.empty(0)


@operator("npu_fused_infer_attention_score.out")
def npu_fused_infer_attention_score_out(
    query: Tensor, key: Tensor, value: Tensor, *, pse_shift: Tensor | None = None, atten_mask: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None, actual_seq_lengths_kv: Sequence[int] | None = None,
    dequant_scale1: Tensor | None = None, quant_scale1: Tensor | None = None, dequant_scale2: Tensor | None = None,
    quant_scale2: Tensor | None = None, quant_offset2: Tensor | None = None, antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None, key_antiquant_scale: Tensor | None = None,
    key_antiquant_offset: Tensor | None = None, value_antiquant_scale: Tensor | None = None,
    value_antiquant_offset: Tensor | None = None, block_table: Tensor | None = None,
    query_padding_size: Tensor | None = None, kv_padding_size: Tensor | None = None,
    key_shared_prefix: Tensor | None = None, value_shared_prefix: Tensor | None = None,
    actual_shared_prefix_len: Sequence[int] | None = None, query_rope: Tensor | None = None,
    key_rope: Tensor | None = None, key_rope_antiquant_scale: Tensor | None = None, num_heads: int = 1,
    scale: float = 1.0, pre_tokens: int = UNBOUNDED, next_tokens: int = UNBOUNDED, input_layout: str = "BSH",
    num_key_value_heads: int = 0, sparse_mode: int = 0, inner_precise: int = 0, block_size: int = 0,
    antiquant_mode: int = 0, key_antiquant_mode: int = 0, value_antiquant_mode: int = 0,
    softmax_lse_flag: bool = False, workspace: Tensor | None = None, out: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`npu_fused_infer_attention_score` into out = [output, lse], the form for graphs, with the caller's workspace."""
    name = "npu_fused_infer_attention_score.out"
    output, lse = npu_fused_infer_attention_score(
        query, key, value, pse_shift=pse_shift, atten_mask=atten_mask, actual_seq_lengths=actual_seq_lengths,
        actual_seq_lengths_kv=actual_seq_lengths_kv, dequant_scale1=dequant_scale1, quant_scale1=quant_scale1,
        dequant_scale2=dequant_scale2, quant_scale2=quant_scale2, quant_offset2=quant_offset2,
        antiquant_scale=antiquant_scale, antiquant_offset=antiquant_offset, key_antiquant_scale=key_antiquant_scale,
        key_antiquant_offset=key_antiquant_offset, value_antiquant_scale=value_antiquant_scale,
        value_antiquant_offset=value_antiquant_offset, block_table=block_table, query_padding_size=query_padding_size,
        kv_padding_size=kv_padding_size, key_shared_prefix=key_shared_prefix, value_shared_prefix=value_shared_prefix,
        actual_shared_prefix_len=actual_shared_prefix_len, query_rope=query_rope, key_rope=key_rope,
        key_rope_antiquant_scale=key_rope_antiquant_scale, num_heads=num_heads, scale=scale, pre_tokens=pre_tokens,
        next_tokens=next_tokens, input_layout=input_layout, num_key_value_heads=num_key_value_heads,
        sparse_mode=sparse_mode, inner_precise=inner_precise, block_size=block_size, antiquant_mode=antiquant_mode,
        key_antiquant_mode=key_antiquant_mode, value_antiquant_mode=value_antiquant_mode,
        softmax_lse_flag=softmax_lse_flag,
    )  # fmt: skip
    if len(out) != 2:
        refuse(name, "out", f"{len(out)} tensors, where the output and lse are needed")
    check_shape(name, "out[0]", out[0], output.shape)
    check_dtype(name, (output.dtype,), **{"out[0]": out[0]})
    out[0].copy_(output)
    if softmax_lse_flag:
        check_shape(name, "out[1]", out[1], lse.shape)
        out[1].copy_(lse)
    return out[0], out[1]


@operator("npu_fused_infer_attention_score_v2")
def npu_fused_infer_attention_score_v2(
    query: Tensor, key: Tensor, value: Tensor, *, query_rope: Tensor | None = None, key_rope: Tensor | None = None,
    pse_shift: Tensor | None = None, atten_mask: Tensor | None = None, actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None, block_table: Tensor | None = None,
    dequant_scale_query: Tensor | None = None, dequant_scale_key: Tensor | None = None,
    dequant_offset_key: Tensor | None = None, dequant_scale_value: Tensor | None = None,
    dequant_offset_value: Tensor | None = None, dequant_scale_key_rope: Tensor | None = None,
    quant_scale_out: Tensor | None = None, quant_offset_out: Tensor | None = None,
    quant_scale_p: Tensor | None = None, learnable_sink: Tensor | None = None, num_query_heads: int = 1,
    num_key_value_heads: int = 0, softmax_scale: float = 1.0, pre_tokens: int = UNBOUNDED,
    next_tokens: int = UNBOUNDED, input_layout: str = "BSH", sparse_mode: int = 0, block_size: int = 0,
    query_quant_mode: int = 0, key_quant_mode: int = 0, value_quant_mode: int = 0, inner_precise: int = 0,
    return_softmax_lse: bool = False, query_dtype: int | None = None, key_dtype: int | None = None,
    value_dtype: int | None = None, query_rope_dtype: int | None = None, key_rope_dtype: int | None = None,
    key_shared_prefix_dtype: int | None = None, value_shared_prefix_dtype: int | None = None,
    dequant_scale_query_dtype: int | None = None, dequant_scale_key_dtype: int | None = None,
    dequant_scale_value_dtype: int | None = None, dequant_scale_key_rope_dtype: int | None = None,
    out_dtype: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`npu_fused_infer_attention_score` under other argument names."""
    name = "npu_fused_infer_attention_score_v2"
    refuse_given(
        name, query_rope=query_rope, key_rope=key_rope, dequant_scale_query=dequant_scale_query,
        dequant_scale_key=dequant_scale_key, dequant_offset_key=dequant_offset_key,
        dequant_scale_value=dequant_scale_value, dequant_offset_value=dequant_offset_value,
        dequant_scale_key_rope=dequant_scale_key_rope, quant_scale_out=quant_scale_out,
        quant_offset_out=quant_offset_out, quant_scale_p=quant_scale_p, learnable_sink=learnable_sink,
        query_dtype=query_dtype, key_dtype=key_dtype, value_dtype=value_dtype, query_rope_dtype=query_rope_dtype,
        key_rope_dtype=key_rope_dtype, key_shared_prefix_dtype=key_shared_prefix_dtype,
        value_shared_prefix_dtype=value_shared_prefix_dtype, dequant_scale_query_dtype=dequant_scale_query_dtype,
        dequant_scale_key_dtype=dequant_scale_key_dtype, dequant_scale_value_dtype=dequant_scale_value_dtype,
        dequant_scale_key_rope_dtype=dequant_scale_key_rope_dtype, out_dtype=out_dtype,
    )  # fmt: skip
    output, lse = InferAttention(
        name, query, key, value, input_layout, num_query_heads, num_key_value_heads, softmax_scale, atten_mask,
        pse_shift, actual_seq_qlen, actual_seq_kvlen, sparse_mode, pre_tokens, next_tokens, inner_precise, block_table,
        block_size, "actual_seq_kvlen",
    ).forward()  # fmt: skip
    return output, lse if return_softmax_lse else torch.empty(0)


@operator("npu_prompt_flash_attention")
def npu_prompt_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None, pse_shift: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None, deq_scale1: Tensor | None = None,
    quant_scale1: Tensor | None = None, deq_scale2: Tensor | None = None, quant_scale2: Tensor | None = None,
    quant_offset2: Tensor | None = None, num_heads: int = 1, scale_value: float = 1.0, pre_tokens: int = UNBOUNDED,
    next_tokens: int = 0, input_layout: str = "BSH", num_key_value_heads: int = 0,
    actual_seq_lengths_kv: Sequence[int] | None = None, sparse_mode: int = 0,
) -> Tensor:  # fmt: skip
    """The output of `npu_fused_infer_attention_score` for a prompt, but next_tokens is 0 unless given.

    Modes 10 to 14 are 0 to 4 in high precision (op-plugin, FlashAttentionKernelNpuOpApi.cpp).
    """
    name = "npu_prompt_flash_attention"
    refuse_given(
        name, padding_mask=padding_mask, deq_scale1=deq_scale1, quant_scale1=quant_scale1, deq_scale2=deq_scale2,
        quant_scale2=quant_scale2, quant_offset2=quant_offset2,
    )  # fmt: skip
    mode = sparse_mode - 10 if 10 <= sparse_mode <= 14 else sparse_mode
    return InferAttention(
        name, query, key, value, input_layout, num_heads, num_key_value_heads, scale_value, atten_mask, pse_shift,
        actual_seq_lengths, actual_seq_lengths_kv, mode, pre_tokens, next_tokens,
    ).forward()[0]  # fmt: skip


@operator("npu_incre_flash_attention")
def npu_incre_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None, pse_shift: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None, antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None, block_table: Tensor | None = None, dequant_scale1: Tensor | None = None,
    quant_scale1: Tensor | None = None, dequant_scale2: Tensor | None = None, quant_scale2: Tensor | None = None,
    quant_offset2: Tensor | None = None, kv_padding_size: Tensor | None = None, num_heads: int = 1,
    scale_value: float = 1.0, input_layout: str = "BSH", num_key_value_heads: int = 0, block_size: int = 0,
    inner_precise: int = 1,
) -> Tensor:  # fmt: skip
    """The output of `npu_fused_infer_attention_score` for one query a sequence; actual_seq_lengths are the keys'."""
    name = "npu_incre_flash_attention"
    refuse_given(
        name, padding_mask=padding_mask, antiquant_scale=antiquant_scale, antiquant_offset=antiquant_offset,
        dequant_scale1=dequant_scale1, quant_scale1=quant_scale1, dequant_scale2=dequant_scale2,
        quant_scale2=quant_scale2, quant_offset2=quant_offset2, kv_padding_size=kv_padding_size,
    )  # fmt: skip
    if input_layout not in ("BSH", "BSND", "BNSD"):
        refuse(name, "input_layout", f"{input_layout} is not one of BSH, BSND, BNSD")
    if inner_precise not in (0, 1):
        refuse(name, "inner_precise", f"{inner_precise} is not one of 0, 1")
    attention = InferAttention(
        name, query, key, value, input_layout, num_heads, num_key_value_heads, scale_value, atten_mask, pse_shift,
        None, actual_seq_lengths, inner_precise=inner_precise, block_table=block_table, block_size=block_size,
        lengths_argument="actual_seq_lengths",
    )  # fmt: skip
    if attention.most_rows != 1:
        refuse(name, "query", f"{attention.most_rows} queries a sequence, where one is documented")
    return attention.forward()[0]


# ---------------------------------------------------------------------------------------------------------------------
# Normalisation


def check_norm(name: str, argument: str, x: Tensor, gamma: Tensor | None) -> Tensor:
    """gamma, once it is known to be the trailing dimensions of x, in x's dtype or, for halves, in fp32."""
    check_dtype(name, FLOATS, **{argument: x}, gamma=gamma)
    assert gamma is not None
    if gamma.dtype not in (x.dtype, torch.float32):
        refuse(
            name, "gamma", f"{gamma.dtype} does not go with {x.dtype}: the same, or float32 with a half, is documented"
        )
    if not 1 <= x.dim() <= 8 or not 1 <= gamma.dim() <= x.dim():
        refuse(name, "gamma", f"{gamma.dim()} dimensions for {x.dim()} of {argument}")
    check_shape(name, "gamma", gamma, x.shape[x.dim() - gamma.dim() :])
    return gamma


def reciprocal_root(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """1 / sqrt(mean(x^2) + epsilon) over gamma's dimensions, which stay with length 1; fp32."""
    return torch.rsqrt(x.float().square().mean(tuple(range(-gamma.dim(), 0)), keepdim=True) + epsilon)


@operator("npu_rms_norm")
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
    """x / rms(x) * gamma in x's dtype, and 1 / rms(x) in fp32. gamma is always needed.

    Source: wheel (torch_npu.npu_rms_norm, meta registration), aclnnRmsNorm, its golden.py.
    """
    gamma = check_norm("npu_rms_norm", "input", input, gamma)
    rstd = reciprocal_root(input, gamma, epsilon)
    return (input.float() * rstd * gamma.float()).to(input.dtype), rstd


@operator("npu_rms_norm_backward")
def npu_rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """dx in x's dtype and dgamma in fp32.

    Source: wheel (meta registration), aclnnRmsNormGrad, its golden.py.
    """
    name = "npu_rms_norm_backward"
    gamma = check_norm(name, "input", input, gamma)
    check_dtype(name, (input.dtype,), dy=dy)
    check_dtype(name, (torch.float32,), rstd=rstd)
    check_shape(name, "dy", dy, input.shape)
    leading = input.shape[: input.dim() - gamma.dim()]
    check_shape(name, "rstd", rstd, (*leading, *[1] * gamma.dim()))
    normed = input.float() * rstd
    scaled = dy.float() * gamma.float()
    mean = (scaled * normed).mean(tuple(range(-gamma.dim(), 0)), keepdim=True)
    d_gamma = (dy.float() * normed).reshape(-1, *gamma.shape).sum(0)
    return ((scaled - normed * mean) * rstd).to(input.dtype), d_gamma


@operator("npu_add_rms_norm")
def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor, Tensor]:
    """rms_norm(x1 + x2), 1 / rms in fp32, and x1 + x2, rounded to the dtype before it is normed. No gradient.

    Source: wheel (meta registration), aclnnAddRmsNorm, its golden.py for Ascend910B.
    """
    name = "npu_add_rms_norm"
    check_dtype(name, FLOATS, x1=x1, x2=x2, gamma=gamma)
    check_same_dtype(name, x1=x1, x2=x2, gamma=gamma)
    check_shape(name, "x2", x2, x1.shape)
    gamma = check_norm(name, "x1", x1, gamma)
    total = (x1.float() + x2.float()).to(x1.dtype)
    rstd = reciprocal_root(total, gamma, epsilon)
    normed = (total.float() * rstd).to(x1.dtype).float()
    return (normed * gamma.float()).to(x1.dtype), rstd, total


# ---------------------------------------------------------------------------------------------------------------------
# Rotary embedding


def rotate_pairs(x: Tensor, mode: str) -> Tensor:
    """(x1, x2) -> (-x2, x1): the halves of the last dimension for "half", neighbours for "interleave"."""
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def check_rotary(name: str, input: Tensor, r1: Tensor, r2: Tensor, mode: str) -> list[int]:
    """Refuse what the rotary operator does; returns the dimensions that r1 and r2 are repeated along.

    In half mode cos and sin may be of length 1 along heads, batch or both, whichever of BNSD, BSND, SBND or TND that
    makes the input; in interleave mode along both. Half mode with (1, 1, S, D) for a BNSD input is refused when B * N
    is large for S, or D is not aligned (tiling: CheckBnsdBlockSkip).
    """
    if mode not in ("half", "interleave"):
        refuse(name, "rotary_mode", f"{mode!r} is not 'half' or 'interleave'")
    check_dtype(name, FLOATS, input=input, r1=r1, r2=r2)
    dims, width = input.dim(), input.size(-1)
    if dims not in (3, 4) or r1.dim() != dims:
        refuse(name, "input, r1, r2", f"{dims} and {r1.dim()} dimensions, where 4 (or 3, TND) are documented")
    check_shape(name, "r2", r2, r1.shape)
    if r1.size(-1) != width or width % 2 or width >= 896:
        refuse(name, "r1", f"last dimension {r1.size(-1)} for {width}: the same, even and below 896 is documented")
    x_shape, r_shape = [1] * (4 - dims) + list(input.shape), [1] * (4 - dims) + list(r1.shape)  # TND as 1TND
    repeated = [dim for dim in range(3) if x_shape[dim] != r_shape[dim]]
    fits = all(r_shape[dim] == 1 for dim in repeated) and len(repeated) < 3
    if mode == "interleave":
        fits = fits and sum(r_shape[dim] == 1 for dim in range(3)) >= 2
    elif repeated == [0]:  # the batch alone is repeated only where there is one head
        fits = fits and 1 in (x_shape[1], x_shape[2])
    if not fits:
        refuse(name, "r1, r2", f"shape {tuple(r1.shape)} is no documented broadcast to {tuple(input.shape)}")
    sizes = [x_shape[dim] for dim in repeated]
    if max(sizes, default=0) >= 1000 or (mode == "interleave" and math.prod(sizes) >= 1000):
        refuse(name, "input", f"{sizes} repeats of r1 and r2 are above the documented limit of 1000")
    if mode == "half" and repeated == [0, 1] and x_shape[2] > 1:
        repeats, rows = math.prod(sizes), x_shape[2]
        aligned = width // 2 * input.element_size() % 32 == 0
        if repeats > 8 * rows if aligned else (2 * repeats > -(-rows // VECTOR_CORES) and width < 80):
            refuse(name, "input", f"BNSD with B * N = {repeats}, S = {rows}, D = {width} is refused: use BSND")
    return [dim - (4 - dims) for dim in repeated]


@operator("npu_rotary_mul")
def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """input * r1 + rotated * r2 with r1 the cosines and r2 the sines, both as wide as the input.

    rotated is cat(-x2, x1) of the halves ("half"), the same of neighbours ("interleave"), or input @ rotate. So a pair
    (a, b) at angle t becomes (a cos t - b sin t, b cos t + a sin t). r1 and r2 are cast to the input's dtype first.
    Source: wheel (torch_npu.npu_rotary_mul), op-plugin (RotaryMulKernelNpuOpApi.cpp), aclnnRotaryPositionEmbedding.
    """
    name = "npu_rotary_mul"
    check_rotary(name, input, r1, r2, rotary_mode)
    x, cos, sin = input.float(), r1.to(input.dtype).float(), r2.to(input.dtype).float()
    if rotate is None:
        rotated = rotate_pairs(x, rotary_mode)
    else:
        check_dtype(name, FLOATS, rotate=rotate)
        check_shape(name, "rotate", rotate, (input.size(-1), input.size(-1)))
        rotated = x @ rotate.float()
    return (x * cos + rotated * sin).to(input.dtype)


@operator("npu_rotary_mul_backward")
def npu_rotary_mul_backward(
    grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dr1 and dr2, the last two summed to r1's shape; all in the input's dtype (wheel: meta registration)."""
    name = "npu_rotary_mul_backward"
    repeated = check_rotary(name, input, r1, r2, rotary_mode)
    check_dtype(name, (input.dtype,), grad=grad)
    check_shape(name, "grad", grad, input.shape)
    g, x = grad.float(), input.float()
    cos, sin = r1.to(input.dtype).float(), r2.to(input.dtype).float()
    d_input = g * cos - rotate_pairs(g * sin, rotary_mode)  # turning back is turning forth, negated
    d_cos, d_sin = g * x, g * rotate_pairs(x, rotary_mode)
    if repeated:
        d_cos, d_sin = d_cos.sum(repeated, keepdim=True), d_sin.sum(repeated, keepdim=True)
    return d_input.to(input.dtype), d_cos.to(input.dtype), d_sin.to(input.dtype)


@operator("npu_apply_rotary_pos_emb")
def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """Turns query and key where they lie, and returns the same two tensors; no gradient.

    On A2 and A3: half mode, head dim 64 or 128, BSND with cos and sin (B, S, 1, D) or TND with (T, 1, D), one dtype.
    Source: wheel (torch_npu.npu_apply_rotary_pos_emb), op-plugin (ApplyRotaryPosEmbNpuOpApi.cpp: no copy is made).
    """
    name = "npu_apply_rotary_pos_emb"
    if layout not in ("BSND", "TND"):
        refuse(name, "layout", f"{layout} is not one of BSND, TND")
    if rotary_mode != "half":
        refuse(name, "rotary_mode", f"{rotary_mode!r} is not 'half'")
    check_dtype(name, FLOATS, query=query, key=key, cos=cos, sin=sin)
    check_same_dtype(name, query=query, key=key, cos=cos, sin=sin)
    dims = len(layout)
    if query.dim() != dims or key.dim() != dims:
        refuse(name, "query, key", f"{query.dim()} and {key.dim()} dimensions do not fit layout {layout}")
    width = query.size(-1)
    if width not in (64, 128) or 0 in query.shape:
        refuse(name, "query", f"head dim {width} is not 64 or 128, or the tensor is empty")
    check_shape(name, "key", key, (*query.shape[:-2], key.size(-2), width))
    check_shape(name, "cos", cos, (*query.shape[:-2], 1, width))
    check_shape(name, "sin", sin, cos.shape)
    for tensor in (query, key):
        x = tensor.float()
        tensor.copy_(x * cos.float() + rotate_pairs(x, "half") * sin.float())
    return query, key


# ---------------------------------------------------------------------------------------------------------------------
# Gates and losses


def check_gate(name: str, x: Tensor, dim: int) -> None:
    check_dtype(name, FLOATS, input=x)
    if not 1 <= x.dim() <= 8 or x.numel() == 0:
        refuse(name, "input", f"shape {tuple(x.shape)}: 1 to 8 dimensions and no empty tensor are documented")
    if not -x.dim() <= dim < x.dim() or x.size(dim) % 2:
        refuse(name, "dim", f"{dim} names no even dimension of {tuple(x.shape)}")


@operator("npu_swiglu")
def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """silu(A) * B, A and B the first and second half of the input along dim.

    Source: wheel (torch_npu.npu_swiglu), aclnnSwiGlu.
    """
    check_gate("npu_swiglu", input, dim)
    gate, other = input.float().chunk(2, dim)
    return (gate * gate.sigmoid() * other).to(input.dtype)


@operator("npu_swiglu_backward")
def npu_swiglu_backward(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor:
    """Gradient of `npu_swiglu`, in the input's shape.

    aclnnSwiGluGrad prints sigmoid(A) + sigmoid(A) * (1 - sigmoid(A) * A), a slip for the derivative of A * sigmoid(A).
    """
    name = "npu_swiglu_backward"
    check_gate(name, input, dim)
    check_dtype(name, (input.dtype,), grad_output=grad_output)
    gate, other = input.float().chunk(2, dim)
    check_shape(name, "grad_output", grad_output, gate.shape)
    grad, opened = grad_output.float(), gate.sigmoid()
    d_gate = grad * other * opened * (1 + gate * (1 - opened))
    return torch.cat((d_gate, grad * gate * opened), dim).to(input.dtype)


def loss_weights(name: str, target: Tensor, weight: Tensor | None, classes: int, ignore_index: int) -> Tensor:
    """fp32 weight of each target; a negative ignore_index ignores nothing, and targets must lie in 0 ... C - 1."""
    check_dtype(name, (torch.int64,), target=target)
    if ignore_index >= classes:
        refuse(name, "ignore_index", f"{ignore_index} must stay below the {classes} classes")
    if bool(((target < 0) | (target >= classes)).any()):
        refuse(name, "target", f"is not within 0 ... {classes - 1}; a negative ignore_index ignores nothing")
    weights = torch.ones(target.shape)
    if weight is not None:
        check_dtype(name, (torch.float32,), weight=weight)
        check_shape(name, "weight", weight, (classes,))
        weights = weight[target]
    return weights.masked_fill(target == ignore_index, 0.0)


def check_loss(name: str, reduction: str, smoothing: float, z_scale: float) -> None:
    if reduction not in ("mean", "sum", "none"):
        refuse(name, "reduction", f"{reduction!r} is not one of mean, sum, none")
    if smoothing or z_scale:
        refuse(name, "label_smoothing, lse_square_scale_for_zloss", "the first is not modelled, the second unsupported")


@operator("npu_cross_entropy_loss")
def npu_cross_entropy_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
    return_zloss: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss (shape (1,), or (N,) for reduction none), log probabilities (N, C), and two empty tensors.

    Source: wheel (torch_npu.npu_cross_entropy_loss), aclnnCrossEntropyLoss.
    """
    name = "npu_cross_entropy_loss"
    check_loss(name, reduction, label_smoothing, lse_square_scale_for_zloss)
    if return_zloss:
        refuse(name, "return_zloss", "is not supported")
    check_dtype(name, FLOATS, input=input)
    if input.dim() != 2 or not 0 < input.size(0) <= 200_000 or input.size(1) == 0:
        refuse(name, "input", f"shape {tuple(input.shape)} is not (N, C) with N in 1 ... 200000")
    check_shape(name, "target", target, (input.size(0),))
    weights = loss_weights(name, target, weight, input.size(1), ignore_index)
    log_prob = input.float().log_softmax(-1)
    losses = -log_prob.gather(1, target.unsqueeze(1)).squeeze(1) * weights
    loss = losses
    if reduction != "none":
        loss = losses.sum().view(1)
        loss = loss / weights.sum() if reduction == "mean" else loss
    nothing = input.new_empty(0)
    return loss.to(input.dtype), log_prob.to(input.dtype), nothing, nothing.clone()


@operator("npu_cross_entropy_loss_backward")
def npu_cross_entropy_loss_backward(
    grad_loss: Tensor,
    log_prob: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    grad_zloss: Tensor | None = None,
    lse_for_zloss: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
) -> Tensor:
    """Gradient of `npu_cross_entropy_loss` for its input, from the log probabilities (aclnnCrossEntropyLossGrad)."""
    name = "npu_cross_entropy_loss_backward"
    check_loss(name, reduction, label_smoothing, lse_square_scale_for_zloss)
    check_dtype(name, FLOATS, grad_loss=grad_loss, log_prob=log_prob)
    rows, classes = log_prob.shape
    check_shape(name, "target", target, (rows,))
    check_shape(name, "grad_loss", grad_loss, (rows,) if reduction == "none" else (1,))
    weights = loss_weights(name, target, weight, classes, ignore_index)
    grads = grad_loss.float() * weights
    if reduction == "mean":
        grads = grads / weights.sum()
    picked = torch.nn.functional.one_hot(target, classes)
    return (grads.unsqueeze(1) * (log_prob.float().exp() - picked)).to(log_prob.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Writing into caches


def scatter_rows(name: str, target: Tensor, indices: Tensor, updates: Tensor) -> None:
    """Write updates into `target` where the last dimension of indices says: a tensor of coordinates."""
    check_dtype(name, INDICES, indices=indices)
    check_dtype(name, (target.dtype,), updates=updates)
    if indices.dim() < 2 or indices.size(-1) > target.dim() or not 1 <= target.dim() <= 8:
        refuse(name, "indices", f"shape {tuple(indices.shape)} does not address {tuple(target.shape)}")
    depth = indices.size(-1)
    check_shape(name, "updates", updates, (*indices.shape[:-1], *target.shape[depth:]))
    limits = torch.tensor(target.shape[:depth])
    if bool(((indices < 0) | (indices >= limits)).any()):
        refuse(name, "indices", f"reach outside {tuple(target.shape)}")
    target[indices.long().unbind(-1)] = updates


@operator("npu_scatter_nd_update_")
def npu_scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """input[indices[..., 0], ..., indices[..., a - 1]] = updates, in place (wheel)."""
    scatter_rows("npu_scatter_nd_update_", input, indices, updates)
    return input


@operator("npu_scatter_nd_update")
def npu_scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """`npu_scatter_nd_update_` on a copy."""
    output = input.clone()
    scatter_rows("npu_scatter_nd_update", output, indices, updates)
    return output


def scatter_spans(name: str, data: Tensor, indices: Tensor, updates: Tensor, axis: int) -> None:
    """Write updates[i] into data[i] from position indices[i] along axis."""
    check_dtype(name, (torch.int8, torch.int32, *FLOATS), input=data)
    check_dtype(name, (data.dtype,), updates=updates)
    check_dtype(name, INDICES, indices=indices)
    if not 2 <= data.dim() <= 8 or updates.dim() != data.dim() or 0 in (data.numel(), updates.numel()):
        refuse(name, "input, updates", "2 to 8 dimensions, as many in both, and no empty tensor are documented")
    if indices.dim() != 1:
        refuse(name, "indices", "only one dimension, a position for each first index, is modelled")
    dim = axis + data.dim() if axis < 0 else axis
    if not 0 < dim < data.dim():
        refuse(name, "axis", f"{axis} is no dimension of {tuple(data.shape)} after the first")
    check_shape(name, "indices", indices, (updates.size(0),))
    check_shape(
        name, "updates", updates, (updates.size(0), *data.shape[1:dim], updates.size(dim), *data.shape[dim + 1 :])
    )
    length = updates.size(dim)
    if updates.size(0) > data.size(0) or bool(((indices < 0) | (indices + length > data.size(dim))).any()):
        refuse(name, "indices", f"{indices.tolist()} with {length} updates each reach outside {tuple(data.shape)}")
    for row, start in enumerate(indices.tolist()):
        data[row].narrow(dim - 1, start, length).copy_(updates[row])


@operator("scatter_update_")
def scatter_update_(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """input[i, ..., indices[i] + k, ...] = updates[i, ..., k, ...], k along axis, in place.

    Source: wheel (torch_npu.scatter_update_), aclnnInplaceScatterUpdate.
    """
    scatter_spans("scatter_update_", input, indices, updates, axis)
    return input


@operator("scatter_update")
def scatter_update(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """`scatter_update_` on a copy."""
    output = input.clone()
    scatter_spans("scatter_update", output, indices, updates, axis)
    return output


@operator("npu_scatter_pa_kv_cache")
def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Writes token t of key and value (T, M, D) into slot slot_mapping[t] of the caches (blocks, block_size, M, D).

    Slot s is place s % block_size of block s // block_size. Only cache_mode "Norm" (or None) is modelled: the default,
    PA_NZ, is a memory format of its own. Source: wheel (torch_npu.npu_scatter_pa_kv_cache, its second scene).
    """
    name = "npu_scatter_pa_kv_cache"
    refuse_given(name, compress_lens=compress_lens, compress_seq_offsets=compress_seq_offsets, seq_lens=seq_lens)
    if cache_mode not in (None, "Norm"):
        refuse(name, "cache_mode", f"{cache_mode!r} is not modelled: give 'Norm'")
    check_dtype(name, INDICES, slot_mapping=slot_mapping)
    check_same_dtype(name, key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    for argument, tokens, cache in (("key", key, key_cache), ("value", value, value_cache)):
        if not (tokens.is_contiguous() and cache.is_contiguous()):
            refuse(name, f"{argument}, {argument}_cache", "must be contiguous")
        if tokens.dim() != 3 or cache.dim() != 4:
            refuse(name, f"{argument}, {argument}_cache", "are not (T, M, D) and (blocks, block_size, M, D)")
        check_shape(name, f"{argument}_cache", cache, (*key_cache.shape[:2], *tokens.shape[1:]))
        check_shape(name, argument, tokens, (*key.shape[:2], tokens.size(2)))
    check_shape(name, "slot_mapping", slot_mapping, (key.size(0),))
    slots, count = slot_mapping.long(), key_cache.size(0) * key_cache.size(1)
    if bool(((slots < 0) | (slots >= count)).any()) or slots.unique().numel() != slots.numel():
        refuse(name, "slot_mapping", f"{slots.tolist()} are not all different and within 0 ... {count - 1}")
    key_cache.flatten(0, 1)[slots] = key
    value_cache.flatten(0, 1)[slots] = value


@operator("npu_scatter_pa_kv_cache_functional")
def npu_scatter_pa_kv_cache_functional(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> tuple[Tensor, Tensor]:
    """`npu_scatter_pa_kv_cache` on copies of the caches."""
    keys, values = key_cache.clone(), value_cache.clone()
    npu_scatter_pa_kv_cache(
        key, value, keys, values, slot_mapping, compress_lens=compress_lens, compress_seq_offsets=compress_seq_offsets,
        seq_lens=seq_lens, cache_mode=cache_mode,
    )  # fmt: skip
    return keys, values


# ---------------------------------------------------------------------------------------------------------------------
# Optimizer step and grouped products


@operator("npu_apply_adam_w.out")
def npu_apply_adam_w_out(
    beta1_power: float, beta2_power: float, lr: float, weight_decay: float, beta1: float, beta2: float,
    epsilon: float, grad: Tensor, max_grad_norm: Tensor | None, amsgrad: bool | None, maximize: bool | None, *,
    out: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One AdamW step on out = [weights, first moment, second moment], in place. beta1_power is beta1 ** (step - 1).

    Source: wheel (torch_npu.npu_apply_adam_w), aclnnApplyAdamW. amsgrad is not modelled.
    """
    name = "npu_apply_adam_w.out"
    if amsgrad:
        refuse(name, "amsgrad", "is not modelled")
    if len(out) != 3:
        refuse(name, "out", f"{len(out)} tensors, where (var, m, v) is needed")
    var, m, v = out
    check_dtype(name, FLOATS, grad=grad)
    check_same_dtype(name, grad=grad, var=var, m=m, v=v)
    for argument, tensor in (("grad", grad), ("m", m), ("v", v)):
        check_shape(name, argument, tensor, var.shape)
    gradient = -grad.float() if maximize else grad.float()
    first = beta1 * m.float() + (1 - beta1) * gradient
    second = beta2 * v.float() + (1 - beta2) * gradient.square()
    mean, spread = first / (1 - beta1_power * beta1), second / (1 - beta2_power * beta2)
    weights = var.float()
    var.copy_(weights - lr * mean / (spread.sqrt() + epsilon) - lr * weight_decay * weights)
    m.copy_(first)
    v.copy_(second)
    return var, m, v


@operator("npu_apply_adam_w")
def npu_apply_adam_w(
    beta1_power: float, beta2_power: float, lr: float, weight_decay: float, beta1: float, beta2: float,
    epsilon: float, grad: Tensor, max_grad_norm: Tensor | None, amsgrad: bool | None, maximize: bool | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Refused: "the weights and moments must be passed through out"."""
    refuse("npu_apply_adam_w", "out", "is missing: the operator works in place on out=(var, m, v)")


def check_plain_product(name: str, x: Sequence[Tensor], weight: Sequence[Tensor], **refused: Any) -> None:
    refuse_given(name, **refused)
    if not x or not weight or len(x) > 128 or len(weight) > 128:
        refuse(name, "x, weight", f"{len(x)} and {len(weight)} tensors, where 1 to 128 are documented")
    for argument, tensors in (("x", x), ("weight", weight)):
        for tensor in tensors:
            check_dtype(name, FLOATS, **{argument: tensor})
            check_same_dtype(name, **{"x[0]": x[0], argument: tensor})


def add_product(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.size(-1) != weight.size(0):
        refuse(name, "weight", f"shape {tuple(weight.shape)} does not take x of width {x.size(-1)}")
    product = x.float() @ weight.float()
    return product if bias is None else product + bias.float()


@operator("npu_grouped_matmul")
def npu_grouped_matmul(
    x: Sequence[Tensor], weight: Sequence[Tensor], *, bias: Sequence[Tensor] | None = None,
    scale: Sequence[Tensor] | None = None, offset: Sequence[Tensor] | None = None,
    antiquant_scale: Sequence[Tensor] | None = None, antiquant_offset: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None, group_list: Tensor | None = None,
    activation_input: Sequence[Tensor] | None = None, activation_quant_scale: Sequence[Tensor] | None = None,
    activation_quant_offset: Sequence[Tensor] | None = None, split_item: int | None = 0,
    group_type: int | None = None, group_list_type: int | None = 0, act_type: int | None = 0,
    tuning_config: Sequence[int] | None = None, output_dtype: int | None = None, x_dtype: int | None = None,
    weight_dtype: int | None = None, scale_dtype: int | None = None, per_token_scale_dtype: int | None = None,
) -> list[Tensor]:  # fmt: skip
    """Products by group, in x's dtype, of two kinds.

    group_type -1, split_item 0 or 1, no group_list: x[i] @ weight[i] + bias[i]. group_type 0, split_item 2 or 3: rows
    of x[0] (m, k) in groups by weight[0] (groups, k, n) into one (m, n); group_list int64 holds the groups' ends
    (group_list_type 0) or sizes (1), and they must cover x. Quantisation, activations, weights in several tensors with
    group_type 0, and group_type 2 are not modelled. Source: wheel (torch_npu.npu_grouped_matmul).
    """
    name = "npu_grouped_matmul"
    check_plain_product(
        name, x, weight, scale=scale, offset=offset, antiquant_scale=antiquant_scale, antiquant_offset=antiquant_offset,
        per_token_scale=per_token_scale, activation_input=activation_input,
        activation_quant_scale=activation_quant_scale, activation_quant_offset=activation_quant_offset,
        tuning_config=tuning_config, output_dtype=output_dtype, x_dtype=x_dtype, weight_dtype=weight_dtype,
        scale_dtype=scale_dtype, per_token_scale_dtype=per_token_scale_dtype,
    )  # fmt: skip
    if act_type:
        refuse(name, "act_type", "activations come with per-token quantisation only, which is not modelled")
    if group_type == -1:
        return separate_products(name, x, weight, bias, group_list, split_item)
    if group_type != 0:
        refuse(name, "group_type", f"{group_type}: -1 and 0 are modelled")
    if split_item not in (2, 3):
        refuse(name, "split_item", f"{split_item}: group_type 0 takes 2 or 3")
    if len(x) != 1 or len(weight) != 1 or x[0].dim() != 2 or weight[0].dim() != 3:
        refuse(name, "x, weight", "one (m, k) and one (groups, k, n) are modelled")
    groups, rows = weight[0].size(0), x[0].size(0)
    check_dtype(name, (torch.int64,), group_list=group_list)
    assert group_list is not None
    check_shape(name, "group_list", group_list, (groups,))
    if group_list_type not in (0, 1) or (group_list_type == 1 and groups == 1):
        refuse(name, "group_list_type", f"{group_list_type} for {groups} groups")
    sizes = group_list if group_list_type else group_list.diff(prepend=torch.zeros(1, dtype=torch.int64))
    if bool((sizes < 0).any()) or int(sizes.sum()) != rows:
        refuse(name, "group_list", f"{group_list.tolist()} does not divide the {rows} rows of x")
    parts = x[0].split(sizes.tolist())
    biases = [None] * groups if bias is None else list(bias[0])  # (groups, n) [I]
    products = [add_product(name, part, weight[0][group], biases[group]) for group, part in enumerate(parts)]
    return [torch.cat(products).to(x[0].dtype)]


def separate_products(
    name: str,
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    bias: Sequence[Tensor] | None,
    groups: Any,
    split: int | None,
) -> list[Tensor]:
    refuse_given(name, group_list=groups)
    if split not in (0, 1):
        refuse(name, "split_item", f"{split}: separate products take 0 or 1")
    if len(x) != len(weight) or (bias is not None and len(bias) != len(weight)):
        refuse(name, "weight", f"{len(weight)} weights for {len(x)} inputs")
    if any(part.dim() not in range(2, 7) for part in x) or any(part.dim() != 2 for part in weight):
        refuse(name, "x, weight", "2 to 6 dimensions of x and 2 of weight are documented")
    biases = [None] * len(x) if bias is None else list(bias)
    pairs = zip(x, weight, biases, strict=True)
    return [add_product(name, part, matrix, extra).to(part.dtype) for part, matrix, extra in pairs]


@operator("npu_grouped_matmul.List")
def npu_grouped_matmul_list(
    x: Sequence[Tensor], weight: Sequence[Tensor], *, bias: Sequence[Tensor] | None = None,
    scale: Sequence[Tensor] | None = None, offset: Sequence[Tensor] | None = None,
    antiquant_scale: Sequence[Tensor] | None = None, antiquant_offset: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None, group_list: Sequence[int] | None = None,
    activation_input: Sequence[Tensor] | None = None, activation_quant_scale: Sequence[Tensor] | None = None,
    activation_quant_offset: Sequence[Tensor] | None = None, split_item: int | None = 0,
    group_type: int | None = None, group_list_type: int | None = 0, act_type: int | None = 0,
    output_dtype: torch.dtype | None = None,
) -> list[Tensor]:  # fmt: skip
    """The form whose group_list is a list of ends, with group_type None: x[i] @ weight[i], or, with split_item 2 or 3,
    the rows of x[0] up to each end by the weight of that place, in one tensor. Source: wheel (the same page)."""
    name = "npu_grouped_matmul.List"
    check_plain_product(
        name, x, weight, scale=scale, offset=offset, antiquant_scale=antiquant_scale, antiquant_offset=antiquant_offset,
        per_token_scale=per_token_scale, activation_input=activation_input,
        activation_quant_scale=activation_quant_scale, activation_quant_offset=activation_quant_offset,
        output_dtype=output_dtype,
    )  # fmt: skip
    if act_type:
        refuse(name, "act_type", "activations come with per-token quantisation only, which is not modelled")
    if split_item in (0, 1) and not group_list:
        return separate_products(name, x, weight, bias, None, split_item)
    if group_type is not None or split_item not in (2, 3) or not group_list:
        refuse(name, "group_type, split_item, group_list", "None, 2 or 3, and a list of ends are modelled together")
    if len(x) != 1 or x[0].dim() != 2 or len(group_list) != len(weight) or len(weight) == 1:
        refuse(name, "x, weight", "one (m, k) and one weight for each of several groups are modelled")
    sizes = packed_lengths(name, "group_list", group_list, x[0].size(0))
    if sum(sizes) != x[0].size(0) or any(part.dim() != 2 or part.size(1) != weight[0].size(1) for part in weight):
        refuse(name, "group_list, weight", "the ends must cover x, and the weights be (k, n) with one n")
    biases = [None] * len(weight) if bias is None else list(bias)
    parts = zip(x[0].split(sizes), weight, biases, strict=True)
    return [torch.cat([add_product(name, part, matrix, extra) for part, matrix, extra in parts]).to(x[0].dtype)]
