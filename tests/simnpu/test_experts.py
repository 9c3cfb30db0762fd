"""Models with experts on two simulated NPUs: pretraining from scratch, and SFT, DPO and RL of a tiny Qwen3-MoE, in
full and with adapters, resumed; their losses are the CPU's."""

from pathlib import Path

import pytest
from runs import metrics
from tiny_families import save_qwen3

from simnpu.test_pipeline import chain, run_here

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("built")]

STEP = "--dtype=float32 --device_batch_size=2 --log_every=1 --save_every=1 --num_iterations=2"
STAGES = {
    "sft": "chat_sft --target_examples_per_step=8 --eval_examples=8",
    "dpo": "chat_dpo --target_examples_per_step=8 --eval_examples=8",
    "rl": "chat_rl --examples_per_step=4 --num_samples=2 --max_tokens=6 --eval_examples=8",
}
BASE = (
    "--data=texts.txt --depth=2 --head_dim=32 --max_seq_len=64 --total_batch_size=512 --eval_tokens=512 --compile=off "
    "--experts=8 --experts_per_token=2 --shared_experts=1"
)
FORGET = """-c '
import os, pathlib, shutil
if os.environ.get("RANK", "0") == "0":
    shutil.rmtree(pathlib.Path(os.environ["NANOCHAT_BASE_DIR"]) / "checkpoints/{stage}/{tag}/step_000002")
'"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The text, and a tiny Qwen3-MoE in Hugging Face's layout."""
    folder = tmp_path_factory.mktemp("experts")
    (folder / "texts.txt").write_text("\n\n".join(f"What is {n} + {n * 7}? I am nanochat." for n in range(400)))
    save_qwen3(folder / "qwen", "qwen3_moe")
    return folder


def commands(folder: Path, device: str, is_resumed: bool = False, more: str = "") -> list[str]:
    """Every stage in full and with adapters; resumed after its first step, if so, without whole experts."""
    made = [f"tok_train --data={folder / 'texts.txt'} --vocab_size=400"]
    for stage, script in (("base", f"base_train {BASE}"), *STAGES.items()):
        for adapters in ("", " --lora_rank=4")[: 1 if stage == "base" else 2]:
            tag = "lora" if adapters else "full"
            command = f"{script} {STEP} --device={device} --model_tag={tag}{adapters}"
            if stage != "base":
                command += f" --tasks=addition --source={folder / 'qwen'} --learning_rate=0.001"
            made.append(command + more)
            if is_resumed:
                made += [FORGET.format(stage=stage, tag=tag), f"{command} --parallel=fsdp --resume"]
    return made


def test_two_npus_learn_what_a_cpu_does(folder, tmp_path):
    """With whole experts on each, then as fsdp from their checkpoint; at last the base model in ddp."""
    run_here(tmp_path / "cpu", folder, *commands(folder, "cpu"))
    whole = commands(folder, "npu", is_resumed=True, more=" --parallel=fsdp --expert_parallel")
    in_ddp = f"base_train {BASE} {STEP} --device=npu --model_tag=ddp --parallel=ddp"
    chain(tmp_path / "npu", folder, *whole, in_ddp, ranks=2)
    runs = [(stage, kind, kind) for stage in STAGES for kind in ("full", "lora")]
    for stage, kind, tag in (*runs, ("base", "full", "full"), ("base", "full", "ddp")):
        expected = metrics(tmp_path / "cpu", stage, kind)
        found = metrics(tmp_path / "npu", stage, tag)
        assert len(found) == len(expected) == 2
        for one, other in zip(found, expected, strict=True):
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-5, abs=1e-6), (stage, tag)
            if stage == "base":  # elsewhere the padding of rows differs, and its tokens have experts too
                assert one["expert_max_tokens"] == other["expert_max_tokens"], tag
