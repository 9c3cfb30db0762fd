"""nanochat.families.hf against transformers: the same logits and replies both ways, bit for bit; hostile folders."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import call
from safetensors.torch import load_file, save_file
from tiny import complaint, cpu_device, run_ranks, tiny_tokenizer
from tiny_families import save_family

from nanochat import model_folder
from nanochat.checkpoint_manager import load_folder, load_model
from nanochat.engine import Engine
from nanochat.families import hf
from nanochat.gpt import GPT, GPTConfig
from nanochat.ground.sharding import whole_weights
from nanochat.ranks import lay_out
from nanochat.run.long_context import NewContext
from nanochat.tokenizer import EXPORTED_NAME
from nanochat.train import make_adamw, next_token_loss, train_step
from scripts import export

transformers = pytest.importorskip("transformers", reason="the extra `dev` brings transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 384, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 96, "rope_theta": 1000.0}
CASES: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2 window": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 10, "tie_word_embeddings": True, "rope_theta": 1e6},
    "qwen3 one kv head, yarn": {
        "model_type": "qwen3", "head_dim": 14, "num_key_value_heads": 1, "rope_parameters": YARN, "rms_norm_eps": 1e-5,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "head_dim": 10, "num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True,
        "moe_intermediate_size": 20,
    },
    "qwen3_moe tied, plain weights": {
        "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 1, "tie_word_embeddings": True,
        "moe_intermediate_size": 36, "head_dim": 6,
    },
    "qwen3_moe window": {
        "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 8, "use_sliding_window": True,
        "sliding_window": 16, "moe_intermediate_size": 8, "head_dim": 6,
    },
    "llama": {"model_type": "llama", "num_key_value_heads": 8},
    "llama3": {"model_type": "llama", "head_dim": 18, "rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "llama linear": {
        "model_type": "llama", "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10_000.0},
    },
    "mistral": {"model_type": "mistral", "sliding_window": 24},
    "mistral without a window": {"model_type": "mistral", "sliding_window": None, "num_key_value_heads": 4},
    "phi3": {"model_type": "phi3", "pad_token_id": None, "rope_theta": 250_000.0},
    "phi3 window": {"model_type": "phi3", "pad_token_id": None, "sliding_window": 24, "num_key_value_heads": 8},
}  # fmt: skip
GREEDY = (
    "qwen2",
    "qwen2 window",
    "qwen3",
    "qwen3_moe",
    "llama3",
    "mistral",
    "phi3",
)  # one of a kind; decoding costs the suite's time


def make_oracle(case: str) -> Any:
    """A random model of transformers in fp32, whose every weight matters."""
    config = transformers.AutoConfig.for_model(**{**SIZES, **CASES[case]})
    config.torch_dtype = torch.float32
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.3 if parameter.ndim == 1 else 0.15)
    return model.float().eval()


def save(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    tiny_tokenizer().save(folder, EXPORTED_NAME)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Every case's folder, as transformers writes it."""
    made = tmp_path_factory.mktemp("folders")
    return {case: save(make_oracle(case), made / case.replace(" ", "_").replace(",", "")) for case in CASES}


@torch.no_grad()
def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens) if isinstance(model, GPT) else model(tokens).logits


