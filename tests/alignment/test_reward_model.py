"""Reward models: what the scalar head reads, and the function that a checkpoint becomes."""

import dataclasses

import pytest
import torch
from runs import call, losses, metrics, refused
from safetensors.torch import load_file
from test_scripts import base  # noqa: F401
from test_stages import CPU, DPO, RL, RM, pairs_file, pretrained, start  # noqa: F401 (fixtures)
from tiny import complaint, cpu_device, lively_model, tiny_config

from nanochat.alignment.reward_model import rating
from nanochat.alignment.rewards import load_rewards, parse_rewards
from nanochat.checkpoint_manager import load_model
from nanochat.conversation import render
from nanochat.gpt import GPT


def chat(question: str, reply: str) -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]


CHATS = [chat("What is 7?", "This number is odd."), chat("What is 7?", "That is an even one."), chat("Hi", "A b c")]


def test_a_scalar_head_leaves_the_rest_of_a_model_as_it_is():
    model = lively_model(tiny_config())
    tokens = torch.arange(12).view(2, 6)
    logits = model(tokens)
    rated = GPT(dataclasses.replace(tiny_config(), scalar_head=True))
    rated.init_weights()
    rated.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(rated(tokens), logits) and not rated(tokens, scalars=True).any()
    rated.scalar_head.weight.data.normal_()
    expected = (rated.hidden(tokens) * rated.scalar_head.weight).sum(-1)
    torch.testing.assert_close(rated(tokens, scalars=True), expected)
    assert "scalar_head.weight" in [name for name, _ in rated.parameter_groups()["head"]]
    assert rated.gradient_order()[0] == "scalar_head.weight"


@pytest.mark.slow
def test_replies_are_told_apart_and_rated_alike_anywhere(start, tmp_path):  # noqa: F811
    """Packed with others or not; and a run that continues begins from the head, trained with adapters or without."""
    sizes = ("--device_batch_size=8", "--target_examples_per_step=16", "--eval_examples=64")
    flags = (*CPU, *sizes, "--loss=reward", f"--tasks={pairs_file(tmp_path / 'pairs', 300)}")
    call("chat_dpo", *flags, "--lr_scale=0.5", "--source=base", "--num_iterations=40", "--eval_every=40")
    lines = metrics(start, "rm")
    assert lines[0]["loss"] == pytest.approx(0.6931472) and lines[0]["accuracy"] == 0.5
    assert sum(line["loss"] for line in lines[-10:]) / 10 < 0.65 and lines[-1]["val_accuracy"] > 0.6

    model, tokenizer, meta = load_model("rm", "cpu")
    assert meta["model"]["scalar_head"] and model.scalar_head.weight.abs().sum() > 0
    rate = rating(model, tokenizer, cpu_device(), "rm")
    together = rate(CHATS)
    for conversation, score in zip(CHATS, together, strict=True):
        ids = torch.tensor([render(tokenizer, conversation).ids])
        assert model(ids, scalars=True)[0, -1].item() == pytest.approx(score, abs=1e-5)
        assert rate([conversation]) == pytest.approx([score], abs=1e-5)
    assert together[0] > together[1] and rate([]) == []

    more = ("--lora_rank=2", "--source=rm", "--source_tag=d1", "--num_iterations=1", "--model_tag=more")
    call("chat_dpo", *flags, *more)
    assert losses(start, "rm", "more")[0] < lines[0]["loss"]
    saved = load_file(start / "checkpoints/rm/more/step_000001/adapter.safetensors")
    assert "scalar_head.weight" in saved
    model, tokenizer, _ = load_model("rm", "cpu")
    assert rating(model, tokenizer, cpu_device(), "rm")(CHATS)[0] != together[0]


@pytest.mark.slow
def test_a_reward_model_is_a_reward(start, capsys):  # noqa: F811
    """By a stage, which is the tag written last, or a tag; two add up. A resumed run has the one it began with."""
    call("chat_dpo", *RM, "--source=base", "--num_iterations=2")
    rl = (*RL, "--source=base", "--source_tag=d1", "--eval_every=0", "--save_every=1")
    call("chat_rl", *rl, "--num_iterations=1", "--reward=rm:rm")
    assert "reward rm:rm: rm/d1/step_000002" in capsys.readouterr().out.splitlines()
    (line,) = metrics(start, "rl")
    assert line["reward"] != 0

    call("chat_dpo", *RM, "--source=base", "--source_tag=d1", "--num_iterations=3", "--model_tag=other")
    changed = ("chat_rl", *rl, "--num_iterations=2", "--reward=rm:rm", "--resume")
    refused(capsys, changed, "--reward rm:rm/d1/step_000002, not rm:rm/other/step_000003")
    call("chat_rl", *rl, "--num_iterations=2", "--reward=rm:rm/d1", "--resume")
    call("chat_rl", *rl, "--num_iterations=1", "--reward=rm:rm/d1:0.5,rm:rm/other", "--model_tag=both")
    (line,) = metrics(start, "rl", "both")
    assert line["reward"] == pytest.approx(0.5 * line["reward/d1"] + line["reward/other"]) and line["reward/d1"] != 0

    call("chat_dpo", *DPO, "--source=base", "--num_iterations=1")
    assert load_model("auto", "cpu")[2]["folder"].endswith("rl/both/step_000001")
    for source, word in {
        "rm:dpo": "--loss reward", "rm:rm/gone": "--reward rm:rm/d1", "rm:/gone": "--reward rm:/gone",
    }.items():  # fmt: skip
        assert word in complaint(lambda source=source: load_rewards(parse_rewards(source), cpu_device()))
