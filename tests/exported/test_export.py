"""scripts.export: a folder of its own, exact in fp32, loaded and chatted with by its path."""

import json
import random
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from runs import call, mistake
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import cpu_device, lively_model, save_checkpoint, tiny_config, tiny_tokenizer

from nanochat.checkpoint_manager import load_model
from nanochat.conversation import render, render_prompt
from nanochat.engine import Engine
from nanochat.exported.tokenizer_files import hugging_face_form
from nanochat.gpt import GPTConfig
from nanochat.ground import cli, paths
from nanochat.rotary import RopeScaling
from nanochat.run.long_context import with_context
from nanochat.tokenizer import SPECIAL_TOKENS, Tokenizer
from scripts import export


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    model = lively_model(tiny_config(vocab_size=tiny_tokenizer().vocab_size))
    meta = {"stage": "sft", "config": {"data": "/home/me/text"}, "pretraining": {"data": "demo"}}
    folder = paths.checkpoint_dir("sft", "tiny")
    save_checkpoint(folder, 7, model, tiny_tokenizer(), meta)
    return tmp_path


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
    ("argv", "code", "message"),
    [
        (["--out", "{base}"], 1, "exists already"),
        (["--out", "/proc/nothing"], 1, "fix the path"),
        (["--out", "{base}/file/below"], 1, "fix the path"),
        (["--out", "{base}/x", "--push", "tiny"], 1, "ORG/NAME"),
        (["--out", "{base}/x", "--source", "rl"], 1, "no rl checkpoint"),
        (["--out", "{base}/x", "--to", "peft"], 1, "holds no adapters"),
        (["--out", "{base}/x", "--to", "peft", "--adapter", "y"], 1, "leave --adapter out"),
        (["--out", "{base}/x", "--source", "sft/tiny/step_8"], 1, "no step 8"),
        (["--out", "{base}/x", "--to", "pickle"], 2, "--to"),
        ([], 2, "--out"),
    ],
)
def test_a_mistake_costs_one_line(base, capsys, argv, code, message):
    (base / "file").write_text("")
    with pytest.raises(SystemExit) as stopped:
        call("export", *(word.format(base=base) for word in argv))
    err = capsys.readouterr().err
    assert stopped.value.code == code and message in err and "Traceback" not in err
    if code == 1:
        assert err.count("\n") == 1
    assert not (base / "x").exists()


SHAPES_OF_OURS = {
    "fast": {"norm_weight": False, "lookback_heads": 1, "key_offset": True},
    # With a context that was extended from 16 tokens.
    "gated": {
        **tiny.SHAPES["qwen3"],
        "qk_norm": "after_rotary",
        "window_pattern": "SSL",
        "value_embeddings": True,
        "rope_scaling": RopeScaling("yarn", 4.0, 16, 0.5, 2.0, 1.3),
    },
    "qwen3": tiny.SHAPES["qwen3"],
}


