"""Flags of other trainers: a command line that has one of them names ours, and docs/finetune.md has the same table."""

import dataclasses
import importlib
import re
from pathlib import Path

import pytest

from nanochat import cli
from nanochat.run.elsewhere import TABLE, flags

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("base_train", "continue_train", "mid_train", "chat_sft", "chat_dpo", "chat_rl")
OURS = {
    field.name
    for script in SCRIPTS
    for field in dataclasses.fields(importlib.import_module(f"scripts.{script}").Config)
}


@pytest.mark.parametrize(
    ("script", "argv", "says"),
    [
        ("chat_sft", ["--per_device_train_batch_size=4"], "--device_batch_size"),
        ("chat_sft", ["--model", "Qwen/Qwen3-0.6B"], "--source hf:ORG/NAME"),
        ("chat_dpo", ["--source=base", "--num-train-epochs", "3"], "--num_epochs"),
        ("chat_rl", ["--num_generations=8"], "--num_samples"),
        ("continue_train", ["--cutoff_len=2048"], "--max_seq_len"),
        ("chat_sft", ["--deepspeed", "zero3"], "--parallel fsdp"),
        ("chat_sft", ["--per_device_eval_batch_size=1"], "--device_batch_size"),
        ("chat_sft", ["--system", "Be kind."], "no such flag in training: a row has its own"),
        ("chat_dpo", ["--streaming", "true"], "there is no such thing here"),
        ("chat_sft", ["--save_strategy=epoch"], "--save_every N, in steps"),
        ("chat_sft", ["--dataloader_num_workers=4"], "only base_train, continue_train and mid_train have it"),
        ("chat_rl", ["--neftune_noise_alpha=5"], "there is no such thing here"),
        ("chat_sft", ["--enable_thinking=false"], "--thoughts keep or drop"),
        ("chat_sft", ["--agent_template=hermes"], "--chat_template FILE"),
    ],
)
def test_a_flag_of_another_trainer_names_ours(capsys, script, argv, says):
    with pytest.raises(SystemExit) as leaving:
        cli.parse(importlib.import_module(f"scripts.{script}").Config, argv)
    (line,) = capsys.readouterr().err.splitlines()
    assert leaving.value.code == 2 and says in line and "other trainers" in line


def test_the_table_names_flags_that_exist_and_none_of_ours():
    # Some stages have this one, and the others name them.
    assert {name.removeprefix("--") for name in flags()} & OURS == {"dataloader_num_workers"}
    for _, ours in TABLE:
        named = set(re.findall(r"--(\w+)", ours)) - {"adapter", "to"}  # of chat_web and of export
        assert named <= OURS, ours


@pytest.mark.parametrize("page", ["finetune.md", "finetune.zh.md"])
def test_the_page_has_the_same_table(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    written = {tuple(re.findall(r"`(\w+)`", row[0])): row[1] for row in rows if len(row) == 2}
    for theirs, ours in TABLE:
        assert tuple(theirs.split()) in written, theirs
        assert set(re.findall(r"--\w+", ours)) <= set(re.findall(r"--\w+", written[tuple(theirs.split())])), theirs
