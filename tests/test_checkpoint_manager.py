"""Checkpoints: exact round trips, damage found, a kill or a full disk at any moment costs nothing, nothing runs."""

import dataclasses
import hashlib
import json
import os
import pickle
import random
import re
import shutil
import threading
from pathlib import Path

import pytest
import torch
from tiny import run_ranks

from nanochat import checkpoint_manager
from nanochat import device as devices
from nanochat.checkpoint_manager import (
    DamagedCheckpoint,
    Training,
    load_model,
    load_training,
    newest,
    save,
    set_aside,
    steps,
)
from nanochat.data.loader import LoaderState, ShardState
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import Optimizer, ParameterGroup
from nanochat.shell import paths, storage
from nanochat.shell.cli import UserError
from nanochat.tokenizer import Tokenizer
from nanochat.train import next_token_loss, train_step

TOKENIZER = Tokenizer([bytes([value]) for value in range(256)])
CONFIG = GPTConfig(vocab_size=TOKENIZER.vocab_size, sequence_len=8, n_layer=1, width=4, n_head=1, n_kv_head=1)
FILES = (
    *("manifest.json", "meta.json", "model.safetensors", "tokenizer.json", "training.json"),
    "training.rank0.safetensors",
)


@pytest.fixture(autouse=True)
def base_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # thousands of saves need not reach the disk
    return tmp_path


@pytest.fixture
def device():
    return devices.init("cpu", "float32")


@pytest.fixture
def folder() -> Path:
    return paths.checkpoint_dir("base", "tiny")


def new_model(seed: int = 0) -> GPT:
    model = GPT(CONFIG)
    model.init_weights(seed)
    return model


def new_training(seed: int = 0) -> Training:
    generator = torch.Generator().manual_seed(seed)
    return Training(
        {"a.momentum": torch.randn(3, 5, generator=generator), "step/count": torch.tensor(7.0)},
        {"row": torch.tensor([seed, 8])},
        {"host": torch.get_rng_state()},
    )


class Holder:
    """What stands for an optimizer here: the tensors of `new_training`."""

    def __init__(self):
        self.tensors = {name: torch.zeros_like(tensor) for name, tensor in new_training().optimizer.items()}

    def state_dict(self) -> dict:
        return self.tensors


def save_step(folder: Path, step: int, device, seed: int = 0, training: bool = True) -> Path:
    meta = {"stage": "base", "seed": seed}
    return save(folder, step, new_model(seed), TOKENIZER, meta, new_training(seed) if training else None, device)


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


def test_round_trip_is_exact(folder, device):
    """Weights with NaN and negative zero, a real optimizer's state, the loader's, the random generator's."""
    model = new_model(3)
    with torch.no_grad():
        model.embedding.weight[0, :2] = torch.tensor([torch.nan, -0.0])
    bits = {name: tensor.clone().view(torch.int32) for name, tensor in model.state_dict().items()}
    optimizer = optimizer_of(new_model(1), steps=2)
    shards = {0: ShardState(3, 32, (torch.arange(4).int().numpy(),)), 1: ShardState(2, 0, ())}
    loader = LoaderState(12, shards, 2)
    torch.manual_seed(5)
    training = Training(optimizer.state_dict(), loader.to_tensors(), device.rng_state())
    path = save(folder, 12, model, TOKENIZER, {"stage": "base", "note": "é"}, training, device)
    expected = torch.randn(4)

    assert path == folder / "step_000012"
    assert sorted(file.name for file in path.iterdir()) == list(FILES)
    assert [file.name for file in folder.iterdir()] == ["step_000012"]
    found = newest(folder)
    assert found is not None and found[0] == path
    meta = found[1]
    assert (meta["step"], meta["stage"], meta["note"], meta["world_size"]) == (12, "base", "é", 1)
    assert GPTConfig(**meta["model"]) == CONFIG
    assert meta["tokenizer"] == TOKENIZER.fingerprint()

    loaded, tokenizer, _ = load_model("base", device)
    assert same_tensors({name: tensor.view(torch.int32) for name, tensor in loaded.state_dict().items()}, bits)
    assert not loaded.training
    assert tokenizer.fingerprint() == TOKENIZER.fingerprint()
    again = optimizer_of(new_model(1), steps=0)
    (loader_share,), (rng,) = load_training(path, meta, again, device)
    assert same_tensors(again.state_dict(), optimizer.state_dict())
    merged = LoaderState.merge([loader_share])
    assert (merged.row, merged.shard_count) == (12, 2)
    assert same_tensors(merged.to_tensors(), loader.to_tensors())
    device.set_rng_state(rng)
    assert torch.equal(torch.randn(4), expected)


