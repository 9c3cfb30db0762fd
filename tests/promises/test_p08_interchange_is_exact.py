"""P8. Interchange is exact: models, tokenizers and adapters are the same here and in Hugging Face's libraries.

Random models of every family that is read are written by transformers and read here, and back: logits within 1e-4 in
fp32, the same 256 greedy tokens, the same bits after a round trip. Models of our own shape are exported and read by
transformers. Tokenizer ids are the same for 10,000 strings. The library peft reads our adapters; tests/adapters has
its gradients and the way back.
"""

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import call
from safetensors.torch import load_file, save_file
from tiny import (
    SHAPES,
    adapt,
    cpu_device,
    lively_model,
    run_ranks,
    save_checkpoint,
    tiny_config,
    tiny_tokenizer,
)
from tiny_families import MODELS, logits_of, make_oracle, oracle_folder, oracle_of, random_string, save_family

from nanochat.adapters import peft as peft_folders
from nanochat.adapters.lora import Adapters
from nanochat.checkpoint_manager import load_folder, load_model
from nanochat.conversation import render, render_prompt
from nanochat.engine import Engine
from nanochat.exported.tokenizer_files import hugging_face_form
from nanochat.families import hf
from nanochat.ground import paths
from nanochat.ground.sharding import whole_weights
from nanochat.ranks import lay_out
from nanochat.rotary import RopeScaling
from nanochat.run.long_context import NewContext
from nanochat.tokenizer import EXPORTED_NAME, SPECIAL_TOKENS, Tokenizer
from nanochat.train import make_adamw, next_token_loss, train_step
from scripts import export

transformers = pytest.importorskip("transformers", reason="the extra `dev` brings transformers")

TOKENS = torch.randint(0, 300, (2, 80), generator=torch.Generator().manual_seed(3))


