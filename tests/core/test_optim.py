"""The optimizer against slow references written from the papers, and sharded against whole."""

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from tiny import run_ranks, tiny_config
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nanochat import optim
from nanochat.device import Device
from nanochat.ground.sharding import Exchange, whole
from nanochat.kernels.adamw import unfused_adamw
from nanochat.operators import TorchKernels
from nanochat.optim import POLAR_EXPRESS, Optimizer, ParameterGroup, StateFormat, orthogonalize
from nanochat.ranks import lay_out
from nanochat.scaling import IMPORTED_RATE, rates

ONE = torch.ones(())
ZERO = torch.zeros(())


class Unfused(TorchKernels):
    """As on devices whose fused AdamW cannot skip a step."""

    adamw = staticmethod(unfused_adamw)


every_adamw = pytest.mark.parametrize("kernels", [TorchKernels(), Unfused()], ids=["fused", "unfused"])


def seeded(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def step(optimizer: Optimizer, targets: float = 1.0, ok: Tensor = ONE, **settings: float) -> Tensor:
    """Reduce and update; returns the squared norm of the share."""
    squares = optimizer.reduce()
    optimizer.step(torch.tensor(targets), ok, **settings)
    return squares


# ---------------------------------------------------------------------- orthogonalisation


def with_singular_values(rows: int, columns: int, values: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """A matrix of the given singular values, and U V^T, its nearest orthogonal one."""
    u, _, vt = torch.linalg.svd(seeded(rows, columns, seed=seed), full_matrices=False)
    return u @ torch.diag(values) @ vt, u @ vt


@pytest.mark.parametrize(("rows", "columns"), [(12, 12), (30, 7), (7, 30), (1, 9), (9, 1)])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_orthogonalize_is_near_u_vt(rows: int, columns: int, size: float) -> None:
    values = torch.linspace(0.3, 1.0, min(rows, columns)) * size
    matrices, nearest = zip(*(with_singular_values(rows, columns, values, seed) for seed in range(3)), strict=True)
    out = orthogonalize(torch.stack(matrices), torch.float32)
    assert out.shape == (3, rows, columns)
    assert ((torch.linalg.svdvals(out) - 1).abs() < 0.15).all()
    assert (torch.linalg.matrix_norm(out - torch.stack(nearest), ord=2) < 0.15).all()


def test_five_steps_reach_one_from_a_thousandth() -> None:
    """The iteration acts on each singular value separately, by an odd polynomial a step."""
    x = torch.logspace(-3, math.log10(1 / 1.02), 500, dtype=torch.float64)
    for a, b, c in POLAR_EXPRESS:
        x = a * x + b * x**3 + c * x**5
    assert 0.85 < x.min() < x.max() < 1.15


@pytest.mark.parametrize(("rows", "columns"), [(64, 256), (256, 64), (64, 96)])
def test_orthogonalize_in_bfloat16_follows_fp32(rows: int, columns: int) -> None:
    """Over all singular values that the iteration is made for; with one x x^T for three steps they end at 4."""
    for seed in range(4):
        matrix, _ = with_singular_values(rows, columns, torch.logspace(-3, 0, 64), seed)
        exact, out = (orthogonalize(matrix[None], dtype) for dtype in (torch.float32, torch.bfloat16))
        assert out.dtype == torch.bfloat16
        out = out.float()
        assert torch.linalg.svdvals(out).max() < 1.2
        assert (out - exact).norm() < 0.14 * exact.norm()


class Flops(TorchDispatchMode):
    """Counts the multiplications of batched products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default):
            self.count += out.numel() * args[-2].size(-1)
        return out


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 25), (torch.bfloat16, 35)])
def test_products_of_a_wide_matrix_are_those_of_its_gram_matrix(dtype: torch.dtype, most: int) -> None:
    """Of a matrix four times as wide as tall, in products of squares: 45 where each step multiplies the matrix."""
    with Flops() as flops:
        orthogonalize(torch.randn(1, 16, 64), dtype)
    assert flops.count <= most * 16**3


# ---------------------------------------------------------------------- Muon


class SlowMuon:
    """One matrix, in fp64, by the letter of the papers."""

    def __init__(self, weight: Tensor, lr: float, decay: float, beta2: float):
        self.weight, self.lr, self.decay, self.beta2 = weight.double(), lr, decay, beta2
        self.momentum, self.second = torch.zeros_like(self.weight), 0.0

    def step(self, grad: Tensor, lr_scale: float, mu: float, decay_scale: float) -> None:
        grad, (rows, columns) = grad.double(), self.weight.shape
        self.momentum = mu * self.momentum + (1 - mu) * grad
        x = (1 - mu) * grad + mu * self.momentum  # Nesterov
        x = x / (1.02 * math.sqrt((x**2).sum()) + 1e-6)
        for a, b, c in POLAR_EXPRESS:
            x = a * x + b * (x @ x.T) @ x + c * (x @ x.T) @ (x @ x.T) @ x
        # NorMuon: by the neurons of the longer side
        mean_square = (x**2).mean(dim=1 if rows >= columns else 0, keepdim=True)
        self.second = self.beta2 * self.second + (1 - self.beta2) * mean_square
        even = x / self.second.sqrt()
        update = even * (x.norm() / even.norm())
        # cautious decay, graded: whole where the update goes a quarter of its usual size the weight's way
        usual = math.sqrt((x**2).mean())
        share = torch.clamp(4 * update * torch.sign(self.weight) / usual, 0, 1)
        update = update + self.decay * decay_scale * self.weight * share
        self.weight = self.weight - self.lr * lr_scale * math.sqrt(max(1, rows / columns)) * update


@pytest.mark.parametrize("shape", [(6, 6), (12, 5), (5, 12)])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_muon_is_the_slow_reference(shape: tuple[int, int], decay: float) -> None:
    parameters = [(f"p{i}", nn.Parameter(seeded(*shape, seed=i))) for i in range(3)]
    slow = [SlowMuon(p.detach(), 0.1, decay, 0.9) for _, p in parameters]
    group = ParameterGroup("muon", parameters, 0.1, decay, betas=(0.0, 0.9))
    optimizer = Optimizer([group], dtype=torch.float32)
    for i in range(5):
        settings = {"lr_scale": 1.0 - 0.1 * i, "momentum": 0.85 + 0.02 * i, "weight_decay_scale": 1.0 - 0.2 * i}
        for j, ((_, parameter), reference) in enumerate(zip(parameters, slow, strict=True)):
            parameter.grad = seeded(*shape, seed=100 * i + j) * 10.0 ** (j - 1)
            reference.step(parameter.grad / 64, *settings.values())
        step(optimizer, 64, **settings)
        assert all(p.grad is None for _, p in parameters)
    for (_, parameter), reference in zip(parameters, slow, strict=True):
        torch.testing.assert_close(parameter.detach().double(), reference.weight, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (16, 64), (256, 64), (64, 256)])
def test_muon_moves_imported_matrices_by_a_share_of_adamws_rate(rows: int, columns: int) -> None:
    """What scaling.py says of its rate for models from elsewhere: 0.2 sqrt(width / columns) of AdamW's, a root mean
    square of the elements. Width 64; the shapes are those of q_proj, k_proj, up_proj and down_proj."""
    width = 64
    config = tiny_config(width=width, embedding_norm=False)
    rate = rates(config, 4096, 1_000_000, "muon").matrix
    weight = nn.Parameter(seeded(rows, columns, seed=0))
    before = weight.detach().clone()
    optimizer = Optimizer([ParameterGroup("muon", [("p", weight)], rate)], dtype=torch.float32)
    weight.grad = seeded(rows, columns, seed=1)
    step(optimizer)
    moved = (weight.detach() - before).square().mean().sqrt().item()
    assert moved / IMPORTED_RATE == pytest.approx(0.2 * math.sqrt(width / columns), rel=0.15)


def test_the_norm_of_a_large_gradient_is_exact() -> None:
    """A CPU sums the squares of a whole tensor in fp32: at 25 million elements 0.1% are lost, at 155 million 2%."""
    parameter = nn.Parameter(torch.empty(3 << 17, 64))
    parameter.grad = seeded(3 << 17, 64, seed=0)
    expected = parameter.grad.double().norm().item()
    assert abs(parameter.grad.norm().item() / expected - 1) > 1e-3, "there is nothing to see"
    optimizer = Optimizer([ParameterGroup("adamw", [("p", parameter)], 0.1)], dtype=torch.float32)
    assert optimizer.reduce().sqrt().item() == pytest.approx(expected, rel=2e-4)


def test_row_splits_are_matrices_of_their_own() -> None:
    whole = nn.Parameter(seeded(16, 6, seed=0))
    pieces = [nn.Parameter(x.clone()) for x in whole.detach().split((8, 4, 4))]
    joined = Optimizer(
        [ParameterGroup("muon", [("qkv", whole)], 0.1, 0.2, row_splits={"qkv": (8, 4, 4)})], dtype=torch.float32
    )
    apart = [ParameterGroup("muon", [(f"p{i}", p)], 0.1, 0.2) for i, p in enumerate(pieces)]
    separate = Optimizer(apart, dtype=torch.float32)
    for i in range(3):
        whole.grad = seeded(16, 6, seed=10 + i)
        for piece, grad in zip(pieces, whole.grad.split((8, 4, 4)), strict=True):
            piece.grad = grad.clone()
        step(joined)
        step(separate)
    torch.testing.assert_close(whole.detach(), torch.cat([p.detach() for p in pieces]), rtol=1e-5, atol=1e-6)


P = ("p", nn.Parameter(torch.zeros(8, 4)))
MISTAKES = {
    "row_splits": [ParameterGroup("muon", [P], 0.1, row_splits={"p": (4, 2)})],
    "two groups": [ParameterGroup("muon", [P], 0.1), ParameterGroup("adamw", [P], 0.1)],
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_rows_left_out_and_a_parameter_in_two_groups_are_mistakes(mistake: str) -> None:
    with pytest.raises(AssertionError, match=mistake):
        Optimizer(MISTAKES[mistake])


# ---------------------------------------------------------------------- AdamW


@every_adamw
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_of_several_rates_and_epsilons_is_one_update_and_torchs(kernels: TorchKernels, decay: float) -> None:
    shapes = [(5, 7), (3,), (100, 64), (2, 9)]
    settings = [(0.02, 1e-10), (0.02, 1e-10), (0.05, 1e-10), (0.05, 0.3)]  # learning rate, epsilon
    ours = [(f"p{i}", nn.Parameter(seeded(*shape, seed=i))) for i, shape in enumerate(shapes)]
    theirs = [nn.Parameter(p.detach().clone()) for _, p in ours]
    groups = []
    reference_groups = []
    for one, other, (rate, eps) in zip(ours, theirs, settings, strict=True):
        groups.append(ParameterGroup("adamw", [one], rate, decay, betas=(0.8, 0.95), eps=eps))
        reference_groups.append({"params": [other], "lr": rate, "eps": eps})
    optimizer = Optimizer(groups, kernels=kernels)
    reference = torch.optim.AdamW(reference_groups, betas=(0.8, 0.95))
    for i in range(6):
        scale = 1.0 - 0.15 * i
        for group, (rate, _) in zip(reference.param_groups, settings, strict=True):
            group.update(lr=rate * scale, weight_decay=decay * scale)
        for j, ((_, one), other) in enumerate(zip(ours, theirs, strict=True)):
            one.grad = seeded(*one.shape, seed=100 * i + j) * 32
            other.grad = one.grad / 32
        step(optimizer, 32, lr_scale=scale, weight_decay_scale=scale)
        reference.step()
    for (_, one), other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-5, atol=1e-6)
    (rule,) = optimizer._rules
    assert isinstance(rule, optim.AdamW)
    assert len(rule.batches) == 1


# ---------------------------------------------------------------------- the whole, on one rank

SHAPES = {
    "muon": [("m0", (8, 8)), ("m1", (8, 8)), ("m2", (8, 8)), ("m3", (8, 4)), ("m4", (7, 8))],  # 3, 1, 1 of a shape
    "qkv": [("q0", (16, 8)), ("q1", (16, 8)), ("q2", (16, 8))],
    "adamw": [("large", (128, 64)), ("odd", (101, 64)), ("small", (6, 8)), ("vector", (5,))],
}


def make_optimizer(
    exchange: Exchange | None = None, kernels: TorchKernels | None = None, kept_as: StateFormat | None = None
) -> tuple[Optimizer, dict[str, nn.Parameter]]:
    """Every kind of share: stacks and rows that two ranks do not divide, split rows, large, odd and small tensors."""
    parameters = {
        name: nn.Parameter(seeded(*shape, seed=i))
        for i, (name, shape) in enumerate(pair for group in SHAPES.values() for pair in group)
    }
    muon, qkv, adamw = ([(name, parameters[name]) for name, _ in group] for group in SHAPES.values())
    groups = [
        ParameterGroup("muon", muon, 0.05, 0.1, betas=(0.8, 0.9)),
        ParameterGroup("muon", qkv, 0.05, 0.1, betas=(0.8, 0.9), row_splits={name: (8, 4, 4) for name, _ in qkv}),
        ParameterGroup("adamw", adamw, 0.01, 0.1),
    ]
    return Optimizer(groups, exchange=exchange, dtype=torch.float32, kernels=kernels, kept_as=kept_as), parameters


def set_gradients(parameters: dict[str, nn.Parameter], index: int, ranks: Iterable[int]) -> None:
    """The sum of some ranks' gradients of step `index`. `m4` has none on rank 1, which counts as zero."""
    for j, (name, parameter) in enumerate(parameters.items()):
        shares = [seeded(*parameter.shape, seed=1000 * index + 10 * j + r) for r in ranks if (name, r) != ("m4", 1)]
        parameter.grad = torch.stack(shares).sum(0) if shares else None


def run_steps(
    optimizer: Optimizer, parameters: dict[str, nn.Parameter], steps: range, ranks: Iterable[int]
) -> list[float]:
    """Four targets a step, every third skipped; returns the squared norms that `reduce` reports."""
    squares = []
    for index in steps:
        set_gradients(parameters, index, ranks)
        squares.append(step(optimizer, 4, ok=ZERO if index % 3 == 2 else ONE, momentum=0.9).item())
    return squares


def values(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def assert_same_bytes(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name].view(torch.int32), other[name].view(torch.int32)), name


@every_adamw
@pytest.mark.parametrize("poison", [0.0, torch.nan, torch.inf])
@pytest.mark.parametrize("begin", [0, 2])
def test_a_skipped_step_changes_no_byte(begin: int, poison: float, kernels: TorchKernels) -> None:
    optimizer, parameters = make_optimizer(kernels=kernels)
    run_steps(optimizer, parameters, range(begin), [0])
    before, state = values(parameters), copied(optimizer.state_dict())
    for skipped in range(2):
        set_gradients(parameters, skipped, [0])
        for parameter in parameters.values():
            assert parameter.grad is not None
            parameter.grad.flatten()[0] += poison
        squares = step(optimizer, 4, ok=ZERO)
        assert math.isfinite(squares.item()) == (poison == 0)
        assert all(p.grad is None for p in parameters.values())
    assert_same_bytes(values(parameters), before)
    assert_same_bytes(optimizer.state_dict(), state)
    run_steps(optimizer, parameters, range(begin, 4), [0])
    straight, others = make_optimizer(kernels=kernels)
    run_steps(straight, others, range(4), [0])
    assert_same_bytes(values(parameters), values(others))


@every_adamw
@pytest.mark.parametrize(("limit", "in_main_memory"), [("BUCKET_ELEMENTS", True), ("UPDATE_ELEMENTS", False)])
def test_updates_in_buckets_and_in_parts_change_no_bit(
    kernels: TorchKernels, limit: str, in_main_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporary tensors have as many elements as a part, and not as many as the model."""
    results = []
    elements = []
    for most, kept_as in ((1 << 28, StateFormat()), (100, StateFormat(in_main_memory=in_main_memory))):
        monkeypatch.setattr(optim, limit, most)
        optimizer, parameters = make_optimizer(kernels=kernels, kept_as=kept_as)
        run_steps(optimizer, parameters, range(6), [0])
        results.append({**values(parameters), **copied(optimizer.state_dict())})
        (adamw,) = [rule for rule in optimizer._rules if isinstance(rule, optim.AdamW)]
        elements.append(max(batch.first_moment.kept.numel() for batch in adamw.batches))
    assert_same_bytes(*results)
    assert elements[1] < elements[0] or in_main_memory


@every_adamw
def test_a_rounded_state_is_near_and_skips_steps_too(kernels: TorchKernels) -> None:
    exact, expected = make_optimizer(kernels=kernels)
    rounded, parameters = make_optimizer(kernels=kernels, kept_as=StateFormat(torch.bfloat16))
    for optimizer, theirs in ((exact, expected), (rounded, parameters)):
        run_steps(optimizer, theirs, range(5), [0])
    for name, tensor in values(expected).items():
        torch.testing.assert_close(parameters[name].detach(), tensor, rtol=0, atol=0.02)
    state = rounded.state_dict()
    halved = {name.rpartition(".")[2] for name, tensor in state.items() if tensor.dtype == torch.bfloat16}
    assert halved == {"momentum", "first_moment", "second_moment"}
    before = {name: tensor.float() for name, tensor in state.items()}
    set_gradients(parameters, 7, [0])
    step(rounded, 4, ok=ZERO)
    assert_same_bytes({name: tensor.float() for name, tensor in state.items()}, before)


def test_a_mean_that_moves_slowly_is_not_rounded() -> None:
    """Rounded, a mean of beta 0.999 would never move from 1 towards 0.5."""
    group = ParameterGroup("adamw", [("p", nn.Parameter(torch.zeros(3)))], 0.1, betas=(0.9, 0.999))
    state = Optimizer([group], kept_as=StateFormat(torch.bfloat16)).state_dict()
    assert state["adamw.p.first_moment"].dtype == torch.bfloat16
    assert state["adamw.p.second_moment"].dtype == torch.float32


# ---------------------------------------------------------------------- on two ranks


def steps_on_a_rank(device: Device, steps: int) -> dict[str, Any]:
    optimizer, parameters = make_optimizer(lay_out(device).exchange(None))
    squares = run_steps(optimizer, parameters, range(steps), [device.rank])
    return {
        "values": values(parameters),
        "state": {n: whole(t).clone() for n, t in optimizer.state_dict().items()},
        "squares": squares,
    }


@pytest.mark.slow
def test_two_ranks_are_as_one_and_their_state_is_anyones() -> None:
    ranks = run_ranks(steps_on_a_rank, 5)
    optimizer, parameters = make_optimizer()
    squares = run_steps(optimizer, parameters, range(5), [0, 1])
    assert_same_bytes(ranks[0]["values"], ranks[1]["values"])
    for name, value in values(parameters).items():
        torch.testing.assert_close(ranks[0]["values"][name], value, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n} {m}")
    for all_of_it, *shares in zip(squares, *(r["squares"] for r in ranks), strict=True):
        assert sum(shares) == pytest.approx(all_of_it, rel=1e-5)

    # the state of two goes on as one's, and so do the next steps
    resumed, others = make_optimizer()
    with torch.no_grad():
        for name, parameter in others.items():
            parameter.copy_(ranks[0]["values"][name])
    for name, tensor in resumed.state_dict().items():
        torch.testing.assert_close(ranks[0]["state"][name], optimizer.state_dict()[name], rtol=1e-5, atol=1e-6)
        tensor.copy_(ranks[0]["state"][name])
    run_steps(optimizer, parameters, range(5, 8), [0, 1])
    run_steps(resumed, others, range(5, 8), [0, 1])
    for name, value in values(parameters).items():
        torch.testing.assert_close(others[name].detach(), value, rtol=0, atol=1e-5)
