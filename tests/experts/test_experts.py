"""Mixtures of experts: what each token computes, and how experts are balanced.

That several processes learn as one is promise T8.
"""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_train import RATES, make_batch, rows_of
from tiny import EXPERT_SHAPES, PLAIN, cpu_device, lively_model, make_engine, tiny_config
from tiny import FOUR_EXPERTS as FOUR
from torch import Tensor

from nanochat import scaling
from nanochat.cross_entropy import IGNORE
from nanochat.experts.layer import Experts
from nanochat.experts.router import BIAS_RATE
from nanochat.gpt import GPT, MLP, GPTConfig
from nanochat.kernels.gradients import product
from nanochat.kernels.grouped import GroupedOperators, Groups, grouped_product, loop_product
from nanochat.train import make_adamw, make_optimizer, next_token_loss, train_step

QWEN3_MOE = EXPERT_SHAPES["qwen3_moe"]
THREE = "gated, all of three, shared"
CASES: dict[str, dict[str, Any]] = {
    "fast": FOUR,
    "shared": EXPERT_SHAPES["experts"],
    "plain weights of one": {**FOUR, "experts_per_token": 1, "router_normalized": False},
    "qwen3_moe": QWEN3_MOE,
    THREE: {
        **PLAIN, "qk_norm": "none", "experts": 3, "experts_per_token": 3, "shared_experts": 2, "mlp_width": 16,
    },
}  # fmt: skip


def experts_of(model: GPT) -> list[Experts]:
    return [block.mlp for block in model.blocks]  # type: ignore[union-attr, misc]


# ---------------------------------------------------------------------- what a token computes


@pytest.mark.parametrize("mlp", ["relu2", "swiglu"])
def test_one_expert_is_the_mlp_to_the_bit(mlp):
    """In its output, its gradients and four steps of Muon and AdamW."""
    dense = lively_model(tiny_config(sequence_len=16, mlp=mlp))
    config = dataclasses.replace(dense.config, experts=1, experts_per_token=1)
    sparse = GPT(config)
    missing = sparse.load_state_dict(dense.state_dict(), strict=False)
    assert {name.split(".mlp.")[1] for name in missing.missing_keys} == {"router.weight", "router.bias"}
    with torch.no_grad():
        for experts in experts_of(sparse):
            experts.router.weight.normal_()
            assert experts.router.bias is not None
            experts.router.bias.fill_(0.5)
    optimizers = [make_optimizer(model, RATES, cpu_device()) for model in (dense, sparse)]
    for step in range(4):
        batches = rows_of(make_batch(step), slice(0, 3), slice(3, 8))
        losses = [
            train_step(model, optimizer, batches, next_token_loss, device=cpu_device())
            for model, optimizer in zip((dense, sparse), optimizers, strict=True)
        ]
        assert torch.equal(losses[0].loss, losses[1].loss)
    for name, weight in dense.state_dict().items():
        assert torch.equal(sparse.state_dict()[name], weight), name


def naive(experts: Experts, x: Tensor) -> Tensor:
    """Every token on its own, through each of its experts."""
    c = experts.config
    router = experts.router
    inputs = experts.input.weight.view(c.experts, -1, c.width)
    outputs = experts.output.weight.view(c.experts, c.width, c.mlp_width)
    rows = []
    for token in x.flatten(0, 1):
        logits = router.weight @ token
        scores = torch.sigmoid(logits) if c.router == "sigmoid" else torch.softmax(logits, dim=0)
        ranked = scores if router.bias is None else scores + router.bias
        chosen = sorted(range(c.experts), key=lambda e, ranked=ranked: -ranked[e].item())[: c.experts_per_token]
        total = sum(scores[e] for e in chosen) if c.router_normalized else 1.0
        row = torch.zeros(c.width)
        for e in chosen:
            inner = inputs[e] @ token
            if c.mlp == "swiglu":
                gate, up = inner.chunk(2)
                inner = F.silu(gate) * up
            else:
                inner = F.relu(inner).square()
            row = row + scores[e] / total * (outputs[e] @ inner)
        if experts.shared is not None:
            row = row + experts.shared(token[None])[0]
        rows.append(row)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("case", CASES)