def optimizer_of(model: GPT, steps: int) -> Optimizer:
    groups = model.parameter_groups()
    kinds = [("muon" if role in ("matrix", "qkv") else "adamw", groups[role]) for role in groups]
    optimizer = Optimizer([ParameterGroup(kind, group, 0.01) for kind, group in kinds if group])
    for seed in range(steps):
        tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(seed))
        device = devices.init("cpu", "float32")
        train_step(model, optimizer, [(tokens[:, :-1], tokens[:, 1:])], next_token_loss, device=device)
    return optimizer


def test_steps_after_a_load_equal_steps_without_one(folder, device):
    straight = new_model()
    optimizer_of(straight, steps=4)
    stopped = new_model()
    optimizer = optimizer_of(stopped, steps=2)
    path = save(folder, 2, stopped, TOKENIZER, {}, Training(optimizer.state_dict(), {}, {}), device)

    resumed = new_model(seed=9)
    checkpoint_manager.load_weights(resumed, path)
    again = optimizer_of(resumed, steps=0)
    load_training(path, checkpoint_manager.verify(path), again, device)
    for seed in (2, 3):
        tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(seed))
        train_step(resumed, again, [(tokens[:, :-1], tokens[:, 1:])], next_token_loss, device=device)
    assert same_tensors(resumed.state_dict(), straight.state_dict())


def test_weights_alone_load_but_do_not_resume(folder, device):
    path = save_step(folder, 1, device, training=False)
    assert not list(path.glob("training*"))
    load_model(str(path), device)
    with pytest.raises(UserError, match="cannot be resumed"):
        load_training(path, checkpoint_manager.verify(path), optimizer_of(new_model(), steps=0), device)


def in_two_ranks(action, device, monkeypatch) -> list[BaseException | None]:
    """Run action(device) as rank 0 and rank 1, in two threads that meet at every barrier."""
    barrier, errors = threading.Barrier(2, timeout=30), [None, None]
    monkeypatch.setattr(checkpoint_manager.dist, "barrier", barrier.wait)

    def work(rank: int) -> None:
        try:
            action(dataclasses.replace(device, rank=rank, world_size=2))
        except BaseException as error:
            errors[rank] = error
            barrier.abort()  # as the launcher ends the others when one of them dies

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank{rank}") for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_every_rank_saves_its_share(folder, device, monkeypatch):
    errors = in_two_ranks(lambda here: save_step(folder, 5, here, seed=here.rank), device, monkeypatch)
    assert errors == [None, None]
    path, meta = newest(folder)
    assert meta["world_size"] == 2
    assert meta["seed"] == 0  # rank 0 writes what all share
    loader, rng = load_training(path, meta, Holder(), device)
    assert [int(share["row"][0]) for share in loader] == [0, 1]
    assert len(rng) == 2
    (path / "training.rank1.safetensors").unlink()
    with pytest.raises(DamagedCheckpoint, match="rank1"):
        checkpoint_manager.verify(path)


# ---------------------------------------------------------------------- damage


@pytest.mark.parametrize("name", FILES)
def test_flips_and_cuts_of_every_file_are_found(folder, device, name):
    path = save_step(folder, 1, device)
    file = path / name
    whole = file.read_bytes()
    source = random.Random(name)
    for _ in range(100):
        place, bit = source.randrange(len(whole)), 1 << source.randrange(8)
        file.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
        with pytest.raises(DamagedCheckpoint, match=r"step_000001.* is damaged"):
            checkpoint_manager.verify(path)
    for length in {0, 1, len(whole) - 1, *(source.randrange(len(whole)) for _ in range(97))}:
        file.write_bytes(whole[:length])
        with pytest.raises(DamagedCheckpoint):
            checkpoint_manager.verify(path)
    file.unlink()
    with pytest.raises(DamagedCheckpoint):
        checkpoint_manager.verify(path)
    file.write_bytes(whole)
    assert checkpoint_manager.verify(path)["step"] == 1


