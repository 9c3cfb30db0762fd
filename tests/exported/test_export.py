"""scripts.export: a folder that is exact in fp32, and that is loaded and chatted with by its path.

That transformers computes the same from it is shown in tests/promises/test_p08_interchange_is_exact.py.
"""

import json
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
from tiny import cpu_device, lively_model, save_checkpoint, tiny_config, tiny_tokenizer

from nanochat.checkpoint_manager import load_model
from nanochat.gpt import GPTConfig
from nanochat.ground import cli, paths
from nanochat.losses import masked_loss
from nanochat.packing import pack_sequences
from nanochat.train import make_adamw, train_step
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
    older.write_text(export.MODELING.read_text().replace("key_offset", "other_field"))
    monkeypatch.setattr(export, "MODELING", older)
    save(paths.checkpoint_dir("sft", "offset"), key_offset=True)
    code, line = mistake(capsys, "export", "--to=hf", "--source=sft/offset", f"--out={base / 'out'}")
    assert code == 1 and "GPTConfig.key_offset" in line
    assert not list(base.glob("out*"))
    call("export", "--to=hf", "--source=sft/tiny", f"--out={base / 'out'}")  # which has no such part


STEPS = 20


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> SimpleNamespace:
    """An exported model of our own shape, eight conversations, and what our loop makes of the two in 20 steps."""
    folder = tmp_path_factory.mktemp("learned")
    config = tiny_config(vocab_size=tiny_tokenizer().vocab_size, sequence_len=256, key_offset=True)
    ours = lively_model(config).train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(folder))
        save_checkpoint(paths.checkpoint_dir("sft", "own"), 1, ours, tiny_tokenizer(), {"stage": "sft"})
        call("export", "--to=hf", "--source=sft", f"--out={folder / 'out'}")
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in (24, 17, 9, 30, 12, 28, 21, 14):  # of different lengths: a mean of means would be another loss
        tokens = torch.randint(config.vocab_size, (length,), generator=generator)
        labels = tokens.where(torch.arange(length) > length // 3, -100)
        rows.append({"input_ids": tokens.tolist(), "labels": labels.tolist()})
    masks = [[int(label != -100) for label in row["labels"]] for row in rows]
    packed = pack_sequences([row["input_ids"] for row in rows], masks, 64)
    device = cpu_device()
    optimizer = make_adamw(ours, 1e-3, device)
    losses = []
    for _ in range(STEPS):
        batches = packed.micro_batches(1, device)
        losses.append(float(train_step(ours, optimizer, batches, masked_loss, device=device).loss))
    assert losses[-1] < losses[0] - 0.5
    return SimpleNamespace(folder=folder, rows=rows, losses=losses, weights=ours.state_dict())


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Rows of the length of the longest, as transformers' collators make them."""
    batch = {}
    for name, value in (("input_ids", 0), ("labels", -100)):
        values = [torch.tensor(row[name]) for row in rows]
        batch[name] = torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=value)
    return batch


@pytest.mark.parametrize("packing", ["padded", "packed"])
@pytest.mark.parametrize(
    ("program", "accumulation"), [("Trainer", 1), ("Trainer", 8), pytest.param("TRL", 4, marks=pytest.mark.slow)]
)
def test_other_trainers_learn_what_our_loop_learns(learned, monkeypatch, program, accumulation, packing):
    """However a step accumulates its eight conversations, and whether they are padded or share rows."""
    transformers = pytest.importorskip("transformers", reason="the extra `dev` brings transformers")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(learned.folder / "modules"))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        learned.folder / "out", trust_remote_code=True, dtype=torch.float32
    )
    settings: dict[str, Any] = {
        "output_dir": str(learned.folder / "trained"), "per_device_train_batch_size": 8 // accumulation,
        "gradient_accumulation_steps": accumulation, "max_steps": STEPS, "learning_rate": 1e-3, "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant", "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no",
        "disable_tqdm": True,
    }  # fmt: skip
    trainer: Any
    if program == "TRL":
        trl = pytest.importorskip("trl", reason="the extra `dev` brings trl")
        datasets = pytest.importorskip("datasets", reason="the extra `dev` brings datasets")
        settings |= {"padding_free": packing == "packed", "max_length": None}
        arguments = trl.SFTConfig(**settings, dataset_kwargs={"skip_prepare_dataset": True})
        tokenizer = transformers.AutoTokenizer.from_pretrained(learned.folder / "out")
        data = datasets.Dataset.from_list(learned.rows)
        trainer = trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)
    else:
        collate = transformers.DataCollatorWithFlattening() if packing == "packed" else padded
        trainer = transformers.Trainer(model, transformers.TrainingArguments(**settings), collate, learned.rows)
    losses = []
    training_step = trainer.training_step

    def recorded(*inputs: Any, **options: Any) -> torch.Tensor:
        loss = training_step(*inputs, **options)
        losses.append(loss)
        return loss

    monkeypatch.setattr(trainer, "training_step", recorded)
    trainer.train()
    sums = torch.stack(losses).view(STEPS, accumulation).sum(dim=1)
    assert sums.tolist() == pytest.approx(learned.losses, rel=1e-5)
    for name, weight in model.state_dict().items():
        assert (weight - learned.weights[name]).abs().max() < 1e-5, name
    assert model.gradient_checkpointing == (program == "TRL")  # TRL's default


