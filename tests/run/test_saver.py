"""Which steps stay, and how a run resumes. That no kill and no full disk costs a save is in tests/promises (T1, T6)."""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_t01_a_kill_costs_no_save import usable
from tiny import BYTES, cpu_device, run_ranks, save_step, smallest_model

from nanochat import model_folder
from nanochat.device import Device
from nanochat.ground import paths, storage
from nanochat.ground.cli import UserError
from nanochat.model_folder import steps
from nanochat.ranks import lay_out
from nanochat.run import saver
from nanochat.run.flags import TrainFlags
from nanochat.run.saver import clean_up, resume
from nanochat.run.stage import Start
from nanochat.scaling import Rates
from nanochat.train import make_optimizer

pytestmark = pytest.mark.usefixtures("base_folder")


@pytest.mark.parametrize(("keep_last", "left"), [(0, 6), (1, 1), (2, 2), (9, 6)])
def test_old_steps_go_once_the_new_one_is_read_back(folder, monkeypatch, keep_last, left):
    read, verify = [], model_folder.verify
    with monkeypatch.context() as patch:
        patch.setattr(model_folder, "verify", lambda path: (read.append(path.name[-1]), verify(path))[1])
        for step in range(1, 7):
            save_step(folder, step, seed=step, keep_last=keep_last)
    assert "".join(read) == ("123456" if keep_last else "")
    assert steps(folder) == [1, 2, 3, 4, 5, 6][-left:] and usable(folder) == (6, 6)


def test_only_steps_are_deleted(folder):
    for name in ("step_x", "step_000001.mine", "notes", "best"):
        (folder / name).mkdir(parents=True)
    (folder / "step_000002.txt").write_text("mine")
    before = set(folder.iterdir())
    for step in (3, 4):
        save_step(folder, step, seed=step, keep_last=1)
    clean_up(folder)
    assert set(folder.iterdir()) == before | {folder / "step_000004"}


# ---------------------------------------------------------------------- a run that resumes


def begin(device: Device, folder: str, steps: int) -> float:
    """The beginning of a script in small: resume, or save step 5 of a new run; returns what is drawn next."""
    torch.manual_seed(device.rank)
    model = smallest_model(1)
    laid_out = lay_out(device, "ddp")
    laid_out.shard(model, device)
    optimizer = make_optimizer(model, Rates(0.02, 0.01, 0.01, 0.01, 0.01, 0.01, 0.1), device, layout=laid_out)
    meta = {"config": {"seed": 0}, "source": None, "fingerprints": {}}
    start = Start(0.0, device, laid_out, model, BYTES, "run", {})
    progress, _ = resume(Path(folder), TrainFlags(), start, optimizer, steps, meta)
    if not progress.step:
        torch.rand(7)  # the generator is not as at the beginning
        progress.step = 5
        now, state = meta | {"progress": dataclasses.asdict(progress)}, optimizer.state_dict()
        saver.save(Path(folder), 5, model, BYTES, now, state, {"row": torch.ones(1)}, device)
    paths.unlock(Path(folder))
    return torch.rand(()).item()


@pytest.mark.slow
def test_a_rank_of_another_world_has_its_generator_back(tmp_path):
    drawn = begin(cpu_device(), str(tmp_path / "run"), 9)
    zero, one = run_ranks(begin, str(tmp_path / "run"), 9)
    assert zero == drawn != one


def rewrite(path: Path, content: bytes) -> None:
    """Change a file of a step, and the manifest that describes it."""
    path.write_bytes(content)
    manifest = json.loads((path.parent / "manifest.json").read_text())
    manifest[path.name] = storage.facts(path)
    (path.parent / "manifest.json").write_text(json.dumps(manifest))


# By code that lacked a flag, or a field of the model: both have their defaults. A field that this code lacks is another
# model.
CHANGES: list[tuple[Callable[[dict[str, Any]], Any], bool]] = [
    (lambda meta: meta["model"].pop("logit_cap"), False),
    (lambda meta: meta["config"].pop("seed"), False),
    (lambda meta: meta["model"].update(gate=True), True),
    (lambda meta: meta["progress"].update(best_val_bpb=1.0), False),  # a number that other code remembers
]


def test_a_resume_that_cannot_be_is_one_line(tmp_path):
    whole = tmp_path / "run"
    begin(cpu_device(), str(whole), 9)
    with pytest.raises(UserError, match="--num_iterations"):
        begin(cpu_device(), str(whole), 4)

    def copied(name: str) -> Path:
        return shutil.copytree(whole, tmp_path / name) / "step_000005"

    for name in ("training.json", "training.rank0.safetensors", "model.safetensors"):
        step = copied(name)
        rewrite(step / name, b"{}")
        with pytest.raises(UserError, match="--resume: .*step_000005"):
            begin(cpu_device(), str(step.parent), 9)
    for number, (change, refused) in enumerate(CHANGES):
        step = copied(f"other{number}")
        meta = json.loads((step / "meta.json").read_text())
        change(meta)
        rewrite(step / "meta.json", json.dumps(meta).encode())
        with pytest.raises(UserError, match="other code.*'gate'") if refused else contextlib.nullcontext():
            begin(cpu_device(), str(step.parent), 9)
    for file in (whole / "step_000005").iterdir():
        file.write_bytes(b"")
    with pytest.raises(UserError, match="no checkpoint in .* is whole"):
        begin(cpu_device(), str(whole), 9)