@pytest.mark.parametrize("name", FILES)
def test_newest_falls_back_with_a_warning(folder, device, capsys, name):
    for step in (1, 2, 3):
        save_step(folder, step, device, seed=step)
    for step, left in ((3, 2), (2, 1)):
        file = folder / f"step_{step:06d}" / name
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        path, meta = newest(folder)
        assert (path.name, meta["step"], meta["seed"]) == (f"step_{left:06d}", left, left)
        warning = capsys.readouterr().err
        assert f"step_{step:06d}" in warning and "falling back" in warning
        assert warning.startswith("warning: ")
    load_model("base", device)
    shutil.rmtree(folder / "step_000001")
    assert newest(folder) is None
    with pytest.raises(UserError, match=r"no whole checkpoint.*`python -m scripts.base_train`"):
        load_model("base", device)


def test_a_folder_without_checkpoints_has_none(folder):
    assert steps(folder) == []
    assert newest(folder) is None
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    (folder / "step_000007.tmp").mkdir()
    (folder / "step_000008.old").mkdir()
    assert steps(folder) == []
    assert newest(folder) is None


def test_an_earlier_run_is_set_aside_and_not_lost(folder, device):
    metrics = paths.run_dir("base", "tiny") / "metrics.jsonl"
    assert set_aside(folder, metrics.parent, device) is None
    for run, where in enumerate(("tiny.1", "tiny.2")):
        save_step(folder, 5, device, seed=run)
        metrics.parent.mkdir(parents=True)
        metrics.write_text(str(run))
        assert set_aside(folder, metrics.parent, device) == folder.with_name(where)
        assert metrics.parent.with_name(where).joinpath("metrics.jsonl").read_text() == str(run)
        assert steps(folder) == []
        found = newest(folder.with_name(where))
        assert found is not None and found[1]["seed"] == run


def stale_on_one_rank(device, base: str) -> list:
    """What is found where rank 1's host lists nothing: a source, what is set aside, and a failure."""
    os.environ["NANOCHAT_BASE_DIR"] = base
    folder = paths.checkpoint_dir("base", "tiny")
    if device.rank == 1:
        checkpoint_manager.steps = lambda folder: []
        Path.glob = lambda self, pattern: iter(())  # type: ignore[method-assign,assignment]
    found = checkpoint_manager.find_source("base", "tiny", device=device)
    with pytest.raises(UserError, match="no whole checkpoint"):
        checkpoint_manager.find_source("sft", "tiny", device=device)
    return [found.name, str(set_aside(folder, paths.run_dir("base", "tiny"), device))]


def test_rank_0_looks_for_all(base_folder, folder, device):
    for step in (1, 2):
        save_step(folder, step, device)
    aside = folder.with_name("tiny.1")
    assert run_ranks(stale_on_one_rank, str(base_folder)) == [["step_000002", str(aside)]] * 2
    assert steps(aside) == [1, 2] and not folder.exists()


def test_a_checkpoint_is_read_once_when_it_is_loaded(folder, device, monkeypatch):
    for step in (1, 2):
        save_step(folder, step, device)
    hashed, sha256 = [], storage.sha256
    monkeypatch.setattr(storage, "sha256", lambda path: (hashed.append(path), sha256(path))[1])
    files = {folder / "step_000002" / name for name in FILES if name != "manifest.json"}

    def hashed_by(load) -> bool:
        hashed.clear()
        load()
        return len(hashed) == len(files) and set(hashed) == files

    assert hashed_by(lambda: load_model("base", device))
    assert hashed_by(lambda: load_model("base", device, step=2))
    assert hashed_by(lambda: load_model(folder / "step_000002", device))
    assert hashed_by(lambda: load_model(checkpoint_manager.find_source("base"), device, verified=True))
    (folder / "step_000002/model.safetensors").write_bytes(b"")
    for load in (load_model, checkpoint_manager.find_source):
        with pytest.raises(UserError, match="model.safetensors is damaged: train it again, or name an older --step"):
            load(str(folder / "step_000002"))


