"""A model's folder: damage is found and named, and what a user names is found, or the next step is."""

import hashlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint_manager import DEVICE, FILES, rewrite_manifest, same_tensors
from tiny import BYTES, complaint, save_checkpoint, save_step, smallest_model

from nanochat import device as devices
from nanochat import model_folder
from nanochat.checkpoint_manager import load_model
from nanochat.ground import paths
from nanochat.ground.cli import UserError
from nanochat.model_folder import DamagedCheckpoint, newest
from nanochat.run import saver
from nanochat.run.saver import set_aside

pytestmark = pytest.mark.usefixtures("base_folder")

# ---------------------------------------------------------------------- damage


def test_where_no_step_is_whole_there_is_nothing_to_fall_back_to(folder, capsys):
    (save_step(folder, 1) / "training.json").write_bytes(b"")
    assert newest(folder) is None and "falling back" not in capsys.readouterr().err
    with pytest.raises(UserError, match=r"no base checkpoint .* whole.*`python -m scripts.base_train`"):
        load_model("base", DEVICE)


def test_another_format_version_is_named(folder):
    path = save_step(folder, 1)
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**meta, "version": 99}))
    rewrite_manifest(path)
    with pytest.raises(UserError, match="version 99, this code reads 2"):
        load_model("base", DEVICE)


