"""Adapters in and out as folders of the library peft: its results, its gradients, its files."""

import copy
import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from runs import call, refused
from safetensors.torch import load_file
from test_lora import FLAGS, adapters_of, gradients, merge, tokens_of
from test_scripts import base  # noqa: F401 (base is a fixture)
from test_stages import SFT
from tiny import adapt, complaint, cpu_device
from tiny_families import oracle_folder, oracle_of, save_qwen3

from nanochat.adapters import peft as peft_folders
from nanochat.adapters.lora import Adapters, Lora
from nanochat.checkpoint_manager import load_model
from nanochat.families import hf
from nanochat.gpt import GPT

transformers = pytest.importorskip("transformers", reason="the extra `dev` brings transformers")
peft = pytest.importorskip("peft", reason="the extra `dev` brings peft")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("qwen") / "qwen")


@pytest.fixture(scope="module")
def qwen(folder) -> tuple[Any, GPT]:
    """The same tiny Qwen3 as transformers has it and as ours."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = load_model(folder, "cpu")[0].train()
    inputs, _ = tokens_of(ours.config)
    torch.testing.assert_close(ours(inputs), theirs(inputs).logits, rtol=1e-4, atol=1e-5)
    return theirs, ours


def with_adapters(theirs: Any, folder: Path) -> Any:
    """Their model with the adapters of a folder."""
    return peft.PeftModel.from_pretrained(copy.deepcopy(theirs), str(folder), is_trainable=True)


def test_adapters_of_a_family_with_other_matrices_stay_here(monkeypatch, tmp_path):
    """peft would apply them to matrices of another shape or scale."""

    class Scaled(hf.FolderFormat):
        pass

    monkeypatch.setattr(peft_folders, "format_of", lambda folder: hf.FORMAT)
    peft_folders.require_same_modules(tmp_path, "--to peft")
    monkeypatch.setattr(peft_folders, "format_of", lambda folder: Scaled())
    said = complaint(lambda: peft_folders.require_same_modules(tmp_path, "--to peft"))
    assert said.startswith(f"--to peft: {tmp_path} ") and "--to hf" in said
    # Phi's are stacked.
    monkeypatch.setattr(peft_folders, "format_of", lambda folder: hf.FORMAT)
    (tmp_path / "config.json").write_text('{"model_type": "phi3"}')
    assert complaint(lambda: peft_folders.require_same_modules(tmp_path, "--to peft")) == said


def clone_of(model: GPT) -> GPT:
    copied = GPT(model.config)
    copied.load_state_dict(model.state_dict())
    return copied


@pytest.mark.parametrize("targets", [Lora.targets, ("v_proj", "up_proj")], ids=["all", "some"])
def test_peft_reads_our_adapters_and_has_their_gradients(qwen, tmp_path, targets):
    theirs, plain = qwen
    adapted = adapt(clone_of(plain), Lora(4, 6.0, targets=targets))
    peft_folders.write(tmp_path, adapters_of(adapted), plain.config, "somewhere")
    wrapped = with_adapters(theirs, tmp_path)
    inputs, labels = tokens_of(plain.config)
    torch.testing.assert_close(adapted(inputs), wrapped(inputs).logits, rtol=1e-5, atol=1e-5)

    loss = F.cross_entropy(wrapped(inputs).logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    named = {name.replace(".default", ""): p for name, p in wrapped.named_parameters() if p.requires_grad}
    found = gradients(adapted)
    gradient_folder = tmp_path / "gradients"
    gradient_folder.mkdir()
    peft_folders.write(gradient_folder, Adapters(adapters_of(adapted).lora, found), plain.config, "")
    as_theirs = load_file(gradient_folder / peft_folders.WEIGHTS)
    assert set(as_theirs) == set(named)
    for name, gradient in as_theirs.items():
        expected = named[name].grad
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("is_stabilized", [False, True], ids=["plain", "rslora"])
def test_our_model_reads_pefts_adapters(qwen, tmp_path, is_stabilized):
    theirs, plain = qwen
    settings = peft.LoraConfig(
        r=3, lora_alpha=7, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"],
        init_lora_weights=False, use_rslora=is_stabilized,
    )  # fmt: skip
    wrapped = peft.get_peft_model(copy.deepcopy(theirs), settings).eval()
    wrapped.save_pretrained(str(tmp_path))
    source = peft_folders.read(tmp_path, plain.config)
    alpha = 7 * 3**0.5 if is_stabilized else 7
    assert source.lora == Lora(3, alpha, 0.1, ("q_proj", "v_proj", "gate_proj", "down_proj"))
    model = clone_of(plain)
    merge(model, source)
    inputs, _ = tokens_of(plain.config)
    torch.testing.assert_close(model(inputs), wrapped(inputs).logits, rtol=1e-4, atol=1e-5)
    # There and back: the same tensors.
    peft_folders.write(tmp_path / ".", source, plain.config, "")
    again = peft_folders.read(tmp_path, plain.config)
    assert again.tensors.keys() == source.tensors.keys()
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in source.tensors.items())
    # Of another model, or of another kind.
    other = dataclasses.replace(plain.config, n_layer=2)
    assert "adapters for another model" in complaint(lambda: peft_folders.read(tmp_path, other))
    path = tmp_path / peft_folders.SETTINGS
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_dora": True}))
    assert "not plain LoRA (use_dora)" in complaint(lambda: peft_folders.read(tmp_path, plain.config))


def test_adapters_of_experts_are_read_by_peft_or_refused(tmp_path):
    """Every choice of the experts' matrices: what peft would refuse, or ignore, costs a line at the export."""
    folder = oracle_folder("qwen3_moe")
    inputs = torch.arange(40)[None]
    experts = ("gate_proj", "up_proj", "down_proj")
    for number in range(8):
        targets = ("q_proj", *(name for place, name in enumerate(experts) if number >> place & 1))
        plain, _, _ = load_model(str(folder), cpu_device())
        adapted = adapt(plain, Lora(4, 6.0, targets=targets))
        adapters = adapters_of(adapted)
        if targets[1:] not in ((), ("down_proj",), experts):
            line = complaint(partial(peft_folders.require_whole_experts, adapters.lora, plain.config))
            assert "--to peft" in line and f"only {' and '.join(targets[1:])} have" in line and "--to hf" in line
            continue
        peft_folders.require_whole_experts(adapters.lora, plain.config)
        peft_folders.write(tmp_path, adapters, plain.config, "somewhere")
        theirs = oracle_of(folder)
        before = theirs(inputs).logits
        wrapped = peft.PeftModel.from_pretrained(theirs, str(tmp_path)).eval()
        torch.testing.assert_close(adapted(inputs), wrapped(inputs).logits, rtol=1e-4, atol=1e-4)
        assert (wrapped(inputs).logits - before).abs().max() > 0.01
        assert peft_folders.read(tmp_path, plain.config).lora == adapters.lora