def test_a_leftover_of_a_killed_save_is_ignored_and_replaced(folder, device, capsys):
    save_step(folder, 2, device)
    leftover = folder / "step_000003.tmp"
    shutil.copytree(folder / "step_000002", leftover)
    (leftover / "training.rank7.safetensors").write_bytes(b"of a run of eight")
    assert steps(folder) == [2]
    assert newest(folder)[1]["step"] == 2
    assert capsys.readouterr().err == ""
    path = save_step(folder, 3, device)
    assert sorted(file.name for file in path.iterdir()) == list(FILES)
    assert newest(folder)[1]["step"] == 3
    assert not leftover.exists()


def test_another_format_version_is_named(folder, device):
    path = save_step(folder, 1, device)
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**meta, "version": 99}))
    rewrite_manifest(path)
    with pytest.raises(UserError, match="version 99, this code reads 2"):
        load_model("base", device)


# ---------------------------------------------------------------------- load_model


def test_load_model_by_stage_tag_step_and_folder(base_folder, device):
    for tag, step, seed in (("old", 1, 1), ("old", 5, 2), ("new", 3, 3)):
        save_step(paths.checkpoint_dir("base", tag), step, device, seed=seed)
    save_step(paths.checkpoint_dir("sft", "chat"), 9, device, seed=4)

    def seed_of(*args, **options) -> int:
        model, _, meta = load_model(*args, device=device, **options)
        assert same_tensors(model.state_dict(), new_model(meta["seed"]).state_dict())
        assert Path(meta["folder"]).name == f"step_{meta['step']:06d}"
        return meta["seed"]

    bases = base_folder / "checkpoints" / "base"
    os.utime(bases / "old" / "step_000005", (1, 1))
    assert seed_of("base") == 3
    os.utime(bases / "new" / "step_000003", (0, 0))
    assert seed_of("base") == 2  # the tag written last, not the first by name
    assert seed_of("base", model_tag="new") == 3
    assert seed_of("base", model_tag="old", step=1) == 1
    assert seed_of("sft") == 4
    assert seed_of(str(bases / "old" / "step_000001")) == 1
    assert load_model("sft")[0].device.type in devices.KINDS  # no device: the best one here
    assert load_model("sft", "cpu")[0].device.type == "cpu"


@pytest.mark.parametrize("stage", paths.STAGES)
def test_a_missing_checkpoint_names_the_script_that_makes_it(stage, device):
    script = Path(__file__).parent.parent / "scripts" / f"{paths.STAGES[stage]}.py"
    assert script.is_file()
    command = rf"`python -m scripts\.{script.stem}`"
    with pytest.raises(UserError, match=rf"no {stage} checkpoint.*{command}"):
        load_model(stage, device)
    with pytest.raises(UserError, match=command):
        load_model(stage, device, model_tag="none")


def test_what_load_model_cannot_find_is_named(base_folder, folder, device):
    for step in (2, 4):
        save_step(folder, step, device)
    with pytest.raises(UserError, match=r"no step 3 .*\[2, 4\]"):
        load_model("base", device, step=3)
    with pytest.raises(UserError, match="no step -1"):
        load_model("base", device, step=-1)
    for source in ("pretrain", str(base_folder), str(folder), "", "../base"):
        with pytest.raises(UserError, match="neither a stage .*base, mid, sft, dpo, rl.* nor a checkpoint"):
            load_model(source, device)
    with pytest.raises(UserError, match="--device"):
        load_model("base", "tpu")


# ---------------------------------------------------------------------- nothing from outside runs or crashes


class Malicious:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("name", [name for name in FILES if name != "manifest.json"])
@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_a_pickle_in_place_of_a_file_runs_nothing(tmp_path, folder, device, name, how):
    path = save_step(folder, 1, device)
    marker = tmp_path / "it ran"
    if how == "pickle":
        (path / name).write_bytes(pickle.dumps(Malicious(marker)))
    else:
        torch.save(Malicious(marker), path / name)
    with pytest.raises(UserError):
        load_model("base", device)
    rewrite_manifest(path)
    if name.startswith("training"):
        with pytest.raises(DamagedCheckpoint):
            load_training(path, checkpoint_manager.verify(path), Holder(), device)
    else:
        with pytest.raises(UserError):
            load_model(str(path), device)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Malicious(marker)))
    assert marker.exists()  # the payload works where something runs it


