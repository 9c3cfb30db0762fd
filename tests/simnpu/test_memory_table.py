"""The table of memory in docs/finetune.md, counted again: a few of its cells, on a simulated NPU."""

import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = [(cards, tokens) for cards in (1, 4, 8) for tokens in (1024, 8192, 32768)]
QWEN_7B = Path(__file__).with_name("qwen2.5_7b.json").read_text()  # as published


def cells() -> dict[tuple[str, str], list[str]]:
    """A row's cells by the model and its flags."""
    text = (ROOT / "docs/finetune.md").read_text(encoding="utf-8")
    found = re.findall(r"(?m)^\| (\d+B), .*?`(--[^`]+)`.*? \| (.*) \|$", text)
    return {(model, flags): row.split(" | ") for model, flags, row in found}


@pytest.mark.parametrize(("flags", "cards"), [("--lora_rank 16", 1), ("--learning_rate 1e-5", 8)])
def test_a_cell_is_what_a_dry_run_counts(simulated: Any, tmp_path: Path, flags: str, cards: int):
    tokens = 8192
    (tmp_path / "config.json").write_text(QWEN_7B)
    command = f"-m scripts.chat_sft --device npu --source {tmp_path} --dry_run --device_batch_size 1 {flags}"
    command += f" --activation_checkpointing --gradient_accumulation_steps 1 --max_seq_len {tokens}"
    if cards > 1:
        command += f" --dry_run_devices {cards} --parallel fsdp"
    done = simulated(command.split(), memory="64GiB", env={"NANOCHAT_BASE_DIR": str(tmp_path)})
    (most,) = re.findall(r"most at once.*?([\d,.]+) MiB", done.stdout)
    written = cells()["7B", flags][COLUMNS.index((cards, tokens))]
    assert float(most.replace(",", "")) / 1024 == pytest.approx(float(written), abs=0.6), done.stdout