def test_a_manifest_reaches_no_file_outside_and_leaves_none_out(tmp_path, folder):
    path = save_step(folder, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    outside = tmp_path / "outside.txt"
    outside.write_text("private")
    entry = {"bytes": 7, "sha256": hashlib.sha256(b"private").hexdigest()}
    for name in ("../../../../outside.txt", str(outside)):
        (path / "manifest.json").write_text(json.dumps({**manifest, name: entry}))
        with pytest.raises(DamagedCheckpoint):
            model_folder.verify(path)
    for left_out in set(FILES) - {"manifest.json"}:
        (path / "manifest.json").write_text(json.dumps({k: v for k, v in manifest.items() if k != left_out}))
        with pytest.raises(DamagedCheckpoint, match=left_out):
            model_folder.verify(path)


# ---------------------------------------------------------------------- finding


def test_load_model_by_stage_tag_step_and_folder(base_folder):
    for tag, step, seed in (("old", 1, 1), ("old", 5, 2), ("new", 3, 3)):
        save_step(paths.checkpoint_dir("base", tag), step, seed=seed)
    save_step(paths.checkpoint_dir("sft", "chat"), 9, seed=4)

    def seed_of(*args, **options) -> int:
        model, _, meta = load_model(*args, device=DEVICE, **options)
        assert same_tensors(model.state_dict(), smallest_model(meta["seed"]).state_dict())
        assert Path(meta["folder"]).name == f"step_{meta['step']:06d}"
        return meta["seed"]

    bases = base_folder / "checkpoints" / "base"
    os.utime(bases / "old" / "step_000005", (1, 1))
    assert seed_of("base") == 3
    os.utime(bases / "new" / "step_000003", (0, 0))
    assert seed_of("base") == 2  # the tag written last, not the first by name
    assert seed_of("base", model_tag="new") == 3
    assert seed_of("base/old/step_000001") == 1
    assert seed_of("sft") == 4
    assert seed_of(str(bases / "old" / "step_000001")) == 1
    assert load_model("sft")[0].device.type in devices.KINDS  # no device: the best one here
    assert load_model("sft", "cpu")[0].device.type == "cpu"


NEITHER = "neither a stage .*base, mid, sft, rm, dpo, rl"
LEAVE_OUT = "leave out the flag for a tag"
# base/tiny has steps 2 and 4; the weights of step 2 are missing. FOLDER is the tag's folder.
NOT_FOUND: list[tuple[str, dict[str, Any], str]] = [
    *((source, {}, NEITHER) for source in ("pretrain", "FOLDER/../../..", "", "../base")),
    ("FOLDER", {}, NEITHER),
    ("FOLDER", {}, "it has neither manifest.json"),
    ("base/huge", {}, "--source base/tiny"),
    ("base/tiny/step_000003", {}, r"no step 3 .*\[2, 4\]"),
    ("base/tiny", {"model_tag": "tiny"}, "names a tag"),
    ("FOLDER/step_000002", {"model_tag": "tiny"}, LEAVE_OUT),
    ("FOLDER/step_000002", {}, r"step_000002/model.safetensors is damaged \(there is no such file\)"),
    ("base", {"device": "tpu"}, "--device"),
    # The script that makes it, where there is none.
    *(
        (stage, options, rf"no {stage} checkpoint.*`python -m scripts\.{paths.STAGES[stage]}`")
        for stage in paths.STAGES if stage != "base" for options in ({}, {"model_tag": "none"})
    ),
    # A tag never leaves its folder.
    *(
        ("base", {"model_tag": tag}, "--model_tag")
        for tag in ("", "..", "../tiny", "/tmp", "a/b", "a\\b", ".hidden", "a\0b", "~", "tiny/", "%2e%2e")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("source", "options", "words"), NOT_FOUND)
def test_what_load_model_cannot_find_is_named(folder, source, options, words):
    for step in (2, 4):
        save_step(folder, step)
    save_step(folder.parent.parent / "tiny", 1)  # what ../tiny would reach
    for name, step in (("base/tiny", 4), ("base/tiny/step_000002", 2)):
        assert model_folder.find_source(name).name == f"step_{step:06d}"
    (folder / "step_000002" / "model.safetensors").unlink()
    source = source.replace("FOLDER", str(folder))
    line = complaint(lambda: load_model(source, **{"device": DEVICE, **options}))
    assert re.search(words, line)


def test_all_ranks_take_what_rank_0_finds(folder, monkeypatch):
    """This rank's file system lists nothing; it gets rank 0's answer."""
    save_step(folder, 1)
    answers = [str(folder / "step_000002"), "tiny.1"]
    for module in (model_folder, saver):
        monkeypatch.setattr(module, "decide_on_rank_zero", lambda device, decide: answers.pop(0))
    assert model_folder.find_source("base", "tiny", device=DEVICE).name == "step_000002"
    assert set_aside(folder, paths.run_dir("base", "tiny"), DEVICE) == folder.with_name("tiny.1")


def test_meta_data_has_what_a_server_shows(folder):
    """Also where it was saved without settings, stage and tasks."""
    before = int(time.time())
    meta = {"stage": "sft", "sampling": {"top_k": 4}, "tasks": ["stories"]}
    path = save_checkpoint(folder, 1, smallest_model(), BYTES, meta)
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    _, _, meta = load_model(path, DEVICE)
    assert neutral.items() <= {**meta["sampling"], "top_k": 0}.items() and meta["sampling"]["top_k"] == 4
    assert (meta["tasks"], meta["stage"]) == (["stories"], "sft") and before <= meta["trained_at"] <= time.time()

    saved = json.loads((path / "meta.json").read_text())
    for name in ("sampling", "tasks", "stage"):
        del saved[name]
    (path / "meta.json").write_text(json.dumps(saved))
    rewrite_manifest(path)
    _, _, meta = load_model(path, DEVICE)
    assert (meta["sampling"]["temperature"], meta["sampling"]["min_p"], meta["tasks"]) == (0.8, 0.2, [])
    assert meta["stage"] == "model" and meta["trained_at"] == saved["trained_at"]


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_a_full_device_is_no_damage(folder, kind):
    """An owner would delete a good model, or train it again."""
    with pytest.raises(kind, match="^NPU out of memory"), model_folder.damage_of(folder):
        raise kind("NPU out of memory. Tried to allocate 2.00 GiB")


def test_a_header_that_asks_for_more_memory_than_there_is_is_damage(folder):
    with pytest.raises(model_folder.DamagedCheckpoint), model_folder.damage_of(folder):
        torch.empty(1 << 60)