def test_dropout_draws_what_peft_draws(qwen, tmp_path):
    """One mask for each adapted matrix: q, k and v read the same input, and drop other parts of it."""
    theirs, plain = qwen
    adapted = adapt(clone_of(plain), Lora(4, 6.0, dropout=0.4))
    peft_folders.write(tmp_path, adapters_of(adapted), plain.config, "somewhere")
    wrapped = with_adapters(theirs, tmp_path).train()
    inputs, _ = tokens_of(plain.config)
    for seed in range(3):
        torch.manual_seed(seed)
        found = adapted(inputs)
        torch.manual_seed(seed)
        torch.testing.assert_close(found, wrapped(inputs).logits, rtol=1e-5, atol=1e-5)
    with torch.no_grad():  # it does drop something, and only in training
        assert (found - adapted(inputs)).abs().max() > 0.01
        torch.testing.assert_close(adapted(inputs), wrapped.eval()(inputs).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "gaussian", "orthogonal", "mica", False])
def test_adapters_that_began_by_changing_the_base_are_refused_by_name(qwen, tmp_path, init):
    """What peft computes with such adapters over the plain base decides: where it is W + scale B A, we read them."""
    theirs, plain = qwen
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=init)
    wrapped = peft.get_peft_model(copy.deepcopy(theirs), settings).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)  # it was trained
    wrapped.save_pretrained(str(tmp_path))
    inputs, _ = tokens_of(plain.config)
    model = clone_of(plain)
    if str(init).startswith(("pissa", "olora")):
        line = complaint(lambda: peft_folders.read(tmp_path, plain.config))
        assert f"not plain LoRA (init_lora_weights {init}): merge it with peft" in line
        # As plain LoRA they would be another model.
        path = tmp_path / peft_folders.SETTINGS
        path.write_text(json.dumps({**json.loads(path.read_text()), "init_lora_weights": True}))
        merge(model, peft_folders.read(tmp_path, plain.config))
        assert (model(inputs) - wrapped(inputs).logits).abs().max() > 0.005
    else:
        merge(model, peft_folders.read(tmp_path, plain.config))
        torch.testing.assert_close(model(inputs), wrapped(inputs).logits, rtol=1e-4, atol=1e-5)


