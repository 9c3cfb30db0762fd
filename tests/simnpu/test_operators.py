"""The documented semantics of torch_npu's custom operators against references that loop over single elements."""

import inspect
import math

import pytest
import torch
from torch import Tensor

from simnpu import operators
from simnpu.operators import COMPRESSED, OPERATORS

TRIANGLE = torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(diagonal=1)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}

# The schemas of torch_npu 2.13.0, as its library holds them.
SCHEMAS = (
    "npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)",
    (
        "npu_apply_adam_w(Scalar beta1_power, Scalar beta2_power, Scalar lr, Scalar weight_decay, Scalar beta1, "
        "Scalar beta2, Scalar epsilon, Tensor grad, Tensor? max_grad_norm, bool? amsgrad, bool? maximize) -> (Tensor,"
        " Tensor, Tensor)"
    ),
    (
        "npu_apply_adam_w.out(Scalar beta1_power, Scalar beta2_power, Scalar lr, Scalar weight_decay, Scalar beta1, "
        "Scalar beta2, Scalar epsilon, Tensor grad, Tensor? max_grad_norm, bool? amsgrad, bool? maximize, *, Tensor[]"
        " out) -> (Tensor, Tensor, Tensor)"
    ),
    (
        "npu_apply_rotary_pos_emb(Tensor query, Tensor key, Tensor cos, Tensor sin, str layout='BSND', str "
        "rotary_mode='half') -> (Tensor, Tensor)"
    ),
    (
        "npu_cross_entropy_loss(Tensor input, Tensor target, Tensor? weight=None, str reduction='mean', int "
        "ignore_index=-100, float label_smoothing=0.0, float lse_square_scale_for_zloss=0.0, bool return_zloss=False)"
        " -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    (
        "npu_cross_entropy_loss_backward(Tensor grad_loss, Tensor log_prob, Tensor target, Tensor? weight=None, "
        "Tensor? grad_zloss=None, Tensor? lse_for_zloss=None, str reduction='mean', int ignore_index=-100, float "
        "label_smoothing=0.0, float lse_square_scale_for_zloss=0.0) -> Tensor"
    ),
    (
        "npu_fused_infer_attention_score(Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None, Tensor? "
        "atten_mask=None, SymInt[]? actual_seq_lengths=None, SymInt[]? actual_seq_lengths_kv=None, Tensor? "
        "dequant_scale1=None, Tensor? quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None, "
        "Tensor? quant_offset2=None, Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, Tensor? "
        "key_antiquant_scale=None, Tensor? key_antiquant_offset=None, Tensor? value_antiquant_scale=None, Tensor? "
        "value_antiquant_offset=None, Tensor? block_table=None, Tensor? query_padding_size=None, Tensor? "
        "kv_padding_size=None, Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None, SymInt[]? "
        "actual_shared_prefix_len=None, Tensor? query_rope=None, Tensor? key_rope=None, Tensor? "
        "key_rope_antiquant_scale=None, int num_heads=1, float scale=1.0, int pre_tokens=2147483647, int "
        'next_tokens=2147483647, str input_layout="BSH", int num_key_value_heads=0, int sparse_mode=0, int '
        "inner_precise=0, int block_size=0, int antiquant_mode=0, int key_antiquant_mode=0, int "
        "value_antiquant_mode=0, bool softmax_lse_flag=False) -> (Tensor, Tensor)"
    ),
    (
        "npu_fused_infer_attention_score.out(Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None, "
        "Tensor? atten_mask=None, SymInt[]? actual_seq_lengths=None, SymInt[]? actual_seq_lengths_kv=None, Tensor? "
        "dequant_scale1=None, Tensor? quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None, "
        "Tensor? quant_offset2=None, Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, Tensor? "
        "key_antiquant_scale=None, Tensor? key_antiquant_offset=None, Tensor? value_antiquant_scale=None, Tensor? "
        "value_antiquant_offset=None, Tensor? block_table=None, Tensor? query_padding_size=None, Tensor? "
        "kv_padding_size=None, Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None, SymInt[]? "
        "actual_shared_prefix_len=None, Tensor? query_rope=None, Tensor? key_rope=None, Tensor? "
        "key_rope_antiquant_scale=None, int num_heads=1, float scale=1.0, int pre_tokens=2147483647, int "
        'next_tokens=2147483647, str input_layout="BSH", int num_key_value_heads=0, int sparse_mode=0, int '
        "inner_precise=0, int block_size=0, int antiquant_mode=0, int key_antiquant_mode=0, int "
        "value_antiquant_mode=0, bool softmax_lse_flag=False, Tensor? workspace=None, Tensor[] out) -> (Tensor, "
        "Tensor)"
    ),
    (
        "npu_fused_infer_attention_score_v2(Tensor query, Tensor key, Tensor value, *, Tensor? query_rope=None, "
        "Tensor? key_rope=None, Tensor? pse_shift=None, Tensor? atten_mask=None, SymInt[]? actual_seq_qlen=None, "
        "SymInt[]? actual_seq_kvlen=None, Tensor? block_table=None, Tensor? dequant_scale_query=None, Tensor? "
        "dequant_scale_key=None, Tensor? dequant_offset_key=None, Tensor? dequant_scale_value=None, Tensor? "
        "dequant_offset_value=None, Tensor? dequant_scale_key_rope=None, Tensor? quant_scale_out=None, Tensor? "
        "quant_offset_out=None, Tensor? quant_scale_p=None, Tensor? learnable_sink=None, int num_query_heads=1, int "
        "num_key_value_heads=0, float softmax_scale=1.0, int pre_tokens=2147483647, int next_tokens=2147483647, str "
        'input_layout="BSH", int sparse_mode=0, int block_size=0, int query_quant_mode=0, int key_quant_mode=0, int '
        "value_quant_mode=0, int inner_precise=0, bool return_softmax_lse=False, int? query_dtype=None, int? "
        "key_dtype=None, int? value_dtype=None, int? query_rope_dtype=None, int? key_rope_dtype=None, int? "
        "key_shared_prefix_dtype=None, int? value_shared_prefix_dtype=None, int? dequant_scale_query_dtype=None, int?"
        " dequant_scale_key_dtype=None, int? dequant_scale_value_dtype=None, int? dequant_scale_key_rope_dtype=None, "
        "int? out_dtype=None) -> (Tensor, Tensor)"
    ),
    (
        "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? "
        "pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., int "
        "pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, int[]? "
        "actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, bool "
        'sync=False, str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, int seed=0, int offset=0) '
        "-> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
    ),
    (
        "npu_fusion_attention_grad(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str input_layout,"
        " *, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? softmax_max=None, Tensor? "
        "softmax_sum=None, Tensor? softmax_in=None, Tensor? attention_in=None, float scale_value=1., float "
        "keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int seed=0, int "
        "offset=0, int numels=0, int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int "
        'sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, str softmax_layout="", Tensor? sink=None) -> '
        "(Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    (
        "npu_fusion_attention_grad_v2(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str "
        "input_layout, *, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? "
        "softmax_max=None, Tensor? softmax_sum=None, Tensor? softmax_in=None, Tensor? attention_in=None, Tensor? "
        "query_rope=None, Tensor? key_rope=None, float scale_value=1., float keep_prob=1., int pre_tokens=2147483647,"
        " int next_tokens=2147483647, int inner_precise=0, int seed=0, int offset=0, int numels=0, int[]? "
        "prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool "
        "gen_mask_parallel=True, bool sync=False, int pse_type=1, int[]? q_start_idx=None, int[]? kv_start_idx=None, "
        'str softmax_layout="", Tensor? sink=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)'
    ),
    (
        "npu_fusion_attention_grad_v3(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str "
        "input_layout, *, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? "
        "softmax_max=None, Tensor? softmax_sum=None, Tensor? softmax_in=None, Tensor? attention_in=None, float "
        "scale_value=1., float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, int "
        "inner_precise=0, Tensor? seed=None, Tensor? offset=None, SymInt[]? prefix=None, Tensor? "
        "actual_seq_qlen=None, Tensor? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, bool "
        'sync=False, str softmax_layout="", Tensor? sink=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)'
    ),
    (
        "npu_fusion_attention_v2(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, *, Tensor? "
        "pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? query_rope=None, Tensor? "
        "key_rope=None, float scale=1., float keep_prob=1., int pre_tokens=2147483647, int next_tokens=2147483647, "
        "int inner_precise=0, int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int "
        "sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, int pse_type=1, int[]? q_start_idx=None, int[]?"
        ' kv_start_idx=None, str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, int seed=0, int '
        "offset=0) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
    ),
    (
        "npu_fusion_attention_v3(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? "
        "pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., int "
        "pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, SymInt[]? prefix=None, Tensor? "
        "actual_seq_qlen=None, Tensor? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, bool "
        'sync=False, str softmax_layout="", Tensor? sink=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)'
    ),
    (
        "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, Tensor[]? "
        "offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, Tensor[]? "
        "per_token_scale=None, Tensor? group_list=None, Tensor[]? activation_input=None, Tensor[]? "
        "activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? split_item=0, int? "
        "group_type=None, int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, int? output_dtype=None,"
        " int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None, int? per_token_scale_dtype=None) -> "
        "Tensor[]"
    ),
    (
        "npu_grouped_matmul.List(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, Tensor[]?"
        " offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, Tensor[]? "
        "per_token_scale=None, int[]? group_list=None, Tensor[]? activation_input=None, Tensor[]? "
        "activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? split_item=0, int? "
        "group_type=None, int? group_list_type=0, int? act_type=0, ScalarType? output_dtype=None) -> Tensor[]"
    ),
    (
        "npu_incre_flash_attention(Tensor query, Tensor key, Tensor value, *, Tensor? padding_mask=None, Tensor? "
        "atten_mask=None, Tensor? pse_shift=None, SymInt[]? actual_seq_lengths=None, Tensor? antiquant_scale=None, "
        "Tensor? antiquant_offset=None, Tensor? block_table=None, Tensor? dequant_scale1=None, Tensor? "
        "quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None, Tensor? quant_offset2=None, "
        'Tensor? kv_padding_size=None, int num_heads=1, float scale_value=1.0, str input_layout="BSH", int '
        "num_key_value_heads=0, int block_size=0, int inner_precise=1) -> Tensor"
    ),
    (
        "npu_prompt_flash_attention(Tensor query, Tensor key, Tensor value, *, Tensor? padding_mask=None, Tensor? "
        "atten_mask=None, Tensor? pse_shift=None, int[]? actual_seq_lengths=None, Tensor? deq_scale1=None, Tensor? "
        "quant_scale1=None, Tensor? deq_scale2=None, Tensor? quant_scale2=None, Tensor? quant_offset2=None, int "
        'num_heads=1, float scale_value=1.0, int pre_tokens=2147483647, int next_tokens=0, str input_layout="BSH", '
        "int num_key_value_heads=0, int[]? actual_seq_lengths_kv=None, int sparse_mode=0) -> Tensor"
    ),
    "npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu_rms_norm_backward(Tensor dy, Tensor input, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)",
    "npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor",
    (
        "npu_rotary_mul_backward(Tensor grad, Tensor input, Tensor r1, Tensor r2, str rotary_mode='half') -> (Tensor,"
        " Tensor, Tensor)"
    ),
    "npu_scatter_nd_update(Tensor input, Tensor indices, Tensor updates) -> Tensor",
    "npu_scatter_nd_update_(Tensor(a!) input, Tensor indices, Tensor updates) -> Tensor(a!)",
    (
        "npu_scatter_pa_kv_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor "
        "slot_mapping, *, Tensor? compress_lens=None, Tensor? compress_seq_offsets=None, Tensor? seq_lens=None, str? "
        "cache_mode='PA_NZ') -> ()"
    ),
    (
        "npu_scatter_pa_kv_cache_functional(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor "
        "slot_mapping, *, Tensor? compress_lens=None, Tensor? compress_seq_offsets=None, Tensor? seq_lens=None, str? "
        "cache_mode='PA_NZ') -> (Tensor, Tensor)"
    ),
    "npu_swiglu(Tensor input, int dim=-1) -> Tensor",
    "npu_swiglu_backward(Tensor grad_output, Tensor input, int dim=-1) -> Tensor",
    "scatter_update(Tensor input, Tensor indices, Tensor updates, int axis) -> Tensor",
    "scatter_update_(Tensor(a!) input, Tensor indices, Tensor updates, int axis) -> Tensor(a!)",
)


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


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.split("(")[0])
def test_arguments_are_the_schemas(schema):
    parsed = torch._C.parse_schema(f"npu::{schema}")
    function = OPERATORS["npu::" + schema.split("(")[0]]
    parameters = list(inspect.signature(function).parameters.values())
    assert [parameter.name for parameter in parameters] == [argument.name for argument in parsed.arguments]
    for parameter, argument in zip(parameters, parsed.arguments, strict=True):
        assert (parameter.kind == inspect.Parameter.KEYWORD_ONLY) == argument.kwarg_only, parameter.name
        default = parameter.default if parameter.default is not inspect.Parameter.empty else None
        assert default == argument.default_value, parameter.name


