"""What torch_npu's fused operators compute, written from the vendor's documentation as plain functions on CPU tensors.

`OPERATORS` maps a dispatcher name ("npu::npu_rms_norm") to a function: those that nanochat/kernels/npu.py calls, and
their gradients. A function has the arguments of the schema that are modelled; kernels.py refuses any other that is not
at its default. Sums are in fp32 and the result is cast as the operator documents: this models what an operator means,
not how a real kernel rounds. A call whose result the documentation leaves open raises RuntimeError.

It is written without sight of its callers on purpose: a convention misread once is then not misread on both sides.

Sources, named in the docstrings by the word before the colon; [I] marks an inference:
  wheel: torch_npu 2.13.0 itself (docstrings in _op_plugin_docs.py, op_plugin/meta, schemas in libtorch_npu.so)
  op-plugin: gitcode.com/Ascend/op-plugin, docs/context/torch_npu-npu_*.md and op_plugin/ops/opapi/*.cpp
  aclnn: CANN's operator pages (aclnnFlashAttentionScore, aclnnRmsNorm, ...), with gitcode.com/cann/ops-transformer,
    ops-nn (docs/en/context/sparse_mode_introduction.md, <operator>/docs/aclnn*.md, tests/assets/golden.py)

Letters: B batch, N query heads, M key and value heads, S query tokens, K key tokens, D head dim.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

OPERATORS: dict[str, Callable[..., Any]] = {}

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
UNBOUNDED = 2147483647  # the default of every token window: no limit
LARGEST = torch.finfo(torch.float32).max  # a masked score is its negative (aclnn)
COMPRESSED = 2048  # side of the triangle for any causal or band mask
MOST_DOCUMENTS = 1024  # lengths in a call of the layout TND: "1 to 2K, in the varlen scenario 1K at most" (op-plugin)
STATISTICS = 8  # softmax_max and softmax_sum repeat each value eight times


def operator(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter the function below into `OPERATORS` as npu::`name`."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        OPERATORS[f"npu::{name}"] = function
        return function

    return enter


def refuse(name: str, argument: str, reason: str) -> NoReturn:
    raise RuntimeError(f"{name}: {argument}: {reason}")


def check_dtypes(name: str, **tensors: Tensor | None) -> None:
    """All are there, in one dtype that the AI cores compute in."""
    found = {argument: None if tensor is None else tensor.dtype for argument, tensor in tensors.items()}
    if len(set(found.values())) > 1 or not set(found.values()) <= set(FLOATS):
        refuse(name, ", ".join(tensors), f"dtypes {', '.join(map(str, found.values()))}")


def check_shape(name: str, argument: str, tensor: Tensor | None, *allowed: Sequence[int]) -> None:
    if tensor is None or tuple(tensor.shape) not in {tuple(shape) for shape in allowed}:
        shapes = " or ".join(str(tuple(shape)) for shape in allowed)
        refuse(
            name, argument, f"shape {tensor if tensor is None else tuple(tensor.shape)}, where {shapes} is documented"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Attention


@functools.cache
def triangle() -> Tensor:
    """The compressed mask as documented: True above the diagonal."""
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(diagonal=1)


def outside_band(rows: int, columns: int, before: int | None, after: int) -> Tensor:
    """True where key j is none of i - before ... i + after for query i, both counted from the top left.

    The operator pages' own reference masks are triu(diagonal=after + 1) and tril(diagonal=-before - 1).
    """
    distance = torch.arange(columns) - torch.arange(rows).unsqueeze(1)  # (rows, columns), j - i
    outside = distance > after
    return outside if before is None else outside | (distance < -before)


def blocked_keys(
    name: str, mask: Tensor | None, heads: tuple[int, int], rows: int, columns: int, mode: int, before: int, after: int
) -> Tensor | None:
    """True where a query does not see a key. Without a mask it sees every key, whatever the mode.

    Modes: 0 the mask as it is; 2 causal from the top left; 4 a band from the bottom right (query i is at key
    i + K - S), of which 2 and 4 take the compressed mask.
    """
    if mode not in (0, 2, 4):
        refuse(name, "sparse_mode", f"{mode} is not modelled, 0, 2 and 4 are")
    if mask is None:
        return None
    if mask.dtype not in (torch.bool, torch.uint8):
        refuse(name, "atten_mask", f"{mask.dtype} is neither bool nor uint8")
    mask = mask.bool()
    if mode == 0:
        batch, head_num = heads
        check_shape(
            name, "atten_mask", mask, *[(*s, rows, columns) for s in [(), (1, 1), (batch, 1), (batch, head_num)]]
        )
        # The window lets the operator skip blocks; inside a block the mask counts. So the mask must hide all that the
        # window excludes.
        if bool((outside_band(rows, columns, before, after) & ~mask).any()):
            refuse(name, "pre_tockens, next_tockens", "the window excludes keys that the mask shows")
        return mask
    check_shape(name, f"atten_mask (sparse_mode {mode})", mask, (COMPRESSED, COMPRESSED))
    if not torch.equal(mask.contiguous().view(torch.int64), triangle().view(torch.int64)):  # eight bytes at a time
        refuse(name, "atten_mask", f"for sparse_mode {mode} only the documented content is modelled")
    if mode == 2:
        return outside_band(rows, columns, None, 0)
    shift = columns - rows  # from the bottom right to the top left
    blocked = outside_band(rows, columns, before - shift, after + shift)
    if bool(blocked.all(-1).any()):
        refuse(name, "pre_tockens, next_tockens", f"{before}, {after} leave a query of {rows}x{columns} without a key")
    return blocked


class FusionAttention:
    """The checked arguments that the operator and its gradient share, on (B, N, S, D)."""

    def __init__(
        self, name: str, query: Tensor, key: Tensor, value: Tensor, head_num: int, layout: str, mask: Tensor | None,
        scale: float, before: int, after: int, mode: int,
    ):  # fmt: skip
        self.name = name
        self.layout = layout
        self.scale = scale
        self.dtype = query.dtype
        if layout not in ("BSND", "BNSD"):
            refuse(name, "input_layout", f"{layout} is not modelled, BSND and BNSD are")
        check_dtypes(name, query=query, key=key, value=value)
        self.q = self.heads_first(query)
        self.k = self.heads_first(key)
        self.v = self.heads_first(value)
        B, N, S, D = self.q.shape
        M, K = self.k.size(1), self.k.size(2)
        if head_num != N or N % M:
            refuse(name, "head_num", f"{head_num} for {N} query heads and {M} key heads")
        check_shape(name, "key", self.k, (B, M, K, D))
        check_shape(name, "value", self.v, (B, M, K, D))
        self.blocked = blocked_keys(name, mask, (B, N), S, K, mode, before, after)

    def heads_first(self, tensor: Tensor) -> Tensor:
        return tensor if self.layout == "BNSD" else tensor.transpose(1, 2)

    def in_layout(self, tensor: Tensor) -> Tensor:
        return self.heads_first(tensor).to(self.dtype).contiguous()

    def grouped(self, tensor: Tensor) -> Tensor:
        """(B, N, S, ...) -> (B, M, N / M, S, ...) in fp32: query head n reads key head n // (N / M)."""
        return tensor.float().unflatten(1, (self.k.size(1), -1))

    def scores(self) -> Tensor:
        """(B, N, S, K) in fp32. A query with every key blocked sees the mean of all values [I]."""
        scores = (self.grouped(self.q) @ self.k.float().unsqueeze(2).mT).flatten(1, 2) * self.scale
        return scores if self.blocked is None else scores.masked_fill(self.blocked, -LARGEST)

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output in the layout, softmax_max and softmax_sum (B, N, S, 8)."""
        scores = self.scores()
        largest = scores.amax(-1, keepdim=True)
        weights = (scores - largest).exp()
        total = weights.sum(-1, keepdim=True)
        output = (self.grouped(weights / total) @ self.v.float().unsqueeze(2)).flatten(1, 2)
        repeated = (*scores.shape[:3], STATISTICS)
        return self.in_layout(output), largest.expand(repeated).contiguous(), total.expand(repeated).contiguous()

    def backward(
        self, dy: Tensor, softmax_max: Tensor | None, softmax_sum: Tensor | None, attention_in: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv from what the forward kept.

        P = exp(score - max) / sum, dV = P^T dY, dS = P * (dY V^T - sum(dY * Y)), dQ = scale dS K, dK = scale dS^T Q
        (aclnnFlashAttentionScoreGrad).
        """
        kept = (*self.q.shape[:3], STATISTICS)
        check_shape(self.name, "softmax_max", softmax_max, kept)
        check_shape(self.name, "softmax_sum", softmax_sum, kept)
        check_dtypes(self.name, query=self.q, dy=dy, attention_in=attention_in)
        check_shape(self.name, "dy", dy, self.heads_first(self.q).shape)
        assert softmax_max is not None and softmax_sum is not None and attention_in is not None
        weights = self.grouped((self.scores() - softmax_max[..., :1]).exp() / softmax_sum[..., :1])  # (B, M, N/M, S, K)
        grad = self.grouped(self.heads_first(dy))
        output = self.grouped(self.heads_first(attention_in))
        k = self.k.float().unsqueeze(2)
        v = self.v.float().unsqueeze(2)
        d_scores = weights * (grad @ v.mT - (grad * output).sum(-1, keepdim=True)) * self.scale
        d_query = (d_scores @ k).flatten(1, 2)
        d_key = (d_scores.mT @ self.grouped(self.q)).sum(2)
        d_value = (weights.mT @ grad).sum(2)
        return self.in_layout(d_query), self.in_layout(d_key), self.in_layout(d_value)


