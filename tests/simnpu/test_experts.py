"""Models with experts on four simulated NPUs: pretraining from scratch, and SFT, DPO and RL of a tiny Qwen3-MoE, in
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
LAYOUTS = {"ddp": "--parallel=ddp", "fsdp": "--parallel=fsdp", "whole": "--parallel=fsdp --expert_parallel"}
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


def commands(folder: Path, device: str, layout: str, is_resumed: bool) -> list[str]:
    made = [f"tok_train --data={folder / 'texts.txt'} --vocab_size=400"]
    for stage, script in (("base", f"base_train {BASE}"), *STAGES.items()):
        for adapters in ("", " --lora_rank=4")[: 1 if stage == "base" else 2]:
            tag = f"{layout}{'-lora' if adapters else ''}"
            command = f"{script} {STEP} --device={device} {LAYOUTS[layout]} --model_tag={tag}{adapters}"
            if stage != "base":
                command += f" --tasks=addition --source={folder / 'qwen'} --learning_rate=0.001"
            made.append(command)
            if is_resumed:
                # From a checkpoint of whole experts fsdp continues.
                resumed = f"{command} --resume".replace(" --expert_parallel", "")
                made += [FORGET.format(stage=stage, tag=tag), resumed]
    return made


def test_four_npus_learn_what_a_cpu_does(folder, tmp_path):
    run_here(tmp_path / "cpu", folder, *commands(folder, "cpu", "ddp", is_resumed=False))
    for layout in LAYOUTS:
        chain(tmp_path / layout, folder, *commands(folder, "npu", layout, is_resumed=True), ranks=4)
        for stage in ("base", *STAGES):
            for kind in ("", "-lora")[: 1 if stage == "base" else 2]:
                expected = metrics(tmp_path / "cpu", stage, f"ddp{kind}")
                found = metrics(tmp_path / layout, stage, f"{layout}{kind}")
                assert len(found) == len(expected) == 2
                for one, other in zip(found, expected, strict=True):
                    assert one["loss"] == pytest.approx(other["loss"], rel=1e-5, abs=1e-6), (layout, stage, kind)
                    if stage == "base":  # elsewhere the padding of rows differs, and its tokens have experts too
                        assert one["expert_max_tokens"] == other["expert_max_tokens"], layout
