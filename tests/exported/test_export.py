"""scripts.export: a folder that is exact in fp32, and that is loaded and chatted with by its path.

That transformers computes the same from it is shown in tests/promises/test_p08_interchange_is_exact.py.
"""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
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
from nanochat.run.long_context import with_context
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
        (["--out", "{base}/x", "--push", "tiny"], 1, "ORG/NAME"),
        (["--out", "{base}/x", "--source", "rl"], 1, "no rl checkpoint"),
        (["--out", "{base}/x", "--to", "peft"], 1, "holds no adapters"),
        (["--out", "{base}/x", "--to", "peft", "--adapter", "y"], 1, "--adapter"),
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
    older.write_text(export.MODELING.read_text().replace("key_offset", "other_field"))
    monkeypatch.setattr(export, "MODELING", older)
    save(paths.checkpoint_dir("sft", "offset"), key_offset=True)
    code, line = mistake(capsys, "export", "--to=hf", "--source=sft/offset", f"--out={base / 'out'}")
    assert code == 1 and "GPTConfig.key_offset" in line
    assert not list(base.glob("out*"))
    call("export", "--to=hf", "--source=sft/tiny", f"--out={base / 'out'}")  # which has no such part


def test_the_trainer_of_transformers_learns_alike_however_it_accumulates(base, monkeypatch):
    """The model of our modeling file beside one of transformers: 8 rows a step, at once and one by one."""
    transformers = pytest.importorskip("transformers", reason="the extra `dev` brings transformers")
    monkeypatch.setenv("HF_HOME", str(base / "hf"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(base / "modules"))
    save(paths.checkpoint_dir("sft", "tiny"), sequence_len=64, **tiny.SHAPES["qwen3"])
    for to in ("hf", "safetensors"):
        call("export", "--to", to, "--source", "sft", "--model_tag", "tiny", "--out", str(base / to))
    # The folder of ours with its modeling file, which a model with Qwen3's shape does not have by itself.
    config = json.loads((base / "safetensors" / "config.json").read_text())
    classes = {"AutoConfig": "NanochatConfig", "AutoModelForCausalLM": "NanochatForCausalLM"}
    config["auto_map"] = {auto: f"modeling_nanochat.{name}" for auto, name in classes.items()}
    config |= {"tie_word_embeddings": False, "rotary_scaling": config.pop("rope_scaling", None)}
    (base / "safetensors" / "config.json").write_text(json.dumps(config))
    shutil.copy(export.MODELING, base / "safetensors")

    # Rows with different numbers of targets: a mean of means would weigh their tokens otherwise.
    rows = []
    for number in range(16):
        tokens = torch.randint(0, 275, (24,))
        rows.append({"input_ids": tokens, "labels": tokens.where(torch.arange(24) > 3 + number % 17, -100)})
    found = []
    for folder, rows_at_once in (("hf", 8), ("safetensors", 8), ("safetensors", 1)):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            base / folder, trust_remote_code=True, dtype=torch.float32
        )
        settings = transformers.TrainingArguments(
            output_dir=str(base / "trained"), per_device_train_batch_size=rows_at_once, use_cpu=True,
            gradient_accumulation_steps=8 // rows_at_once, max_steps=2, learning_rate=1e-2, logging_steps=1,
            report_to="none", save_strategy="no", disable_tqdm=True, max_grad_norm=1.0, seed=1,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=settings, train_dataset=rows)
        trainer.train()
        log = [line for line in trainer.state.log_history if "loss" in line]
        found.append([line[name] for line in log for name in ("loss", "grad_norm")])
    assert len(found[0]) == 4 and all(values == pytest.approx(found[0], rel=1e-4) for values in found[1:]), found


def test_a_cache_under_either_name_and_no_other():
    """transformers renames the cache: a call whose cache the modeling file does not know raises."""
    transformers = pytest.importorskip("transformers", reason="the extra `dev` brings transformers")
    from nanochat.exported.modeling_nanochat import NanochatConfig, NanochatForCausalLM

    ours = lively_model(tiny_config())
    rotary = asdict(ours.config)
    rotary["rotary_scaling"] = rotary.pop("rope_scaling")
    model = NanochatForCausalLM(NanochatConfig(**rotary)).eval()
    model.load_state_dict(ours.state_dict())
    tokens = torch.randint(0, ours.config.vocab_size, (1, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    with torch.no_grad():
        expected = ours(tokens)
        for name in ("past_key_values", "cache"):
            filled = model(tokens[:, :8], use_cache=True).past_key_values
            last = model(tokens[:, 8:], attention_mask=mask, **{name: filled}).logits
            assert (last - expected[:, 8:]).abs().max() < 1e-4, name
        filled = model(tokens[:, :8], use_cache=True).past_key_values
        tensors = ((torch.zeros(1, 2, 8, 8), torch.zeros(1, 2, 8, 8)),)
        for arguments in ({"kv_state": filled}, {"past_key_values": filled, "cache": filled}, {"cache": tensors}):
            with pytest.raises(ValueError, match="one transformers.Cache"):
                model(tokens[:, 8:], **arguments)
        # An empty cache, none at all, and one that does not reach the mask's end.
        for arguments in ({}, {"use_cache": True}, {"cache": transformers.DynamicCache()}):
            with pytest.raises(ValueError, match=r"attention_mask has shape \(1, 12\)"):
                model(tokens[:, 8:], attention_mask=mask, **arguments)


@pytest.mark.parametrize("method", ["linear", "yarn"])
def test_the_modeling_file_scales_positions_as_we_do(method):
    transformers = pytest.importorskip("transformers", reason="the extra `dev` brings transformers")
    assert transformers
    from nanochat.exported import modeling_nanochat

    config = with_context(tiny_config(head_dim=64, rope_theta=500.0), 512, 64, method)
    assert config.rope_scaling is not None
    frequencies = config.rope_theta ** (-torch.arange(0, 64, 2) / 64)
    settings = SimpleNamespace(rotary_scaling=asdict(config.rope_scaling), rope_theta=config.rope_theta)
    expected = config.rope_scaling.apply(frequencies, config.rope_theta)
    assert (expected < frequencies).any()
    assert torch.allclose(modeling_nanochat.scaled(frequencies, settings), expected, rtol=1e-6)


def test_push_uploads_to_a_private_repository(base, capsys, monkeypatch):
    calls = []

    class Api:
        def __init__(self, endpoint):
            calls.append(endpoint)

        def create_repo(self, name, **options):
            calls.append((name, options))

        def upload_folder(self, repo_id, folder_path, **_):
            calls.append((repo_id, sorted(path.name for path in Path(folder_path).iterdir())))
            if repo_id == "me/unreachable":
                raise ConnectionError("no route")

    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    call("export", "--to", "hf", "--out", str(base / "out"), "--push", "me/tiny")
    assert calls[:2] == ["https://mirror.example", ("me/tiny", {"private": True, "exist_ok": True})]
    assert calls[2][0] == "me/tiny" and "modeling_nanochat.py" in calls[2][1] and "model.safetensors" in calls[2][1]
    assert "https://mirror.example/me/tiny" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        call("export", "--to", "hf", "--out", str(base / "two"), "--push", "me/unreachable")
    err = capsys.readouterr().err
    assert "cannot reach" in err and err.count("\n") == 1 and (base / "two").exists()