def test_every_operator_has_its_schema_here():
    assert set(OPERATORS) == {"npu::" + schema.split("(")[0] for schema in SCHEMAS}


# ---------------------------------------------------------------------------------------------------------------------
# Attention


def sees(mode: int, i: int, j: int, rows: int, columns: int, before: int = 0, after: int = 0, prefix: int = 0) -> bool:
    """Whether query i sees key j, from the words of the page on sparse modes."""
    place = i + columns - rows  # where the query stands when the bottom right corners meet
    if mode == 2:
        return j <= i
    if mode == 3:
        return j <= place
    if mode == 4:
        return place - before <= j <= place + after
    if mode == 6:
        return j <= place or j < prefix
    return True


def seen_in(mode, rows, columns, before=0, after=0):
    """`sees` as a function of batch, head, query and key; mode None sees everything."""
    return lambda b, n, i, j: mode is None or sees(mode, i, j, rows, columns, before, after)


def by_loops(q, k, v, scale, visible, pse=None, add_first=True):
    """Attention one query at a time in fp64: (B, N, S, Dv), and the log of the sum of exponentials (B, N, S)."""
    batch, heads, rows, _ = q.shape
    outputs, sums = [], []
    for b in range(batch):
        for n in range(heads):
            m = n * k.size(1) // heads
            for i in range(rows):
                keys = [j for j in range(k.size(2)) if visible(b, n, i, j)]
                if not keys:
                    outputs.append(v.new_zeros(v.size(3)) + 0 * q[b, n, i].sum())
                    sums.append(q.new_tensor(math.inf))
                    continue
                scores = k[b, m][keys] @ q[b, n, i]
                if pse is not None:
                    shift = pse[b % pse.size(0), n, i % pse.size(2)][keys]
                    scores = (scores + shift) * scale if add_first else scores * scale + shift
                else:
                    scores = scores * scale
                outputs.append(scores.softmax(0) @ v[b, m][keys])
                sums.append(scores.logsumexp(0))
    return torch.stack(outputs).view(batch, heads, rows, -1), torch.stack(sums).view(batch, heads, rows)


def arrange(tensor: Tensor, layout: str) -> Tensor:
    """(B, N, S, D) in a batched layout."""
    order = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "BSH": (0, 2, 1, 3), "SBH": (2, 0, 1, 3)}[layout]
    tensor = tensor.permute(order).contiguous()
    return tensor.flatten(2) if layout.endswith("H") else tensor


LAYOUTS = ("BNSD", "BSND", "BSH", "SBH")
# mode, queries, keys, pre_tockens, next_tockens
CASES = (
    (2, 7, 7, 0, 0),
    (2, 5, 9, 0, 0),
    (2, 9, 5, 3, 3),  # the window has no effect
    (2, 131, 131, 0, 0),
    (3, 7, 7, 0, 0),
    (3, 4, 11, 0, 0),
    (3, 9, 5, 0, 0),  # the first four queries see nothing
    (4, 9, 9, 3, 0),
    (4, 9, 9, 2, 1),
    (4, 9, 9, 0, 0),
    (4, 4, 11, 3, 0),
    (4, 9, 5, 2, 1),
    (4, 7, 7, 3, -1),  # a query does not see itself
    (4, 7, 7, -1, 3),
    (4, 11, 11, 100, 0),
    (4, 131, 131, 17, 0),
)


def fusion_inputs(batch, heads, kv_heads, rows, columns, width=8, value_width=None, dtype=torch.float32):
    """Query, key, value and the output's gradient, (B, N, S, D)."""
    shapes = [(heads, rows, width), (kv_heads, columns, width)]
    shapes += [(kv_heads, columns, value_width or width), (heads, rows, value_width or width)]
    return tuple(random(batch, *shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))