@pytest.mark.parametrize("name", [name for name in FILES if name != "manifest.json"])
def test_mutated_files_are_an_error_not_a_crash(folder, device, name):
    """1,000 over all kinds, under a manifest that matches, so that the file itself is parsed; of safetensors most
    changes are in the header, of JSON everywhere."""
    path = save_step(folder, 1, device)
    file, training = path / name, name.startswith("training")
    whole, source, refused = (path / name).read_bytes(), random.Random(name), 0
    header = 8 + int.from_bytes(whole[:8], "little") if name.endswith("safetensors") else len(whole)
    for trial in range(200):
        data = bytearray(whole)
        for _ in range(source.randrange(1, 4)):
            place = source.randrange(8 if trial % 4 == 0 else header if trial % 4 < 3 else len(whole))
            data[place] = source.randrange(256)
        kind = source.randrange(6)
        if kind == 0:
            data = data[: source.randrange(len(data))]
        elif kind == 1:
            data += bytes(source.randrange(1, 64))
        file.write_bytes(data)
        rewrite_manifest(path)
        try:
            if training:
                load_training(path, checkpoint_manager.verify(path), Holder(), device)
            else:
                load_model(str(path), device)
        except UserError as error:
            refused += 1
            assert re.search("train it again|restore it or train|format version", str(error))
        except ValueError:  # a resume makes one line of it
            refused += 1
            assert training
    assert refused > 60


@pytest.mark.parametrize(
    "change",
    [
        lambda meta: [],
        lambda meta: "text",
        lambda meta: {key: value for key, value in meta.items() if key != "model"},
        lambda meta: {**meta, "model": None},
        lambda meta: {**meta, "model": {**meta["model"], "unknown": 1}},
        lambda meta: {**meta, "model": {**meta["model"], "n_head": 0, "head_dim": 0}},
        lambda meta: {**meta, "model": {**meta["model"], "n_kv_head": 3}},
        lambda meta: {**meta, "model": {**meta["model"], "width": 6}},
        lambda meta: {**meta, "model": {**meta["model"], "vocab_size": "many"}},
        lambda meta: {**meta, "version": "1"},
    ],
)
def test_meta_data_that_describes_no_model_is_one_error(folder, device, change):
    path = save_step(folder, 1, device)
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(change(meta)))
    rewrite_manifest(path)
    with pytest.raises(UserError):
        load_model(str(path), device)


def test_a_manifest_reaches_no_file_outside_and_leaves_none_out(tmp_path, folder, device):
    path = save_step(folder, 1, device)
    manifest = json.loads((path / "manifest.json").read_text())
    outside = tmp_path / "outside.txt"
    outside.write_text("private")
    entry = {"bytes": 7, "sha256": hashlib.sha256(b"private").hexdigest()}
    for name in ("../../../../outside.txt", str(outside)):
        (path / "manifest.json").write_text(json.dumps({**manifest, name: entry}))
        with pytest.raises(DamagedCheckpoint):
            checkpoint_manager.verify(path)
    for left_out in set(FILES) - {"manifest.json"}:
        (path / "manifest.json").write_text(json.dumps({k: v for k, v in manifest.items() if k != left_out}))
        with pytest.raises(DamagedCheckpoint, match=left_out):
            checkpoint_manager.verify(path)


@pytest.mark.parametrize("tag", ["..", "../tiny", "/tmp", "a/b", "a\\b", ".hidden", "a\0b", "~", "tiny/", "%2e%2e"])
def test_a_tag_never_leaves_its_folder(folder, device, tag):
    save_step(folder, 1, device)
    save_step(folder.parent.parent / "tiny", 1, device)  # what ../tiny would reach
    with pytest.raises(UserError, match="--model_tag"):
        load_model("base", device, model_tag=tag)
