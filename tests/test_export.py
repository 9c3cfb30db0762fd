"""scripts.export: a folder of its own, exact in fp32, loaded and chatted with by its path."""

import json
import random
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import lively_model, save_checkpoint, tiny_config, tiny_tokenizer

from nanochat.checkpoint_manager import load_model
from nanochat.gpt import GPTConfig
from nanochat.shell import cli, paths
from nanochat.tokenizer import SPECIAL_TOKENS, Tokenizer
from scripts import chat_cli, export


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    model = lively_model(tiny_config(vocab_size=tiny_tokenizer().vocab_size))
    meta = {"stage": "sft", "config": {"data": "/home/me/text"}, "pretraining": {"data": "demo"}}
    folder = paths.checkpoint_dir("sft", "tiny")
    save_checkpoint(folder, 7, model, tiny_tokenizer(), meta)
    return tmp_path


def call(module, *argv: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script", *argv])
        cli.run(module.main, module.Config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exported_folder_is_a_model(base, capsys, dtype):
    out = base / "made" / "here"
    call(export, "--to", "safetensors", "--source", "sft", "--out", str(out), "--dtype", dtype)
    files = {path.name for path in out.iterdir()}
    tokenizers = {"tokenizer.json", "tokenizer_config.json", "nanochat_tokenizer.json"}
    assert files == {"model.safetensors", "config.json", "meta.json", "manifest.json", *tokenizers}
    assert not out.with_name("here.tmp").exists()
    size = sum(path.stat().st_size for path in out.iterdir() if path.name != "manifest.json")
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
    call(chat_cli, "--source", str(out), "--device=cpu", "--max_tokens=4", "-p", "hello")


def test_an_exported_folder_is_verified(base):
    out = base / "out"
    call(export, "--out", str(out))
    data = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(cli.UserError, match="model.safetensors is damaged"):
        load_model(str(out), "cpu")


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--out", "{base}"], 1, "exists already"),
        (["--out", "/proc/nothing"], 1, "fix the path"),
        (["--out", "{base}/file/below"], 1, "fix the path"),
        (["--out", "{base}/x", "--source", "rl"], 1, "no rl checkpoint"),
        (["--out", "{base}/x", "--source", "sft", "--step", "8"], 1, "no step 8"),
        (["--out", "{base}/x", "--to", "pickle"], 2, "--to"),
        ([], 2, "--out"),
    ],
)
def test_a_mistake_costs_one_line(base, capsys, argv, code, message):
    (base / "file").write_text("")
    with pytest.raises(SystemExit) as stopped:
        call(export, *(word.format(base=base) for word in argv))
    err = capsys.readouterr().err
    assert stopped.value.code == code and message in err and "Traceback" not in err
    if code == 1:
        assert err.count("\n") == 1
    assert not (base / "x").exists()


def texts(count: int) -> list[str]:
    """English, Chinese, emoji, code, numbers, white space, broken and spelled-out special tokens."""
    draw = random.Random(0)
    pieces = (
        *(
            "the",
            " other",
            " Don't",
            "we'LL",
            "从",
            "你好",
            "，",
            "🙂",
            "👩\u200d🚀",
            "é",
            "e\u0301",
            "1234567",
            " $1,234",
        ),
        *("  ", "\n\n", "\t", " \r\n ", "\u00a0", "\u3000", "def f(x):\n    return x", "...", "<|", "|>", "\x00", "ß"),
        *("ﬁ", "\u0660\u0661", "𝔘", "नमस्ते", "\ufffd", *SPECIAL_TOKENS),
    )
    made = ["", *pieces]
    for _ in range(count):
        chosen = [draw.choice(pieces) for _ in range(draw.randint(1, 12))]
        chosen += [chr(draw.choice([draw.randrange(32, 127), draw.randrange(0x4E00, 0x9FA5), draw.randrange(0x250)]))]
        made.append(draw.choice(["", " "]).join(draw.sample(chosen, len(chosen))))
    return made


def test_the_exported_tokenizer_json_is_hugging_faces():
    """The same ids for thousands of texts, and no special token from any of them."""
    tokenizers = pytest.importorskip("tokenizers", reason="the extra `clients` brings tokenizers")
    sample = texts(3000)
    ours = Tokenizer.train(sample[:600], 700)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(export.hugging_face_form(ours)))
    assert theirs.get_vocab_size() == ours.vocab_size > 600
    for text, encoded in zip(sample, theirs.encode_batch(sample), strict=True):
        assert encoded.ids == ours.encode(text), repr(text)
        assert theirs.decode(encoded.ids) == text
    assert {name: theirs.token_to_id(name) for name in SPECIAL_TOKENS} == ours.special_ids