def check_fusion(q, k, v, dy, layout, visible, mask, pse=None, scale=0.3, **options):
    """Forward and backward of the fusion attention in `layout` against the loops, on (B, N, S, D) tensors."""
    heads, dtype = q.size(1), q.dtype
    given = [arrange(tensor, layout) for tensor in (q, k, v)]
    results = run("npu_fusion_attention", *given, heads, layout, pse, None, mask, scale, **options)
    output, high, total, nothing, *_ = results
    wide = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected, sums = by_loops(*wide, scale, visible, None if pse is None else pse.double())
    assert output.dtype == dtype and output.is_contiguous() and nothing.numel() == 0
    close(output, arrange(expected.detach(), layout), dtype)
    assert high.shape == total.shape == (*q.shape[:3], 8) and high.dtype == total.dtype == torch.float32
    assert torch.equal(high, high[..., :1].expand_as(high)) and torch.equal(total, total[..., :1].expand_as(total))
    seen = sums.isfinite()
    close((high + total.log())[..., 0][seen], sums.detach()[seen], dtype)
    gradients = run(
        "npu_fusion_attention_grad", *given, arrange(dy, layout), heads, layout, pse=pse, atten_mask=mask,
        softmax_max=high, softmax_sum=total, attention_in=output, scale_value=scale, **options,
    )  # fmt: skip
    expected.backward(dy.double())
    for gradient, tensor, like in zip(gradients, wide, given, strict=False):
        assert gradient.dtype == dtype and gradient.shape == like.shape and gradient.is_contiguous()
        close(gradient, arrange(tensor.grad, layout), dtype)
    return gradients[3:]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fusion_attention_sparse_modes(case):
    mode, rows, columns, before, after = case
    large = rows > 100
    q, k, v, dy = fusion_inputs(1, 2, 1, rows, columns) if large else fusion_inputs(2, 4, 2, rows, columns)
    layout = LAYOUTS[CASES.index(case) % 4]
    check_fusion(
        q, k, v, dy, layout, seen_in(*case), TRIANGLE,
        sparse_mode=mode, pre_tockens=before, next_tockens=after,
    )  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fusion_attention_layouts_and_dtypes(layout, dtype):
    q, k, v, dy = fusion_inputs(2, 6, 3, 5, 8, width=16, value_width=12, dtype=dtype)
    check_fusion(q, k, v, dy, layout, seen_in(3, 5, 8), TRIANGLE.byte(), sparse_mode=3)


def test_a_band_of_p_and_n_sees_p_keys_before_and_n_behind_the_query_itself():
    columns = 12
    q, k, v = torch.zeros(1, 1, 5, 16), torch.zeros(1, 1, columns, 16), torch.eye(columns, 16).view(1, 1, columns, 16)
    options = {"sparse_mode": 4, "pre_tockens": 3, "next_tockens": 1}
    weights = run("npu_fusion_attention", q, k, v, 1, "BNSD", None, None, TRIANGLE, **options)[0]
    for i in range(5):
        place = i + 7  # the last query stands at the last key
        assert weights[0, 0, i].nonzero().flatten().tolist() == [j for j in range(place - 3, place + 2) if j < columns]


@pytest.mark.parametrize("mode", [0, 1, 2, 3, 4])
def test_without_a_mask_every_mode_sees_everything(mode):
    q, k, v, dy = fusion_inputs(1, 2, 2, 5, 7)
    check_fusion(q, k, v, dy, "BNSD", lambda *_: True, None, sparse_mode=mode, pre_tockens=1, next_tockens=0)


@pytest.mark.parametrize("shape", [(6, 9), (1, 1, 6, 9), (2, 1, 6, 9), (2, 4, 6, 9)], ids=str)
@pytest.mark.parametrize("mode", [0, 1])
def test_true_in_a_full_mask_means_left_out(shape, mode):
    mask = random(*shape, seed=9) > 0.5
    mask[..., 0] = False  # something is left for everyone
    spread = mask.expand(2, 4, 6, 9) if mask.dim() == 4 else mask.view(1, 1, 6, 9).expand(2, 4, 6, 9)
    q, k, v, dy = fusion_inputs(2, 4, 2, 6, 9)
    check_fusion(q, k, v, dy, "BSND", lambda b, n, i, j: not spread[b, n, i, j], mask, sparse_mode=mode)


def test_window_of_mode_0_counts_from_the_top_left_and_must_agree_with_the_mask():
    q, k, v, dy = fusion_inputs(1, 2, 2, 6, 9)
    distance = torch.arange(9) - torch.arange(6).unsqueeze(1)
    mask = (distance < -2) | (distance > 1)
    check_fusion(q, k, v, dy, "BNSD", lambda b, n, i, j: i - 2 <= j <= i + 1, mask, pre_tockens=2, next_tockens=1)
    causal = distance > 0
    check_fusion(q, k, v, dy, "BNSD", lambda b, n, i, j: j <= i, causal, pre_tockens=6, next_tockens=0)
    arguments = (q, k, v, 2, "BNSD", None, None, causal)
    refused("npu_fusion_attention", "lets through keys", *arguments, pre_tockens=2, next_tockens=0)
    refused("npu_fusion_attention", "lets through keys", *arguments, pre_tockens=6, next_tockens=-1)


def test_prefix_modes():
    rows, columns, prefixes = 5, 7, [4, 2]
    q, k, v, dy = fusion_inputs(2, 2, 1, rows, columns)

    def visible(b, n, i, j):
        return sees(6, i, j, rows, columns, prefix=prefixes[b])

    compressed = torch.cat((TRIANGLE, (torch.arange(2048) >= 1024).expand(1024, -1)))
    check_fusion(q, k, v, dy, "BSH", visible, compressed, sparse_mode=6, prefix=prefixes)
    full = torch.tensor([[[[not visible(b, 0, i, j) for j in range(7)] for i in range(5)]] for b in range(2)])
    check_fusion(q, k, v, dy, "BSH", visible, full, sparse_mode=5, prefix=prefixes)
    refused("npu_fusion_attention", "prefix", q, k, v, 2, "BNSD", None, None, compressed, sparse_mode=6, prefix=[1, 2])
    refused("npu_fusion_attention", "prefix", q, k, v, 2, "BNSD", None, None, compressed, sparse_mode=6)


@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (1, 4, 5, 7), (2, 4, 1, 7)], ids=str)
def test_pse_is_added_before_the_scale_and_after_it_with_pse_type_0(shape):
    q, k, v, dy = fusion_inputs(2, 4, 2, 5, 7)
    pse = random(*shape, seed=5)
    dpse, dsink = check_fusion(q, k, v, dy, "BNSD", lambda *_: True, None, pse=pse)
    assert dpse.shape == pse.shape and dsink.numel() == 0
    output = run("npu_fusion_attention_v2", q, k, v, 4, "BNSD", pse=pse, scale=0.3, pse_type=0)[0]
    expected, _ = by_loops(q.double(), k.double(), v.double(), 0.3, lambda *_: True, pse.double(), add_first=False)
    close(output, expected)


def test_versions_2_and_3_are_the_same_under_other_names():
    q, k, v, dy = fusion_inputs(2, 4, 2, 6, 8)
    plain = run("npu_fusion_attention", q, k, v, 4, "BNSD", None, None, TRIANGLE, 0.3, 1.0, 3, 0, sparse_mode=4)
    options = {"atten_mask": TRIANGLE, "sparse_mode": 4}
    second = run("npu_fusion_attention_v2", q, k, v, 4, "BNSD", scale=0.3, pre_tokens=3, next_tokens=0, **options)
    third = run("npu_fusion_attention_v3", q, k, v, 4, "BNSD", None, None, TRIANGLE, 0.3, 1.0, 3, 0, sparse_mode=4)
    for ours, theirs, others in zip(plain[:3], second, third, strict=False):
        assert torch.equal(ours, theirs) and torch.equal(ours, others)
    assert len(plain) == len(second) == 7 and plain[4:] == second[4:] == (0, 0, 2 * 4 * 6 * 8)
    assert len(third) == 6 and third[4].dtype == third[5].dtype == torch.int64
    kept = {"softmax_max": plain[1], "softmax_sum": plain[2], "attention_in": plain[0], "scale_value": 0.3, **options}
    one = run("npu_fusion_attention_grad", q, k, v, dy, 4, "BNSD", pre_tockens=3, next_tockens=0, **kept)
    two = run("npu_fusion_attention_grad_v2", q, k, v, dy, 4, "BNSD", pre_tokens=3, next_tokens=0, **kept)
    three = run("npu_fusion_attention_grad_v3", q, k, v, dy, 4, "BNSD", pre_tockens=3, next_tockens=0, **kept)
    assert (len(one), len(two), len(three)) == (5, 7, 5) and one[3] is None and two[3] is None
    for ours, theirs, others in zip(one[:3], two, three, strict=False):
        assert torch.equal(ours, theirs) and torch.equal(ours, others)


