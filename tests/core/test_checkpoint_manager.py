"""Checkpoints: exact round trips, files from outside never run or crash anything.

test_saver.py has the saving side: kills, full disks, lost ranks; test_model_folder.py damage, and how one is found.
"""

import hashlib
import json
import os
import pickle
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import BYTES, complaint, cpu_device, momentum, save_checkpoint, save_step, smallest_model

from nanochat import model_folder
from nanochat.checkpoint_manager import load_model
from nanochat.gpt import GPT, GPTConfig
from nanochat.ground import paths
from nanochat.ground.cli import UserError
from nanochat.loader import LoaderState, Position, ShardState
from nanochat.model_folder import newest, steps
from nanochat.optim import Optimizer, ParameterGroup
from nanochat.run import saver
from nanochat.run.saver import load_training, set_aside
from nanochat.train import next_token_loss, train_step

FILES = (
    *("manifest.json", "meta.json", "model.safetensors", "tokenizer.json", "training.json"),
    "training.rank0.safetensors",
)
DEVICE = cpu_device()

pytestmark = pytest.mark.usefixtures("base_folder")


def same_tensors(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def rewrite_manifest(step_folder: Path) -> None:
    """Make a file that was changed on purpose look as it was saved."""
    names = [path for path in step_folder.iterdir() if path.name != "manifest.json"]
    manifest = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in names
    }
    (step_folder / "manifest.json").write_text(json.dumps(manifest))


# ---------------------------------------------------------------------- round trip


def test_round_trip_is_exact(folder):
    """Weights with NaN and negative zero, a real optimizer's state, the loader's, the random generator's."""
    model = smallest_model(3)
    with torch.no_grad():
        model.embedding.weight[0, :2] = torch.tensor([torch.nan, -0.0])
    bits = {name: tensor.clone().view(torch.int32) for name, tensor in model.state_dict().items()}
    optimizer = optimizer_of(smallest_model(1), steps=2)
    shards = {0: ShardState([Position(3, 32, 7)], [torch.arange(4).int().numpy()]), 1: ShardState([Position(2)], [])}
    loader = LoaderState(12, shards, 2)
    torch.manual_seed(5)
    meta = {"stage": "base", "note": "é"}
    path = saver.save(folder, 12, model, BYTES, meta, optimizer.state_dict(), loader.to_tensors(), DEVICE)
    expected = torch.randn(4)

    assert path == folder / "step_000012"
    assert sorted(file.name for file in path.iterdir()) == list(FILES)
    assert [file.name for file in folder.iterdir()] == ["step_000012"]
    found = newest(folder)
    assert found is not None and found[0] == path
    meta = found[1]
    assert (meta["step"], meta["stage"], meta["note"], meta["world_size"]) == (12, "base", "é", 1)
    assert GPTConfig(**meta["model"]) == model.config
    assert meta["tokenizer"] == BYTES.fingerprint()

    loaded, tokenizer, _ = load_model("base", DEVICE)
    assert same_tensors({name: tensor.view(torch.int32) for name, tensor in loaded.state_dict().items()}, bits)
    assert not loaded.training
    assert tokenizer.fingerprint() == BYTES.fingerprint()
    again = optimizer_of(smallest_model(1), steps=0)
    (loader_share,), (rng,) = load_training(path, meta, again.state_dict())
    assert same_tensors(again.state_dict(), optimizer.state_dict())
    merged = LoaderState.merge([loader_share])
    assert (merged.row, merged.shard_count) == (12, 2)
    assert same_tensors(merged.to_tensors(), loader.to_tensors())
    DEVICE.set_rng_state(rng)
    assert torch.equal(torch.randn(4), expected)


def optimizer_of(model: GPT, steps: int) -> Optimizer:
    groups = model.parameter_groups()
    kinds = [("muon" if role in ("matrix", "qkv") else "adamw", groups[role]) for role in groups]
    optimizer = Optimizer([ParameterGroup(kind, group, 0.01) for kind, group in kinds if group])
    for seed in range(steps):
        tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(seed))
        train_step(model, optimizer, [(tokens[:, :-1], tokens[:, 1:])], next_token_loss, device=DEVICE)
    return optimizer


def test_weights_alone_load_but_do_not_resume(folder):
    path = save_checkpoint(folder, 1, smallest_model(), BYTES, {"world_size": 0})
    for file in path.glob("training*"):
        file.unlink()
    rewrite_manifest(path)
    load_model(str(path), DEVICE)
    with pytest.raises(UserError, match="--source"):
        load_training(path, model_folder.verify(path), momentum())


# ---------------------------------------------------------------------- what was there before


def test_an_earlier_run_is_set_aside_and_not_lost(folder):
    metrics = paths.run_dir("base", "tiny") / "metrics.jsonl"
    assert set_aside(folder, metrics.parent, DEVICE) is None
    for run, where in enumerate(("tiny.1", "tiny.2")):
        save_step(folder, 5, seed=run)
        metrics.parent.mkdir(parents=True)
        metrics.write_text(str(run))
        assert set_aside(folder, metrics.parent, DEVICE) == folder.with_name(where)
        assert metrics.parent.with_name(where).joinpath("metrics.jsonl").read_text() == str(run)
        assert steps(folder) == []
        found = newest(folder.with_name(where))
        assert found is not None and found[1]["seed"] == run