def test_every_variant_of_peft_is_refused_by_name(qwen, tmp_path):
    """peft marks the settings that make another method of LoRA; a folder that sets one of them is not read."""
    theirs, plain = qwen
    variants = {field.name for field in dataclasses.fields(peft.LoraConfig) if field.metadata.get("is_lora_variant")}
    assert "alora_invocation_tokens" in variants and "use_dora" in variants
    fields = {"use_qalora", "lora_bias", "target_parameters", "layer_replication", "rank_pattern", "alpha_pattern"}
    adapted = adapt(clone_of(plain), Lora(2, 4.0))
    peft_folders.write(tmp_path, adapters_of(adapted), plain.config, "")
    path = tmp_path / peft_folders.SETTINGS
    written = json.loads(path.read_text())
    for name in sorted(variants | fields | {"modules_to_save", "trainable_token_indices"}):
        path.write_text(json.dumps({**written, name: [5, 7]}))
        assert f"({name})" in complaint(lambda: peft_folders.read(tmp_path, plain.config)), name
    for init in ("corda", "loftq", "lora_ga", "a method to come"):
        path.write_text(json.dumps({**written, "init_lora_weights": init}))
        assert f"(init_lora_weights {init})" in complaint(lambda: peft_folders.read(tmp_path, plain.config))


@pytest.mark.slow
def test_a_qwen_is_tuned_exported_and_read_by_peft(qwen, folder, base, tmp_path, capsys):  # noqa: F811
    """From a folder in Hugging Face's layout to adapters, and from there to a merged folder and to one of peft's."""
    theirs, _ = qwen
    source = shutil.copytree(folder, tmp_path / "qwen")
    call("chat_sft", *SFT, *FLAGS, f"--source={source}", "--num_iterations=2", "--model_tag=q")
    tuned_model, _, meta = load_model("sft", "cpu", model_tag="q")
    assert meta["adapter"]["base"] == str(source)
    flags = ("--source=sft", "--model_tag=q")
    call("export", *flags, "--to=hf", f"--out={tmp_path / 'merged'}")
    call("export", *flags, "--to=peft", f"--out={tmp_path / 'peft'}")
    call("export", f"--source={tmp_path / 'peft'}", "--to=hf", f"--out={tmp_path / 'again'}")
    inputs, _ = tokens_of(tuned_model.config)
    expected = tuned_model(inputs)
    assert not torch.allclose(theirs(inputs).logits, expected, atol=1e-3)
    for name in ("merged", "again"):
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        torch.testing.assert_close(merged(inputs).logits, expected, rtol=1e-4, atol=1e-4)
    wrapped = with_adapters(theirs, tmp_path / "peft").eval()
    torch.testing.assert_close(wrapped(inputs).logits, expected, rtol=1e-4, atol=1e-4)
    # As a source: over the model that it names.
    again, _, _ = load_model(tmp_path / "peft", "cpu")
    torch.testing.assert_close(again(inputs), expected, rtol=1e-5, atol=1e-5)
    call("chat_sft", *SFT, *FLAGS, f"--source={tmp_path / 'peft'}", "--num_iterations=1", "--model_tag=further")
    _, _, meta = load_model("sft", "cpu", model_tag="further")
    assert meta["adapter"]["base"] == str(tmp_path / "peft")
    # Mistakes.
    out = f"--out={tmp_path / 'x'}"
    refused(capsys, ("export", f"--source={source}", "--to=peft", out), "no adapters")
    shutil.rmtree(source)
    refused(capsys, ("export", *flags, out), str(source), "is missing")
    refused(capsys, ("chat_cli", f"--source={tmp_path / 'peft'}"), f"adapters for {source}")