# Packed: lengths of the queries, lengths of the keys, mode, pre_tockens, next_tockens
PACKED = (
    ([3, 1, 5], [3, 1, 5], 2, 0, 0),
    ([3, 1, 5], [4, 1, 7], 3, 0, 0),
    ([5, 3], [2, 4], 2, 0, 0),
    ([4, 6], [4, 6], 4, 2, 0),
    ([2, 0, 4], [2, 0, 4], 3, 0, 0),
    ([3, 4, 2], [5, 4, 3], None, 0, 0),
)


def ends(lengths: list[int]) -> list[int]:
    return torch.tensor(lengths).cumsum(0).tolist()


@pytest.mark.parametrize("softmax_layout", ["", "TND"])
@pytest.mark.parametrize("case", PACKED, ids=str)
def test_packed_sequences_are_attended_one_by_one(case, softmax_layout):
    q_lengths, k_lengths, mode, before, after = case
    mask = None if mode is None else TRIANGLE
    options = {"sparse_mode": mode or 0, "pre_tockens": before, "next_tockens": after, "softmax_layout": softmax_layout}
    options |= {"actual_seq_qlen": ends(q_lengths), "actual_seq_kvlen": ends(k_lengths)}
    q, dy = random(sum(q_lengths), 4, 8, seed=1), random(sum(q_lengths), 4, 8, seed=4)
    k, v = random(sum(k_lengths), 2, 8, seed=2), random(sum(k_lengths), 2, 8, seed=3)
    output, high, total, *_, numels = run("npu_fusion_attention", q, k, v, 4, "TND", None, None, mask, 0.3, **options)
    assert high.shape == total.shape == (sum(q_lengths), 4, 8)
    assert numels == 4 * sum(a * b for a, b in zip(q_lengths, k_lengths, strict=True))
    gradients = run(
        "npu_fusion_attention_grad", q, k, v, dy, 4, "TND", atten_mask=mask, softmax_max=high, softmax_sum=total,
        attention_in=output, scale_value=0.3, **options,
    )  # fmt: skip
    wide = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    parts, largest = [], []
    pairs = zip(wide[0].split(q_lengths), wide[1].split(k_lengths), wide[2].split(k_lengths), strict=True)
    for part_q, part_k, part_v in pairs:
        rows, columns = len(part_q), len(part_k)
        if not rows:
            continue
        visible = seen_in(mode, rows, columns, before, after)
        part, _ = by_loops(*(t.transpose(0, 1)[None] for t in (part_q, part_k, part_v)), 0.3, visible)
        parts.append(part[0].transpose(0, 1))
        scores = torch.einsum("snd,knd->snk", part_q * 0.3, part_k.repeat_interleave(2, 1))
        hidden = torch.tensor([[[not visible(0, 0, i, j) for j in range(columns)]] for i in range(rows)])
        largest.append(scores.masked_fill(hidden, -math.inf).amax(-1))  # (S, N)
    expected = torch.cat(parts)
    close(output, expected)
    if softmax_layout:
        close(high[..., 0], torch.cat(largest))
    else:  # one (N, S) block a sequence
        close(high[..., 0].flatten(), torch.cat([part.t().flatten() for part in largest]))
    expected.backward(dy.double())
    for gradient, tensor in zip(gradients, wide, strict=False):
        close(gradient, tensor.grad)


def test_cut_sequences_of_modes_7_and_8_are_as_in_the_documented_examples():
    """Packed sequences whose second, 4 x 6 in mode 3 or 5 x 4 in mode 2, is cut between two devices."""
    q, k, v = random(12, 2, 8, seed=1), random(15, 2, 8, seed=2), random(15, 2, 8, seed=3)

    def attend(tokens, keys, mode, q_ends, k_ends, **window):
        options = {"actual_seq_qlen": q_ends, "actual_seq_kvlen": k_ends, "sparse_mode": mode, **window}
        arguments = (q[tokens], k[keys], v[keys], 2, "TND", None, None, TRIANGLE, 0.3)
        return run("npu_fusion_attention", *arguments, **options)[0]

    whole = attend(slice(0, 7), slice(0, 9), 3, [3, 7], [3, 9])
    first = attend(slice(0, 5), slice(0, 9), 7, [3, 5], [3, 9], pre_tockens=6, next_tockens=-2)
    close(first, whole[:5])
    whole = attend(slice(0, 8), slice(0, 7), 2, [3, 8], [3, 7])
    second = attend(slice(5, 12), slice(3, 11), 8, [3, 7], [4, 8], pre_tockens=4, next_tockens=1)
    close(second[:3], whole[5:])
    arguments = (q[:5], k[:9], v[:9], 2, "TND", None, None, TRIANGLE)
    lengths = {"actual_seq_qlen": [3, 5], "actual_seq_kvlen": [3, 9], "sparse_mode": 7}
    refused("npu_fusion_attention", "pre_tockens", *arguments, **lengths, pre_tockens=5, next_tockens=-2)


def test_sequences_left_out_at_the_end_of_a_pack():
    q, k, v = random(9, 2, 8, seed=1), random(9, 2, 8, seed=2), random(9, 2, 8, seed=3)
    options = {"actual_seq_qlen": [2, 5, 0, 0], "actual_seq_kvlen": [2, 5, 0, 0], "sparse_mode": 3}
    output = run("npu_fusion_attention", q, k, v, 2, "TND", None, None, TRIANGLE, **options)[0]
    options |= {"actual_seq_qlen": [2, 5], "actual_seq_kvlen": [2, 5]}
    shorter = run("npu_fusion_attention", q[:5], k[:5], v[:5], 2, "TND", None, None, TRIANGLE, **options)[0]
    assert torch.equal(output[:5], shorter) and not output[5:].any()
    refused("npu_fusion_attention", "zeros at the end", q, k, v, 2, "TND", None, None, TRIANGLE, **options)


def test_a_full_mask_in_a_pack_is_read_from_its_top_left():
    q, k, v = random(5, 2, 8, seed=1), random(5, 2, 8, seed=2), random(5, 2, 8, seed=3)
    mask = torch.tensor([[False, True, False], [True, False, False], [False, False, True]])
    lengths = {"actual_seq_qlen": [3, 5], "actual_seq_kvlen": [3, 5], "sparse_mode": 1}
    output = run("npu_fusion_attention", q, k, v, 2, "TND", None, None, mask, 0.3, **lengths)[0]
    second = [t[3:].double().transpose(0, 1)[None] for t in (q, k, v)]
    expected, _ = by_loops(*second, 0.3, lambda b, n, i, j: not mask[i, j])
    close(output[3:], expected[0].transpose(0, 1))
    mask[2] = True
    refused("npu_fusion_attention", "blocks every key", q, k, v, 2, "TND", None, None, mask, **lengths)


def test_a_query_that_sees_nothing_is_averaged_or_with_inner_precise_2_zero():
    q, k, v, dy = fusion_inputs(1, 2, 2, 3, 4)
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[1] = True
    arguments = (q, k, v, 2, "BNSD", None, None, mask, 0.3)
    averaged = run("npu_fusion_attention", *arguments, sparse_mode=1)[0]
    close(averaged[:, :, 1], v.mean(2))
    zeroed, high, total, *_ = run("npu_fusion_attention", *arguments, sparse_mode=1, inner_precise=2)
    assert not zeroed[:, :, 1].any() and torch.equal(zeroed[:, :, 0], averaged[:, :, 0])
    kept = {"softmax_max": high, "softmax_sum": total, "attention_in": zeroed, "scale_value": 0.3}
    kept |= {"atten_mask": mask, "sparse_mode": 1, "inner_precise": 2}
    gradients = run("npu_fusion_attention_grad", q, k, v, dy, 2, "BNSD", **kept)
    assert gradients[0][:, :, 1].abs().max() < 1e-30
    dy[:, :, 1] = 100.0  # what flows back into it goes nowhere
    again = run("npu_fusion_attention_grad", q, k, v, dy, 2, "BNSD", **kept)
    for one, other in zip(gradients[:3], again[:3], strict=True):
        close(one, other)


@pytest.mark.parametrize("rows, columns", [(5, 5), (300, 300), (130, 2200), (700, 40)])
@pytest.mark.parametrize("before, after", [(None, 0), (None, 900), (None, -3), (20, 0), (150, 3), (1500, 1200)])
def test_tiles_read_from_the_documented_triangle_give_the_band(rows, columns, before, after):
    tiles = operators.blocked_by_tiles(TRIANGLE, rows, columns, before, after)
    assert torch.equal(tiles, operators.outside_band(rows, columns, before, after))


