"""--dry_run: the memory of a step, from config.json alone, for devices that are not here."""

import json
from pathlib import Path

import pytest
from runs import call, refused
from test_scripts import base  # noqa: F401 (base is a fixture)
from tiny import run_command

from nanochat.data import hashes
from nanochat.ground import storage
from nanochat.parallel.dry_run import MIB

CPU = ("--device=cpu", "--dtype=float32")
# Qwen2's form: biases, grouped heads, a tied head.
SHAPE = {
    "model_type": "qwen2", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
MATRICES = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96)
PARAMETERS = MATRICES + 320 * 64 + 2 * (64 + 2 * 32 + 2 * 64) + 64
ROTARY = 2 * 256 * 16  # numbers of its tables at the whole context


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a config.json and nothing else."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder


def sizes_of(out: str) -> dict[str, float]:
    """MiB by part."""
    lines = [line for line in out.splitlines() if line.endswith(" MiB") and line.startswith("  ")]
    return {line[2:34].strip(): float(line[34:].split()[0].replace(",", "")) for line in lines}


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("chat_sft", ("--lora_rank=4", "--num_epochs=2", "--tasks=not_written_yet.jsonl")),
        ("chat_dpo", ("--tasks=not_written_yet.jsonl",)),
        ("chat_rl", ("--kl=0.1",)),
        ("mid_train", ("--num_iterations=1", "--data=not_written_yet.txt")),
        ("mid_train", ("--num_iterations=1", "--tasks=not_written_yet.jsonl")),
    ],
)
def test_config_json_is_enough(base, folder, capsys, script, flags):  # noqa: F811
    call(script, *CPU, f"--source={folder}", "--dry_run", "--device_batch_size=2", *flags)
    sizes = sizes_of(capsys.readouterr().out)
    adapters = 2 * 4 * (2 * 64 + 2 * (64 + 32) + 2 * 64 + 2 * (64 + 96) + (96 + 64)) if "--lora_rank=4" in flags else 0
    assert sizes["parameters"] == pytest.approx(4 * (PARAMETERS + adapters + ROTARY) / MIB, abs=0.06)
    assert sizes["gradients"] == pytest.approx(4 * (adapters or PARAMETERS) / MIB, abs=0.06)
    assert not list(base.rglob("*.safetensors")) and not (base / "hashes").exists()


def test_weights_that_are_there_are_neither_read_nor_hashed(base, folder, capsys, monkeypatch):  # noqa: F811
    (folder / "model.safetensors").write_bytes(b"15 GB that nobody opens")
    for module in (storage, hashes):
        monkeypatch.setattr(module, "sha256", lambda path: pytest.fail(f"{path} is hashed"))
    call("chat_sft", *CPU, f"--source={folder}", "--dry_run", "--device_batch_size=2", "--lora_rank=4")
    assert sizes_of(capsys.readouterr().out)["parameters"]


@pytest.mark.parametrize("layers", [0, 10**6])
def test_a_hostile_shape_is_one_line(base, folder, capsys, layers):  # noqa: F811
    (folder / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": layers}))
    refused(capsys, ("chat_sft", *CPU, f"--source={folder}", "--dry_run"), str(folder))


# ---------------------------------------------------------------------- devices that are not here


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_part_of_the_model_on_each_of_four_devices(base, folder, capsys, parallel):  # noqa: F811
    flags = (*CPU, f"--source={folder}", "--dry_run", "--device_batch_size=2", f"--parallel={parallel}")
    call("chat_sft", *flags)
    one = sizes_of(capsys.readouterr().out)
    call("chat_sft", *flags, "--dry_run_devices=4")
    four = sizes_of(capsys.readouterr().out)
    assert four["optimizer state"] == pytest.approx(one["optimizer state"] / 4, rel=0.1)
    weights = one["parameters"] - 4 * ROTARY / MIB  # each device has whole tables
    shared = 4 if parallel == "fsdp" else 1
    assert four["parameters"] - 4 * ROTARY / MIB == pytest.approx(weights / shared, abs=0.06)


def test_further_micro_batches_keep_only_their_share_of_the_gradients(base, folder, capsys):  # noqa: F811
    """Under fsdp every micro-batch reduces its gradients (parallel/fsdp.py)."""
    flags = (*CPU, f"--source={folder}", "--dry_run", "--device_batch_size=1", "--parallel=fsdp")
    most = []
    gradients = 0.0
    for steps in (1, 2, 3):
        call("chat_sft", *flags, "--dry_run_devices=8", "--max_seq_len=8", f"--gradient_accumulation_steps={steps}")
        sizes = sizes_of(capsys.readouterr().out)
        gradients = sizes["gradients"]
        most.append(next(size for name, size in sizes.items() if name.startswith("most at once")))
    assert gradients == pytest.approx(4 * PARAMETERS / 8 / MIB, abs=0.06)
    assert most[1] == most[2] <= most[0] + gradients + 0.06


@pytest.mark.parametrize(
    ("parallel", "devices", "form", "has_hint"),
    [("fsdp", 2, "nf4", False), ("fsdp", 4, "nf4", True), ("fsdp", 4, "plain", False), ("ddp", 8, "nf4", False)],
)
def test_a_hint_where_four_bits_take_more_than_a_share(base, folder, capsys, parallel, devices, form, has_hint):  # noqa: F811
    flags = ("--device=cpu", "--dtype=bfloat16", f"--source={folder}", "--dry_run", f"--parallel={parallel}")
    call("chat_sft", *flags, f"--dry_run_devices={devices}", "--lora_rank=4", f"--lora_base={form}")
    out = capsys.readouterr().out
    bytes_of_both = (f"{2 * MATRICES // devices:,} bytes", f"{MATRICES * 9 // 16:,} on each process")
    assert all(words in out for words in ("hint:", *bytes_of_both)) == ("hint:" in out) == has_hint


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_devices_that_are_not_here_count_as_those_that_are(base, folder, capsys, parallel):  # noqa: F811
    flags = (*CPU, f"--source={folder}", "--dry_run", "--device_batch_size=2", f"--parallel={parallel}")
    call("chat_sft", *flags, "--dry_run_devices=2")
    assert sizes_of(capsys.readouterr().out) == sizes_of(run_command("chat_sft", *flags)) != {}


def test_the_flag_for_devices_belongs_to_a_dry_run(base, folder, capsys):  # noqa: F811
    refused(capsys, ("chat_sft", *CPU, f"--source={folder}", "--dry_run_devices=8"), "--nproc_per_node=8")
