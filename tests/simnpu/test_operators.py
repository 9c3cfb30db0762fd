"""The documented semantics of torch_npu's custom operators: attention and rotation against references that loop over
single elements, and what each refuses. The values of the others are test_npu_equals_cpu.py's."""

from typing import Any

import pytest
import torch
from torch import Tensor

from simnpu.operators import COMPRESSED, OPERATORS

TRIANGLE = torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(diagonal=1)


def run(name: str, *arguments: Any, **keywords: Any) -> Any:
    return OPERATORS[f"npu::{name}"](*arguments, **keywords)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------------- attention


def by_loops(q, k, v, scale, sees):
    """Attention one query at a time in fp64: (B, N, S, D), and the log of the sum of exponentials (B, N, S).

    `sees(b, i, j)`: whether query i sees key j.
    """
    batch, heads, rows, _ = q.shape
    outputs, sums = [], []
    for b in range(batch):
        for n in range(heads):
            m = n * k.size(1) // heads
            for i in range(rows):
                keys = [j for j in range(k.size(2)) if sees(b, i, j)]
                scores = k[b, m][keys] @ q[b, n, i] * scale
                outputs.append(scores.softmax(0) @ v[b, m][keys])
                sums.append(scores.logsumexp(0))
    return torch.stack(outputs).view(batch, heads, rows, -1), torch.stack(sums).view(batch, heads, rows)


def arrange(tensor: Tensor, layout: str) -> Tensor:
    """(B, N, S, ...) in a layout, and back; TND has one row."""
    if layout == "TND":
        return tensor[0].transpose(0, 1).contiguous()
    return tensor if layout == "BNSD" else tensor.transpose(1, 2).contiguous()


def check(sees, layout, rows, columns, mask, batch=2, dtype=torch.float32, **options):
    """Forward and backward of the fusion attention in `layout` against the loops."""
    shapes = [(4, rows, 8), (2, columns, 8), (2, columns, 8), (4, rows, 8)]
    q, k, v, dy = (random(batch, *shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))
    given = [arrange(tensor, layout) for tensor in (q, k, v)]
    output, high, total, *_ = run("npu_fusion_attention", *given, 4, layout, mask, 0.3, **options)
    wide = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected, sums = by_loops(*wide, 0.3, sees)
    assert output.dtype == dtype and output.is_contiguous() and high.size(-1) == total.size(-1) == 8
    close(output, arrange(expected.detach(), layout), dtype)
    statistics = arrange(sums.detach(), "TND") if layout == "TND" else sums.detach()
    close((high + total.log())[..., 0], statistics, dtype)
    gradients = run(
        "npu_fusion_attention_grad", *given, arrange(dy, layout), 4, layout, atten_mask=mask,
        softmax_max=high, softmax_sum=total, attention_in=output, scale_value=0.3, **options,
    )  # fmt: skip
    expected.backward(dy.double())
    for gradient, tensor in zip(gradients, wide, strict=False):
        close(gradient, arrange(tensor.grad, layout), dtype)
    assert len(gradients) == 5 and gradients[3] is None


@pytest.mark.parametrize("layout", ["BNSD", "BSND"])
def test_fusion_attention_is_causal_from_the_top_left(layout):
    for rows, columns, dtype in ((7, 7, torch.bfloat16), (5, 9, torch.float32), (9, 5, torch.float32)):
        window = {"pre_tockens": 3, "next_tockens": 3}  # has no effect
        check(lambda b, i, j: j <= i, layout, rows, columns, TRIANGLE.byte(), dtype=dtype, sparse_mode=2, **window)


@pytest.mark.parametrize("case", [(9, 9, 3, 0), (9, 9, 2, 1), (4, 11, 3, 0), (11, 11, 99, 0)], ids=str)
def test_a_band_counts_keys_besides_the_querys_own_from_the_bottom_right(case):
    rows, columns, before, after = case

    def sees(b, i, j):
        place = i + columns - rows
        return place - before <= j <= place + after

    check(sees, "BSND", rows, columns, TRIANGLE, sparse_mode=4, pre_tockens=before, next_tockens=after)


@pytest.mark.parametrize("mode", [0, 2, 4])
def test_without_a_mask_every_mode_sees_everything(mode):
    check(lambda *_: True, "BNSD", 5, 7, None, sparse_mode=mode, pre_tockens=1, next_tockens=0)


@pytest.mark.parametrize("shape", [(6, 9), (1, 1, 6, 9), (2, 1, 6, 9)], ids=str)
def test_true_in_a_full_mask_means_left_out(shape):
    mask = random(*shape, seed=9) > 0.5
    mask[..., 0] = False  # something is left for everyone
    spread = mask.expand(2, 1, 6, 9)
    check(lambda b, i, j: not spread[b, 0, i, j], "BSND", 6, 9, mask, sparse_mode=0)


@pytest.mark.parametrize("mode", [2, 4])
def test_documents_in_a_row_attend_each_by_itself(mode):
    """TND: tokens of documents of 3, 0, 1 and 5 tokens."""
    document = [0, 0, 0, 2, 3, 3, 3, 3, 3]
    window = {"pre_tockens": 2, "next_tockens": 0} if mode == 4 else {}

    def sees(b, i, j):
        return document[i] == document[j] and j <= i and (mode == 2 or i - j <= 2)

    check(sees, "TND", 9, 9, TRIANGLE, batch=1, sparse_mode=mode, **of_documents(3, 3, 4, 9), **window)