def test_a_compressed_mask_of_the_wrong_content_goes_wrong_near_the_diagonal():
    q, k, v = torch.zeros(1, 1, 300, 16), torch.zeros(1, 1, 300, 16), random(1, 1, 300, 16)
    nothing = torch.zeros_like(TRIANGLE)
    output = run("npu_fusion_attention", q, k, v, 1, "BNSD", None, None, nothing, sparse_mode=2)[0]
    close(output[0, 0, 0], v[0, 0].mean(0))  # sees ahead: the tile of the diagonal is not masked
    inverted = run("npu_fusion_attention", q, k, v, 1, "BNSD", None, None, ~TRIANGLE, sparse_mode=2)[0]
    close(inverted[0, 0, 10], v[0, 0, 11:].mean(0))


def test_fusion_attention_refusals():
    q, k, v, dy = fusion_inputs(2, 4, 2, 5, 7)

    def no(words, *arguments, **options):
        refused("npu_fusion_attention", words, *arguments, **options)

    no("head dims", q, k[:, :, :, :4], v[:, :, :, :4], 4, "BNSD")
    no("query, key, value", q, k.bfloat16(), v, 4, "BNSD")
    no("query", q.double(), k.double(), v.double(), 4, "BNSD")
    no("head_num", q, k, v, 2, "BNSD")
    no("key", q, torch.cat((k, k[:, :1]), 1), torch.cat((v, v[:, :1]), 1), 4, "BNSD")  # 4 heads for 3
    no("value", q, k, v[:, :, :6], 4, "BNSD")
    no("input_layout", q, k, v, 4, "BDSN")
    no("query", q, k, v, 4, "BSH")
    no("query", *(random(1, 1, 2, 784) for _ in range(3)), 1, "BNSD")
    no("keep_prob", q, k, v, 4, "BNSD", keep_prob=0.9)
    no("keep_prob", q, k, v, 4, "BNSD", keep_prob=0.0)
    no("sparse_mode", q, k, v, 4, "BNSD", sparse_mode=7)
    no("padding_mask", q, k, v, 4, "BNSD", padding_mask=TRIANGLE)
    no("sink", q, k, v, 4, "BNSD", sink=torch.zeros(4))
    no("softmax_layout", q, k, v, 4, "BNSD", softmax_layout="TND")
    no("pse", q, k, v, 4, "BNSD", pse=random(2, 1, 5, 7))
    no("pse", q, k, v, 4, "BNSD", pse=random(2, 4, 5, 7).bfloat16())
    for mode in (2, 3, 4):
        no("atten_mask", q, k, v, 4, "BNSD", atten_mask=TRIANGLE[:5, :7], sparse_mode=mode, next_tockens=0)
        no("atten_mask", q, k, v, 4, "BNSD", atten_mask=TRIANGLE.float(), sparse_mode=mode, next_tockens=0)
    for mode in (0, 1):
        no("atten_mask", q, k, v, 4, "BNSD", atten_mask=TRIANGLE, sparse_mode=mode)
        no("atten_mask", q, k, v, 4, "BNSD", atten_mask=torch.zeros(1, 4, 5, 7, dtype=torch.bool), sparse_mode=mode)
    no("pre_tockens", q, k, v, 4, "BNSD", atten_mask=TRIANGLE, sparse_mode=4, pre_tockens=-4, next_tockens=2)
    packed = (random(5, 4, 8), random(5, 2, 8), random(5, 2, 8), 4, "TND")
    no("actual_seq_qlen", *packed)
    no("actual_seq_qlen", *packed, actual_seq_qlen=[2, 5], actual_seq_kvlen=[5])
    no("actual_seq_qlen", *packed, actual_seq_qlen=[2, 6], actual_seq_kvlen=[2, 5])
    no("does not grow", *packed, actual_seq_qlen=[3, 2], actual_seq_kvlen=[2, 5])  # lengths, not ends
    no("sparse_mode 3", *packed, atten_mask=TRIANGLE, sparse_mode=3, actual_seq_qlen=[3, 5], actual_seq_kvlen=[2, 5])
    no("sparse_mode", *packed, sparse_mode=5, actual_seq_qlen=[5], actual_seq_kvlen=[5])
    output, high, total, *_ = run("npu_fusion_attention", q, k, v, 4, "BNSD")
    kept = {"softmax_max": high, "softmax_sum": total, "attention_in": output}
    for argument in kept:
        refused("npu_fusion_attention_grad", argument, q, k, v, dy, 4, "BNSD", **(kept | {argument: None}))
    narrow = kept | {"softmax_max": high[..., :1]}
    refused("npu_fusion_attention_grad", "softmax_max", q, k, v, dy, 4, "BNSD", **narrow)
    refused("npu_fusion_attention_grad", "dy", q, k, v, dy[:, :2], 4, "BNSD", **kept)


# ---------------------------------------------------------------------------------------------------------------------
# Attention for inference


def infer_inputs(batch, heads, kv_heads, rows, columns, width=16, dtype=torch.bfloat16):
    return fusion_inputs(batch, heads, kv_heads, rows, columns, width=width, dtype=dtype)[:3]


def check_infer(q, k, v, layout, visible, scale=0.3, name="npu_fused_infer_attention_score", rows=None, **options):
    """On (B, N, S, D) tensors; `rows` says how many queries of each sequence count."""
    layout_in, layout_out = layout.split("_")[0], layout.split("_")[-1]
    given = [arrange(tensor, layout_in) for tensor in (q, k, v)]
    heads = {"num_heads": q.size(1), "num_key_value_heads": k.size(1), "input_layout": layout}
    output, lse = run(name, *given, **heads, scale=scale, softmax_lse_flag=True, **options)
    expected, sums = by_loops(q.double(), k.double(), v.double(), scale, visible)
    assert output.dtype == q.dtype and lse.shape == (*q.shape[:3], 1) and lse.dtype == torch.float32
    for b in range(q.size(0)):
        count = q.size(2) if rows is None else rows[b]
        expected[b, :, count:] = 0
        sums[b, :, count:] = math.inf
    close(output, arrange(expected, layout_out), q.dtype)
    close(lse[..., 0], sums, q.dtype)
    plain = run(name, *given, **heads, scale=scale, **options)
    assert torch.equal(plain[0], output) and plain[1].numel() == 0


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND"])
@pytest.mark.parametrize("case", [case for case in CASES if case[1] < 100], ids=str)
def test_fused_infer_attention_sparse_modes(case, layout):
    mode, rows, columns, before, after = case
    q, k, v = infer_inputs(2, 4, 2, rows, columns)
    options = {"sparse_mode": mode, "pre_tokens": before, "next_tokens": after}
    check_infer(q, k, v, layout, seen_in(*case), atten_mask=TRIANGLE.to(torch.int8), **options)


def test_the_bottom_right_of_inference_is_that_of_the_lengths_in_use():
    q, k, v = infer_inputs(3, 4, 2, 5, 9)
    rows, columns = [5, 2, 3], [9, 4, 0]

    def everything(b, n, i, j):
        return i < rows[b] and j < columns[b]

    def causal(b, n, i, j):
        return everything(b, n, i, j) and j <= i + columns[b] - rows[b]

    lengths = {"actual_seq_lengths": rows, "actual_seq_lengths_kv": columns}
    check_infer(q, k, v, "BNSD", causal, rows=rows, atten_mask=TRIANGLE, sparse_mode=3, **lengths)
    check_infer(q, k, v, "BSND", everything, rows=rows, **lengths)


@pytest.mark.parametrize("shape", [(6, 9), (1, 6, 9), (2, 1, 6, 9), (16, 32), (2, 1, 16, 9)], ids=str)
@pytest.mark.parametrize("mode", [0, 1])
def test_full_masks_of_inference_may_be_padded(shape, mode):
    q, k, v = infer_inputs(2, 4, 2, 6, 9)
    mask = random(*shape, seed=9) > 0.5
    mask[..., 0] = False
    spread = mask.view(-1, *shape[-2:]).expand(2, -1, -1)
    check_infer(q, k, v, "BNSD", lambda b, n, i, j: not spread[b, i, j], atten_mask=mask, sparse_mode=mode)