def exported_model(**shape: Any) -> tuple[Any, Any]:
    """A model of ours, and the same as the modeling file computes it."""
    from nanochat.exported.modeling_nanochat import NanochatConfig, NanochatForCausalLM

    ours = lively_model(tiny_config(**shape))
    settings = asdict(ours.config)
    del settings["rope_scaling"]
    model = NanochatForCausalLM(NanochatConfig(**settings, **export.derived_settings(ours.config))).eval()
    model.load_state_dict(ours.state_dict())
    return ours, model


@pytest.mark.parametrize("shape", [tiny.SHAPES["fast"], tiny.SHAPES["ungrouped"], {"tied_head": True}])
def test_documents_of_a_row_do_not_attend_to_each_other(shape):
    """Their `position_ids` divide a row, also one that begins, ends or is interrupted by padding."""
    pytest.importorskip("transformers", reason="the extra `dev` brings transformers")
    ours, model = exported_model(**shape)
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(ours.config.vocab_size, (length,), generator=generator) for length in (13, 1, 1, 17)]
    padding = torch.zeros(2, dtype=torch.long)
    for pieces in (
        [*documents],
        [padding, *documents],
        [*documents, padding],
        [documents[0], padding, *documents[1:]],
    ):
        row = torch.cat(pieces)[None]
        positions = torch.cat([torch.arange(len(piece)) for piece in pieces])[None]
        mask = torch.cat([torch.full_like(piece, piece is not padding) for piece in pieces])[None]
        for arguments in ({}, {"attention_mask": mask}):
            found = model(row, position_ids=positions, **arguments).logits[0].split([len(piece) for piece in pieces])
            for piece, logits in zip(pieces, found, strict=True):
                if piece is not padding:
                    assert (logits - ours(piece[None])[0]).abs().max() < 1e-5
    # One document with a gap, as `generate` counts its positions.
    mask = torch.ones(1, 17, dtype=torch.long)
    mask[0, 5:8] = 0
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    found = model(documents[3][None], position_ids=positions, attention_mask=mask).logits[mask == 1]
    expected = model(documents[3][None], attention_mask=mask).logits[mask == 1]
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="position_ids"):
        model(row, seq_idx=positions)


def test_the_output_head_is_the_vocabulary_without_padding():
    """As programs take it: TRL multiplies with its weight, peft leaves it out of `all-linear`, none may resize it."""
    pytest.importorskip("transformers", reason="the extra `dev` brings transformers")
    peft = pytest.importorskip("peft", reason="the extra `dev` brings peft")
    for shape in ({}, {"tied_head": True}):
        ours, model = exported_model(**shape)
        tokens = torch.arange(12)[None]
        head = model.get_output_embeddings()
        output = model(tokens)
        cap = model.config.final_logit_softcapping
        assert torch.equal(cap * torch.tanh(output.last_hidden_state @ head.weight.T / cap), output.logits)
        assert len(head.weight) == ours.config.vocab_size and head.bias is None
        with pytest.raises(ValueError, match="cannot resize"):
            model.resize_token_embeddings(128)
        targets = output.logits.roll(-1, dims=1).argmax(dim=-1)
        labels = targets.roll(1, dims=1)
        loss = model(tokens, labels=labels).loss
        assert torch.equal(loss, model(tokens, shift_labels=targets.index_fill(1, torch.tensor([11]), -100)).loss)
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
        adapted(tokens, labels=labels).loss.backward()
        trained = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
        assert trained and all(parameter.grad is not None for parameter in trained.values())


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