def test_a_run_that_cannot_have_its_folder_moves_nothing(folder):
    save_step(folder, 5)
    runs = paths.run_dir("base", "tiny")
    runs.parent.mkdir(parents=True)
    runs.write_text("a file in its place")
    with pytest.raises(FileExistsError):
        set_aside(folder, runs, DEVICE)
    assert steps(folder) == [5] and runs.is_file()


SAVED = {
    "model": {"n_layer": 2, "tied_head": False}, "tokenizer": "", "source": None, "config": {"tasks": ""},
    "fingerprints": {"tokens a step": 256},
}  # fmt: skip


CHANGES = [
    ({}, ""),
    ({"config": {"tasks": "addition"}}, "--tasks .*addition"),
    ({"fingerprints": {"tokens a step": 512}}, "--total_batch_size .*256.*512"),
    ({"fingerprints": {"what --data names": "text"}}, "--data .*text"),
    # The weights have the same shapes, so that nothing else would say that the model is another one.
    ({"model": {"n_layer": 2, "tied_head": True}}, "tied_head False.*True"),
]


@pytest.mark.parametrize(("changes", "words"), CHANGES)
def test_what_has_changed_since_a_run_has_a_name_in_the_message(changes, words):
    def resume() -> list[str]:
        return saver._refuse_changes(SAVED, {**SAVED, **changes}, ["tasks"], Path("step"))

    assert re.search(words, complaint(resume)) if words else resume() == []


# ---------------------------------------------------------------------- nothing from outside runs or crashes


class Malicious:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def load_what_it_is_part_of(path: Path, name: str) -> None:
    if name.startswith("training"):
        load_training(path, model_folder.verify(path), momentum())
    else:
        load_model(str(path), DEVICE)


@pytest.mark.parametrize("name", FILES)
def test_a_pickle_in_place_of_a_file_runs_nothing(tmp_path, folder, name):
    path = save_step(folder, 1)
    marker = tmp_path / "it ran"
    for save in (torch.save, lambda value, file: file.write_bytes(pickle.dumps(value))):
        save(Malicious(marker), path / name)
        with pytest.raises(UserError):
            load_model("base", DEVICE)
        if name != "manifest.json":
            rewrite_manifest(path)
        with pytest.raises(UserError):
            load_what_it_is_part_of(path, name)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Malicious(marker)))
    assert marker.exists()  # the payload works where something runs it


@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", FILES[1:])
def test_mutated_files_are_an_error_not_a_crash(folder, name, count):
    """Under a manifest that matches, so that the file itself is parsed; most changes of safetensors are in the header,
    and changes of JSON are anywhere."""
    path = save_step(folder, 1)
    whole, source, refused = (path / name).read_bytes(), random.Random(name), 0
    header = 8 + int.from_bytes(whole[:8], "little") if name.endswith("safetensors") else len(whole)
    for trial in range(count):
        data = bytearray(whole)
        for _ in range(source.randrange(1, 4)):
            place = source.randrange(8 if trial % 4 == 0 else header if trial % 4 < 3 else len(whole))
            data[place] = source.randrange(256)
        kind = source.randrange(6)
        if kind == 0:
            data = data[: source.randrange(len(data))]
        elif kind == 1:
            data += bytes(source.randrange(1, 64))
        (path / name).write_bytes(data)
        rewrite_manifest(path)
        try:
            load_what_it_is_part_of(path, name)
        except UserError as error:
            refused += 1
            assert re.search("train it again|restore it or train|format version", str(error))
        except ValueError:  # a resume makes one line of it
            refused += 1
            assert name.startswith("training")
    assert refused > 0.3 * count


# What replaces entries of a good meta.json, and sizes of its model.
META: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(({}, sizes) for sizes in ({"unknown": 1}, {"n_head": 0, "head_dim": 0}, {"n_kv_head": 3}, {"width": 6})),
    ({}, {"vocab_size": "many"}),
    *(({"sampling": value}, {}) for value in ({"temperature": -1}, [["temperature", 1]])),
    *(({"tasks": value}, {}) for value in ("stories", 7, [1], ["stories"] * 10**5)),
    *(({"stage": value}, {}) for value in (["sft"], "s" * 10**6)),
    *(({"trained_at": value}, {}) for value in ("today", 10**30)),
    *((changes, {}) for changes in ({"model": None}, {"version": "1"}, {"pretraining": {"data": 3}})),
]


def test_meta_data_that_describes_no_model_is_one_error(folder):
    path = save_step(folder, 1)
    meta = json.loads((path / "meta.json").read_text())
    without_model = {key: value for key, value in meta.items() if key != "model"}
    hostile = [[], "text", without_model]
    hostile += [{**meta, "model": {**meta["model"], **sizes}, **changes} for changes, sizes in META]
    for one in hostile:
        (path / "meta.json").write_text(json.dumps(one))
        rewrite_manifest(path)
        assert len(complaint(lambda: load_model(str(path), DEVICE))) < 1000
