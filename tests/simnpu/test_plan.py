"""A plan on a machine without an NPU counts what a plan on a simulated NPU counts."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_scripts import process

pytestmark = pytest.mark.slow

# Qwen3-8B's, with 3 of its 36 layers.
SHAPE = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 3, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("flags", ["--learning_rate 1e-5 --parallel fsdp", "--lora_rank 16 --parallel fsdp"])
def test_the_counts_do_not_depend_on_the_machine(simulated: Any, tmp_path: Path, flags: str):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    command = f"scripts.chat_sft --source {tmp_path} --dry_run --plan 8x64 --device_batch_size 1 --max_seq_len 4096"
    command += f" --activation_checkpointing {flags}"
    env = {"NANOCHAT_BASE_DIR": str(tmp_path)}
    on_npu = simulated(["-m", *command.split(), "--device", "npu"], memory="64GiB", env=env).stdout
    on_cpu = process(*command.split(), "--device", "cpu", **env).stdout
    counts = [
        re.findall(r"(?m)^  (fsdp[a-z0-9+ ]*?) {2,}([\d.]+) +([\d.]+) +(\w+) +([\d.]+)", out)
        for out in (on_npu, on_cpu)
    ]
    assert len(counts[0]) >= 2, on_npu
    for npu, cpu in zip(*counts, strict=True):
        assert npu[0] == cpu[0] and npu[3:] == cpu[3:]
        assert float(npu[2]) == pytest.approx(float(cpu[2]), rel=0.01)
