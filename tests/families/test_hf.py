"""nanochat.families.hf: what cannot be read ends in one line; older and unusual folders are read as by transformers.

That the numbers are transformers' is shown in tests/promises/test_p08_interchange_is_exact.py.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import call
from safetensors.torch import load_file, save_file
from tiny import SHAPES, complaint, cpu_device, tiny_config
from tiny_families import LLAMA3_POSITIONS, logits_of, oracle_folder, oracle_of

from nanochat import model_folder
from nanochat.checkpoint_manager import load_model
from nanochat.families import hf
from nanochat.gpt import GPTConfig
from nanochat.run.long_context import NewContext

transformers = pytest.importorskip("transformers", reason="the extra `dev` brings transformers")

TOKENS = torch.randint(0, 300, (2, 80), generator=torch.Generator().manual_seed(3))
WEIGHTS, NORM, SHARD = "model.safetensors", "model.norm.weight", "model-00001-of-00002.safetensors"


def copy_of(name: str, tmp_path: Path) -> Path:
    return shutil.copytree(oracle_folder(name), tmp_path / "model")


def change_config(folder: Path, **changes: Any) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **changes}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt_neox"}, "gpt_neox is not read: one of qwen2, "),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "mlp_only_layers [0]"),
        ({"model_type": "qwen3_moe", "num_experts_per_tok": 4, "num_experts": 3}, "per_tok 4 of num_experts 3"),
        ({"model_type": "qwen3_moe", "num_experts": 1 << 20}, "at most 4,096"),
        ({"model_type": "qwen3_moe", "num_experts": 1 << 40}, "num_experts is"),
        ({"model_type": "qwen3_moe", "num_experts": 2, "num_experts_per_tok": 1}, "no model.layers.0"),
        ({"model_type": "qwen3_5", "head_dim": 16, "linear_num_key_heads": 5}, "linear_num_value_heads is not"),
        ({"model_type": "qwen3_5", "linear_conv_kernel_dim": 3}, "only 4 is known"),
        ({"model_type": "qwen3_5", "head_dim": 16, "partial_rotary_factor": 0.2}, "3 channels, which turn"),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope", "factor": 2}}, "rope_type longrope"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"num_local_experts": 8}, "experts"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"partial_rotary_factor": 0.5}, "a part of the channels"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type dynamic"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "mrope"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
        ({"rope_scaling": [1]}, "not an object"),
        ({"rope_parameters": {"full_attention": LLAMA3_POSITIONS, "sliding_attention": {}}}, "(full_attention, s"),
        ({"rope_parameters": {"full_attention": None}}, "(full_attention)"),
        ({"rope_parameters": {"global": LLAMA3_POSITIONS}}, "(global)"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 1}}, "turns"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"hidden_size": 1 << 40}, "hidden_size"),
        ({"hidden_size": 96}, "config.json asks for"),
        ({"num_hidden_layers": 1}, "1 layers, its weights have 2"),
        ({"num_hidden_layers": 100_000}, "from 1 to 1000"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"head_dim": 7}, "odd"),
        ({"vocab_size": 1000}, "config.json asks for"),
        ({"vocab_size": 40}, "its tokenizer has"),
        ({"max_position_embeddings": 1 << 24, "head_dim": None}, "a context of"),
        ({"vocab_size": None}, "vocab_size is None"),
    ],
)
def test_what_cannot_be_computed_is_named(tmp_path, change, words):
    folder = copy_of("llama", tmp_path)
    change_config(folder, **change)
    line = complaint(lambda: load_model(str(folder), "cpu"))
    assert words in line and str(folder) in line


def resave(folder: Path, changes: Mapping[str, torch.Tensor | None]) -> None:
    """The folder's weights with these tensors; None leaves one out."""
    tensors = {**load_file(folder / WEIGHTS), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / WEIGHTS)


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def replace_by_pipe(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def rename(folder: Path, old: str, new: str) -> None:
    """The folder's weights, with a part of their names replaced."""
    tensors = load_file(folder / WEIGHTS)
    save_file({name.replace(old, new): tensor for name, tensor in tensors.items()}, folder / WEIGHTS)


BIAS = {"model.layers.0.mlp.gate_proj.bias": torch.ones(40)}
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda folder: (folder / WEIGHTS).unlink(), "no model.safetensors"),
    "pickled": (lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"), "pickled"),
    "gguf": (lambda folder: (folder / WEIGHTS).rename(folder / "model.gguf"), "GGUF"),
    "cut short": (lambda folder: os.truncate(folder / WEIGHTS, 5000), "cannot be used"),
    "a pipe": (replace_by_pipe, "no regular file"),
    "a long header": (lambda folder: (folder / WEIGHTS).write_bytes(b"\0" * 7 + b"\x10{}"), "header"),
    "another dtype": (lambda folder: resave(folder, {NORM: torch.ones(48, dtype=torch.int64)}), "stored as I64"),
    # Saved inside of a wrapper, whole or in each layer.
    "compiled": (lambda folder: rename(folder, "model.", "_orig_mod.model."), "by torch.compile: save"),
    "parallel": (lambda folder: rename(folder, "model.", "module.model."), "model.module"),
    "sharded": (lambda folder: rename(folder, ".mlp.", "._fsdp_wrapped_module.mlp."), "FSDP"),
    "checkpointed": (lambda folder: rename(folder, ".mlp", "._checkpoint_wrapped_module.mlp"), "without it"),
    "adapted": (lambda folder: rename(folder, "model.", "base_model.model.model."), "merge_and_unload"),
    "adapted layers": (lambda folder: rename(folder, "q_proj.", "q_proj.base_layer."), "merge_and_unload"),
    "a tensor too many": (lambda folder: resave(folder, BIAS), "gate_proj.bias"),
    "a tensor missing": (lambda folder: resave(folder, {NORM: None}), "no model.norm.weight"),
    "a shard missing": (lambda folder: write_index(folder, {NORM: SHARD}), "is missing"),
    "outside": (lambda folder: write_index(folder, {NORM: "../model.safetensors"}), "not plain"),
    "no map": (lambda folder: write_index(folder, [WEIGHTS]), "weight_map"),
    "an index that lies": (lambda folder: write_index(folder, {"nothing": WEIGHTS}), "nothing"),
    "no config": (lambda folder: (folder / "config.json").write_text("[]"), "not an object"),
    "a deep config": (lambda folder: (folder / "config.json").write_text("[" * 100_000), "nested"),
}