def test_tokens_pass_through_their_experts(case):
    model = lively_model(tiny_config(**CASES[case]))
    experts = experts_of(model)[1]
    if experts.shared is not None:
        assert isinstance(experts.shared, MLP)
    x = torch.randn(3, 7, model.config.width, requires_grad=True)
    y = experts(x)
    expected = naive(experts, x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    weights = [p for name, p in experts.named_parameters() if name != "router.bias"]
    toward = torch.randn_like(y)
    for ours, theirs in zip(
        torch.autograd.grad((y * toward).sum(), [x, *weights]),
        torch.autograd.grad((expected * toward).sum(), [x, *weights]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[5, 0, 9, 2], [0, 0, 16, 0], [16, 0, 0, 0], [4, 4, 4, 4]])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_loop_is_the_grouped_product_to_the_bit(dtype, counts, frozen):
    x = torch.randn(16, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(4 * 24, 8, requires_grad=not frozen)
    groups = Groups(16, torch.tensor(counts))
    assert groups.ends.tolist() == torch.tensor(counts).cumsum(0).tolist() and groups.ends.dtype == torch.int32
    results = []
    for cast in (None, weight.to(dtype)):
        for y in (
            loop_product(product, x, weight, groups, cast),
            grouped_product(GroupedOperators(), x, weight, groups, cast),
        ):
            gradients = torch.autograd.grad(y.float().square().sum(), [x] if frozen else [x, weight])
            results.append([y, *gradients])
    for others in results[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(results[0], others, strict=True))
    by_hand = torch.cat([r @ w.T for r, w in zip(x.split(counts), weight.to(dtype).chunk(4), strict=True)])
    torch.testing.assert_close(results[0][0], by_hand)


@pytest.mark.parametrize("case", CASES)
def test_tokens_with_a_cache_are_those_without(case):
    """24 greedy tokens, each from a cache; the model without one would have chosen the same."""
    engine = make_engine(**{**CASES[case], "sequence_len": 32, "window_pattern": "L"})
    generated = engine.generate_batch([3, 1, 4, 1, 5], max_tokens=24, temperature=0.0)[0][0]
    assert len(generated) == 29
    with torch.no_grad():
        best = engine.model(torch.tensor([generated]))[0].argmax(dim=-1)
    assert best[4:-1].tolist() == generated[5:]


# ---------------------------------------------------------------------- optimizer


def loads(model: GPT, tokens: Tensor, learns: Tensor | None = None) -> list[Tensor]:
    """The tokens of each expert in each layer, in the last one only those that learn."""
    chosen: list[Tensor] = []
    hooks = [one.router.register_forward_hook(lambda _, __, out: chosen.append(out[1])) for one in experts_of(model)]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    if learns is not None:
        chosen[-1] = chosen[-1][learns.flatten()]
    return [torch.bincount(one.flatten(), minlength=model.config.experts) for one in chosen]


@pytest.mark.parametrize(("by", "recompute"), [("muon", True), ("adamw", False), ("sft", True)])
def test_a_bias_moves_once_a_step_against_its_surplus(by, recompute):
    """By the rule of the paper, whatever the number of micro-batches; a step that is skipped does not move it."""
    config = tiny_config(sequence_len=16, **FOUR)
    model = lively_model(config)
    if recompute:
        model.recompute_activations()
    device = cpu_device()
    optimizer = make_adamw(model, 1e-3, device) if by == "sft" else make_optimizer(model, RATES, device, by)
    routers = [one.router for one in experts_of(model)]
    biases = [router.bias.detach().clone() for router in routers if router.bias is not None]
    for step in range(4):
        batch = make_batch(step)
        every = loads(model, batch[0])
        tokens = loads(model, batch[0], batch[1] != IGNORE)
        assert not torch.equal(every[-1], tokens[-1])
        rows = rows_of(batch, slice(0, 2), slice(2, 8)) if step % 2 else [batch]
        for router in routers:
            router.loads = None
        before = [bias.clone() for bias in biases]
        for bias, counts in zip(biases, tokens, strict=True):
            bias -= BIAS_RATE * 0.5 * torch.sign(counts - counts.float().mean())
        stats = train_step(model, optimizer, rows, next_token_loss, device=device, lr=0.5, max_grad_norm=0.01)
        assert stats.updated
        for router, bias, counts, old in zip(routers, biases, every, before, strict=True):
            assert router.bias is not None and router.loads is not None
            torch.testing.assert_close(router.bias.detach(), bias, rtol=0, atol=1e-7)
            assert not torch.equal(bias, old)
            assert torch.equal(router.loads, counts.float())  # once, although recomputation runs forward twice

    # Skipped, because a gradient is not finite; and idle, because there is no gradient.
    def broken(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        loss, count = next_token_loss(model, batch)
        return loss * torch.nan, count

    def idle(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        loss, count = next_token_loss(model, batch)
        return loss * 0, count

    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    for loss_fn in (broken, idle):
        assert not train_step(model, optimizer, [make_batch(9)], loss_fn, device=device).updated
        assert all(torch.equal(model.state_dict()[name], weight) for name, weight in weights.items())


def test_a_bias_does_not_show_in_the_norm_of_the_gradients():
    config = tiny_config(sequence_len=16, **FOUR)
    norms = []
    for has_bias in (True, False):
        model = lively_model(config)
        if not has_bias:
            for experts in experts_of(model):
                assert experts.router.bias is not None
                experts.router.bias.requires_grad_(False)
        optimizer = make_optimizer(model, RATES, cpu_device())
        norms.append(train_step(model, optimizer, [make_batch(0)], next_token_loss, device=cpu_device()).grad_norm)
    assert torch.equal(*norms)


# ---------------------------------------------------------------------- sizes


def test_sizes_count_what_a_token_passes_through():
    config = GPTConfig(experts=8, experts_per_token=2, shared_experts=1, mlp_width=100, vocab_size=640, sequence_len=64)
    dense = dataclasses.replace(config, experts=0, shared_experts=0, mlp_width=300)
    router = config.n_layer * 8 * config.width
    assert scaling.scaling_parameters(config) == scaling.scaling_parameters(dense) + router
    assert scaling.flops_per_token(config) == scaling.flops_per_token(dense) + 6 * router
    with torch.device("meta"):
        model = GPT(config)
    assert scaling.parameter_counts(model)["matrix"] == config.n_layer * config.width * (config.width + 2 * 100 * 9 + 8)
    for changes in ({"experts_per_token": 9}, {"experts_per_token": 0}, {"shared_experts": -1}):
        with pytest.raises(ValueError, match="--"):
            GPT(dataclasses.replace(config, **changes))
