"""The documented semantics of torch_npu's custom operators: attention and rotation against references that loop over
single elements, and what each refuses. The values of the others are test_npu_equals_cpu.py's."""

import pytest
import torch
from torch import Tensor

from simnpu.operators import COMPRESSED, OPERATORS

TRIANGLE = torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(diagonal=1)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def run(name: str, *arguments, **keywords):
    return OPERATORS[f"npu::{name}"](*arguments, **keywords)


def refused(name: str, words: str, *arguments, **keywords) -> None:
    """The operator refuses, with its own name and `words` in the message."""
    with pytest.raises(RuntimeError, match=words) as error:
        run(name, *arguments, **keywords)
    assert str(error.value).startswith(name.split(".")[0])


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


# ---------------------------------------------------------------------------------------------------------------------
# Attention


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
    """(B, N, S, D) in a layout, and back."""
    return tensor if layout == "BNSD" else tensor.transpose(1, 2).contiguous()


def fusion_inputs(batch, heads, kv_heads, rows, columns, width=8, dtype=torch.float32):
    """Query, key, value and the output's gradient, (B, N, S, D)."""
    shapes = [(heads, rows, width), (kv_heads, columns, width), (kv_heads, columns, width), (heads, rows, width)]
    return tuple(random(batch, *shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))


def check_fusion(q, k, v, dy, layout, sees, mask, scale=0.3, **options):
    """Forward and backward of the fusion attention in `layout` against the loops, on (B, N, S, D) tensors."""
    heads, dtype = q.size(1), q.dtype
    given = [arrange(tensor, layout) for tensor in (q, k, v)]
    results = run("npu_fusion_attention", *given, heads, layout, mask, scale, **options)
    output, high, total, nothing, *rest = results
    wide = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected, sums = by_loops(*wide, scale, sees)
    assert output.dtype == dtype and output.is_contiguous() and nothing.numel() == 0
    assert rest == [0, 0, sums.numel() * k.size(2)]
    close(output, arrange(expected.detach(), layout), dtype)
    assert high.shape == total.shape == (*q.shape[:3], 8) and high.dtype == total.dtype == torch.float32
    assert torch.equal(high, high[..., :1].expand_as(high)) and torch.equal(total, total[..., :1].expand_as(total))
    close((high + total.log())[..., 0], sums.detach(), dtype)
    gradients = run(
        "npu_fusion_attention_grad", *given, arrange(dy, layout), heads, layout, atten_mask=mask,
        softmax_max=high, softmax_sum=total, attention_in=output, scale_value=scale, **options,
    )  # fmt: skip
    expected.backward(dy.double())
    for gradient, tensor, like in zip(gradients, wide, given, strict=False):
        assert gradient.dtype == dtype and gradient.shape == like.shape and gradient.is_contiguous()
        close(gradient, arrange(tensor.grad, layout), dtype)
    assert gradients[3] is None and gradients[4].numel() == 0


