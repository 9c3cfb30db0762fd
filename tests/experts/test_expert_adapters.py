"""Adapters of experts: each expert has its own A and B, in training, merged, in 4 bits and in peft's folders."""

from dataclasses import replace

import pytest
import torch
from test_lora import adapters_of, gradients, tokens_of
from tiny import EXPERT_SHAPES, adapt, lively_model, tiny_config

from nanochat.adapters import lora, peft
from nanochat.adapters.lora import ExpertAdapters, Lora
from nanochat.adapters.nf4 import NF4Experts
from nanochat.gpt import GPT

ALL = Lora(4, 8.0)
SETTINGS = [ALL, Lora(3, 8.0, targets=("up_proj", "k_proj")), Lora(4, 8.0, base_format="nf4")]
QWEN3_MOE = EXPERT_SHAPES["qwen3_moe"]


@pytest.mark.parametrize("settings", SETTINGS, ids=["all", "some", "nf4"])
@pytest.mark.parametrize("shape", EXPERT_SHAPES)
def test_merged_is_unmerged_in_output_and_gradients(shape, settings):
    config = tiny_config(**EXPERT_SHAPES[shape])
    adapted = adapt(lively_model(config), settings)
    tokens, targets = tokens_of(config)
    merged = GPT(config)
    weights = dict(lora.merged_weights(adapted))
    merged.load_state_dict(weights)
    rounding = 5e-5 if config.has_states else 2e-5  # a norm of what a state returns amplifies it
    torch.testing.assert_close(adapted(tokens), merged(tokens), rtol=0, atol=rounding)
    kind = NF4Experts if settings.base_format == "nf4" else torch.nn.Module
    assert isinstance(adapted.blocks[1].mlp.input, kind)  # type: ignore[union-attr]
    assert sum(isinstance(module, ExpertAdapters) for module in adapted.modules()) >= 3
    # With W + scale B A for W: the gradient of B is scale G A^T, and of A scale B^T G.
    found = gradients(adapted)
    assert all(".adapters." in name for name in found)
    merged(tokens, targets).backward()
    start = config.mlp_width if config.mlp == "swiglu" else 0
    prefix = "blocks.1.mlp.input"
    G = merged.get_parameter(f"{prefix}.weight").grad
    assert G is not None
    G = G.view(4, -1, config.width)[:, start : start + config.mlp_width]  # of up_proj
    A, B = (adapted.get_parameter(f"{prefix}.adapters.up_proj.lora_{side}").detach() for side in "AB")
    A = A.view(4, settings.rank, -1)
    B = B.view(4, -1, settings.rank)
    torch.testing.assert_close(
        found[f"{prefix}.adapters.up_proj.lora_A"].view_as(A), settings.scale * B.mT @ G, rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(
        found[f"{prefix}.adapters.up_proj.lora_B"].view_as(B), settings.scale * G @ A.mT, rtol=1e-4, atol=1e-4
    )


def test_pefts_folder_has_a_name_for_each_expert(tmp_path):
    config = tiny_config(**QWEN3_MOE)
    adapters = adapters_of(adapt(lively_model(config)))
    peft.write(tmp_path, adapters, config, "base")
    names = peft.names(config)
    assert "base_model.model.model.layers.2.mlp.experts.3.up_proj.lora_A.weight" in names
    assert len(names) == 3 * 2 * (4 + 4 * 3)
    again = peft.read(tmp_path, config)
    targets = lora.choose_targets("all", 4, config)
    assert set(again.tensors) == set(adapters.tensors) and again.lora == replace(adapters.lora, targets=targets)
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in adapters.tensors.items())