@pytest.mark.parametrize(("damage", "words"), BROKEN.values(), ids=BROKEN)
def test_a_broken_folder_costs_one_line(tmp_path, damage, words):
    folder = copy_of("llama", tmp_path)
    damage(folder)
    assert words in complaint(lambda: load_model(str(folder), "cpu"))


def test_names_that_older_folders_have(tmp_path):
    """A tied head that is stored all the same, rotary tables, and settings in the form before transformers 5."""
    folder = copy_of("llama 3", tmp_path)
    head = load_file(folder / WEIGHTS)["model.embed_tokens.weight"].clone()
    resave(folder, {"lm_head.weight": head, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(9)})
    settings = json.loads((folder / "config.json").read_text())
    rope = settings.pop("rope_parameters")
    settings["rope_theta"] = rope.pop("rope_theta")
    (folder / "config.json").write_text(json.dumps({**settings, "rope_scaling": rope}))
    old, _, _ = load_model(str(folder), "cpu")
    new, _, _ = load_model(str(oracle_folder("llama 3")), "cpu")
    assert old.config == new.config
    assert torch.equal(logits_of(old, TOKENS), logits_of(new, TOKENS))


def test_a_head_beside_tied_embeddings_is_kept(tmp_path, capsys):
    """As transformers keeps it; one that equals the embedding stays tied (above)."""
    folder = copy_of("qwen3", tmp_path)
    tensors = load_file(folder / WEIGHTS)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    capsys.readouterr()
    model, _, meta = load_model(str(folder), cpu_device())
    (line,) = capsys.readouterr().err.splitlines()
    assert str(folder) in line and "tie_word_embeddings" in line and "lm_head.weight" in line
    assert not model.config.tied_head and meta["model"]["tied_head"] is False
    expected = logits_of(oracle_of(folder), TOKENS)
    assert (logits_of(model, TOKENS) - expected).abs().max() < 1e-4
    assert (logits_of(oracle_of(oracle_folder("qwen3")), TOKENS) - expected).abs().max() > 0.01

    out = tmp_path / "out"
    call("export", "--to=hf", f"--source={folder}", f"--out={out}")
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(load_file(out / WEIGHTS)["lm_head.weight"], tensors["lm_head.weight"])

    # Of another shape, it is not ignored either.
    resave(folder, {"lm_head.weight": tensors["lm_head.weight"][:-1].clone()})
    line = complaint(lambda: load_model(str(folder), "cpu"))
    assert f"lm_head.weight is {[*tensors['lm_head.weight'][:-1].shape]}" in line


def test_sampling_is_the_folders(tmp_path):
    folder = copy_of("llama", tmp_path)
    for content, expected in (
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}, (0.6, 20, 0.95)),
        ({"do_sample": True, "temperature": "hot"}, (0.8, 0, 1.0)),
        ({"eos_token_id": 2}, (0.8, 0, 1.0)),
    ):
        (folder / "generation_config.json").write_text(json.dumps(content))
        _, _, meta = load_model(str(folder), "cpu")
        assert tuple(meta["sampling"][name] for name in ("temperature", "top_k", "top_p")) == expected
    assert model_folder.tag_of(folder) == "model"


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_what_a_config_leaves_out_is_transformers_default(family):
    settings = transformers.AutoConfig.for_model(family).get_text_config()
    for name, value in hf.FAMILIES[family].defaults.items():
        assert getattr(settings, name) == value, name


def test_which_family_can_say_what_a_model_computes():
    qwen3 = tiny_config(**SHAPES["qwen3"], norm_eps=1e-6)
    qwen3 = dataclasses.replace(qwen3, window_pattern="L")
    assert hf.family_of(qwen3) == "qwen3" and hf.family_of(GPTConfig()) is None
    assert hf.computes("qwen3", qwen3) and not hf.computes("llama", qwen3)
    assert not hf.computes("llama", dataclasses.replace(qwen3, qk_norm="none", mlp="relu2"))
    # Phi's config.json can only say longrope: after another method it is written as Llama.
    model, _, _ = load_model(str(oracle_folder("phi3")), "cpu", prepare=[NewContext(768, "yarn")])
    assert not hf.computes("phi3", model.config) and hf.family_of(model.config) == "llama"
    plain, _, _ = load_model(str(oracle_folder("phi3")), "cpu")
    assert hf.computes("phi3", plain.config)
