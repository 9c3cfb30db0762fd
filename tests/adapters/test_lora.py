"""Adapters: nothing changes at the start, gradients as autograd's, and merged = unmerged.

The stages run as in test_stages, from its small base model.
"""

import contextlib
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_stages as stages
import torch
import torch.nn.functional as F
from runs import call, losses, refused
from safetensors.torch import load_file, save_file
from test_scripts import base  # noqa: F401 (base is a fixture)
from test_stages import SFT, pretrained, start  # noqa: F401 (fixtures)
from tiny import EXPERT_SHAPES, SHAPES, Kept, adapt, complaint, cpu_device, lively_model, tiny_config, tiny_tokenizer
from tiny import LIVELY_ADAPTERS as LIVELY
from tiny_families import save_qwen3
from torch import Tensor

from nanochat.adapters import lora
from nanochat.adapters.lora import Adapters, Lora, adapters_in
from nanochat.adapters.nf4 import NF4Linear, dequantize
from nanochat.checkpoint_manager import load_model
from nanochat.engine import Engine, SamplingParams
from nanochat.gpt import GPT, Linear
from nanochat.ground import storage
from nanochat.ground.cli import UserError
from nanochat.kernels.casts import cast_together
from nanochat.kernels.gradients import StackedLinear
from nanochat.train import make_adamw

FLAGS = ("--lora_rank=4", "--lora_alpha=8", "--learning_rate=0.01")
DPO, RL = (tuple(flag for flag in flags if "lr_scale" not in flag) for flags in (stages.DPO, stages.RL))


def tokens_of(config: Any, rows: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, config.vocab_size, (rows, 17), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def adapted_model(shape: str = "fast", settings: Lora = LIVELY, lively: bool = True, **options: Any) -> GPT:
    """A model with adapters; with `lively` their B is not 0."""
    changes = options.pop("changes", {})
    model = lively_model(tiny_config(**{**(SHAPES | EXPERT_SHAPES)[shape], **changes}), **options)
    return adapt(model, settings, lively)


def gradients(model: GPT) -> dict[str, Tensor]:
    inputs, targets = tokens_of(model.config)
    model(inputs, targets).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# ---------------------------------------------------------------------- the mathematics


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, "qwen3_moe"])
def test_fresh_adapters_change_no_bit(shape, dtype):
    kernels = cpu_device(dtype=dtype).kernels
    plain = lively_model(tiny_config(**(SHAPES | EXPERT_SHAPES)[shape]), kernels=kernels).to(dtype)
    inputs, targets = tokens_of(plain.config)
    adapted = adapted_model(shape, lively=False, kernels=kernels)
    with cast_together(adapted, dtype):
        assert torch.equal(adapted(inputs), plain(inputs))
        assert torch.equal(adapted(inputs, targets), plain(inputs, targets))
    assert adapted.embedding.weight.dtype == dtype
    assert {p.dtype for p in adapted.parameters() if p.requires_grad} == {torch.float32}


def written_out(layer: Any, x: Tensor) -> Any:
    """The layer's definition, target by target, by autograd."""
    if isinstance(layer, NF4Linear):
        weight = dequantize(layer.codes, layer.factors, (layer.out_features, layer.in_features), torch.float32)
    else:
        weight = layer.weight
    y = F.linear(x, weight, layer.bias)
    adapters = getattr(layer, "adapters", None)
    if adapters is not None:
        parts = list(y.split(list(adapters.parts.values()), dim=-1))
        for place, name in enumerate(adapters.parts):
            if name in adapters:
                dropped = F.dropout(x, adapters.dropout) if adapters.dropout else x
                parts[place] = (
                    parts[place] + adapters.lora.scale * dropped @ adapters[name].lora_A.T @ adapters[name].lora_B.T
                )
        y = torch.cat(parts, dim=-1)
    if not (isinstance(layer, StackedLinear) or getattr(layer, "is_stacked", False)):
        return y
    q, k, v = y.chunk(3, dim=-1)
    return torch.stack((q, k)), v


@pytest.mark.parametrize(
    "settings",
    [
        LIVELY,
        Lora(4, 8.0, targets=("v_proj", "q_proj", "down_proj")),
        Lora(4, 8.0, dropout=0.3),
        Lora(4, 8.0, base_format="nf4"),
        Lora(3, 8.0, targets=("up_proj", "k_proj"), base_format="nf4"),
    ],
    ids=["all", "some", "dropout", "nf4", "nf4-some"],
)
@pytest.mark.parametrize("shape", ["ungrouped", "qwen2", "qwen3"])
@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
def test_gradients_are_those_of_the_definition(monkeypatch, shape, settings, together):
    model = adapted_model(shape, settings)
    torch.manual_seed(3)
    with cast_together(model, torch.float32) if together else contextlib.nullcontext():
        assert all((adapters.together is not None) == together for adapters in adapters_in(model))
        found = gradients(model)
    assert all(adapters.together is None for adapters in adapters_in(model))
    assert set(found) == {name for name, _ in model.named_parameters() if ".lora_" in name}
    model.zero_grad()
    for linear in (Linear, StackedLinear, NF4Linear):
        monkeypatch.setattr(linear, "forward", written_out)
    for adapters in adapters_in(model):
        adapters.enabled = False
    torch.manual_seed(3)
    expected = gradients(model)
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max().item())


