"""Commands over models with experts: base_train from scratch, and every stage of a tiny Qwen3-MoE.

The stages run as in test_stages.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import call, exactly_resumed, forget_after, losses, metrics, refused
from safetensors.torch import load_file
from test_scripts import base  # noqa: F401 (base is a fixture)
from test_stages import BASE, CPU, SFT, pretrained, start  # noqa: F401 (fixtures)
from tiny import cpu_device, run_command
from tiny_families import save_qwen3

from nanochat.checkpoint_manager import load_model
from nanochat.engine import Engine

LORA = ("--lora_rank=4", "--lora_alpha=8")
EXPERTS = ("--experts=4", "--experts_per_token=2", "--shared_experts=1")


def test_pretraining_resumes_exactly_and_logs_its_loads(start):  # noqa: F811
    exactly_resumed(start, "base_train", "base", (*BASE, *EXPERTS, "--num_iterations=4", "--save_every=2"), 4, (2,))
    lines = metrics(start, "base")
    # The MLP is 256 wide: 3 experts of 80 for each token.
    model, _, meta = load_model("base", "cpu")
    assert meta["model"]["mlp_width"] == 80 and (model.config.experts, model.config.router_normalized) == (4, True)
    for line in lines:
        assert 1 / 4 <= line["expert_max_share"] < 1 and 0 <= line["expert_min_share"] <= 1 / 4
        assert line["expert_max_tokens"] == round(line["expert_max_share"] * 2 * 512)
        assert 0 < line["expert_entropy"] <= 1
    # No gradient reaches a router in the first step of a new model, whose output projections are 0; then its bias moves
    # by 0.001 a step, in a run of 4 steps less.
    bias = model.get_parameter("blocks.0.mlp.router.bias").detach()
    assert 0 < bias.abs().max() <= 0.003


@pytest.mark.slow
def test_loads_and_losses_are_those_of_one_process_on_two(start):  # noqa: F811
    flags = (*BASE, *EXPERTS, "--num_iterations=2", "--optimizer_dtype=float32")
    call("base_train", *flags)
    run_command("base_train", *flags, "--parallel=fsdp", "--model_tag=two", "--activation_checkpointing")
    for found, expected in zip(metrics(start, "base", "two"), metrics(start, "base"), strict=True):
        for name in ("loss", "expert_max_share", "expert_min_share", "expert_max_tokens", "expert_entropy"):
            assert found[name] == pytest.approx(expected[name], abs=1e-6), name


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--experts=2", "--experts_per_token=3"), 1, ("--experts_per_token 3", "from 1 to 2")),
        (("--experts=4", "--compile=on"), 1, ("--compile on",)),
        (("--shared_experts=1",), 2, ("--shared_experts", "add --experts")),
    ],
)
def test_a_mistake_costs_one_line(start, capsys, flags, code, words):  # noqa: F811
    refused(capsys, ("base_train", *BASE, "--num_iterations=1", *flags), *words, code=code)


def test_our_own_experts_in_transformers(start, tmp_path):  # noqa: F811
    transformers = pytest.importorskip("transformers")
    call("base_train", *BASE, *EXPERTS, "--num_iterations=3", "--mlp=swiglu")
    call("export", "--source=base", "--to=hf", f"--out={tmp_path / 'out'}", "--dtype=float32")
    ours, tokenizer, _ = load_model("base", "cpu")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    tokens = torch.tensor([tokenizer.encode("What is 12 + 30? I am nanochat.")])
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=0, atol=1e-4)


# ---------------------------------------------------------------------- Qwen3-MoE


@pytest.fixture
def qwen(base, tmp_path) -> Path:  # noqa: F811
    return save_qwen3(tmp_path / "qwen", "qwen3_moe")


PAIRS = (*CPU, "--tasks=addition", "--device_batch_size=2", "--target_examples_per_step=8", "--eval_examples=8")


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "adapters"), [("sft", False), ("dpo", True)])
def test_a_stage_on_two_processes_is_that_of_one_and_resumes(qwen, base, stage, adapters):  # noqa: F811
    """In fsdp, without adapters with whole experts on each process, resumed in ddp; the last weights are those of one
    process."""
    flags = (*(SFT if stage == "sft" else PAIRS), f"--source={qwen}", "--num_iterations=2", "--save_every=1")
    rate = 0.002 if adapters else 0.001
    flags += (f"--learning_rate={rate}", *(LORA if adapters else ()))
    call(f"chat_{stage}", *flags, "--model_tag=one")
    sharded = ("--parallel=fsdp", *(() if adapters else ("--expert_parallel",)))
    printed = run_command(f"chat_{stage}", *flags, "--model_tag=two", *sharded)
    assert ("tokens travel to their experts" in printed) == (not adapters)
    name = "adapter.safetensors" if adapters else "model.safetensors"
    folders = [base / "checkpoints" / stage / tag / "step_000002" for tag in ("one", "two")]
    expected, straight = (load_file(folder / name) for folder in folders)
    forget_after(base, stage, 1, "two")
    run_command(f"chat_{stage}", *flags, "--model_tag=two", "--parallel=ddp", "--resume")
    resumed = load_file(folders[1] / name)
    assert losses(base, stage, "two") == pytest.approx(losses(base, stage, "one"), rel=1e-5, abs=1e-6)
    assert all(math.isfinite(line["expert_entropy"]) for line in metrics(base, stage, "two"))
    for tensors in (straight, resumed):
        assert tensors.keys() == expected.keys()
        for key, tensor in tensors.items():
            torch.testing.assert_close(tensor, expected[key], rtol=1e-3, atol=rate / 10, msg=key)


def test_what_was_tuned_replies_as_in_transformers(qwen, base, tmp_path):  # noqa: F811
    transformers = pytest.importorskip("transformers")
    call("chat_sft", *SFT, *LORA, "--learning_rate=0.01", f"--source={qwen}", "--num_iterations=2", "--model_tag=q")
    model, tokenizer, _ = load_model("sft", "cpu")
    prompt = tokenizer.encode("What is 12 + 30?")
    call("export", "--source=sft", "--to=hf", f"--out={tmp_path / 'out'}", "--dtype=float32")
    settings = json.loads((tmp_path / "out/config.json").read_text())
    assert settings["model_type"] == "qwen3_moe" and settings["num_experts"] == 4
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    reply = theirs.generate(torch.tensor([prompt]), max_new_tokens=64, **options)[0].tolist()
    engine = Engine(model, tokenizer, cpu_device())
    engine.stop_ids = set()
    engine.call_start = engine.call_end = -1
    assert engine.generate_batch(prompt, max_tokens=64, temperature=0.0)[0][0] == reply
