"""The model: cached as uncached, no look ahead, the promised initial state, every parameter in one group."""

import contextlib
import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from tiny import SHAPES, ReferenceKernels, cpu_device, lively_model, tiny_config
from torch import Tensor
from torch._subclasses import FakeTensorMode

from nanochat import scaling
from nanochat.attention import KVCache, Segments
from nanochat.cross_entropy import IGNORE
from nanochat.gpt import GPT, Attention, GPTConfig
from nanochat.kernels import gradients
from nanochat.kernels.casts import cast_together
from nanochat.kernels.cpu import CpuKernels
from nanochat.kernels.gradients import WrittenKernels
from nanochat.operators import TorchKernels

shapes = pytest.mark.parametrize("shape", SHAPES)
WRITTEN = WrittenKernels()


def random_tokens(model: GPT, B: int, T: int, seed: int = 0) -> Tensor:
    return torch.randint(0, model.config.vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------- the whole, written out slowly


@torch.no_grad()
def slow_logits(model: GPT, tokens: Tensor) -> Tensor:
    """The logits in fp64, from the config's words alone: no module, no kernel and no table of the model's is used."""
    c, T = model.config, tokens.size(1)
    H, K, D = c.n_head, c.n_kv_head, c.head_dim
    p = {name: parameter.double() for name, parameter in model.named_parameters()}
    place = torch.arange(T, dtype=torch.float64)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * (p[name] if c.norm_weight else 1)

    def turn(x: Tensor) -> Tensor:  # (B, T, heads, D)
        angles = place[:, None] * c.rope_theta ** (-torch.arange(D // 2) * 2 / D)  # (T, D / 2)
        z = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * torch.exp(1j * angles)[:, None]
        return torch.cat((z.real, z.imag), dim=-1)

    x = p["embedding.weight"][tokens]
    x = norm(x, "embedding_norm.weight") if c.embedding_norm else x
    first = x
    for i in range(c.n_layer):
        block = f"blocks.{i}."
        if c.residual_scales:
            x = p["residual_scales"][i] * x + p["embedding_scales"][i] * first

        h = norm(x, f"{block}attention_norm.weight")
        qkv = h @ p[f"{block}attention.qkv.weight"].T
        qkv = qkv + p[f"{block}attention.qkv.bias"] if c.attention_bias else qkv
        q, k, v = (part.unflatten(-1, (-1, D)) for part in qkv.split((H * D, K * D, K * D), dim=-1))
        if i == 0 and c.lookback_heads:
            biases = p[f"{block}attention.lookback"].view(H + K, D)
            q, k = q + biases[:H], k + biases[H:]
        if c.qk_norm == "before_rotary":
            q, k = norm(q, f"{block}attention.q_norm.weight"), norm(k, f"{block}attention.k_norm.weight")
        q, k = turn(q), turn(k)
        if c.qk_norm == "after_rotary":
            q, k = norm(q, f"{block}attention.q_norm.weight"), norm(k, f"{block}attention.k_norm.weight")
        if c.qk_norm != "none":
            q, k = c.qk_scale * q, c.qk_scale * k
        if c.value_embeddings and (c.n_layer - 1 - i) % 2 == 0:
            gate = 3 * torch.sigmoid(h[..., :32] @ p[f"{block}attention.value_gate.weight"].T)  # (B, T, K)
            v = v + gate[..., None] * p[f"value_embeddings.{i}.weight"][tokens].unflatten(-1, (K, D))
        short = c.window_pattern[i % len(c.window_pattern)] == "S" and i < c.n_layer - 1
        behind = place[:, None] - place
        hidden = (behind < 0) | (behind >= (c.sequence_len // 4 if short else T))
        heads = []
        for head in range(H):
            scores = q[:, :, head] @ k[:, :, head // (H // K)].mT / D**0.5
            heads.append(scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ v[:, :, head // (H // K)])
        x = x + torch.cat(heads, dim=-1) @ p[f"{block}attention.output.weight"].T

        h = norm(x, f"{block}mlp_norm.weight") @ p[f"{block}mlp.input.weight"].T
        if c.mlp == "swiglu":
            gate, up = h.split(c.mlp_width, dim=-1)
            h = gate / (1 + torch.exp(-gate)) * up
        else:
            h = h.clamp(min=0) ** 2
        x = x + h @ p[f"{block}mlp.output.weight"].T
    logits = norm(x, "norm.weight") @ p["embedding.weight" if c.tied_head else "head.weight"][: c.vocab_size].T
    return c.logit_cap * torch.tanh(logits / c.logit_cap) if c.logit_cap else logits


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "qwen3_5"])  # transformers is its reference
@pytest.mark.parametrize("T", [1, 32])
def test_the_model_is_what_its_config_says(shape: str, T: int) -> None:
    model = lively_model(tiny_config(**{"lookback_heads": 1, **SHAPES[shape]}, norm_eps=1e-3))
    tokens = random_tokens(model, 2, T)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).double(), slow_logits(model, tokens), rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------- cached as uncached


@torch.no_grad()
def greedy(model: GPT, prompt: Tensor, new: int) -> tuple[Tensor, Tensor]:
    """The plainest decoding there is: the whole row again for every token. Returns tokens (B, new) and logits."""
    tokens, logits = prompt, []
    for _ in range(new):
        logits.append(model(tokens)[:, -1])
        tokens = torch.cat((tokens, logits[-1].argmax(dim=-1, keepdim=True)), dim=1)
    return tokens[:, prompt.size(1) :], torch.stack(logits, dim=1)


@torch.no_grad()
def greedy_cached(model: GPT, prompt: Tensor, new: int, chunks: list[int]) -> tuple[Tensor, Tensor]:
    """The same against a cache; the prompt goes in by `chunks`."""
    c = model.config
    cache = KVCache.empty(c.n_layer, len(prompt), c.sequence_len, c.n_kv_head, c.head_dim, "cpu", torch.float32)
    cache.states = model.kernels.row_states(c, len(prompt), "cpu", torch.float32)
    out: list[Tensor] = []
    for tokens in prompt.split(chunks, dim=1):
        cache.lengths = torch.full((len(tokens),), tokens.size(1))
        last = model(tokens, cache=cache)[:, -1]
        cache.position += tokens.size(1)
    logits = [last]
    while len(out) < new:
        out.append(logits[-1].argmax(dim=-1))
        if len(out) < new:
            logits.append(model(out[-1][:, None], cache=cache)[:, -1])
            cache.position += 1
    return torch.stack(out, dim=1), torch.stack(logits, dim=1)


HEADS_AND_WINDOWS: dict[str, dict[str, Any]] = {
    "one key head": {"n_kv_head": 1},
    "short windows": {"window_pattern": "S"},
    "lookback": {"lookback_heads": 2},
}


@pytest.mark.parametrize("changes", [*SHAPES.values(), *HEADS_AND_WINDOWS.values()], ids=[*SHAPES, *HEADS_AND_WINDOWS])
@pytest.mark.parametrize("chunks", [[5], [11], [1, 1, 1], [6, 1, 4]], ids=str)
def test_cached_greedy_decoding_is_exact(changes: dict[str, Any], chunks: list[int]) -> None:
    model = lively_model(tiny_config(**changes))
    prompt = random_tokens(model, 3, sum(chunks))
    new = model.config.sequence_len - sum(chunks)  # to the end of the context, past the window
    tokens, logits = greedy(model, prompt, new)
    cached_tokens, cached_logits = greedy_cached(model, prompt, new, chunks)
    assert torch.equal(cached_tokens, tokens)
    torch.testing.assert_close(cached_logits, logits, rtol=1e-4, atol=1e-4)
    assert len(set(tokens.flatten().tolist())) > 8, "the case is too easy to show anything"


# ---------------------------------------------------------------------- what a token may see


@pytest.mark.parametrize("kernels", [ReferenceKernels(), CpuKernels()], ids=["reference", "cpu"])
def test_documents_of_a_row_are_as_each_alone(kernels: TorchKernels) -> None:
    """Including documents of one token at the beginning, in the middle and at the end of a row."""
    model = lively_model(tiny_config(lookback_heads=1), kernels=kernels)
    lengths = ((1, 9, 1, 20, 1), (17, 3, 12))
    tokens = random_tokens(model, 2, 32)
    numbers = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    with torch.no_grad():
        packed = model(tokens, segments=Segments.from_numbers(numbers))
        for row, documents in enumerate(lengths):
            parts = zip(tokens[row].split(documents), packed[row].split(documents), strict=True)
            for document, logits in parts:
                torch.testing.assert_close(logits, model(document[None])[0], rtol=1e-4, atol=1e-4)


def test_windows_follow_the_pattern_and_the_last_layer_sees_all() -> None:
    config = tiny_config(n_layer=6, window_pattern="SSL", sequence_len=64)
    assert [config.window(layer) for layer in range(6)] == [16, 16, 0, 16, 16, 0]
    assert [tiny_config(n_layer=3, window_pattern="S").window(layer) for layer in range(3)] == [8, 8, 0]
    assert tiny_config(window_pattern="S", sequence_len=3).window(0) == 1
    assert [tiny_config(window_pattern="SL", window_tokens=5).window(layer) for layer in range(2)] == [5, 0]


# ---------------------------------------------------------------------- the loss


@shapes
def test_loss_is_the_cross_entropy_of_the_logits(shape: str) -> None:
    model = lively_model(tiny_config(**SHAPES[shape]))
    tokens, targets = random_tokens(model, 3, 20), random_tokens(model, 3, 20, seed=1)
    targets[0, :5], targets[2] = IGNORE, IGNORE
    logits = model(tokens)
    assert logits.shape == (3, 20, 100)
    assert logits.dtype == torch.float32
    losses = F.cross_entropy(logits.flatten(0, 1), targets.clamp(min=0).flatten(), reduction="none").view(3, 20)
    losses = losses * (targets != IGNORE)
    torch.testing.assert_close(model(tokens, targets), losses.sum(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(model(tokens, targets, reduction="none"), losses, rtol=1e-4, atol=1e-4)
    fused = torch.autograd.grad(model(tokens, targets), list(model.parameters()))
    plain = torch.autograd.grad(losses.sum(), list(model.parameters()))
    for (name, _), one, other in zip(model.named_parameters(), fused, plain, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm(), name
        assert other.any(), f"{name} has no effect"


@pytest.mark.slow
def test_the_compiler_sees_one_graph() -> None:
    """The loss of packed rows, forward and backward, traced without generating code."""
    model = lively_model(tiny_config(n_layer=2))
    tokens, targets = random_tokens(model, 3, 20), random_tokens(model, 3, 20, seed=1)
    targets[0, :5] = IGNORE
    segments = Segments.from_numbers(torch.arange(20).expand(3, 20) // 6)
    traced = torch.compile(model, backend="aot_eager", dynamic=False, fullgraph=True)
    results = []
    for forward in (traced, model):
        losses = forward(tokens, targets, segments=segments, reduction="none")
        weights = torch.linspace(-1, 1, losses.numel()).view_as(losses)
        results.append((losses, *torch.autograd.grad((losses * weights).sum(), list(model.parameters()))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@shapes
def test_between_embedding_and_loss_everything_is_in_bfloat16(shape: str) -> None:
    """By the model's own casts, and so on every device: no autocast is involved. The loss is near fp32's."""
    seen: dict[str, set[torch.dtype]] = {}

    def note(name: str, *tensors: Any) -> None:
        floats = {x.dtype for x in tensors if isinstance(x, Tensor) and x.is_floating_point()}
        seen[name] = seen.get(name, set()) | floats

    class Noting(WrittenKernels):
        def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            note("attention", q, k, v)
            return super().attention(q, k, v, **options)

    model = lively_model(tiny_config(**SHAPES[shape]), kernels=Noting(torch.bfloat16))
    for name, module in model.named_modules():
        if name.startswith("blocks.") or name in ("norm", "embedding_norm"):
            module.register_forward_hook(lambda _, inputs, output, name=name: note(name, *inputs, output))
    tokens, targets = random_tokens(model, 2, 32), random_tokens(model, 2, 32, seed=1)
    loss = model(tokens, targets)
    loss.backward()
    exact = lively_model(tiny_config(**SHAPES[shape]))(tokens, targets).item()
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact, rel=0.02) and loss.item() != exact
    assert {dtype for dtypes in seen.values() for dtype in dtypes} == {torch.bfloat16}
    assert {"attention", "blocks.0.mlp.input", "blocks.0.attention.qkv", "blocks.0", "norm"} <= seen.keys()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_weights_cast_together_are_those_cast_one_by_one() -> None:
    model = lively_model(tiny_config(), kernels=WrittenKernels(torch.bfloat16))
    tokens = random_tokens(model, 2, 8)

    def gradients(together: bool) -> list[Tensor]:
        model.zero_grad()
        with cast_together(model, torch.bfloat16) if together else contextlib.nullcontext():
            assert (model.blocks[0].get_submodule("mlp.input").cast is not None) == together
            for _ in range(2):  # micro-batches share the casts
                model(tokens, tokens).backward()
        assert model.blocks[0].get_submodule("mlp.input").cast is None
        return [p.grad for p in model.parameters() if p.grad is not None]

    for one, other in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(one, other)


def test_norms_and_rotations_on_a_cpu_are_about_as_exact_as_torchs() -> None:
    """In bf16, for gradients in any direction, and for those with a part along the norm's result."""
    angles = torch.randn(64, 1, 32, dtype=torch.float64)
    cos, sin = (torch.cat((table, table), dim=-1) for table in (angles.cos(), angles.sin()))
    x = torch.randn(2, 64, 2, 64).bfloat16().double()
    plain, ours = ReferenceKernels(), CpuKernels()
    for part, most in ((0.0, 1.5), (1.0, 2.5)):
        grad = (torch.randn_like(x) + part * plain.rotate(x, cos, sin)).bfloat16()
        errors = []
        for kernels, dtype in ((plain, torch.float64), (plain, torch.bfloat16), (ours, torch.bfloat16)):
            small = x.to(dtype).requires_grad_()
            out = kernels.rotate(kernels.rms_norm(small, None, 1e-6), cos.to(dtype), sin.to(dtype))
            assert out.dtype == dtype
            (found,) = torch.autograd.grad(out, small, grad.to(dtype))
            if dtype == torch.float64:
                true = found
            errors.append(((found.double() - true).norm() / true.norm()).item())
        assert 1e-3 < errors[2] <= most * errors[1] <= 0.02, errors


def test_a_dry_run_leaves_no_tensor_without_data() -> None:
    """The zero that relu squared adds to is kept for later steps of the process."""
    gradients._zero.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.randn(4, requires_grad=True)
        WRITTEN.relu_squared(x).sum().backward()
    x = torch.tensor([-1.0, 3.0], requires_grad=True)
    WRITTEN.relu_squared(x).sum().backward()
    assert type(x.grad) is Tensor and x.grad.tolist() == [0.0, 6.0]


def test_a_dot_product_in_bf16_is_added_up_in_fp32() -> None:
    """Of 100,000 ones: in bf16 a sum that grows by 1 ends at 256."""
    x, first = torch.ones(2, 100_000, dtype=torch.bfloat16).requires_grad_().unbind()
    a, b = torch.ones(2, requires_grad=True).unbind()
    mixed = WRITTEN.mix(x, first, a.to(x.dtype), b.to(x.dtype))[0]
    assert [grad.item() for grad in torch.autograd.grad(mixed.sum(), (a, b))] == [pytest.approx(1e5, rel=0.004)] * 2


@shapes
def test_padded_rows_get_neither_probability_nor_gradient(shape: str) -> None:
    model = lively_model(tiny_config(**SHAPES[shape]))
    assert model.embedding.weight.shape[0] == model.config.padded_vocab_size == 128
    tokens, targets = random_tokens(model, 2, 20), random_tokens(model, 2, 20, seed=1)
    assert model(tokens).size(-1) == 100
    before = model(tokens, targets)
    before.backward()
    tables = [p for _, p in sum((model.parameter_groups()[r] for r in ("embedding", "value_embedding", "head")), [])]
    for table in tables:
        assert table.grad is not None
        assert table.grad[:100].any()
        assert not table.grad[100:].any()
        table.data[100:] = 1e6
    assert torch.equal(model(tokens, targets), before)


@pytest.mark.parametrize(("vocab", "padded"), [(1, 64), (64, 64), (65, 128), (32768, 32768), (50257, 50304)])
def test_the_vocabulary_is_padded_to_64(vocab: int, padded: int) -> None:
    assert GPTConfig(vocab_size=vocab).padded_vocab_size == padded


# ---------------------------------------------------------------------- rotary positions


def test_heads_begin_by_looking_back() -> None:
    config = tiny_config(sequence_len=64, head_dim=64, width=128, n_kv_head=4, lookback_heads=3)
    model = GPT(config)
    model.init_weights(0)
    attention = model.blocks[0].attention
    assert isinstance(attention, Attention)
    with patch.object(attention.kernels, "attention", wraps=attention.kernels.attention) as attend:
        model.hidden(random_tokens(model, 4, 64))
    q, k = attend.call_args_list[0].args[:2]  # of the first layer, (B, T, H, D)
    scores = attention.scale * torch.einsum("bthd,bshd->bhts", q, k)
    weights = scores.masked_fill(torch.ones(64, 64).triu(1).bool(), -torch.inf).softmax(-1)  # (B, H, T, S)
    at_distance = [weights.diagonal(-d, -2, -1)[..., 3:].mean((0, 2)) for d in range(5)]  # (H,) each
    shares = torch.stack(at_distance)  # (distance, head)
    assert shares.argmax(0)[:3].tolist() == [1, 2, 3]
    assert (shares.amax(0)[:3] > 0.3).all() and (shares[:, 3] < 0.1).all(), shares


# ---------------------------------------------------------------------- parameters and their initial values


def test_a_parameter_without_initial_values_makes_the_loss_nan() -> None:
    model = GPT(tiny_config())
    model.get_submodule("blocks.0.attention.output").bias = torch.nn.Parameter(torch.zeros(model.config.width))
    model.init_weights()
    tokens = random_tokens(model, 1, 8)
    assert model(tokens, tokens).isnan()


@shapes
def test_the_gradients_order_is_the_backwards(shape: str) -> None:
    model = GPT(tiny_config(**SHAPES[shape]))
    model.init_weights()
    names, came = {p: name for name, p in model.named_parameters()}, []
    for parameter in names:
        parameter.register_post_accumulate_grad_hook(lambda p: came.append(names[p]))
    model(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long)).backward()
    order = model.gradient_order()
    assert sorted(order) == sorted(came) == sorted(names.values())
    assert order[0].startswith("norm." if model.config.tied_head else "head.")
    assert order[-1] == came[-1] == "embedding.weight"
    layers = [[name.split(".")[1] for name in list_ if name.count(".") > 1] for list_ in (order, came)]
    assert layers[0] == layers[1] == sorted(layers[0], reverse=True)  # within a block the order may differ


@shapes
def test_from_the_meta_device_the_same(shape: str) -> None:
    config = tiny_config(**SHAPES[shape])
    direct = GPT(config)
    direct.init_weights(7)
    with torch.device("meta"):
        model = GPT(config)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(torch.nan)
    torch.manual_seed(1)  # the global generator has no say
    model.init_weights(7)
    for name, tensor in {**direct.state_dict(), **dict(direct.named_buffers())}.items():
        assert torch.equal(tensor, model.get_parameter(name) if "rotary" not in name else model.get_buffer(name)), name
    assert not any("rotary" in name for name in model.state_dict()), "the tables follow from the config"
    model.init_weights(8)
    assert not torch.equal(model.blocks[0].attention.qkv.weight, direct.blocks[0].attention.qkv.weight)  # type: ignore


def test_initial_values() -> None:
    model = GPT(tiny_config(width=256, n_head=4, n_kv_head=2, vocab_size=1024, n_layer=3))
    model.init_weights(0)
    weights = dict(model.named_parameters())
    std = 1 / math.sqrt(256)
    normal = {"embedding.weight": 0.8, "head.weight": 0.001}
    uniform = {f"blocks.{i}.attention.qkv.weight": std for i in range(3)}
    uniform |= {f"blocks.{i}.mlp.input.weight": 0.4 * std for i in range(3)}
    uniform |= {f"value_embeddings.{i}.weight": std for i in (0, 2)}
    for name, size in (normal | uniform).items():
        weight = weights.pop(name)
        assert weight.std().item() == pytest.approx(size, rel=0.02), name
        assert weight.mean().item() == pytest.approx(0, abs=0.01 * size), name
        if name in uniform:
            assert weight.abs().max().item() == pytest.approx(size * math.sqrt(3), rel=0.001), name
        else:
            assert weight.abs().max() > 3.5 * size, name
    torch.testing.assert_close(weights.pop("residual_scales"), torch.tensor([1.15, 1.10, 1.05]))
    torch.testing.assert_close(weights.pop("embedding_scales"), torch.tensor([0.20, 0.125, 0.05]))
    assert not any(weight.any() for weight in weights.values()), "each branch begins as the identity"
    # In other families: learned gains begin at one, biases at zero.
    model = lively_model(tiny_config(**SHAPES["qwen2"]))
    model.init_weights(0)
    for name, parameter in model.named_parameters():
        assert parameter.ndim > 1 or parameter.eq(1 if "norm" in name else 0).all(), name


# ---------------------------------------------------------------------- configs


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"width": 30, "n_head": 4}, "width 30 .* n_head 4"),
    ({"n_head": 4, "n_kv_head": 3}, "n_head 4 .* n_kv_head 3"),
    ({"head_dim": 7}, "head_dim 7"),
    ({"lookback_heads": 3}, "lookback_heads 3 .* 2 key heads"),
    ({"window_pattern": "SXL"}, "--window_pattern 'SXL'"),
    ({"window_pattern": ""}, "--window_pattern ''"),
]


@pytest.mark.parametrize(("changes", "words"), IMPOSSIBLE)
def test_impossible_configs_say_why(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tiny_config(**changes)


def test_sizes_left_at_zero_follow_from_the_width() -> None:
    config = tiny_config(width=48, n_head=4)
    assert (config.head_dim, config.mlp_width) == (12, 192)
    config = tiny_config(width=30, n_head=4, head_dim=16, mlp_width=10)  # heads may be wider than the model
    assert (config.head_dim, config.mlp_width) == (16, 10)
    assert GPT(config).blocks[0].attention.output.weight.shape == (30, 64)  # type: ignore[union-attr]


def test_a_row_longer_than_the_context_is_refused() -> None:
    model = GPT(tiny_config())
    with pytest.raises(AssertionError, match="33 tokens in a row of at most 32"):
        model(torch.zeros(1, 33, dtype=torch.long))


@pytest.mark.parametrize("norm", ["none", "before_rotary", "after_rotary"])
@pytest.mark.parametrize("options", [{}, {"n_kv_head": 1}, {"norm_weight": True}, {"attention_bias": True}])
def test_plain_operators_compute_what_the_written_out_ones_do(norm: Any, options: dict[str, Any]) -> None:
    """Loss and every gradient of whole models: separate queries and keys against joined ones, and autograd's gradients
    against those that are written out for every device and for a CPU."""
    config = tiny_config(qk_norm=norm, lookback_heads=1, norm_eps=0.1, **options)
    tokens = torch.randint(100, (2, 24), generator=torch.Generator().manual_seed(0))
    found = []
    for kernels in (ReferenceKernels(), WRITTEN, CpuKernels()):
        model = lively_model(config, kernels=kernels)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        found.append({"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}})
    for written in found[1:]:
        for name, plain in found[0].items():
            torch.testing.assert_close(written[name], plain, rtol=1e-4, atol=1e-4, msg=name)


def test_bytes_kept_for_backward() -> None:
    """One more token keeps 391 KiB, at depth 12 in bf16 on a CPU."""

    def bytes_kept(tokens: int) -> int:
        kept: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage._cdata] = storage.nbytes()
            return tensor

        with FakeTensorMode():
            model = GPT(scaling.model_config(12, 1024, tokens), cpu_device(dtype=torch.bfloat16).kernels)
            ids = torch.zeros(1, tokens, dtype=torch.long)
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                model(ids, ids)
        return sum(kept.values())

    assert bytes_kept(512) - bytes_kept(256) <= 256 * 392 * 1024
