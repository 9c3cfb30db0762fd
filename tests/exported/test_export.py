"""scripts.export: a folder that is exact in fp32, and that is loaded and chatted with by its path.

That transformers computes the same from it is shown in tests/promises/test_p08_interchange_is_exact.py.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from runs import call, mistake, refused
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import lively_model, save_checkpoint, tiny_config, tiny_tokenizer

from nanochat.checkpoint_manager import load_model
from nanochat.gpt import GPTConfig
from nanochat.ground import cli, paths
from scripts import export


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    save(paths.checkpoint_dir("sft", "tiny"), 7)
    return tmp_path


def save(folder: Path, step: int = 8, **shape: Any) -> None:
    model = lively_model(tiny_config(vocab_size=tiny_tokenizer().vocab_size, **shape))
    meta = {"stage": "sft", "config": {"data": "/home/me/text"}, "pretraining": {"data": "demo"}}
    save_checkpoint(folder, step, model, tiny_tokenizer(), meta)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exported_folder_is_a_model(base, capsys, dtype):
    out = base / "made" / "here"
    call("export", "--to", "safetensors", "--source", "sft", "--out", str(out), "--dtype", dtype)
    files = {path.name for path in out.iterdir()}
    tokenizers = {"tokenizer.json", "tokenizer_config.json", "nanochat_tokenizer.json"}
    assert files == {"model.safetensors", "config.json", "meta.json", "manifest.json", *tokenizers}
    assert not out.with_name("here.tmp").exists()
    size = sum(path.stat().st_size for path in out.iterdir())
    assert f"{size:,} bytes" in capsys.readouterr().out
    original, _, meta = load_model("sft", "cpu")
    exact = getattr(torch, dtype)
    weights = load_file(out / "model.safetensors")
    assert all(weights[name].dtype == exact for name in weights)
    model, tokenizer, meta = load_model(str(out), "cpu")
    for name, tensor in original.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor.to(exact).float()), name
    assert tokenizer.fingerprint() == tiny_tokenizer().fingerprint()
    assert (meta["step"], meta["stage"], meta["exported_from"]) == (7, "sft", "sft/tiny/step_000007")
    assert "/home/me" not in "".join(path.read_text() for path in out.glob("*.json"))
    config = json.loads((out / "config.json").read_text())
    assert (config.pop("model_type"), config.pop("dtype")) == ("nanochat", dtype)
    assert GPTConfig(**config) == model.config
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "step": "7", "tokenizer": tiny_tokenizer().fingerprint()}
    call("chat_cli", "--source", str(out), "--device=cpu", "--max_tokens=4", "-p", "hello")


def test_an_exported_folder_is_verified(base):
    out = base / "out"
    call("export", "--out", str(out))
    data = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(cli.UserError, match="model.safetensors is damaged"):
        load_model(str(out), "cpu")


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--out", "{base}"], 1, "exists already"),
        (["--out", "/proc/nothing"], 1, "fix the path"),
        (["--out", "{base}/file/below"], 1, "fix the path"),
        (["--out", "{base}/x", "--source", "rl"], 1, "no rl checkpoint"),
        (["--out", "{base}/x", "--to", "peft"], 1, "holds no adapters"),
        (["--out", "{base}/x", "--source", "sft/tiny/step_8"], 1, "no step 8"),
        (["--out", "{base}/x", "--to", "pickle"], 2, "--to"),
        ([], 2, "--out"),
    ],
)
def test_a_mistake_costs_one_line(base, capsys, argv, code, words):
    (base / "file").write_text("")
    refused(capsys, ["export", *(word.format(base=base) for word in argv)], words, code=code)
    assert not (base / "x").exists()


def test_a_part_that_the_modeling_file_does_not_compute_is_named(base, capsys, monkeypatch):
    """Its logits would be other ones, without an error."""
    older = base / "modeling_nanochat.py"
    older.write_text(export.MODELING.read_text().replace("lookback_heads", "other_field"))
    monkeypatch.setattr(export, "MODELING", older)
    save(paths.checkpoint_dir("sft", "lookback"), lookback_heads=1)
    code, line = mistake(capsys, "export", "--to=hf", "--source=sft/lookback", f"--out={base / 'out'}")
    assert code == 1 and "GPTConfig.lookback_heads" in line
    assert not list(base.glob("out*"))
    call("export", "--to=hf", "--source=sft/tiny", f"--out={base / 'out'}")  # which has no such part


def exported_model(**shape: Any) -> tuple[Any, Any]:
    """A model of ours, and the same as the modeling file computes it."""
    from nanochat.exported.modeling_nanochat import NanochatConfig, NanochatForCausalLM

    ours = lively_model(tiny_config(**shape))
    settings = asdict(ours.config)
    del settings["rope_scaling"]
    model = NanochatForCausalLM(NanochatConfig(**settings, **export.derived_settings(ours.config))).eval()
    model.load_state_dict(ours.state_dict())
    return ours, model


@pytest.mark.parametrize("shape", [tiny.SHAPES["fast"], {"tied_head": True}])
def test_transformers_trainer_learns_padded_rows(tmp_path, shape):
    """A loss for each micro-batch, divided by their number: a mean of means. Packed rows are refused."""
    transformers = pytest.importorskip("transformers", reason="the extra `dev` brings transformers")
    ours, model = exported_model(**shape)
    tokens = torch.randint(ours.config.vocab_size, (4, 16), generator=torch.Generator().manual_seed(0))
    labels = tokens.where(torch.arange(16) > 4, -100)
    expected = ours(tokens)[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(expected, labels[:, 1:].flatten())
    assert model(tokens, labels=labels).loss.item() == pytest.approx(loss.item(), rel=1e-5)
    rows = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]
    settings: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "max_steps": 1}
    settings |= {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    trainer = transformers.Trainer(model, transformers.TrainingArguments(**settings), train_dataset=rows)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), abs=1e-3)
    positions = torch.tensor([[*range(9), *range(7)]])
    for arguments in ({"position_ids": positions}, {"seq_idx": positions}):
        with pytest.raises(ValueError, match="packed"):
            model(tokens[:1], **arguments)


def test_a_cache_under_either_name_and_no_other():
    """transformers renames the cache: a call whose cache the modeling file does not know raises."""
    transformers = pytest.importorskip("transformers", reason="the extra `dev` brings transformers")
    ours, model = exported_model()
    tokens = torch.randint(0, ours.config.vocab_size, (1, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    with torch.no_grad():
        expected = ours(tokens)
        for name in ("past_key_values", "cache"):
            filled = model(tokens[:, :8], use_cache=True).past_key_values
            last = model(tokens[:, 8:], attention_mask=mask, **{name: filled}).logits
            assert (last - expected[:, 8:]).abs().max() < 1e-4, name
        filled = model(tokens[:, :8], use_cache=True).past_key_values
        # A cache under a third name, none at all, and one that does not reach the mask's end.
        for arguments in ({"kv_state": filled}, {}, {"use_cache": True}, {"cache": transformers.DynamicCache()}):
            with pytest.raises(ValueError, match=r"attention_mask has shape \(1, 12\)"):
                model(tokens[:, 8:], attention_mask=mask, **arguments)
