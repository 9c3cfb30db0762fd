"""A training step of a device against the CPU's, module by module."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from simnpu import cases

from nanochat import scaling
from nanochat.device import Device
from nanochat.families.hf import to_config
from on_device.recording import TOLERANCES, differences, first_difference, record_step
from on_device.sizes import init

# Qwen3's settings at a small size: grouped heads, norms with a gain before the rotation, a gated MLP, a tied head.
QWEN3 = {
    "model_type": "qwen3", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 256,
    "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
SHAPES = {"preset": scaling.model_config(4, 1024, 256, window_pattern="SSSL"), "Qwen3": to_config(QWEN3)}
DOCUMENT = 100  # tokens of a document in packed rows: more than a window, and a row ends within one


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("document_tokens", [0, DOCUMENT], ids=["whole", "packed"])
@pytest.mark.parametrize("shape", SHAPES)
def test_step(kind: str, trains: Device, measured: Callable[..., None], shape: str, document_tokens: int, dtype: str):
    """Every module, operator and gradient of a training step is the CPU's; else the first that differs is named."""
    config = replace(SHAPES[shape], n_layer=2)
    recordings = [
        record_step(init(name, dtype), config, rows=2, document_tokens=document_tokens) for name in (kind, "cpu")
    ]
    found = differences(*recordings)
    measured(tensors=len(found), largest_difference=max(error for _, error in found))
    assert not first_difference(found, TOLERANCES[dtype])


def test_a_step_that_is_not_finite(kind: str, trains: Device):
    """It changes no weight and no state, and neither does a step without a target; a good one does."""
    assert cases.skipped_steps(kind) == [False, False, True]