def test_one_cast_serves_several_micro_batches():
    model = adapted_model("qwen3")
    once = gradients(model)
    with cast_together(model, torch.float32):
        gradients(model)
        twice = gradients(model)  # the gradients of both add up
    for name, gradient in once.items():
        torch.testing.assert_close(twice[name], 3 * gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max().item())


def test_recomputed_blocks_draw_the_same_dropout():
    kept, recomputed = (adapted_model(settings=Lora(4, 8.0, dropout=0.5)) for _ in range(2))
    recomputed.recompute_activations()
    torch.manual_seed(1)
    expected = gradients(kept)
    torch.manual_seed(1)
    found = gradients(recomputed)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_without_adapters_is_the_base_and_they_come_back():
    plain = lively_model(tiny_config(**SHAPES["fast"]))
    model = adapted_model()
    inputs, targets = tokens_of(plain.config)
    adapted = model(inputs)
    assert not torch.equal(adapted, plain(inputs))
    reference = lora.without_adapters(model)
    assert torch.equal(reference(inputs), plain(inputs))
    assert torch.equal(reference(inputs, targets, reduction="none"), plain(inputs, targets, reduction="none"))
    assert torch.equal(model(inputs), adapted)


# ---------------------------------------------------------------------- what a step keeps


def kept_bytes(model: GPT) -> int:
    kept = Kept([*model.parameters(), *model.buffers()])
    with kept.counting():
        inputs, targets = tokens_of(model.config)
        model(inputs, targets)
    return kept.bytes


def test_bytes_of_parameters_state_and_what_backward_keeps():
    device = cpu_device(dtype=torch.bfloat16)
    changes = {**SHAPES["qwen3"], "width": 64, "mlp_width": 128, "sequence_len": 16}
    full = lively_model(tiny_config(**changes), kernels=device.kernels)
    matrices = sum(p.numel() for name, p in full.named_parameters() if name.startswith("blocks") and p.ndim == 2)
    others = sum(p.numel() for p in full.parameters()) - matrices
    kept = {"full": kept_bytes(full)}
    for name in ("plain", "nf4"):
        model = adapted_model("qwen3", Lora(2, base_format=name), kernels=device.kernels, changes=changes)
        quantized = [layer for layer in model.modules() if isinstance(layer, NF4Linear)]
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert trained == sum(
            2 * (adapter.lora_A.size(1) + adapter.lora_B.size(0))
            for adapters in adapters_in(model)
            for adapter in adapters.values()
        )
        frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
        if name == "plain":
            assert frozen == 2 * (matrices + others)
        else:
            assert frozen == 2 * others
            assert sum(layer.codes.nbytes + layer.factors.nbytes for layer in quantized) == matrices * 4.5 / 8
        optimizer = make_adamw(model, 0.01, device)
        assert sum(tensor.numel() for tensor in optimizer.state_dict().values()) == 2 * trained + 1
        kept[name] = kept_bytes(model)
    # Full training keeps the matrices in bf16 and the gradient of the head too; 4 bits keep what 16 do.
    assert kept["nf4"] == kept["plain"] < kept["full"] - 2 * matrices


# ---------------------------------------------------------------------- merged


def adapters_of(model: GPT) -> Adapters:
    settings = model.extension.lora
    assert settings is not None
    return Adapters(settings, {name: p.detach() for name, p in model.named_parameters() if p.requires_grad})


def merge(model: GPT, adapters: Adapters) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(adapters.merged(name, parameter, model.config))


@pytest.mark.parametrize("settings", [LIVELY, Lora(3, 8.0, targets=("k_proj", "up_proj"), base_format="nf4")])
@pytest.mark.parametrize("shape", SHAPES)
def test_merged_is_unmerged(shape, settings):
    adapted = adapted_model(shape, settings)
    merged = lively_model(tiny_config(**SHAPES[shape]))
    merge(merged, adapters_of(adapted))
    inputs, _ = tokens_of(merged.config)
    # Rounding alone, of logits up to 5: a model without norms of q and k has 2e-5 of it.
    torch.testing.assert_close(merged(inputs), adapted(inputs), rtol=1e-5, atol=3e-5)
    assert not torch.allclose(merged(inputs), lively_model(tiny_config(**SHAPES[shape]))(inputs), atol=1e-2)


@pytest.mark.parametrize("settings", [LIVELY, Lora(4, 8.0, base_format="nf4")], ids=["plain", "nf4"])
def test_the_engine_reads_adapters_as_they_are_trained(settings):
    tokenizer = tiny_tokenizer()
    model = adapted_model(settings=settings, changes={"vocab_size": tokenizer.vocab_size})
    engine = Engine(model, tokenizer, cpu_device())
    engine.stop_ids = set()
    assert engine.model is model, "no second copy of the base is in memory"

    def replies() -> list[int]:
        return engine.generate([[5, 6, 7]], max_tokens=12, sampling=SamplingParams(temperature=0.0))[0][0]

    def uncached() -> list[int]:
        tokens = [5, 6, 7]
        for _ in range(12):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        return tokens[3:]

    first = replies()
    assert first == uncached()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.mul_(-3)
    engine.update(model)
    assert replies() == uncached() != first