def oracle_of(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


TOKENS = torch.randint(0, 300, (2, 80), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_transformers_in_both_directions(folders, tmp_path, case):
    folder = folders[case]
    model, _, meta = load_model(str(folder), "cpu")
    expected = logits_of(oracle_of(folder), TOKENS)
    assert (logits_of(model, TOKENS) - expected).abs().max() < 1e-4
    assert expected.std() > 0.1  # or anything would be close
    assert (meta["stage"], meta["step"], meta["pretraining"]["family"]) == ("hf", 0, CASES[case]["model_type"])

    # Back: the weights are the same bits, in one file and in several, and transformers reads them as before.
    family = meta["pretraining"]["family"]
    theirs = hf.from_config(model.config, family)
    assert hf.to_config(json.loads(json.dumps(theirs))) == model.config
    for shard_bytes in (1 << 30, 40_000):
        out = tmp_path / str(shard_bytes)
        out.mkdir()
        (out / "config.json").write_text(json.dumps(theirs))
        files = hf.write_weights(out, model.config, whole_weights(model), torch.float32, shard_bytes, family)
        assert (len(files) > 3) == (shard_bytes == 40_000)
        original = load_file(folder / "model.safetensors")
        written: dict[str, torch.Tensor] = {}
        for path in out.glob("*.safetensors"):
            written |= load_file(path)
        assert set(written) == set(original)
        assert all(torch.equal(written[name], original[name]) for name in original)
        assert torch.equal(logits_of(oracle_of(out), TOKENS), expected)
    # The sharded folder, read here.
    tiny_tokenizer().save(out, EXPORTED_NAME)
    again, _, _ = load_model(str(out), "cpu")
    assert all(torch.equal(again.state_dict()[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("case", GREEDY)
def test_greedy_replies_are_transformers(folders, case):
    model, tokenizer, _ = load_model(str(folders[case]), "cpu")
    engine = Engine(model, tokenizer, cpu_device())
    engine.stop_ids = set()
    engine.call_start = engine.call_end = -1
    prompt = TOKENS[0, :40].tolist()
    ours = engine.generate_batch(prompt, max_tokens=256, temperature=0.0)[0][0]
    oracle = oracle_of(folders[case])
    theirs = oracle.generate(
        torch.tensor([prompt]), max_new_tokens=256, do_sample=False, pad_token_id=0, attention_mask=torch.ones(1, 40)
    )
    assert len(ours) == 40 + 256 and ours == theirs[0].tolist()


def test_a_bf16_folder_keeps_its_bits(folders, tmp_path):
    folder = save(oracle_of(folders["qwen2"]).bfloat16(), tmp_path / "bf16")
    original = load_file(folder / "model.safetensors")
    model, _, meta = load_model(str(folder), "cpu")
    assert model.embedding.weight.dtype == torch.float32 and model_folder.stored_dtype(folder) == torch.bfloat16
    (tmp_path / "out").mkdir()
    hf.write_weights(tmp_path / "out", model.config, whole_weights(model), torch.bfloat16)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert set(written) == set(original)
    assert all(torch.equal(written[name], original[name]) for name in original)


def loaded_rows(device, folder: str) -> dict[str, torch.Tensor]:
    """On a rank: the whole weights of a model that was loaded sharded."""
    layout = lay_out(device, "fsdp", 1)
    model, _, _ = load_folder(Path(folder), device, layout=layout)
    weights = {name: parameter.full_tensor() for name, parameter in model.state_dict().items()}
    return {**weights, "held": torch.tensor(sum(p.to_local().numel() for p in model.parameters()))}


@pytest.mark.slow
def test_every_rank_reads_its_rows(folders):
    """Two ranks together have what one has; the rows of q, k and v end in the middle of a rank's share."""
    folder = str(folders["qwen2"])
    model, _, _ = load_model(folder, "cpu")
    total = sum(parameter.numel() for parameter in model.parameters())
    for weights in run_ranks(loaded_rows, folder):
        assert weights.pop("held") < 0.52 * total
        for name, weight in model.state_dict().items():
            assert torch.equal(weights[name], weight), name


def test_an_imported_model_is_exported_with_its_tokenizer(folders, tmp_path, monkeypatch):
    """From a family's folder to another: config, weights, ids and template are the same in transformers."""
    source = save_family(tmp_path / "source", "qwen3")
    oracle = make_oracle("qwen3")
    oracle.resize_token_embeddings(700)  # wider than the vocabulary, as Qwen's
    oracle.generation_config.eos_token_id = json.loads((source / "generation_config.json").read_text())["eos_token_id"]
    oracle.bfloat16().save_pretrained(source)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    call("export", "--to", "hf", "--source", str(source), "--out", str(tmp_path / "out"))
    written = load_file(tmp_path / "out" / "model.safetensors")
    original = load_file(source / "model.safetensors")
    assert set(written) == set(original) and written["model.norm.weight"].dtype == torch.bfloat16
    assert all(torch.equal(written[name], original[name]) for name in original)
    _, before, _ = load_model(str(source), "cpu")
    _, after, _ = load_model(str(tmp_path / "out"), "cpu")
    assert after.fingerprint() == before.fingerprint()
    theirs = [transformers.AutoTokenizer.from_pretrained(folder) for folder in (source, tmp_path / "out")]
    messages = [{"role": "user", "content": "Hello! 从前 12"}]
    ids = [one.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) for one in theirs]
    assert ids[0] == ids[1] and len(ids[0]) > 10


EXTENDED = {"qwen3": "yarn", "llama": "linear", "mistral without a window": "theta"}
EXTENDED |= dict.fromkeys(("llama3", "llama linear", "qwen3 one kv head, yarn"), "auto")


@pytest.mark.parametrize("case", EXTENDED)
def test_an_extended_context_is_transformers(folders, tmp_path, case):
    """Written as the family, positions beyond the original context of 384 tokens have transformers' logits."""
    model, _, meta = load_model(str(folders[case]), "cpu", prepare=[NewContext(768, EXTENDED[case])])
    theirs = hf.from_config(model.config, meta["pretraining"]["family"])
    assert theirs["max_position_embeddings"] == meta["pretraining"]["context"] == 768
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    hf.write_weights(tmp_path, model.config, whole_weights(model), torch.float32)
    tokens = torch.randint(0, 300, (1, 500), generator=torch.Generator().manual_seed(4))
    expected = logits_of(oracle_of(tmp_path), tokens)
    assert (logits_of(model, tokens) - expected).abs().max() < 1e-4
    assert hf.FORMAT.describe(tmp_path)[0] == model.config
    # It is not what the original computes.
    assert (logits_of(oracle_of(folders[case]), tokens) - expected)[:, 400:].abs().max() > 0.01


@pytest.mark.parametrize(("stated", "context"), [(96, 384), (120, 384), (120, 300), (120, 768)])
def test_yarn_of_a_folder_reaches_its_factor_times_the_original_context(folders, tmp_path, stated, context):
    """As Qwen3 is extended: 4 times 96 tokens are trained, whichever max_position_embeddings the folder states.

    Up to there transformers computes the same from the folder as it is; beyond, the factor grows by what is missing.
    """
    folder = tmp_path / "model"
    shutil.copytree(folders["qwen3 one kv head, yarn"], folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": stated}))
    model, _, meta = load_model(str(folder), "cpu", prepare=[NewContext(context, "auto")])
    scaling = model.config.rope_scaling
    assert scaling is not None and (scaling.factor, scaling.original_len) == (max(4.0, context / 96), 96)
    assert model.config.sequence_len == meta["pretraining"]["context"] == context
    if context <= 384:
        tokens = torch.randint(0, 300, (1, context), generator=torch.Generator().manual_seed(5))
        assert (logits_of(model, tokens) - logits_of(oracle_of(folder), tokens)).abs().max() < 1e-4


def test_an_imported_models_pretraining_is_continued(folders, tmp_path, monkeypatch):
    """On text, with its tokenizer, in longer rows than it knew; then it is a folder of its family again."""
    source = tmp_path / "tiny-qwen"
    shutil.copytree(folders["qwen3"], source)
    save_family(source, "qwen3")
    oracle = oracle_of(source)
    oracle.resize_token_embeddings(700)
    oracle.save_pretrained(source)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    flags = ("--device=cpu", "--dtype=float32", "--device_batch_size=1", "--eval_tokens=768", "--log_every=1")
    sizes = ("--max_seq_len=768", "--num_iterations=4", "--eval_every=0", "--learning_rate=1e-3")
    call("mid_train", "--source", str(source), "--data=demo:0.5,pydoc:0.5", *flags, *sizes)
    lines = (tmp_path / "base/runs/base/tiny-qwen/metrics.jsonl").read_text().splitlines()
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    assert last["val_bpb"] < first["val_bpb_before"]
    assert last["val_bpb"] == pytest.approx((last["val_bpb_demo"] + last["val_bpb_pydoc"]) / 2)
    call("export", "--to", "hf", "--source", "base", "--out", str(tmp_path / "out"))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["model_type"], config["max_position_embeddings"], config["rope_scaling"]["factor"]) == (
        "qwen3",
        768,
        2,
    )
    model, tokenizer, meta = load_model("base", "cpu")
    assert meta["pretraining"]["data"] == "web,demo:0.5,pydoc:0.5" and meta["pretraining"]["family"] == "qwen3"
    tokens = torch.tensor([tokenizer.encode("从前 a small boat ") * 60])[:, :700]
    assert (logits_of(oracle_of(tmp_path / "out"), tokens) - logits_of(model, tokens)).abs().max() < 1e-4


def test_sampling_is_the_folders(folders, tmp_path):
    folder = tmp_path / "sampling"
    shutil.copytree(folders["llama"], folder)
    settings = folder / "generation_config.json"
    for content, expected in (
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}, (0.6, 20, 0.95)),
        ({"do_sample": True, "temperature": "hot"}, (0.8, 0, 1.0)),
        ({"eos_token_id": 2}, (0.8, 0, 1.0)),
    ):
        settings.write_text(json.dumps(content))
        _, _, meta = load_model(str(folder), "cpu")
        assert tuple(meta["sampling"][name] for name in ("temperature", "top_k", "top_p")) == expected
    assert model_folder.tag_of(folder) == "sampling"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt_neox"}, "model_type gpt_neox is not known: one of qwen2"),
        # Families that people bring, by name; Qwen3.5's folders have both.
        (
            {"model_type": "qwen3_5_text"},
            "qwen3_5_text is not read: it needs layers with a recurrent state (GatedDelta",
        ),
        (
            {"model_type": "qwen3_5", "vision_config": {"depth": 2}},
            "its attention, and it has a part for vision. Dense",
        ),
        (
            {"model_type": "qwen2_5_vl", "vision_config": {"depth": 2}},
            "qwen2_5_vl is not read: it has a part for vision.",
        ),
        ({"model_type": "gemma3_text"}, "GELU in the MLP"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "mixtral is not read: it needs experts under other names"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "mlp_only_layers [0]: layers without experts"),
        (
            {"model_type": "qwen3_moe", "num_experts_per_tok": 4, "num_experts": 3},
            "per_tok 4 of num_experts 3: at most all",
        ),
        ({"model_type": "qwen3_moe", "num_experts": 1 << 20}, "at most all of at most 4,096"),
        ({"model_type": "qwen3_moe", "num_experts": 1 << 40}, "num_experts is"),
        ({"model_type": "qwen3_moe", "num_experts": 2, "num_experts_per_tok": 1}, "weights have no model.layers.0"),
        ({"model_type": "phi"}, "phi is not read: it needs attention beside the MLP, LayerNorm, biases"),
        ({"model_type": "glm4"}, "norms after attention and MLP, and rotary positions in a part"),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope", "factor": 2}}, "rope_type longrope is not known"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"num_local_experts": 8}, "a mixture of experts"),
        ({"quantization_config": {"bits": 4}}, "quantized weights"),
        ({"partial_rotary_factor": 0.5}, "a part of the channels"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type dynamic is not known"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "mrope"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
        ({"rope_scaling": [1]}, "not an object"),
        ({"rope_parameters": {"full_attention": LLAMA3, "sliding_attention": {}}}, "by layer type (full_attention, s"),
        ({"rope_parameters": {"full_attention": None}}, "by layer type (full_attention)"),
        ({"rope_parameters": {"global": LLAMA3}}, "by layer type (global)"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 1}}, "turns"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"hidden_size": 1 << 40}, "hidden_size"),
        ({"hidden_size": 96}, "config.json asks for"),
        ({"num_hidden_layers": 2}, "2 layers, its weights have 3"),
        ({"num_hidden_layers": 100_000}, "100000 layers: from 1 to 1000"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"head_dim": 7}, "odd"),
        ({"vocab_size": 1000}, "config.json asks for"),
        ({"vocab_size": 40}, "its tokenizer has"),
        ({"max_position_embeddings": 1 << 24, "head_dim": None}, "a context of"),
        ({"vocab_size": None}, "vocab_size is None"),
    ],
)
def test_what_cannot_be_computed_is_named(folders, tmp_path, change, words):
    folder = tmp_path / "model"
    shutil.copytree(folders["llama"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    line = complaint(lambda: load_model(str(folder), "cpu"))
    assert words in line and str(folder) in line


def resave(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """The folder's weights with these tensors; None leaves one out."""
    tensors = {**load_file(folder / WEIGHTS), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / WEIGHTS)


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def replace_by_pipe(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


WEIGHTS, NORM = "model.safetensors", "model.norm.weight"
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda folder: (folder / WEIGHTS).unlink(), "no model.safetensors"),
    "pickled": (lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"), "pickled"),
    "gguf": (lambda folder: (folder / WEIGHTS).rename(folder / "model.gguf"), "GGUF"),
    "cut short": (lambda folder: os.truncate(folder / WEIGHTS, 5000), "cannot be used"),
    "a pipe": (replace_by_pipe, "no regular file"),
    "a long header": (lambda folder: (folder / WEIGHTS).write_bytes(b"\0" * 7 + b"\x10{}"), "header"),
    "another dtype": (lambda folder: resave(folder, {NORM: torch.ones(48, dtype=torch.int64)}), "stored as I64"),
    "a tensor too many": (
        lambda folder: resave(folder, {"model.layers.0.mlp.gate_proj.bias": torch.ones(40)}), "gate_proj.bias",
    ),
    "a tensor missing": (lambda folder: resave(folder, {NORM: None}), "no model.norm.weight"),
    "a shard missing": (lambda folder: write_index(folder, {NORM: "model-00001-of-00002.safetensors"}), "is missing"),
    "outside": (lambda folder: write_index(folder, {NORM: "../model.safetensors"}), "not plain"),
    "no map": (lambda folder: write_index(folder, [WEIGHTS]), "weight_map"),
    "an index that lies": (lambda folder: write_index(folder, {"nothing": WEIGHTS}), "nothing"),
    "no config": (lambda folder: (folder / "config.json").write_text("[]"), "not an object"),
    "a deep config": (lambda folder: (folder / "config.json").write_text("[" * 100_000), "nested"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_costs_one_line(folders, tmp_path, name):
    folder = tmp_path / "model"
    shutil.copytree(folders["llama"], folder)
    damage, words = BROKEN[name]
    damage(folder)
    assert words in complaint(lambda: load_model(str(folder), "cpu"))


def test_names_that_older_folders_have(folders, tmp_path):
    """A tied head that is stored all the same, rotary tables, and settings in the form before transformers 5."""
    folder = tmp_path / "model"
    shutil.copytree(folders["llama3"], folder)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    extra = {"lm_head.weight": head, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(9)}
    save_file({**tensors, **extra}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    (folder / "config.json").write_text(json.dumps(config))
    old, _, _ = load_model(str(folder), "cpu")
    new, _, _ = load_model(str(folders["llama3"]), "cpu")
    assert old.config == new.config
    assert torch.equal(logits_of(old, TOKENS), logits_of(new, TOKENS))


def test_a_head_beside_tied_embeddings_is_kept(folders, tmp_path, capsys):
    """As transformers keeps it; one that equals the embedding stays tied (above)."""
    folder = tmp_path / "model"
    shutil.copytree(folders["qwen3"], folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model, _, meta = load_model(str(folder), cpu_device())
    (line,) = capsys.readouterr().err.splitlines()
    assert str(folder) in line and "tie_word_embeddings is true, but lm_head.weight is not the embedding" in line
    assert not model.config.tied_head and meta["model"]["tied_head"] is False
    expected = logits_of(oracle_of(folder), TOKENS)
    assert (logits_of(model, TOKENS) - expected).abs().max() < 1e-4
    assert (logits_of(oracle_of(folders["qwen3"]), TOKENS) - expected).abs().max() > 0.01

    out = tmp_path / "out"
    export.main(export.Config(to="hf", source=str(folder), out=str(out)))
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(load_file(out / "model.safetensors")["lm_head.weight"], tensors["lm_head.weight"])


def test_phi_after_a_longer_context_is_written_as_llama(folders):
    """Its config.json can only say longrope."""
    model, _, _ = load_model(str(folders["phi3"]), "cpu", prepare=[NewContext(768, "yarn")])
    assert model.config.rope_scaling is not None
    assert not hf.computes("phi3", model.config) and hf.family_of(model.config) == "llama"
    plain, _, _ = load_model(str(folders["phi3"]), "cpu")
    assert hf.computes("phi3", plain.config)


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_the_command_writes_a_folder_of_its_own_family(folders, tmp_path, family):
    source = tmp_path / "tiny"
    shutil.copytree(folders[family], source)
    out = tmp_path / "out"
    call("export", "--to", "hf", "--source", str(source), "--out", str(out))
    written = load_file(out / "model.safetensors")
    original = load_file(source / "model.safetensors")
    assert set(written) == set(original) and all(torch.equal(written[name], original[name]) for name in original)
    assert ("model.layers.0.self_attn.qkv_proj.weight" in written) == (family == "phi3")
    assert torch.equal(logits_of(oracle_of(out), TOKENS), logits_of(oracle_of(source), TOKENS))


def test_our_own_models_have_a_family_or_none():
    qwen3 = GPTConfig(
        n_layer=2, mlp="swiglu", qk_norm="before_rotary", qk_scale=1.0, norm_weight=True, embedding_norm=False,
        value_embeddings=False, residual_scales=False, logit_cap=0.0,
    )  # fmt: skip
    assert hf.family_of(qwen3) == "qwen3"
    assert hf.family_of(GPTConfig()) is None
    # A family that a model was read from, and that cannot say what it has become.
    assert hf.computes("qwen3", qwen3) and not hf.computes("llama", qwen3)
    assert not hf.computes("llama", dataclasses.replace(qwen3, qk_norm="none", mlp="relu2"))


@pytest.mark.slow
def test_training_is_that_of_transformers(folders):
    """Two steps of AdamW on the same tokens."""
    folder = folders["qwen3"]
    device = cpu_device()
    ours, _, _ = load_model(str(folder), "cpu")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rate = 1e-3
    ids = torch.randint(ours.config.vocab_size, (2, 65), generator=torch.Generator().manual_seed(0))
    inputs = ids[:, :-1].contiguous()
    targets = ids[:, 1:].contiguous()
    optimizer = make_adamw(ours.train(), rate, device)
    their_optimizer = torch.optim.AdamW(theirs.train().parameters(), lr=rate, betas=(0.9, 0.999), weight_decay=0)
    losses: list[list[float]] = [[], []]
    for _ in range(2):
        losses[0].append(float(train_step(ours, optimizer, [[inputs, targets]], next_token_loss, device=device).loss))
        loss = theirs(inputs, labels=targets, shift_labels=targets, use_cache=False).loss
        loss.backward()
        their_optimizer.step()
        their_optimizer.zero_grad()
        losses[1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][1] < losses[0][0]