def test_one_query_a_sequence_ignores_the_mode_and_sees_what_its_lengths_and_mask_leave():
    q, k, v = infer_inputs(3, 4, 2, 1, 40)
    columns = [7, 40, 1]
    options = {"actual_seq_lengths_kv": columns, "sparse_mode": 3, "pre_tokens": 0, "next_tokens": 0}
    options |= {"actual_seq_lengths": [0, 0, 0]}
    check_infer(q, k, v, "BNSD", lambda b, n, i, j: j < columns[b], **options)
    mask = random(3, 40, seed=7) > 0
    mask[:, 0] = False
    for shaped in (mask, mask.view(3, 1, 40), mask.view(3, 1, 1, 40)):
        check_infer(q, k, v, "BSH", lambda b, n, i, j: not mask[b, j], atten_mask=shaped)
    given = [arrange(tensor, "BSH") for tensor in (q, k, v)]
    heads = {"num_heads": 4, "num_key_value_heads": 2}
    refused("npu_fused_infer_attention_score", "atten_mask", *given, **heads, atten_mask=TRIANGLE, sparse_mode=3)
    output = run("npu_incre_flash_attention", *given, **heads, scale_value=0.3, actual_seq_lengths=columns)
    expected, _ = by_loops(q.double(), k.double(), v.double(), 0.3, lambda b, n, i, j: j < columns[b])
    close(output, arrange(expected, "BSH"), q.dtype)
    refused("npu_incre_flash_attention", "query", given[0].repeat(1, 2, 1), *given[1:], **heads)


@pytest.mark.parametrize("mode", [None, 2, 3])
def test_fused_infer_attention_of_packed_sequences(mode):
    q_lengths, k_lengths = [3, 1, 5], [4, 1, 7]
    q, k, v = (random(n, h, 16, seed=s, dtype=torch.bfloat16) for n, h, s in ((9, 4, 1), (12, 2, 2), (12, 2, 3)))
    options = {} if mode is None else {"atten_mask": TRIANGLE, "sparse_mode": mode}
    output, lse = run(
        "npu_fused_infer_attention_score", q, k, v, num_heads=4, num_key_value_heads=2, input_layout="TND", scale=0.3,
        actual_seq_lengths=ends(q_lengths), actual_seq_lengths_kv=ends(k_lengths), softmax_lse_flag=True, **options,
    )  # fmt: skip
    assert output.shape == q.shape and lse.shape == (9, 4, 1)
    parts = zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True)
    for part, out, sums in zip(parts, output.split(q_lengths), lse.split(q_lengths), strict=True):
        rows, columns = len(part[0]), len(part[1])
        wide = [tensor.double().transpose(0, 1)[None] for tensor in part]
        expected, logs = by_loops(*wide, 0.3, seen_in(mode, rows, columns))
        close(out, expected[0].transpose(0, 1), q.dtype)
        close(sums[..., 0], logs[0].t(), q.dtype)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("layout", ["BNSD", "TND"])
def test_paged_caches(rows, flat, layout):
    columns, size = [5, 130, 256], 128
    q, k, v = infer_inputs(3, 4, 2, rows, 256)
    table = torch.tensor([[3, 0], [1, 5], [2, 4]], dtype=torch.int32)
    caches = []
    for tensor in (k, v):
        cache = torch.full((6, 2, size, 16), 9.0, dtype=tensor.dtype)
        for b in range(3):
            for place in range(columns[b]):
                cache[table[b, place // size], :, place % size] = tensor[b, :, place]
        caches.append(cache.transpose(1, 2).flatten(2).contiguous() if flat else cache)
    mask = {} if rows == 1 else {"atten_mask": TRIANGLE, "sparse_mode": 3}
    given = q if layout == "BNSD" else q.transpose(1, 2).flatten(0, 1).contiguous()
    query_ends = {} if layout == "BNSD" else {"actual_seq_lengths": [rows, 2 * rows, 3 * rows]}
    output, _ = run(
        "npu_fused_infer_attention_score", given, *caches, num_heads=4, num_key_value_heads=2, input_layout=layout,
        scale=0.3, block_table=table, block_size=size, actual_seq_lengths_kv=columns, **query_ends, **mask,
    )  # fmt: skip
    wide = q.double(), k.double(), v.double()
    expected, _ = by_loops(*wide, 0.3, lambda b, n, i, j: j < columns[b] and j <= i + columns[b] - rows)
    close(output, expected if layout == "BNSD" else expected.transpose(1, 2).flatten(0, 1), q.dtype)


def test_prompt_attention_has_a_window_without_a_view_ahead():
    q, k, v = infer_inputs(2, 4, 2, 6, 6, dtype=torch.float16)
    heads = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "BNSD", "scale_value": 0.3}
    causal = TRIANGLE[:6, :6].contiguous()
    expected, _ = by_loops(q.double(), k.double(), v.double(), 0.3, lambda b, n, i, j: j <= i)
    for mask, mode in ((causal, 0), (TRIANGLE, 2), (TRIANGLE, 13)):
        output = run("npu_prompt_flash_attention", q, k, v, **heads, atten_mask=mask, sparse_mode=mode)
        close(output, expected, q.dtype)
    full, _ = by_loops(q.double(), k.double(), v.double(), 0.3, lambda *_: True)
    close(run("npu_prompt_flash_attention", q, k, v, **heads), full, q.dtype)  # no mask: the window has no effect
    refused("npu_prompt_flash_attention", "lets through", q, k, v, **heads, atten_mask=torch.zeros_like(causal))


def test_fused_infer_attention_forms():
    q, k, v = infer_inputs(2, 4, 2, 6, 9)
    options = {"num_key_value_heads": 2, "input_layout": "BNSD", "atten_mask": TRIANGLE, "sparse_mode": 3}
    first = {"num_heads": 4, "scale": 0.3, "softmax_lse_flag": True}
    second = {"num_query_heads": 4, "softmax_scale": 0.3, "return_softmax_lse": True}
    output, lse = run("npu_fused_infer_attention_score", q, k, v, **first, **options)
    other, other_lse = run("npu_fused_infer_attention_score_v2", q, k, v, **second, **options)
    assert torch.equal(other, output) and torch.equal(other_lse, lse)
    out = [torch.zeros_like(output), torch.zeros_like(lse)]
    written = run("npu_fused_infer_attention_score.out", q, k, v, out=out, **first, **options)
    assert written[0] is out[0] and torch.equal(out[0], output) and torch.equal(out[1], lse)
    pse = random(1, 4, 6, 9, seed=5, dtype=q.dtype)
    options = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "BNSD", "scale": 0.3, "pse_shift": pse}
    shifted, _ = run("npu_fused_infer_attention_score", q, k, v, **options)
    expected, _ = by_loops(q.double(), k.double(), v.double(), 0.3, lambda *_: True, pse.double(), add_first=False)
    close(shifted, expected, q.dtype)


def test_inference_attention_refusals():
    q, k, v = infer_inputs(2, 4, 2, 6, 9)

    def no(words, *arguments, **options):
        heads = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "BNSD"}
        refused("npu_fused_infer_attention_score", words, *arguments, **(heads | options))

    no("query", q.float(), k.float(), v.float())
    no("key", q, k[:, :, :8], v[:, :, :8])  # a slice of a cache is not contiguous
    for mode in (2, 3, 4):
        no("atten_mask", q, k, v, sparse_mode=mode)
        no("atten_mask", q, k, v, sparse_mode=mode, atten_mask=TRIANGLE[:6, :9].contiguous())
    no("atten_mask", q, k, v, sparse_mode=1)
    no("atten_mask", q, k, v, atten_mask=TRIANGLE)
    no("sparse_mode", q, k, v, sparse_mode=6)
    no("num_heads", q, k, v, num_heads=8)
    no("num_key_value_heads", q, k, v, num_key_value_heads=4)
    no("actual_seq_lengths_kv", q, k, v, actual_seq_lengths_kv=[9, 10])
    no("actual_seq_lengths_kv", *infer_inputs(3, 4, 2, 6, 9), actual_seq_lengths_kv=[9, 9])
    no("query", *infer_inputs(1, 4, 2, 6, 9, width=24))
    no("key_rope", q, k, v, key_rope=k)
    no("block_size", q, k, v, block_table=torch.zeros(2, 1, dtype=torch.int32), block_size=64)


# ---------------------------------------------------------------------------------------------------------------------
# Normalisation, rotation, gates, losses