def assert_same_weights(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert set(left) == set(right)
    for name, weight in left.items():
        assert torch.equal(weight, right[name]), name


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """The prompt and `count` tokens, whatever they are."""
    engine = Engine(model, tiny_tokenizer(), cpu_device())
    engine.stop_ids = set()
    engine.call_start = engine.call_end = -1
    return engine.generate_batch(prompt, max_tokens=count, temperature=0.0)[0][0]


# ---------------------------------------------------------------------- models of other families


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_transformers_in_both_directions(tmp_path, name):
    folder = oracle_folder(name)
    model, _, meta = load_model(str(folder), "cpu")
    expected = logits_of(oracle_of(folder), TOKENS)
    assert (logits_of(model, TOKENS) - expected).abs().max() < 1e-4
    assert expected.std() > 0.1  # or anything would be close
    family = meta["pretraining"]["family"]
    assert (meta["stage"], meta["step"], family) == ("hf", 0, name.split()[0].removesuffix("_text"))

    # Back: the weights are the same bits, in one file and in several, and transformers reads them as before.
    theirs = hf.from_config(model.config, family)
    assert hf.to_config(json.loads(json.dumps(theirs))) == model.config
    original = load_file(folder / "model.safetensors")
    for shard_bytes in (1 << 30, 40_000):
        out = tmp_path / str(shard_bytes)
        out.mkdir()
        (out / "config.json").write_text(json.dumps(theirs))
        files = hf.write_weights(out, model.config, whole_weights(model), torch.float32, shard_bytes, family)
        assert (len(files) > 2) == (shard_bytes == 40_000)
        written: dict[str, torch.Tensor] = {}
        for path in out.glob("*.safetensors"):
            written |= load_file(path)
        assert_same_weights(written, original)
    assert torch.equal(logits_of(oracle_of(out), TOKENS), expected)
    # The sharded folder, read here.
    tiny_tokenizer().save(out, EXPORTED_NAME)
    assert_same_weights(load_model(str(out), "cpu")[0].state_dict(), model.state_dict())


@pytest.mark.parametrize("name", ["qwen2 window", "qwen3", "qwen3_moe", "llama 3", "qwen3_5_text", "qwen3_5_moe_text"])
def test_256_greedy_tokens_are_transformers(name):
    model, _, _ = load_model(str(oracle_folder(name)), "cpu")
    prompt = TOKENS[0, :40]
    settings = {"max_new_tokens": 256, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones(1, 40)}
    theirs = oracle_of(oracle_folder(name)).generate(prompt[None], **settings)[0].tolist()
    assert len(theirs) == 40 + 256 and greedy(model, prompt.tolist(), 256) == theirs


def test_a_bf16_folder_keeps_its_bits(tmp_path):
    folder = shutil.copytree(oracle_folder("qwen2"), tmp_path / "bf16")
    oracle_of(folder).bfloat16().save_pretrained(folder)
    model, _, _ = load_model(str(folder), "cpu")
    assert model.embedding.weight.dtype == torch.float32 and export.stored_dtype(folder) == torch.bfloat16
    out = tmp_path / "out"
    out.mkdir()
    hf.write_weights(out, model.config, whole_weights(model), torch.bfloat16)
    assert_same_weights(load_file(out / "model.safetensors"), load_file(folder / "model.safetensors"))


@pytest.mark.parametrize(("name", "method"), [("qwen3", "yarn"), ("mistral whole", "yarn"), ("llama 3", "auto")])
def test_an_extended_context_is_transformers(tmp_path, name, method):
    """Written as the family, positions beyond the original context of 384 tokens have transformers' logits."""
    folder = oracle_folder(name)
    model, _, meta = load_model(str(folder), "cpu", prepare=[NewContext(768, method)])
    theirs = hf.from_config(model.config, meta["pretraining"]["family"])
    assert theirs["max_position_embeddings"] == meta["pretraining"]["context"] == 768
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    hf.write_weights(tmp_path, model.config, whole_weights(model), torch.float32)
    tokens = torch.randint(0, 300, (1, 500), generator=torch.Generator().manual_seed(4))
    expected = logits_of(oracle_of(tmp_path), tokens)
    assert (logits_of(model, tokens) - expected).abs().max() < 1e-4
    assert hf.FORMAT.describe(tmp_path)[0] == model.config
    # It is not what the original computes.
    assert (logits_of(oracle_of(folder), tokens) - expected)[:, 400:].abs().max() > 0.01


@pytest.mark.parametrize(("stated", "context"), [(96, 384), (120, 300), (120, 768)])
def test_yarn_of_a_folder_reaches_its_factor_times_the_original_context(tmp_path, stated, context):
    """As Qwen3 is extended: 4 times 96 tokens are trained, whichever max_position_embeddings the folder states.

    Up to there transformers computes the same from the folder as it is; beyond, the factor grows by what is missing.
    """
    folder = shutil.copytree(oracle_folder("qwen3 yarn"), tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": stated}))
    model, _, meta = load_model(str(folder), "cpu", prepare=[NewContext(context, "auto")])
    scaling = model.config.rope_scaling
    assert scaling is not None and (scaling.factor, scaling.original_len) == (max(4.0, context / 96), 96)
    assert model.config.sequence_len == meta["pretraining"]["context"] == context
    if context <= 384:
        tokens = torch.randint(0, 300, (1, context), generator=torch.Generator().manual_seed(5))
        assert (logits_of(model, tokens) - logits_of(oracle_of(folder), tokens)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("name", "steps", "rate"), [("qwen3", 2, 1e-3), ("qwen3_5_text", 20, 1e-4), ("qwen3_5_moe_text", 5, 1e-4)]
)
def test_training_is_that_of_transformers(name, steps, rate):
    """Steps of AdamW on the same tokens."""
    ours, _, _ = load_model(str(oracle_folder(name)), "cpu")
    theirs = oracle_of(oracle_folder(name)).train()
    ids = torch.randint(300, (2, 65), generator=torch.Generator().manual_seed(0))
    inputs = ids[:, :-1].contiguous()
    targets = ids[:, 1:].contiguous()
    device = cpu_device()
    optimizer = make_adamw(ours.train(), rate, device)
    their_optimizer = torch.optim.AdamW(theirs.parameters(), lr=rate, betas=(0.9, 0.999), weight_decay=0)
    losses: list[list[float]] = [[], []]
    for _ in range(steps):
        losses[0].append(float(train_step(ours, optimizer, [[inputs, targets]], next_token_loss, device=device).loss))
        loss = theirs(inputs, labels=targets, shift_labels=targets, use_cache=False).loss
        loss.backward()
        their_optimizer.step()
        their_optimizer.zero_grad()
        losses[1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][-1] < losses[0][0]


def loaded_rows(device, folder: str) -> dict[str, torch.Tensor]:
    """On a rank: the whole weights of a model that was loaded sharded."""
    model, _, _ = load_folder(Path(folder), device, layout=lay_out(device, "fsdp", 1))
    weights = {name: parameter.full_tensor() for name, parameter in model.state_dict().items()}
    return {**weights, "held": torch.tensor(sum(p.to_local().numel() for p in model.parameters()))}


@pytest.mark.slow
def test_every_rank_reads_its_rows():
    """Two ranks together have what one has; the rows of q, k and v end in the middle of a rank's share."""
    model, _, _ = load_model(str(oracle_folder("qwen2")), "cpu")
    total = sum(parameter.numel() for parameter in model.parameters())
    for weights in run_ranks(loaded_rows, str(oracle_folder("qwen2"))):
        assert weights.pop("held") < 0.52 * total
        assert_same_weights(weights, model.state_dict())


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_text"])
def test_peft_reads_our_adapters(tmp_path, name):
    peft = pytest.importorskip("peft", reason="the extra `dev` brings peft")
    model, _, _ = load_model(str(oracle_folder(name)), "cpu")
    adapted = adapt(model)
    assert adapted.extension.lora is not None
    trained = {name: parameter.detach() for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    peft_folders.write(tmp_path, Adapters(adapted.extension.lora, trained), adapted.config, "somewhere")
    plain = oracle_of(oracle_folder(name))
    before = logits_of(plain, TOKENS)
    expected = logits_of(peft.PeftModel.from_pretrained(plain, str(tmp_path)).eval(), TOKENS)
    assert (logits_of(adapted, TOKENS) - expected).abs().max() < 1e-4
    assert (before - expected).abs().max() > 0.01


# ---------------------------------------------------------------------- the command, both ways


@pytest.fixture
def base(tmp_path, monkeypatch) -> Path:
    """A folder for a test; what transformers keeps of models with code goes there, too."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path


def test_an_imported_model_is_exported_with_its_tokenizer(base):
    """From a family's folder to another: config, weights, ids and template are the same in transformers."""
    source = save_family(base / "source", "qwen3")
    oracle = make_oracle("qwen3")
    oracle.resize_token_embeddings(700)  # wider than the vocabulary, as Qwen's
    oracle.generation_config.eos_token_id = json.loads((source / "generation_config.json").read_text())["eos_token_id"]
    oracle.bfloat16().save_pretrained(source)
    out = base / "out"
    call("export", "--to", "hf", "--source", str(source), "--out", str(out))
    written = load_file(out / "model.safetensors")
    assert written["model.norm.weight"].dtype == torch.bfloat16
    assert_same_weights(written, load_file(source / "model.safetensors"))
    assert load_model(str(out), "cpu")[1].fingerprint() == load_model(str(source), "cpu")[1].fingerprint()
    theirs = [transformers.AutoTokenizer.from_pretrained(folder) for folder in (source, out)]
    messages = [{"role": "user", "content": "Hello! 从前 12"}]
    ids = [one.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) for one in theirs]
    assert ids[0] == ids[1] and len(ids[0]) > 10


def test_an_imported_models_pretraining_is_continued(base):
    """On text, with its tokenizer, in longer rows than it knew; then it is a folder of its family again."""
    source = shutil.copytree(oracle_folder("qwen3"), base / "tiny-qwen")
    save_family(source, "qwen3")
    oracle = oracle_of(source)
    oracle.resize_token_embeddings(700)
    oracle.save_pretrained(source)
    flags = ("--device=cpu", "--dtype=float32", "--device_batch_size=1", "--eval_tokens=768", "--log_every=1")
    sizes = ("--max_seq_len=768", "--rope_scaling=yarn", "--num_iterations=3", "--eval_every=0", "--learning_rate=1e-3")
    call("mid_train", "--source", str(source), "--data=demo:0.5,pydoc:0.5", *flags, *sizes)
    lines = (base / "base/runs/base/tiny-qwen/metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert last["val_bpb"] < json.loads(lines[0])["val_bpb_before"]
    assert last["val_bpb"] == pytest.approx((last["val_bpb_demo"] + last["val_bpb_pydoc"]) / 2)
    call("export", "--to", "hf", "--source", "base", "--out", str(base / "out"))
    config = json.loads((base / "out/config.json").read_text())
    assert (config["model_type"], config["max_position_embeddings"]) == ("qwen3", 768)
    assert config["rope_scaling"]["factor"] == 2
    model, tokenizer, meta = load_model("base", "cpu")
    assert meta["pretraining"]["data"] == "web,demo:0.5,pydoc:0.5" and meta["pretraining"]["family"] == "qwen3"
    tokens = torch.tensor([tokenizer.encode("从前 a small boat ") * 60])[:, :700]
    assert (logits_of(oracle_of(base / "out"), tokens) - logits_of(model, tokens)).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_the_parts_that_see_are_written_again(base, name, capsys):
    """A model that also sees, trained on text and exported: the parts that were not read have the same bits."""
    source = shutil.copytree(oracle_folder(name), base / "source")
    text = load_file(source / "model.safetensors")
    whole = {re.sub(r"^model\.", "model.language_model.", key): tensor for key, tensor in text.items()}
    unseen = {key: torch.randn(3, 5).bfloat16() for key in ("model.visual.blocks.0.attn.qkv.weight", "mtp.norm.weight")}
    if "moe" in name:  # as the hub has it: the matrices of all experts in one tensor
        for kind, parts in {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.items():
            for layer in range(4):
                place = f"model.language_model.layers.{layer}.mlp.experts."
                experts = [torch.cat([whole.pop(f"{place}{e}.{part}.weight") for part in parts]) for e in range(5)]
                whole[place + kind] = torch.stack(experts)
    save_file(whole | unseen, source / "model.safetensors")
    settings = json.loads((source / "config.json").read_text())
    nested = {
        "model_type": name.removesuffix("_text"),
        "text_config": {**settings, "mtp_num_hidden_layers": 1},
        "vision_config": {"a": 1},
    }
    (source / "config.json").write_text(json.dumps(nested))
    chats = base / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 8)
    flags = ("--max_seq_len", "64", "--device_batch_size", "1", "--num_iterations", "1", "--eval_every", "0")
    call("chat_sft", "--source", str(source), "--tasks", str(chats), *flags)
    assert "not mtp and visual: --to hf writes them again (2 tensors)" in capsys.readouterr().out
    call("export", "--to", "hf", "--source", "sft", "--out", str(base / "out"), "--dtype", "float32")
    written = load_file(base / "out" / "model.safetensors")
    assert_same_weights({key: written[key] for key in unseen}, unseen)
    assert set(written) == {re.sub(r"^model\.", "model.language_model.", key) for key in text} | set(unseen)
    out = json.loads((base / "out" / "config.json").read_text())
    assert out["vision_config"] == {"a": 1} and out["text_config"]["mtp_num_hidden_layers"] == 1
    learned = logits_of(load_model("sft", "cpu")[0], TOKENS[:, :64])
    assert torch.equal(logits_of(load_model(str(base / "out"), "cpu")[0], TOKENS[:, :64]), learned)
    assert not torch.equal(logits_of(load_model(str(source), "cpu")[0], TOKENS[:, :64]), learned)


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_the_command_writes_a_folder_of_its_own_family(base, family):
    source = shutil.copytree(oracle_folder(family), base / "tiny")
    out = base / "out"
    call("export", "--to", "hf", "--source", str(source), "--out", str(out))
    written = load_file(out / "model.safetensors")
    assert_same_weights(written, load_file(source / "model.safetensors"))
    assert ("model.layers.0.self_attn.qkv_proj.weight" in written) == (family == "phi3")
    assert torch.equal(logits_of(oracle_of(out), TOKENS), logits_of(oracle_of(source), TOKENS))


# ---------------------------------------------------------------------- models of our own

OUR_SHAPES: dict[str, dict[str, Any]] = {
    "fast": {"norm_weight": False, "lookback_heads": 1},
    # With a context that was extended from 16 tokens.
    "gated": {
        **SHAPES["qwen3"],
        "qk_norm": "after_rotary",
        "window_pattern": "SSL",
        "value_embeddings": True,
        "rope_scaling": RopeScaling("yarn", 4.0, 16, 0.5, 2.0, 1.3),
    },
    "qwen3": SHAPES["qwen3"],
}
REPLY_WITH_A_CALL = [
    {"type": "text", "text": "It is "},
    {"type": "python", "text": "2+3"},
    {"type": "python_output", "text": "5"},
    {"type": "text", "text": ""},
    {"type": "text", "text": "5."},
]


@pytest.mark.parametrize("shape", OUR_SHAPES)
def test_our_own_models_in_transformers(base, shape):
    """The fast preset by its modeling file, a Qwen3-shaped model natively: logits, left padding, replies, chats."""
    ours = lively_model(tiny_config(vocab_size=tiny_tokenizer().vocab_size, sequence_len=64, **OUR_SHAPES[shape]))
    save_checkpoint(paths.checkpoint_dir("sft", shape), 1, ours, tiny_tokenizer(), {"stage": "sft"})
    out = base / shape
    call("export", "--to", "hf", "--source", "sft", "--model_tag", shape, "--out", str(out))
    config = json.loads((out / "config.json").read_text())
    is_native = shape == "qwen3"
    assert config["model_type"] == ("qwen3" if is_native else "nanochat")
    assert (out / "modeling_nanochat.py").exists() != is_native
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        out, trust_remote_code=not is_native, dtype=torch.float32
    ).eval()

    # Logits; a shorter row's are the same with padding on its left.
    tokens = torch.randint(0, 275, (2, 40), generator=torch.Generator().manual_seed(0))
    expected = logits_of(ours, tokens)
    assert (logits_of(theirs, tokens) - expected).abs().max() < 1e-4 and expected.std() > 0.1
    padded = torch.cat((torch.zeros(2, 5, dtype=torch.long), tokens), dim=1)
    mask = torch.cat((torch.zeros(2, 5), torch.ones(2, 40)), dim=1).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = theirs(padded, attention_mask=mask, position_ids=positions).logits[:, 5:]
    assert (logits - expected).abs().max() < 1e-4

    # Greedy replies, with a cache and without; ours ends with the same marks.
    prompt = tokens[0, :8]
    reply = greedy(ours, prompt.tolist(), 50)
    for use_cache in (True, False):
        settings = {"max_new_tokens": 50, "do_sample": False, "eos_token_id": None, "use_cache": use_cache}
        assert theirs.generate(prompt[None], **settings)[0].tolist() == reply
    generation = json.loads((out / "generation_config.json").read_text())
    assert (generation["temperature"], generation["min_p"], generation["do_sample"]) == (0.8, 0.2, True)
    assert tiny_tokenizer().encode_special("<|assistant_end|>") in generation["eos_token_id"]

    # The chat template renders what conversation.py does.
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    messages = [{"role": "system", "content": "Be\nbrief. "}, {"role": "user", "content": " 2+3 从? "}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == render_prompt(tiny_tokenizer(), messages)
    messages.append({"role": "assistant", "content": REPLY_WITH_A_CALL})
    assert tokenizer.apply_chat_template(messages, return_dict=False) == render(tiny_tokenizer(), messages).ids
    if not is_native:  # back into this project
        assert_same_weights(load_model(str(out), "cpu")[0].state_dict(), ours.state_dict())


# ---------------------------------------------------------------------- tokenizers


@pytest.fixture(scope="module")
def strings() -> list[str]:
    source = random.Random(0)
    return [random_string(source) for _ in range(10_000)]


@pytest.mark.parametrize("family", ["qwen2", "llama3", "mistral", "metaspace"])
def test_ids_and_texts_are_those_of_transformers(family_folders, family_tokenizers, strings, family):
    """The families' other tokenizers differ only in their template."""
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(family_folders[family])
    theirs = oracle(strings, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    tokenizer = family_tokenizers[family]
    special = set(tokenizer.special_ids.values())
    for text, ids, expected in zip(strings, tokenizer.encode_batch(strings), theirs, strict=True):
        assert ids == expected, repr(text)
        assert not special & set(ids)
        assert b"".join(tokenizer.token_texts[index] for index in ids) == tokenizer.decode_bytes(ids)
        if family == "llama3":  # elsewhere NFC joins accents, and U+2581 becomes a space
            assert tokenizer.decode(ids) == text
    for text in strings[:500]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == oracle.decode(ids, clean_up_tokenization_spaces=False)


def test_our_tokenizer_is_hugging_faces(strings):
    """The exported tokenizer.json: the same ids, and no special token from any text."""
    tokenizers = pytest.importorskip("tokenizers", reason="the extra `clients` brings tokenizers")
    numbers = random.Random(0)
    sample = strings[:3000] + [chr(numbers.randrange(32, 0x9FA5)) for _ in range(500)]
    sample += ["1234567 $1,234", "Don't we'LL", "ﬁ\u0660\u0661𝔘नमस्ते ß", *SPECIAL_TOKENS]
    ours = Tokenizer.train(sample[:900], 700)
    theirs = tokenizers.Tokenizer.from_str(hugging_face_form(ours).to_str())
    assert theirs.get_vocab_size() == ours.vocab_size > 600
    for text, encoded in zip(sample, theirs.encode_batch(sample), strict=True):
        assert encoded.ids == ours.encode(text), repr(text)
        assert theirs.decode(encoded.ids) == text
    assert {name: theirs.token_to_id(name) for name in SPECIAL_TOKENS} == ours.special_ids