@pytest.mark.parametrize("shape", SHAPES_OF_OURS)
def test_our_own_models_in_transformers(base, monkeypatch, shape):
    """The fast preset by its modeling file, a Qwen3-shaped model natively: logits, left padding, replies, chats."""
    transformers = pytest.importorskip("transformers", reason="the extra `dev` brings transformers")
    monkeypatch.setenv("HF_HOME", str(base / "hf"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(base / "modules"))
    ours = lively_model(tiny_config(vocab_size=tiny_tokenizer().vocab_size, sequence_len=64, **SHAPES_OF_OURS[shape]))
    save_checkpoint(paths.checkpoint_dir("sft", shape), 1, ours, tiny_tokenizer(), {"stage": "sft"})
    out = base / shape
    call("export", "--to", "hf", "--source", "sft", "--model_tag", shape, "--out", str(out))
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == ("qwen3" if shape == "qwen3" else "nanochat")
    assert (out / "modeling_nanochat.py").exists() == (shape != "qwen3")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        out, trust_remote_code=shape != "qwen3", dtype=torch.float32
    ).eval()

    # Logits; a shorter row's are the same with padding on its left.
    tokens = torch.randint(0, 275, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = ours(tokens)
        assert (theirs(tokens).logits - expected).abs().max() < 1e-4 and expected.std() > 0.1
        padded = torch.cat((torch.zeros(2, 5, dtype=torch.long), tokens), dim=1)
        mask = torch.cat((torch.zeros(2, 5), torch.ones(2, 40)), dim=1).long()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = theirs(padded, attention_mask=mask, position_ids=positions).logits[:, 5:]
        assert (logits - expected).abs().max() < 1e-4

    # Greedy replies, with a cache; ours ends with the same marks.
    prompt = tokens[0, :8].tolist()
    engine = Engine(ours, tiny_tokenizer(), cpu_device())
    engine.stop_ids = set()
    engine.call_start = engine.call_end = -1
    reply = engine.generate_batch(prompt, max_tokens=50, temperature=0.0)[0][0]
    settings = {"max_new_tokens": 50, "do_sample": False, "eos_token_id": None}
    assert theirs.generate(torch.tensor([prompt]), **settings)[0].tolist() == reply
    assert theirs.generate(torch.tensor([prompt]), **settings, use_cache=False)[0].tolist() == reply
    generation = json.loads((out / "generation_config.json").read_text())
    assert (generation["temperature"], generation["min_p"], generation["do_sample"]) == (0.8, 0.05, True)
    assert tiny_tokenizer().encode_special("<|assistant_end|>") in generation["eos_token_id"]

    # The chat template renders what conversation.py does.
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    call_and_answer = [
        {"type": "text", "text": "It is "}, {"type": "python", "text": "2+3"}, {"type": "python_output", "text": "5"},
        {"type": "text", "text": ""}, {"type": "text", "text": "5."},
    ]  # fmt: skip
    messages = [{"role": "system", "content": "Be\nbrief. "}, {"role": "user", "content": " 2+3 从? "}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert prompt == render_prompt(tiny_tokenizer(), messages)
    messages.append({"role": "assistant", "content": call_and_answer})
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    assert whole == render(tiny_tokenizer(), messages).ids

    # Back into this project.
    again, _, meta = load_model(str(out), "cpu") if shape != "qwen3" else (None, None, None)
    if again is not None:
        assert all(torch.equal(again.state_dict()[name], weight) for name, weight in ours.state_dict().items())


def test_a_part_that_the_modeling_file_does_not_compute_is_named(base, capsys, monkeypatch):
    """Its logits would be other ones, without an error."""
    older = base / "modeling_nanochat.py"
    older.write_text(export.MODELING.read_text().replace("key_offset", "other_field"))
    monkeypatch.setattr(export, "MODELING", older)
    model = lively_model(tiny_config(vocab_size=tiny_tokenizer().vocab_size, key_offset=True))
    save_checkpoint(paths.checkpoint_dir("sft", "offset"), 1, model, tiny_tokenizer(), {"stage": "sft"})
    code, line = mistake(capsys, "export", "--to=hf", "--source=sft/offset", f"--out={base / 'out'}")
    assert code == 1 and "modeling_nanochat.py does not know GPTConfig.key_offset, which is True" in line
    assert not list(base.glob("out*"))
    call("export", "--to=hf", "--source=sft/tiny", f"--out={base / 'out'}")  # which has no such part


def test_the_trainer_of_transformers_learns_alike_however_it_accumulates(base, monkeypatch):
    """The model of our modeling file beside one of transformers: 8 rows a step, in 1, 4 and 8 micro-batches."""
    transformers = pytest.importorskip("transformers", reason="the extra `dev` brings transformers")
    monkeypatch.setenv("HF_HOME", str(base / "hf"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(base / "modules"))
    ours = lively_model(tiny_config(vocab_size=tiny_tokenizer().vocab_size, sequence_len=64, **tiny.SHAPES["qwen3"]))
    save_checkpoint(paths.checkpoint_dir("sft", "tiny"), 1, ours, tiny_tokenizer(), {"stage": "sft"})
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
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(24):
        tokens = torch.randint(0, 275, (24,), generator=generator)
        rows.append({"input_ids": tokens, "labels": tokens.where(torch.arange(24) > 3 + number % 17, -100)})
    found = {}
    for folder in ("hf", "safetensors"):
        for rows_at_once in (8, 2, 1):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                base / folder, trust_remote_code=True, dtype=torch.float32
            )
            settings = transformers.TrainingArguments(
                output_dir=str(base / "trained"), per_device_train_batch_size=rows_at_once, use_cpu=True,
                gradient_accumulation_steps=8 // rows_at_once, max_steps=3, learning_rate=1e-2, logging_steps=1,
                report_to="none", save_strategy="no", disable_tqdm=True, max_grad_norm=1.0, seed=1,
            )  # fmt: skip
            trainer = transformers.Trainer(model=model, args=settings, train_dataset=rows)
            trainer.train()
            log = [line for line in trainer.state.log_history if "loss" in line]
            found[folder, rows_at_once] = [line[name] for line in log for name in ("loss", "grad_norm")]
    expected = found["hf", 8]
    assert len(expected) == 6 and all(values == pytest.approx(expected, rel=1e-4) for values in found.values()), found


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
    theirs = tokenizers.Tokenizer.from_str(json.dumps(hugging_face_form(ours)))
    assert theirs.get_vocab_size() == ours.vocab_size > 600
    for text, encoded in zip(sample, theirs.encode_batch(sample), strict=True):
        assert encoded.ids == ours.encode(text), repr(text)
        assert theirs.decode(encoded.ids) == text
    assert {name: theirs.token_to_id(name) for name in SPECIAL_TOKENS} == ours.special_ids