@pytest.mark.parametrize("dtype, gamma_dtype", [
    (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
])  # fmt: skip
@pytest.mark.parametrize("shape, normed", [((3, 5, 8), 1), ((2, 3, 4, 6), 2), ((7,), 1)])
def test_rms_norm_and_its_gradient(dtype, gamma_dtype, shape, normed):
    x, dy = random(*shape, seed=1, dtype=dtype), random(*shape, seed=2, dtype=dtype)
    gamma = random(*shape[len(shape) - normed :], seed=3, dtype=gamma_dtype)
    y, rstd = run("npu_rms_norm", x, gamma, 1e-3)
    dx, d_gamma = run("npu_rms_norm_backward", dy, x, gamma, rstd)
    wide, wide_gamma = x.double().requires_grad_(), gamma.double().requires_grad_()
    rows, width = wide.reshape(-1, gamma.numel()), wide_gamma.flatten()
    expected, roots = [], []
    for row in rows:
        roots.append(1 / (sum(number * number for number in row) / len(row) + 1e-3).sqrt())
        expected.append(torch.stack([number * roots[-1] * scale for number, scale in zip(row, width, strict=True)]))
    expected = torch.stack(expected).view(shape)
    assert (y.dtype, rstd.dtype, dx.dtype, d_gamma.dtype) == (dtype, torch.float32, dtype, torch.float32)
    assert rstd.shape == (*shape[: len(shape) - normed], *[1] * normed) and d_gamma.shape == gamma.shape
    close(y, expected.detach(), dtype)
    close(rstd.flatten(), torch.stack(roots).detach())
    expected.backward(dy.double())
    close(dx, wide.grad, dtype)
    close(d_gamma, wide_gamma.grad)


def test_add_rms_norm_norms_the_rounded_sum():
    x1, x2, gamma = (random(4, 8, seed=s, dtype=torch.bfloat16) for s in (1, 2, 3))
    x1 = (x1 * 100).bfloat16()
    y, rstd, total = run("npu_add_rms_norm", x1, x2, gamma[0], 1e-3)
    assert torch.equal(total, x1 + x2)
    expected, expected_rstd = run("npu_rms_norm", total, gamma[0], 1e-3)
    close(y, expected, torch.bfloat16)
    assert torch.equal(rstd, expected_rstd)
    assert torch.equal(y, ((total * rstd).bfloat16() * gamma[0]))  # rounded before gamma, too


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
    refused("npu_add_rms_norm", "gamma", x.half(), x.half(), gamma)
    refused("npu_add_rms_norm", "x2", x, x[:2], gamma)


def turned(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    """Pair by pair: (a, b) becomes (a cos - b sin, b cos + a sin), each element with the angle of its own place."""
    width = x.size(-1)
    columns: list[Tensor] = [x] * width
    for pair in range(width // 2):
        one, two = (pair, pair + width // 2) if mode == "half" else (2 * pair, 2 * pair + 1)
        columns[one] = x[..., one] * cos[..., one] - x[..., two] * sin[..., one]
        columns[two] = x[..., two] * cos[..., two] + x[..., one] * sin[..., two]
    return torch.stack(columns, -1)


# shape of the input, of cos and sin, modes
ROTARY = (
    ((2, 5, 3, 16), (1, 5, 1, 16), ("half", "interleave")),  # BSND
    ((2, 5, 3, 16), (2, 5, 1, 16), ("half",)),
    ((2, 5, 3, 16), (2, 5, 3, 16), ("half",)),
    ((2, 3, 5, 16), (1, 1, 5, 16), ("half", "interleave")),  # BNSD
    ((2, 3, 5, 16), (2, 1, 5, 16), ("half",)),
    ((5, 2, 3, 16), (5, 1, 1, 16), ("half", "interleave")),  # SBND
    ((5, 3, 16), (5, 1, 16), ("half", "interleave")),  # TND
    ((4, 1, 3, 16), (1, 1, 1, 16), ("half", "interleave")),  # one position
)


@pytest.mark.parametrize("case", ROTARY, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_mul_and_its_gradient(case, dtype):
    shape, angles, modes = case
    for mode in modes:
        x, grad = random(*shape, seed=1).to(dtype), random(*shape, seed=2).to(dtype)
        cos, sin = random(*angles, seed=3), random(*angles, seed=4)  # fp32: cast to the input's dtype by the operator
        if dtype == torch.bfloat16 and mode == "half" and angles == (1, 1, 5, 16):
            continue  # BNSD with D / 2 that is no 32 bytes: refused, see below
        y = run("npu_rotary_mul", x, cos, sin, mode)
        gradients = run("npu_rotary_mul_backward", grad, x, cos, sin, mode)
        wide = [tensor.to(dtype).double().requires_grad_() for tensor in (x, cos, sin)]
        expected = turned(wide[0], wide[1].expand(shape), wide[2].expand(shape), mode)
        assert y.dtype == dtype
        close(y, expected.detach(), dtype)
        expected.backward(grad.double())
        for gradient, tensor in zip(gradients, wide, strict=True):
            assert gradient.dtype == dtype and gradient.shape == tensor.shape
            close(gradient / 4, tensor.grad / 4, dtype)


def test_rotary_mul_takes_a_matrix_for_the_rotation():
    x, cos, sin = random(2, 5, 3, 8, seed=1), random(1, 5, 1, 8, seed=2), random(1, 5, 1, 8, seed=3)
    rotate = torch.zeros(8, 8)
    rotate[:4, 4:], rotate[4:, :4] = torch.eye(4), -torch.eye(4)
    close(run("npu_rotary_mul", x, cos, sin, "half", rotate), run("npu_rotary_mul", x, cos, sin))


def test_rotary_refusals():
    x, cos = random(2, 5, 3, 16), random(1, 5, 1, 16)

    def no(words, *arguments):
        refused("npu_rotary_mul", words, *arguments)

    no("rotary_mode", x, cos, cos, "quarter")
    no("r1", x, cos[..., :8], cos[..., :8])  # half as wide
    no("r1, r2", x, cos[:, :3], cos[:, :3])
    no("r1, r2", x, random(1, 5, 3, 16), random(1, 5, 3, 16))  # repeated along the batch only
    no("r1, r2", x, random(2, 5, 1, 16), random(2, 5, 1, 16), "interleave")
    no("r2", x, cos, random(2, 5, 1, 16))
    no("input, r1, r2", x, cos.view(5, 16), cos.view(5, 16))
    no("use BSND", random(5, 4, 2, 32).half(), *(random(1, 1, 2, 32) for _ in range(2)))
    no("use BSND", x.transpose(1, 2).bfloat16(), random(1, 1, 5, 16), random(1, 1, 5, 16))  # D / 2 is no 32 bytes


@pytest.mark.parametrize("shape, angles", [((2, 5, 3, 64), (2, 5, 1, 64)), ((5, 3, 64), (5, 1, 64))])
def test_apply_rotary_pos_emb_works_in_place(shape, angles):
    q, k = random(*shape, seed=1), random(*shape[:-2], 1, 64, seed=2)
    cos, sin = random(*angles, seed=3), random(*angles, seed=4)
    expected = [turned(tensor, cos.expand_as(tensor), sin.expand_as(tensor), "half") for tensor in (q, k)]
    out = run("npu_apply_rotary_pos_emb", q, k, cos, sin, "BSND" if len(shape) == 4 else "TND")
    assert out[0] is q and out[1] is k
    close(q, expected[0])
    close(k, expected[1])
    refused("npu_apply_rotary_pos_emb", "cos", q, k, cos[..., :32], sin[..., :32], "BSND" if len(shape) == 4 else "TND")
    refused("npu_apply_rotary_pos_emb", "head dim", *(random(2, 5, 1, 32) for _ in range(4)))
    refused("npu_apply_rotary_pos_emb", "layout", q, k, cos, sin, "BNSD")


@pytest.mark.parametrize("dim", [-1, 0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_and_its_gradient(dim, dtype):
    x = random(4, 6, 8, seed=1, dtype=dtype)
    wide = x.double().requires_grad_()
    half = x.size(dim) // 2
    gate, other = wide.narrow(dim, 0, half), wide.narrow(dim, half, half)
    expected = gate / (1 + (-gate).exp()) * other
    grad = random(*expected.shape, seed=2, dtype=dtype)
    y = run("npu_swiglu", x, dim)
    close(y, expected.detach(), dtype)
    expected.backward(grad.double())
    dx = run("npu_swiglu_backward", grad, x, dim)
    assert y.dtype == dx.dtype == dtype
    close(dx, wide.grad, dtype)
    refused("npu_swiglu", "dim", x[..., :7])
    refused("npu_swiglu", "dim", x, 3)
    refused("npu_swiglu", "input", x.double())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted, ignored", [(False, -100), (True, -100), (True, 2)])
def test_cross_entropy_loss_and_its_gradient(reduction, weighted, ignored):
    x, target = random(6, 5, seed=1), torch.tensor([0, 2, 4, 2, 1, 3])
    weight = random(5, seed=2).sigmoid() if weighted else None
    loss, log_prob, *rest = run("npu_cross_entropy_loss", x, target, weight, reduction, ignored)
    wide = x.double().requires_grad_()
    losses, counted = [], []
    for row, label in zip(wide, target.tolist(), strict=True):
        counted.append(0.0 if label == ignored else float(weight[label]) if weighted else 1.0)
        losses.append(-(row[label] - row.exp().sum().log()) * counted[-1])
    expected = torch.stack(losses)
    if reduction != "none":
        expected = (expected.sum() / (sum(counted) if reduction == "mean" else 1)).view(1)
    close(loss, expected.detach())
    assert loss.shape == expected.shape and all(extra.numel() == 0 for extra in rest)
    grad = random(*loss.shape, seed=3)
    expected.backward(grad.double())
    dx = run("npu_cross_entropy_loss_backward", grad, log_prob, target, weight, None, None, reduction, ignored)
    close(dx, wide.grad)


def test_cross_entropy_loss_refusals():
    x, target = random(6, 5, seed=1), torch.tensor([0, 2, 4, 2, 1, 3])
    refused("npu_cross_entropy_loss", "target", x, torch.tensor([0, 2, 4, 2, 1, -100]))  # -100 ignores nothing
    refused("npu_cross_entropy_loss", "target", x, torch.tensor([0, 2, 4, 2, 1, -1]), None, "mean", -1)
    refused("npu_cross_entropy_loss", "target", x, target.int())
    refused("npu_cross_entropy_loss", "target", x, target[:5])
    refused("npu_cross_entropy_loss", "label_smoothing", x, target, label_smoothing=0.1)
    refused("npu_cross_entropy_loss", "input", x.view(2, 3, 5), target)


# ---------------------------------------------------------------------------------------------------------------------
# Caches, optimizer, grouped products


def test_scatter_nd_update():
    data, updates = random(4, 5, 6, seed=1), random(3, 6, seed=2)
    indices = torch.tensor([[0, 1], [3, 4], [2, 0]], dtype=torch.int32)
    expected = data.clone()
    for (a, b), update in zip(indices.tolist(), updates, strict=True):
        expected[a, b] = update
    before = data.clone()
    assert torch.equal(run("npu_scatter_nd_update", data, indices, updates), expected) and torch.equal(data, before)
    assert run("npu_scatter_nd_update_", data, indices, updates) is data and torch.equal(data, expected)
    refused("npu_scatter_nd_update_", "updates", data, indices, updates[:, :5])
    refused("npu_scatter_nd_update_", "updates", data, indices, updates.half())
    refused("npu_scatter_nd_update_", "indices", data, indices + 1, updates)
    refused("npu_scatter_nd_update_", "indices", data, indices.flatten(), updates)


@pytest.mark.parametrize("axis", [-2, 2, 1])
def test_scatter_update_writes_a_span_for_each_first_index(axis):
    data, start = random(3, 6, 7, 4, seed=1), torch.tensor([0, 3, 2])
    shape = [3, 6, 7, 4]
    shape[axis] = 2
    updates, expected = random(*shape, seed=2), data.clone()
    for i in range(3):
        for place in range(2):
            expected[i].select(axis % 4 - 1, int(start[i]) + place).copy_(updates[i].select(axis % 4 - 1, place))
    before = data.clone()
    assert torch.equal(run("scatter_update", data, start, updates, axis), expected) and torch.equal(data, before)
    assert run("scatter_update_", data, start, updates, axis) is data and torch.equal(data, expected)
    refused("scatter_update_", "indices", data, start + 4, updates, axis)
    refused("scatter_update_", "updates", data, start, updates.half(), axis)
    refused("scatter_update_", "axis", data, start, updates, 0)


def test_scatter_pa_kv_cache():
    key, value = random(3, 2, 8, seed=1), random(3, 2, 4, seed=2)
    caches = torch.zeros(5, 16, 2, 8), torch.zeros(5, 16, 2, 4)
    slots = torch.tensor([0, 37, 79], dtype=torch.int32)
    copies = run("npu_scatter_pa_kv_cache_functional", key, value, *caches, slots, cache_mode="Norm")
    assert not caches[0].any() and not caches[1].any()
    assert run("npu_scatter_pa_kv_cache", key, value, *caches, slots, cache_mode="Norm") is None
    for tokens, cache, copy in zip((key, value), caches, copies, strict=True):
        expected = torch.zeros_like(cache)
        for token, slot in zip(tokens, slots.tolist(), strict=True):
            expected[slot // 16, slot % 16] = token
        assert torch.equal(cache, expected) and torch.equal(copy, expected)
    refused("npu_scatter_pa_kv_cache", "cache_mode", key, value, *caches, slots)  # the default is another format
    refused("npu_scatter_pa_kv_cache", "slot_mapping", key, value, *caches, slots + 1, cache_mode="Norm")
    refused("npu_scatter_pa_kv_cache", "slot_mapping", key, value, *caches, slots * 0, cache_mode="Norm")
    refused("npu_scatter_pa_kv_cache", "key", key.half(), value.half(), *caches, slots, cache_mode="Norm")


@pytest.mark.parametrize("maximize", [None, True])
def test_apply_adam_w_takes_the_steps_of_torch(maximize):
    weights = random(4, 5, seed=1)
    parameter = weights.double().requires_grad_()
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-6, "maximize": bool(maximize)}
    optimizer = torch.optim.AdamW([parameter], **options)
    out = [weights, torch.zeros(4, 5), torch.zeros(4, 5)]
    for step in range(3):
        grad = random(4, 5, seed=10 + step)
        parameter.grad = grad.double()
        optimizer.step()
        scalars = (0.9**step, 0.95**step, 1e-2, 0.1, 0.9, 0.95, 1e-6)
        written = run("npu_apply_adam_w.out", *scalars, grad, None, None, maximize, out=out)
        assert all(one is other for one, other in zip(written, out, strict=True))
        close(weights, parameter.detach())
    state = optimizer.state[parameter]
    close(out[1], state["exp_avg"])
    close(out[2], state["exp_avg_sq"])
    scalars = (1.0, 1.0, 1e-2, 0.1, 0.9, 0.95, 1e-6)
    refused("npu_apply_adam_w", "out", *scalars, weights, None, None, None)
    refused("npu_apply_adam_w.out", "amsgrad", *scalars, weights, weights, True, None, out=out)
    refused("npu_apply_adam_w.out", "grad", *scalars, weights.half(), None, None, None, out=out)


def test_grouped_matmul():
    x, weight = random(10, 4, seed=1), random(3, 4, 5, seed=2)
    sizes = [2, 0, 8]
    expected = torch.cat([part.double() @ weight[g].double() for g, part in enumerate(x.split(sizes))])
    options = {"split_item": 3, "group_type": 0}
    for kind, groups in enumerate((torch.tensor(ends(sizes)), torch.tensor(sizes))):
        (y,) = run("npu_grouped_matmul", [x], [weight], group_list=groups, group_list_type=kind, **options)
        close(y, expected)
    several = [random(2, 4, seed=3), random(7, 6, seed=4)], [random(4, 3, seed=5), random(6, 2, seed=6)]
    bias = [random(3, seed=7), random(2, seed=8)]
    products = run("npu_grouped_matmul", *several, bias=bias, group_type=-1)
    listed = run("npu_grouped_matmul.List", *several, bias=bias)
    for y, z, part, matrix, extra in zip(products, listed, *several, bias, strict=True):
        close(y, part.double() @ matrix.double() + extra.double())
        assert torch.equal(y, z)
    (y,) = run("npu_grouped_matmul.List", [x], [weight[0], weight[1]], group_list=[4, 10], split_item=2)
    close(y, torch.cat((x[:4].double() @ weight[0].double(), x[4:].double() @ weight[1].double())))
    groups = torch.tensor(ends(sizes))
    refused("npu_grouped_matmul", "group_list", [x], [weight], group_list=groups - 1, **options)
    refused("npu_grouped_matmul", "group_list", [x], [weight], group_list=groups.int(), **options)
    refused("npu_grouped_matmul", "group_list", [x], [weight], **options)
    refused("npu_grouped_matmul", "group_type", [x], [weight], group_list=groups, split_item=3)
    refused("npu_grouped_matmul", "split_item", [x], [weight], group_list=groups, group_type=0)
    refused("npu_grouped_matmul", "scale", [x], [weight], group_list=groups, scale=[x], **options)
    refused("npu_grouped_matmul", "weight", [x], [weight.half()], group_list=groups, **options)