# ---------------------------------------------------------------------- stages


def folder_of(base: Path, stage: str, step: int, tag: str = "d1") -> Path:  # noqa: F811
    return base / "checkpoints" / stage / tag / f"step_{step:06d}"


@pytest.fixture
def tuned(start) -> Iterator[Path]:  # noqa: F811
    call("chat_sft", *SFT, *FLAGS, "--source=base", "--num_iterations=3")
    yield start


def same_weights(one: GPT, other: GPT) -> bool:
    weights = other.state_dict()
    return all(torch.equal(tensor, weights[name]) for name, tensor in one.state_dict().items())


def test_a_checkpoint_of_adapters_is_a_model(tuned, tmp_path):
    """It is loaded merged, exported, and trained further; and it misses its base in one line."""
    model, _, meta = load_model("sft", "cpu")
    untouched, _, _ = load_model("base", "cpu")
    assert model.extension is None
    assert (meta["adapter"]["base"], meta["adapter"]["rank"]) == ("base/d1/step_000020", 4)
    changed = {name for name, t in model.state_dict().items() if not torch.equal(t, untouched.state_dict()[name])}
    assert changed == {name for name in model.state_dict() if ".attention." in name or ".mlp." in name} - {
        name for name in model.state_dict() if "value_gate" in name or "lookback" in name
    }
    # An exported model needs no base.
    call("export", "--source", "sft", "--out", str(tmp_path / "merged"))
    exported, _, about = load_model(tmp_path / "merged", "cpu")
    assert same_weights(exported, model) and "adapter" not in about

    # Adapters upon adapters, and all weights upon adapters.
    call("chat_dpo", *DPO, *FLAGS, "--lora_base=nf4", "--source=sft", "--num_iterations=1")
    assert losses(tuned, "dpo") == [pytest.approx(math.log(2), abs=1e-7)]  # the reference is the model itself
    call("chat_rl", *RL, "--source=dpo", "--num_iterations=1", "--eval_examples=1")
    upon, _, meta = load_model("dpo", "cpu")
    assert meta["adapter"]["base"] == "sft/d1/step_000003"
    assert (folder_of(tuned, "rl", 1) / "model.safetensors").is_file()

    # The base was moved to another tag: it is found by its weights.
    home = tuned / "checkpoints/base/d1"
    home.rename(home.with_name("elsewhere"))
    assert same_weights(load_model("dpo", "cpu")[0], upon)
    # It is gone, or is another one.
    shutil.move(tuned / "checkpoints/base", tmp_path / "away")
    line = complaint(lambda: load_model("sft", "cpu"))
    assert "base/d1/step_000020" in line and "is missing" in line
    shutil.copytree(folder_of(tuned, "rl", 1), folder_of(tuned, "base", 20))
    assert "has other weights now" in complaint(lambda: load_model("sft", "cpu"))


def test_a_mistake_costs_one_line(tuned, capsys):
    flags = ("chat_sft", *SFT, "--source=base", "--num_iterations=4")
    for more, words in (
        (("--lora_rank=4", "--lora_targets=q_prj"), ("--lora_targets q_prj", "q_proj")),
        (("--lora_rank=4", "--lora_targets=gate_proj"), ("--lora_targets gate_proj",)),
        (("--lora_rank=1000",), ("--lora_rank 1000", "q_proj")),
        (("--resume",), ("--lora_rank 4, not 0",)),
        (("--resume", *FLAGS, "--lora_alpha=9"), ("--lora_alpha 8.0, not 9.0",)),
    ):
        refused(capsys, (*flags, *more), *words)


# ---------------------------------------------------------------------- the base of another program


@pytest.fixture
def qwen(base, tmp_path) -> Path:  # noqa: F811
    return save_qwen3(tmp_path / "qwen")


def test_a_base_is_hashed_once_and_never_again(qwen, monkeypatch):
    """15 to 65 GB of the usual ones: neither another run nor a resume reads them only to hash them."""
    hashed: list[Path] = []
    original = storage.sha256
    monkeypatch.setattr(storage, "sha256", lambda path: (hashed.append(path), original(path))[1])
    weights = qwen / "model.safetensors"
    flags = (*SFT, *FLAGS, f"--source={qwen}", "--num_iterations=2", "--save_every=1")
    call("chat_sft", *flags, "--model_tag=first")
    assert hashed.count(weights) == 1
    for more in (("--model_tag=first", "--resume"), ("--model_tag=second", "--lora_rank=2")):
        call("chat_sft", *flags, *more)
    load_model("sft", "cpu")  # finds the base by its hash
    assert hashed.count(weights) == 1

    changed = load_file(weights)
    next(iter(changed.values()))[0] += 1
    save_file(changed, weights)
    with pytest.raises(UserError, match="has other weights now"):
        load_model("sft", "cpu")
    assert hashed.count(weights) == 2