def of_documents(*ends: int) -> dict[str, list[int]]:
    return {"actual_seq_qlen": [*ends], "actual_seq_kvlen": [*ends]}


# ---------------------------------------------------------------------- rotation


@pytest.mark.parametrize("angles", [(1, 5, 1, 16), (2, 5, 3, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_mul_and_its_gradient(angles, dtype):
    """Pair by pair: (a, b) becomes (a cos - b sin, b cos + a sin), each element with the angle of its position."""
    shape = (2, 5, 3, 16)
    x, grad = random(*shape, seed=1).to(dtype), random(*shape, seed=2).to(dtype)
    cos, sin = random(*angles, seed=3), random(*angles, seed=4)  # fp32: cast to the input's dtype by the operator
    y = run("npu_rotary_mul", x, cos, sin)
    gradients = run("npu_rotary_mul_backward", grad, x, cos, sin)
    wide = [tensor.to(dtype).double().requires_grad_() for tensor in (x, cos, sin)]
    a, b = wide[0].chunk(2, -1)
    expected = wide[0] * wide[1] + torch.cat([-b, a], -1) * wide[2]
    assert y.dtype == dtype
    close(y, expected.detach(), dtype)
    expected.backward(grad.double())
    for gradient, tensor in zip(gradients, wide, strict=True):
        assert gradient.dtype == dtype and gradient.shape == tensor.shape
        close(gradient / 4, tensor.grad / 4, dtype)


# ---------------------------------------------------------------------- what is refused

X = random(2, 5, 4, 8)  # BSND
K = random(2, 7, 2, 8)
ROWS = random(9, 2, 8)  # TND
SIZES = torch.tensor([2, 0, 4, 1])
COS = random(1, 5, 1, 8)
TND = {"atten_mask": TRIANGLE, "sparse_mode": 2}
COMPRESSED_MASK = {"sparse_mode": 4, "next_tockens": 0}
GROUPED = {"group_list": SIZES, "group_list_type": 1, "split_item": 3, "group_type": 2}
REFUSED = [  # an operator, what its message names, arguments, options
    ("npu_fusion_attention", "query, key, value", (X, K.bfloat16(), K, 4, "BSND"), {}),
    ("npu_fusion_attention", "head_num", (X, K, K, 2, "BSND"), {}),
    ("npu_fusion_attention", "input_layout", (X, K, K, 4, "BSH"), {}),
    ("npu_fusion_attention", "actual_seq_qlen", (X, K, K, 4, "BSND"), {"actual_seq_qlen": [5]}),
    ("npu_fusion_attention", "atten_mask", (X, K, K, 4, "BSND", TRIANGLE[:5, :7]), COMPRESSED_MASK),
    ("npu_fusion_attention", "atten_mask", (X, K, K, 4, "BSND", TRIANGLE.float()), COMPRESSED_MASK),
    ("npu_fusion_attention", "atten_mask", (X, K, K, 4, "BSND", ~TRIANGLE), COMPRESSED_MASK),
    ("npu_fusion_attention", "atten_mask", (X, K, K, 4, "BSND", TRIANGLE), {}),
    ("npu_fusion_attention", "pre_tockens", (X, K, K, 4, "BSND", torch.zeros(5, 7).bool()), {"pre_tockens": 2}),
    ("npu_fusion_attention", "TND needs both", (ROWS, ROWS, ROWS, 2, "TND"), TND),
    ("npu_fusion_attention", "2 lengths", (ROWS, ROWS, ROWS, 2, "TND"), {**TND, **of_documents(3, 8)}),
    ("npu_fusion_attention", "3 lengths", (ROWS, ROWS, ROWS, 2, "TND"), {**TND, **of_documents(4, 3, 9)}),
    ("npu_fusion_attention", "1025 lengths", (ROWS, ROWS, ROWS, 2, "TND"), {**TND, **of_documents(*[0] * 1024, 9)}),
    ("npu_rms_norm", "gamma", (X, None), {}),
    ("npu_rms_norm", "gamma", (X, torch.ones(8).bfloat16()), {}),
    ("npu_rms_norm_backward", "dy", (X.half(), X, torch.ones(8), X[..., :1]), {}),
    ("npu_add_rms_norm", "x2", (X, X[:, :1], torch.ones(8)), {}),
    ("npu_swiglu_backward", "grad_output", (X, X, -1), {}),
    ("npu_grouped_matmul", "group_type", ([random(3, 7)], [random(7, 5)]), GROUPED),
    ("npu_grouped_matmul", "weight", ([random(7, 3).T], [random(6, 5)]), GROUPED),
    ("npu_grouped_matmul", "group_list", ([random(7, 3).T], [random(7, 5)]), {**GROUPED, "group_list": SIZES.int()}),
    ("npu_rotary_mul", "rotary_mode", (X, COS, COS, "interleave"), {}),
    ("npu_rotary_mul", "r1", (X, COS[..., :4], COS[..., :4]), {}),
    ("npu_rotary_mul", "r2", (X, COS, random(2, 5, 1, 8)), {}),
]


def test_refused():
    for name, words, arguments, options in REFUSED:
        with pytest.raises(RuntimeError, match=f"^{name}: .*{words}"):
            run(name, *arguments, **options)
