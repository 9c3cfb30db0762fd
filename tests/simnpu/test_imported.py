"""Imported models on two simulated NPUs: SFT, DPO and RL of a Qwen3 with adapters, and of a Qwen3-MoE in full or with
adapters, resumed in another layout; and a model with experts from scratch. Their losses are the CPU's."""

import shlex
from pathlib import Path

import pytest
from runs import metrics
from tiny_families import save_qwen3

from simnpu.test_pipeline import chain, run_here

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("built")]

STEP = "--dtype=float32 --device_batch_size=2 --log_every=1 --save_every=1 --num_iterations=2"
STAGES = {
    "sft": "chat_sft --target_examples_per_step=8 --eval_examples=4",
    "dpo": "chat_dpo --target_examples_per_step=8 --eval_examples=4",
    "rl": "chat_rl --examples_per_step=4 --num_samples=2 --max_tokens=6 --eval_examples=4 --reward=mine.py:short",
}
BASE = (
    "--data=texts.txt --depth=2 --head_dim=32 --max_seq_len=64 --total_batch_size=512 --eval_tokens=512 --compile=off "
    "--experts=8 --experts_per_token=2 --shared_experts=1"
)
# Replies of a model that knows nothing differ, and so does their reward.
MINE = "def short(episodes):\n    return [len(one.reply) % 7 / 7 for one in episodes]\n"
FORGET = """
import os, pathlib, shutil
if os.environ.get("RANK", "0") == "0":
    shutil.rmtree(pathlib.Path(os.environ["NANOCHAT_BASE_DIR"]) / "checkpoints/{stage}/{tag}/step_000002")
"""
# The model, the stages by name of a run, their flags, and the layout at first on two NPUs. All resume as fsdp.
RUNS = {
    "dense": ("qwen3", ("sft", "dpo", "rl"), "--lora_rank=4", "--parallel=ddp"),
    "experts": ("qwen3_moe", ("sft",), "", "--parallel=fsdp --expert_parallel"),
    "adapters": ("qwen3_moe", ("dpo", "rl"), "--lora_rank=4", "--parallel=fsdp --expert_parallel"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The text, a reward, and tiny models in Hugging Face's layout."""
    folder = tmp_path_factory.mktemp("imported")
    (folder / "texts.txt").write_text("\n\n".join(f"What is {n} + {n * 7}? I am nanochat." for n in range(400)))
    (folder / "mine.py").write_text(MINE)
    for model in ("qwen3", "qwen3_moe"):
        save_qwen3(folder / model, model)
    return folder


def commands(folder: Path, device: str) -> list[str]:
    made = [f"tok_train --data={folder / 'texts.txt'} --vocab_size=400"]
    first = "--parallel=fsdp --expert_parallel" if device == "npu" else ""
    made.append(f"base_train {BASE} {STEP} --device={device} --model_tag=experts {first}")
    for tag, (model, stages, flags, layout) in RUNS.items():
        for stage in stages:
            command = f"{STAGES[stage]} {STEP} --device={device} --model_tag={tag} {flags} --learning_rate=0.001"
            command += f" --tasks=addition --source={folder / model}"
            if device == "cpu":
                made.append(command)
                continue
            forget = f"-c {shlex.quote(FORGET.format(stage=stage, tag=tag))}"
            made += [f"{command} {layout}", forget, f"{command} --parallel=fsdp --resume"]
    return made


def test_two_npus_learn_what_a_cpu_does(folder, tmp_path):
    run_here(tmp_path / "cpu", folder, *commands(folder, "cpu"))
    chain(tmp_path / "npu", folder, *commands(folder, "npu"), ranks=2)
    runs = [(stage, tag) for tag, (_, stages, *_) in RUNS.items() for stage in stages]
    for stage, tag in (("base", "experts"), *runs):
        expected = metrics(tmp_path / "cpu", stage, tag)
        found = metrics(tmp_path / "npu", stage, tag)
        assert len(found) == len(expected) == 2
        for one, other in zip(found, expected, strict=True):
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-5, abs=1e-6), (stage, tag)
            # RL's loss is 0 where the samples are its own; its gradient is not.
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3) and one["grad_norm"] > 0, (
                stage,
                tag,
            )
            if stage == "base":  # elsewhere the padding of rows differs, and its tokens have experts too
                assert one["expert_max_tokens"] == other["expert_max_tokens"]