def documents(
    name: str, tokens: int, mode: int, qlen: Sequence[int] | None, kvlen: Sequence[int] | None
) -> list[slice]:
    """The places of each document among the `tokens` of the layout TND.

    Source: the constraints on op-plugin's page of npu_fusion_attention and in the wheel's docstring: cumulative
    lengths, 1 to 2K of them, at most 1K in the varlen scenario, which is TND; the last one is T. CANN's pages of
    aclnnFlashAttentionVarLenScore name 1K only for calls with `prefix`; the smaller number fits both.
    """
    if mode not in (2, 4):
        refuse(name, "sparse_mode", f"{mode} is not modelled for TND, 2 and 4 are")
    if not qlen or qlen != kvlen:
        refuse(name, "actual_seq_qlen, actual_seq_kvlen", "TND needs both, and only equal ones are modelled")
    if len(qlen) > MOST_DOCUMENTS or list(qlen) != sorted(qlen) or qlen[-1] != tokens:
        refuse(name, "actual_seq_qlen", f"{len(qlen)} lengths up to {qlen[-1]} for {tokens} tokens")
    return [slice(begin, end) for begin, end in zip([0, *qlen], qlen, strict=False) if begin < end]


@operator("npu_fusion_attention")
def npu_fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, atten_mask: Tensor | None = None,
    scale: float = 1.0, pre_tockens: int = UNBOUNDED, next_tockens: int = UNBOUNDED,
    actual_seq_qlen: Sequence[int] | None = None, actual_seq_kvlen: Sequence[int] | None = None, sparse_mode: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:  # fmt: skip
    """softmax(mask(scale * query key^T)) value, and what the gradient needs of it.

    A True or 1 in atten_mask means left out. With atten_mask=None sparse_mode and the token windows are ignored and
    every query sees every key. pre_tockens and next_tockens count keys besides the query's own.
    Source: wheel (torch_npu.npu_fusion_attention), op-plugin (the page and FlashAttentionKernelNpuOpApi.cpp), aclnn
    (aclnnFlashAttentionScore, sparse_mode_introduction). In the layout TND (tokens, heads, width) each document attends
    by itself, and the statistics are (T, N, 8) (wheel, _meta_registrations.py).
    """
    name = "npu_fusion_attention"
    options = (atten_mask, scale, pre_tockens, next_tockens, sparse_mode)
    if input_layout == "TND":
        results = []
        for part in documents(name, len(query), sparse_mode, actual_seq_qlen, actual_seq_kvlen):
            q, k, v = (tensor[None, part] for tensor in (query, key, value))
            output, largest, total = FusionAttention(name, q, k, v, head_num, "BSND", *options).forward()
            results.append((output[0], largest[0].transpose(0, 1), total[0].transpose(0, 1)))
        output, softmax_max, softmax_sum = (torch.cat(parts).contiguous() for parts in zip(*results, strict=True))
        return output, softmax_max, softmax_sum, query.new_empty(0), 0, 0, 0
    if actual_seq_qlen is not None or actual_seq_kvlen is not None:
        refuse(name, "actual_seq_qlen, actual_seq_kvlen", "only for the layout TND")
    attention = FusionAttention(name, query, key, value, head_num, input_layout, *options)
    output, softmax_max, softmax_sum = attention.forward()
    numels = softmax_max.numel() // STATISTICS * attention.k.size(2)  # elements of a dropout mask
    return output, softmax_max, softmax_sum, query.new_empty(0), 0, 0, numels