@pytest.mark.parametrize("layout", ["BNSD", "BSND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fusion_attention_is_causal_from_the_top_left(layout, dtype):
    for rows, columns in ((7, 7), (5, 9), (9, 5)):
        inputs = fusion_inputs(2, 6, 3, rows, columns, width=16, dtype=dtype)
        window = {"pre_tockens": 3, "next_tockens": 3}  # has no effect
        check_fusion(*inputs, layout, lambda b, i, j: j <= i, TRIANGLE.byte(), sparse_mode=2, **window)


@pytest.mark.parametrize("case", [(9, 9, 3, 0), (9, 9, 2, 1), (9, 9, 0, 0), (4, 11, 3, 0), (11, 11, 99, 0)], ids=str)
def test_a_band_counts_keys_besides_the_querys_own_from_the_bottom_right(case):
    rows, columns, before, after = case

    def sees(b, i, j):
        place = i + columns - rows
        return place - before <= j <= place + after

    inputs = fusion_inputs(2, 4, 2, rows, columns)
    check_fusion(*inputs, "BSND", sees, TRIANGLE, sparse_mode=4, pre_tockens=before, next_tockens=after)


@pytest.mark.parametrize("mode", [0, 2, 4])
def test_without_a_mask_every_mode_sees_everything(mode):
    inputs = fusion_inputs(1, 2, 2, 5, 7)
    check_fusion(*inputs, "BNSD", lambda *_: True, None, sparse_mode=mode, pre_tockens=1, next_tockens=0)


@pytest.mark.parametrize("shape", [(6, 9), (1, 1, 6, 9), (2, 1, 6, 9)], ids=str)
def test_true_in_a_full_mask_means_left_out(shape):
    mask = random(*shape, seed=9) > 0.5
    mask[..., 0] = False  # something is left for everyone
    spread = mask.expand(2, 1, 6, 9)
    check_fusion(*fusion_inputs(2, 4, 2, 6, 9), "BSND", lambda b, i, j: not spread[b, 0, i, j], mask, sparse_mode=0)


@pytest.mark.parametrize("mode", [2, 4])
def test_documents_in_a_row_attend_each_by_itself(mode):
    """TND: tokens of documents of 3, 1 and 5, which sees nothing of the others."""
    bounds = [3, 3, 4, 9]  # one is empty
    window = {"pre_tockens": 2, "next_tockens": 0} if mode == 4 else {}
    options = {"sparse_mode": mode, "actual_seq_qlen": bounds, "actual_seq_kvlen": bounds, **window}
    document = [0, 0, 0, 2, 3, 3, 3, 3, 3]

    def sees(b, i, j):
        return document[i] == document[j] and j <= i and (mode == 2 or i - j <= 2)

    q, k, v, dy = fusion_inputs(1, 4, 2, 9, 9)
    wide = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected, sums = by_loops(*wide, 0.3, sees)
    expected.backward(dy.double())
    flat = [tensor[0].transpose(0, 1).contiguous() for tensor in (q, k, v, dy)]  # (T, N, D)
    output, high, total, *_ = run(
        "npu_fusion_attention", *flat[:3], 4, "TND", atten_mask=TRIANGLE, scale=0.3, **options
    )
    close(output, expected.detach()[0].transpose(0, 1))
    assert high.shape == total.shape == (9, 4, 8)
    close((high + total.log())[..., 0], sums.detach()[0].T)
    gradients = run(
        "npu_fusion_attention_grad", *flat, 4, "TND", atten_mask=TRIANGLE, softmax_max=high, softmax_sum=total,
        attention_in=output, scale_value=0.3, **options,
    )  # fmt: skip
    for gradient, tensor in zip(gradients, wide, strict=False):
        close(gradient, tensor.grad[0].transpose(0, 1))


def test_lengths_of_documents_are_checked():
    q = random(9, 2, 8)

    def lengths(words: str, mode: int = 2, **options) -> None:
        refused("npu_fusion_attention", words, q, q, q, 2, "TND", atten_mask=TRIANGLE, sparse_mode=mode, **options)

    lengths("TND needs both")
    lengths("only equal ones", actual_seq_qlen=[9], actual_seq_kvlen=[4, 9])
    lengths("up to 8 for 9 tokens", actual_seq_qlen=[3, 8], actual_seq_kvlen=[3, 8])
    lengths("3 lengths", actual_seq_qlen=[4, 3, 9], actual_seq_kvlen=[4, 3, 9])
    lengths("1025 lengths", actual_seq_qlen=[0] * 1024 + [9], actual_seq_kvlen=[0] * 1024 + [9])
    lengths("sparse_mode", 0, actual_seq_qlen=[9], actual_seq_kvlen=[9])


def test_a_query_that_sees_nothing_gets_the_mean():
    q, k, v, _ = fusion_inputs(1, 2, 2, 3, 4)
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[1] = True
    output = run("npu_fusion_attention", q, k, v, 2, "BNSD", mask, 0.3)[0]
    close(output[:, :, 1], v.mean(2))


def test_fusion_attention_refusals():
    q, k, v, dy = fusion_inputs(2, 4, 2, 5, 7)

    def no(words, *arguments, **options):
        refused("npu_fusion_attention", words, *arguments, **options)

    no("key", q, k[:, :, :, :4], v[:, :, :, :4], 4, "BNSD")
    no("query, key, value", q, k.bfloat16(), v, 4, "BNSD")
    no("query", q.double(), k.double(), v.double(), 4, "BNSD")
    no("head_num", q, k, v, 2, "BNSD")
    no("key", q, torch.cat((k, k[:, :1]), 1), torch.cat((v, v[:, :1]), 1), 4, "BNSD")  # 4 heads for 3
    no("value", q, k, v[:, :, :6], 4, "BNSD")
    no("input_layout", q, k, v, 4, "BSH")
    no("query", *(random(1, 1, 2, 784) for _ in range(3)), 1, "BNSD")
    no("sparse_mode", q, k, v, 4, "BNSD", sparse_mode=7)
    no("actual_seq_qlen", q, k, v, 4, "BNSD", actual_seq_qlen=[5])
    for mode in (2, 4):
        no("atten_mask", q, k, v, 4, "BNSD", atten_mask=TRIANGLE[:5, :7], sparse_mode=mode, next_tockens=0)
        no("atten_mask", q, k, v, 4, "BNSD", atten_mask=TRIANGLE.float(), sparse_mode=mode, next_tockens=0)
        no("atten_mask", q, k, v, 4, "BNSD", atten_mask=~TRIANGLE, sparse_mode=mode, next_tockens=0)
    no("atten_mask", q, k, v, 4, "BNSD", atten_mask=TRIANGLE)
    no("atten_mask", q, k, v, 4, "BNSD", atten_mask=torch.zeros(1, 4, 5, 7, dtype=torch.bool))
    no("pre_tockens", q, k, v, 4, "BNSD", atten_mask=TRIANGLE, sparse_mode=4, pre_tockens=-4, next_tockens=2)
    no("pre_tockens", q, k, v, 4, "BNSD", atten_mask=torch.zeros(5, 7, dtype=torch.bool), pre_tockens=2)  # shows more
    output, high, total, *_ = run("npu_fusion_attention", q, k, v, 4, "BNSD")
    kept = {"softmax_max": high, "softmax_sum": total, "attention_in": output}
    for argument in kept:
        refused("npu_fusion_attention_grad", argument, q, k, v, dy, 4, "BNSD", **(kept | {argument: None}))
    narrow = kept | {"softmax_max": high[..., :1]}
    refused("npu_fusion_attention_grad", "softmax_max", q, k, v, dy, 4, "BNSD", **narrow)
    refused("npu_fusion_attention_grad", "dy", q, k, v, dy[:, :2], 4, "BNSD", **kept)


# ---------------------------------------------------------------------------------------------------------------------
# Normalisation and rotation


def test_norm_refusals():
    x, gamma = random(3, 8), torch.ones(8)
    refused("npu_rms_norm", "gamma", x, None)
    refused("npu_rms_norm", "gamma", x, torch.ones(4))
    refused("npu_rms_norm", "gamma", x, gamma.bfloat16())
    refused("npu_rms_norm", "gamma", x.half(), gamma.bfloat16())
    refused("npu_rms_norm", "input", x.double(), gamma.double())
    refused("npu_rms_norm", "gamma", x, torch.ones(1, 3, 8))
    y, rstd = run("npu_rms_norm", x, gamma)
    refused("npu_rms_norm_backward", "dy", y.half(), x, gamma, rstd)
    refused("npu_rms_norm_backward", "rstd", y, x, gamma, rstd.flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_sum_is_that_of_the_rounded_sum(dtype):
    one, two, gamma = random(3, 5, 8, dtype=dtype), random(3, 5, 8, seed=1, dtype=dtype), random(8, seed=2).to(dtype)
    y, rstd, total = run("npu_add_rms_norm", one, two, gamma, epsilon=0.5)
    assert total.dtype == dtype and torch.equal(total, one + two)
    assert all(torch.equal(*pair) for pair in zip((y, rstd), run("npu_rms_norm", total, gamma, 0.5), strict=True))
    refused("npu_add_rms_norm", "x2", one, two[:, :1], gamma)
    refused("npu_add_rms_norm", "x2", one, two.half(), gamma)
    refused("npu_add_rms_norm", "gamma", one, two, gamma[:4])


def test_swiglu_refusals():
    x = random(3, 6, 4)
    refused("npu_swiglu", "input", x[..., :3])
    refused("npu_swiglu", "input", x.double())
    refused("npu_swiglu_backward", "grad_output", x, x, -1)


def test_grouped_products_refusals():
    x, y, sizes = random(7, 3), random(7, 5, seed=2), torch.tensor([2, 0, 4, 1])
    options = {"group_list": sizes, "group_list_type": 1, "split_item": 3, "group_type": 2}
    (sums,) = run("npu_grouped_matmul", [x.T], [y], **options)
    ends = {**options, "group_list": sizes.cumsum(0), "group_list_type": 0}
    assert torch.equal(run("npu_grouped_matmul", [x.T], [y], **ends)[0], sums)
    refused("npu_grouped_matmul", "x: of group_type 2", [x.T.contiguous()], [y], **options)
    refused("npu_grouped_matmul", "weight", [x.T], [y[:6]], **options)
    refused("npu_grouped_matmul", "group_list", [x.T], [y], **{**options, "group_list": sizes.int()})


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pair by pair: (a, b) becomes (a cos - b sin, b cos + a sin), each element with the angle of its own place."""
    half = x.size(-1) // 2
    columns: list[Tensor] = [x] * (2 * half)
    for one in range(half):
        two = one + half
        columns[one] = x[..., one] * cos[..., one] - x[..., two] * sin[..., one]
        columns[two] = x[..., two] * cos[..., two] + x[..., one] * sin[..., two]
    return torch.stack(columns, -1)


@pytest.mark.parametrize("angles", [(1, 5, 1, 16), (2, 5, 1, 16), (2, 5, 3, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_mul_and_its_gradient(angles, dtype):
    shape = (2, 5, 3, 16)
    x, grad = random(*shape, seed=1).to(dtype), random(*shape, seed=2).to(dtype)
    cos, sin = random(*angles, seed=3), random(*angles, seed=4)  # fp32: cast to the input's dtype by the operator
    y = run("npu_rotary_mul", x, cos, sin)
    gradients = run("npu_rotary_mul_backward", grad, x, cos, sin)
    wide = [tensor.to(dtype).double().requires_grad_() for tensor in (x, cos, sin)]
    expected = turned(wide[0], wide[1].expand(shape), wide[2].expand(shape))
    assert y.dtype == dtype
    close(y, expected.detach(), dtype)
    expected.backward(grad.double())
    for gradient, tensor in zip(gradients, wide, strict=True):
        assert gradient.dtype == dtype and gradient.shape == tensor.shape
        close(gradient / 4, tensor.grad / 4, dtype)


def test_rotary_refusals():
    x, cos = random(2, 5, 3, 16), random(1, 5, 1, 16)
    for words, *arguments in (
        ("rotary_mode", x, cos, cos, "interleave"),
        ("r1", x, cos[..., :8], cos[..., :8]),  # half as wide
        ("r1", x, cos[:, :3], cos[:, :3]),
        ("r1", x, random(1, 5, 3, 16), random(1, 5, 3, 16)),  # repeated along the batch only
        ("r1", x, cos.view(5, 16), cos.view(5, 16)),
        ("r2", x, cos, random(2, 5, 1, 16)),
        ("r1", x.transpose(1, 2), random(1, 1, 5, 16), random(1, 1, 5, 16)),  # BNSD
    ):
        refused("npu_rotary_mul", words, *arguments)