@operator("npu_fusion_attention_grad")
def npu_fusion_attention_grad(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, *,
    atten_mask: Tensor | None = None, softmax_max: Tensor | None = None, softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None, attention_in: Tensor | None = None, scale_value: float = 1.0,
    pre_tockens: int = UNBOUNDED, next_tockens: int = UNBOUNDED, numels: int = 0,
    actual_seq_qlen: Sequence[int] | None = None, actual_seq_kvlen: Sequence[int] | None = None, sparse_mode: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """dq, dk, dv, dpse (None without pse) and dsink (empty without sink) of `npu_fusion_attention`.

    Source: wheel (meta registration), aclnnFlashAttentionScoreGrad.
    """
    name = "npu_fusion_attention_grad"
    options = (atten_mask, scale_value, pre_tockens, next_tockens, sparse_mode)
    if input_layout == "TND":
        assert softmax_max is not None and softmax_sum is not None and attention_in is not None
        check_shape(name, "softmax_max", softmax_max, (len(query), head_num, STATISTICS))
        gradients = []
        for part in documents(name, len(query), sparse_mode, actual_seq_qlen, actual_seq_kvlen):
            statistics = [tensor[part].transpose(0, 1)[None] for tensor in (softmax_max, softmax_sum)]
            q, k, v, grad, output = (tensor[None, part] for tensor in (query, key, value, dy, attention_in))
            attention = FusionAttention(name, q, k, v, head_num, "BSND", *options)
            gradients.append(attention.backward(grad, *statistics, output))
        dq, dk, dv = (torch.cat([part[0] for part in parts]) for parts in zip(*gradients, strict=True))
        return dq, dk, dv, None, query.new_empty(0)
    attention = FusionAttention(name, query, key, value, head_num, input_layout, *options)
    return *attention.backward(dy, softmax_max, softmax_sum, attention_in), None, query.new_empty(0)


# ---------------------------------------------------------------------------------------------------------------------
# Normalisation


def check_norm(name: str, x: Tensor, gamma: Tensor | None) -> Tensor:
    """gamma, once it is known to be the last dimension of x, in x's dtype or, for halves, in fp32."""
    check_dtypes(name, x=x)
    check_shape(name, "gamma", gamma, x.shape[-1:])
    assert gamma is not None
    if gamma.dtype not in (x.dtype, torch.float32):
        refuse(name, "gamma", f"{gamma.dtype} does not go with {x.dtype}")
    return gamma


@operator("npu_rms_norm")
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
    """x / rms(x) * gamma in x's dtype, and 1 / rms(x) in fp32. gamma is always needed.

    Source: wheel (torch_npu.npu_rms_norm, meta registration), aclnnRmsNorm, its golden.py.
    """
    gamma = check_norm("npu_rms_norm", input, gamma)
    rstd = torch.rsqrt(input.float().square().mean(-1, keepdim=True) + epsilon)
    return (input.float() * rstd * gamma.float()).to(input.dtype), rstd


@operator("npu_rms_norm_backward")
def npu_rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """dx in x's dtype and dgamma in fp32.

    Source: wheel (meta registration), aclnnRmsNormGrad, its golden.py.
    """
    name = "npu_rms_norm_backward"
    gamma = check_norm(name, input, gamma)
    check_dtypes(name, input=input, dy=dy)
    check_shape(name, "dy", dy, input.shape)
    check_shape(name, "rstd", rstd, (*input.shape[:-1], 1))
    normed = input.float() * rstd
    scaled = dy.float() * gamma.float()
    mean = (scaled * normed).mean(-1, keepdim=True)
    d_gamma = (dy.float() * normed).flatten(0, -2).sum(0)
    return ((scaled - normed * mean) * rstd).to(input.dtype), d_gamma


@operator("npu_add_rms_norm")
def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of x1 + x2, 1 / rms of it in fp32, and the sum. It has no gradient (wheel).

    On a 910B or 910C the sum is rounded to its dtype before the norm reads it; a 950 norms it unrounded.
    Source: wheel (meta registration), aclnnAddRmsNorm, its golden.py.
    """
    name = "npu_add_rms_norm"
    check_dtypes(name, x1=x1, x2=x2, gamma=gamma)
    check_shape(name, "x2", x2, x1.shape)
    total = (x1.float() + x2.float()).to(x1.dtype)
    return *npu_rms_norm(total, gamma, epsilon), total


# ---------------------------------------------------------------------------------------------------------------------
# Gated activation


@operator("npu_swiglu")
def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """silu(first half) * second half. Source: wheel (meta registration), aclnnSwiGlu, its golden.py."""
    check_dtypes("npu_swiglu", input=input)
    first, second = input.float().chunk(2, dim)
    return (first * first.sigmoid() * second).to(input.dtype)


@operator("npu_swiglu_backward")
def npu_swiglu_backward(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor:
    """The gradient of input. Source: wheel (meta registration), aclnnSwiGluGrad."""
    check_dtypes("npu_swiglu_backward", input=input, grad_output=grad_output)
    first, second = input.float().chunk(2, dim)
    check_shape("npu_swiglu_backward", "grad_output", grad_output, first.shape)
    gate = first.sigmoid()
    grad = grad_output.float()
    d_first = grad * second * gate * (1 + first * (1 - gate))
    return torch.cat((d_first, grad * first * gate), dim).to(input.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Products in groups


@operator("npu_grouped_matmul")
def npu_grouped_matmul(
    x: Sequence[Tensor], weight: Sequence[Tensor], *, group_list: Tensor | None = None, split_item: int | None = 0,
    group_type: int | None = None, group_list_type: int | None = 0,
) -> list[Tensor]:  # fmt: skip
    """One product for each group of rows, with one tensor each for x, weight and the result.

    group_type 0 splits the rows of x (M, K) over the matrices of weight (E, K, N) into y (M, N). group_type 2 splits
    the axis that is summed: x (M, K), a transposed view, and weight (K, N) into y (E, M, N). group_list has the sizes
    of the groups (group_list_type 1). Other forms are not modelled.
    Source: wheel (meta registration), op-plugin (npu_grouped_matmul), aclnnGroupedMatmulV4.
    """
    name = "npu_grouped_matmul"
    (left,), (right,) = x, weight
    check_dtypes(name, x=left, weight=right)
    if group_list is None or group_list.dtype != torch.int64 or group_list_type != 1 or split_item not in (2, 3):
        refuse(name, "group_list", "sizes in int64, and one result, are modelled")
    sizes = group_list.tolist()
    if group_type == 0:
        check_shape(name, "weight", right, (len(sizes), left.size(1), right.size(-1)))
        parts = [rows.float() @ matrix.float() for rows, matrix in zip(left.split(sizes), right, strict=True)]
        return [torch.cat(parts).to(left.dtype)]
    if group_type != 2 or (left.is_contiguous() and min(left.shape) > 1):
        refuse(name, "group_type", f"{group_type}: 0, or 2 with a transposed view of x")
    check_shape(name, "weight", right, (left.size(1), right.size(-1)))
    pairs = zip(left.split(sizes, dim=1), right.split(sizes), strict=True)
    return [torch.stack([one.float() @ other.float() for one, other in pairs]).to(left.dtype)]


# ---------------------------------------------------------------------------------------------------------------------
# Rotary embedding


def turn_halves(x: Tensor) -> Tensor:
    """(x1, x2) -> (-x2, x1), the halves of the last dimension."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def check_rotary(name: str, input: Tensor, r1: Tensor, r2: Tensor, mode: str) -> list[int]:
    """Refuse what the rotary operator does; returns the dimensions that r1 and r2 are repeated along.

    Of a BSND input cos and sin may be of length 1 along the heads, or along heads and batch. Other layouts, whose
    broadcasts the operator refuses by size and alignment, are not modelled.
    """
    check_dtypes(name, input=input)
    B, S, N, D = input.shape
    if mode != "half" or D % 2:
        refuse(name, "rotary_mode", f"{mode!r} for a head dim of {D}: 'half' of an even one is modelled")
    check_shape(name, "r1", r1, (1, S, 1, D), (B, S, 1, D), (B, S, N, D))
    check_shape(name, "r2", r2, r1.shape)
    return [dim for dim in (0, 2) if input.size(dim) != r1.size(dim)]


@operator("npu_rotary_mul")
def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    """input * r1 + cat(-x2, x1) * r2 with r1 the cosines and r2 the sines, both as wide as the input.

    A pair (a, b) at angle t becomes (a cos t - b sin t, b cos t + a sin t). r1 and r2 are cast to the input's dtype.
    Source: wheel (torch_npu.npu_rotary_mul), op-plugin (RotaryMulKernelNpuOpApi.cpp), aclnnRotaryPositionEmbedding.
    """
    check_rotary("npu_rotary_mul", input, r1, r2, rotary_mode)
    x, cos, sin = input.float(), r1.to(input.dtype).float(), r2.to(input.dtype).float()
    return (x * cos + turn_halves(x) * sin).to(input.dtype)


@operator("npu_rotary_mul_backward")
def npu_rotary_mul_backward(
    grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dr1 and dr2, the last two summed to r1's shape; all in the input's dtype (wheel: meta registration)."""
    name = "npu_rotary_mul_backward"
    repeated = check_rotary(name, input, r1, r2, rotary_mode)
    check_dtypes(name, input=input, grad=grad)
    check_shape(name, "grad", grad, input.shape)
    g, x = grad.float(), input.float()
    cos, sin = r1.to(input.dtype).float(), r2.to(input.dtype).float()
    d_input = g * cos - turn_halves(g * sin)  # turning back is turning forth, negated
    d_cos, d_sin = g * x, g * turn_halves(x)
    if repeated:
        d_cos, d_sin = d_cos.sum(repeated, keepdim=True), d_sin.sum(repeated, keepdim=True)
    return d_input.to(input.dtype), d_cos.to(input.dtype), d_sin.to(input.dtype)
