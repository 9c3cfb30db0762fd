"""Checkpoints: saved whole or not at all, verified when read, found by stage and tag.

A step is a folder `checkpoints/<stage>/<tag>/step_<n>/` of safetensors and JSON, never pickle:

    model.safetensors  meta.json  tokenizer.json     what a later stage or the engine needs
    training.rank<r>.safetensors                     what only a resume needs: each rank's share of the optimizer's
                                                     state, its loader's state and its random generators
    manifest.json                                    size and sha256 of every other file; written last

The folder is written as `step_<n>.tmp`, flushed to the disk, and renamed by rank 0 once all ranks are done.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanochat import device as devices
from nanochat import paths
from nanochat.cli import UserError
from nanochat.device import Device
from nanochat.gpt import GPT, GPTConfig
from nanochat.log import print0, warn
from nanochat.optim import Optimizer
from nanochat.tokenizer import Tokenizer
from nanochat.train import Progress

FORMAT_VERSION = 1


class DamagedCheckpoint(ValueError):
    """A checkpoint whose files are not what its manifest says."""


@dataclass
class Training:
    """What only a resume needs, as one rank holds it."""

    optimizer: dict[str, Tensor]
    loader: dict[str, Tensor]
    rng: dict[str, Tensor]

    def to_tensors(self) -> dict[str, Tensor]:
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        return {f"{part}/{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> "Training":
        parts: dict[str, dict[str, Tensor]] = {f.name: {} for f in fields(cls)}
        for key, tensor in tensors.items():
            part, _, name = key.partition("/")
            parts[part][name] = tensor
        return cls(**parts)


def save(
    folder: Path,
    step: int,
    model: GPT,
    tokenizer: Tokenizer,
    meta: dict[str, Any],
    training: Training | None,
    device: Device,
) -> Path:
    """Write `folder/step_<n>`, all ranks together, and return it.

    Raises UserError: when the disk cannot hold it; older checkpoints stay as they are.
    """
    final = folder / f"step_{step:06d}"
    needed = sum(t.nbytes for t in model.state_dict().values())
    if training is not None:
        needed += sum(t.nbytes for t in training.to_tensors().values()) * device.world_size
    unfinished, replaced = _unfinished(final), final.with_name(final.name + ".old")
    with _full_disk_told(final, needed):
        if device.is_main:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            weights = {name: p.detach().cpu().contiguous() for name, p in model.state_dict().items()}
            if needed * 1.02 > shutil.disk_usage(final.parent).free:
                raise UserError(_disk_is_full(final.parent, needed))
            save_file(weights, unfinished / "model.safetensors")
            tokenizer.save(unfinished)
            meta = {
                "version": FORMAT_VERSION,
                "step": step,
                "model": asdict(model.config),
                "tokenizer": tokenizer.fingerprint(),
                "world_size": device.world_size if training else 0,
                **meta,
            }
            (unfinished / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
        if training is not None:
            _barrier(device)  # the folder is there
            tensors = {name: t.detach().cpu().contiguous() for name, t in training.to_tensors().items()}
            save_file(tensors, unfinished / f"training.rank{device.rank}.safetensors")
            _barrier(device)  # every rank's share is there
        if device.is_main:
            files = sorted(path for path in unfinished.iterdir())
            manifest = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files}
            (unfinished / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
            for path in (*files, unfinished / "manifest.json", unfinished):
                _flush_to_disk(path)
            shutil.rmtree(replaced, ignore_errors=True)
            if final.exists():  # a damaged one that was passed over, or a run begun anew: out of the way in one move
                final.rename(replaced)
            unfinished.rename(final)
            _flush_to_disk(final.parent)
            shutil.rmtree(replaced, ignore_errors=True)
        _barrier(device)
    return final


def steps(folder: Path) -> list[int]:
    """Steps with a finished checkpoint, oldest first."""
    if not folder.is_dir():
        return []
    names = (re.fullmatch(r"step_(\d+)", path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in names if match)


def set_aside(folder: Path, run_folder: Path, device: Device) -> Path | None:
    """Before a run from the beginning: move an earlier run's checkpoints and metrics to `<tag>.<n>`, so that none is
    lost and none is taken for the new run's. Returns where the checkpoints are now, None if there were none."""
    there = steps(folder)
    _barrier(device)  # every rank has looked
    if not there:
        return None
    name = next(f"{folder.name}.{n}" for n in range(1, 10**6) if not folder.with_name(f"{folder.name}.{n}").exists())
    _barrier(device)
    if device.is_main:
        folder.rename(folder.with_name(name))
        if run_folder.is_dir() and not run_folder.with_name(name).exists():
            run_folder.rename(run_folder.with_name(name))
    _barrier(device)
    return folder.with_name(name)


def verify(step_folder: Path) -> dict[str, Any]:
    """Check every file against the manifest and return the meta data.

    Raises DamagedCheckpoint: naming the file that is missing, cut short or changed.
    """
    try:
        manifest = json.loads((step_folder / "manifest.json").read_text(encoding="utf-8"))
        for name, expected in manifest.items():
            path = step_folder / Path(name).name
            if path.stat().st_size != expected["bytes"] or _sha256(path) != expected["sha256"]:
                raise DamagedCheckpoint(f"{path} is damaged")
        needed = {"model.safetensors", "meta.json", "tokenizer.json"}
        if missing := needed - set(manifest):
            raise DamagedCheckpoint(f"{step_folder} is damaged (its manifest has no {', '.join(sorted(missing))})")
        meta = json.loads((step_folder / "meta.json").read_text(encoding="utf-8"))
        version = meta.get("version")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, DamagedCheckpoint):
            raise
        raise DamagedCheckpoint(f"{step_folder} is damaged ({error})") from error
    if version != FORMAT_VERSION:
        raise UserError(f"{step_folder} has format version {version}, this code reads {FORMAT_VERSION}")
    return meta


def newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that is whole, with its meta data; damaged ones are passed over with a warning."""
    for step in reversed(steps(folder)):
        path = folder / f"step_{step:06d}"
        try:
            return path, verify(path)
        except DamagedCheckpoint as error:
            warn(f"{error}; falling back to the step before it")
    return None


def load_weights(model: GPT, step_folder: Path) -> None:
    """Copy a verified checkpoint's weights into a model of the same config."""
    try:
        model.load_state_dict(load_file(step_folder / "model.safetensors"))
    except (SafetensorError, RuntimeError) as error:
        raise DamagedCheckpoint(f"{step_folder}/model.safetensors cannot be used ({error})") from error


def load_training(step_folder: Path, meta: dict[str, Any]) -> list[Training]:
    """Every rank's training state, in rank order."""
    if not meta["world_size"]:
        raise UserError(f"{step_folder} holds weights only: it cannot be resumed")
    ranks = range(meta["world_size"])
    return [Training.from_tensors(load_file(step_folder / f"training.rank{r}.safetensors")) for r in ranks]


def resume(
    folder: Path,
    config: Any,
    flags: str,
    steps_asked: int,
    model: GPT,
    tokenizer: Tokenizer,
    optimizer: Optimizer,
    device: Device,
    source: Path | None = None,
) -> tuple[Progress, list[dict[str, Tensor]]]:
    """Go on from the newest whole checkpoint of a folder: its weights, optimizer and generators are loaded; returns
    its progress and every rank's loader state. Where there is none yet, a progress of 0 and no state.

    `flags` names those of `config` that a run keeps from its beginning to its end, `source` is the checkpoint that it
    began from. Raises UserError: when they, the sizes or the tokenizer are others than the checkpoint's, when it is
    beyond `steps_asked`, when none is whole.
    """
    found = newest(folder)
    if found is None:
        if steps(folder):
            raise UserError(f"--resume: no checkpoint in {folder} is whole: move the folder away to begin anew")
        print0(f"--resume: nothing in {folder} yet, starting from the beginning")
        return Progress(), []
    step_folder, meta = found
    for flag in flags.split():
        if meta["config"].get(flag) != getattr(config, flag):
            raise UserError(
                f"--resume: {step_folder} was trained with --{flag} {meta['config'].get(flag)}, not "
                f"{getattr(config, flag)}: use that, or another --model_tag"
            )
    if source is not None and meta["source"] != short_name(source):
        raise UserError(
            f"--resume: {step_folder} was trained from {meta['source']}, the source is now {short_name(source)}: name "
            "that by --source_step, or give another --model_tag"
        )
    if meta["step"] > steps_asked:
        raise UserError(f"--resume: {step_folder} is beyond {steps_asked} steps: raise --num_iterations to go on")
    for name, value in asdict(model.config).items():
        if meta["model"][name] != value:
            raise UserError(
                f"--resume: {step_folder} has {name} {meta['model'][name]}, the flags say {value}: "
                "use its flags, or another --model_tag"
            )
    if meta["tokenizer"] != tokenizer.fingerprint():
        raise UserError(
            f"--resume: {step_folder} was trained with another tokenizer: restore it, or use another --model_tag"
        )
    shares = load_training(step_folder, meta)
    load_weights(model, step_folder)
    try:
        optimizer.load_state_dict([share.optimizer for share in shares])
    except ValueError as error:  # --optimizer is not the one it was trained with
        raise UserError(f"--resume: {step_folder}: {error}: use its flags, or another --model_tag") from error
    device.set_rng_state(shares[device.rank % len(shares)].rng)
    print0(f"resumed from {step_folder}")
    return Progress(**meta["progress"]), [share.loader for share in shares]


def find_source(source: str, model_tag: str | None = None, step: int | None = None) -> Path:
    """The folder of a stage's checkpoint ("base", "mid", "sft", "dpo", "rl"), or of one given by its path; "auto" is
    the furthest stage that has one.

    Without `model_tag` the tag last written, without `step` its newest whole step.
    Raises UserError: when there is none.
    """
    if source == "auto":
        source = _furthest_stage(model_tag)
    if source in paths.STAGES:
        folder = paths.checkpoint_dir(source, model_tag) if model_tag else _newest_tag(source)
        if step is not None:
            chosen = folder / f"step_{step:06d}"
            if not chosen.is_dir():
                raise UserError(f"there is no step {step} in {folder}: it has {steps(folder) or 'none'}")
        else:
            found = newest(folder)
            if found is None:
                tags = folder.parent.iterdir() if folder.parent.is_dir() else ()
                there = sorted(path.name for path in tags if steps(path))
                hint = f", or name one of the tags {', '.join(there)}" if there else ""
                raise UserError(f"there is no whole checkpoint in {folder}: {_mend(source)}{hint}")
            chosen = found[0]
    else:
        chosen = Path(source).expanduser()
        if not (chosen / "manifest.json").is_file():
            raise UserError(
                f"{source!r} is neither a stage (auto, {', '.join(paths.STAGES)}) nor a checkpoint's folder (step_<n>)"
            )
    return chosen


def short_name(step_folder: Path) -> str:
    """`<stage>/<tag>/step_<n>`: the same wherever the base folder is."""
    return "/".join(step_folder.resolve().parts[-3:])


def tag_of(step_folder: Path) -> str:
    """The tag that a checkpoint's folder belongs to."""
    return step_folder.resolve().parent.name


def load_model(
    source: str | Path,
    device: str | torch.device | Device | None = None,
    *,
    model_tag: str | None = None,
    step: int | None = None,
) -> tuple[GPT, Tokenizer, dict[str, Any]]:
    """`(model, tokenizer, meta)` of a stage or of a checkpoint's folder, as `find_source` finds it.

    `device` is "npu:0", "cuda:0", "cpu" or nothing for the best one here. The model is in eval mode, its weights in
    fp32.
    Raises UserError: when there is none, or it is damaged.
    """
    chosen = source if isinstance(source, Path) else find_source(source, model_tag, step)
    try:
        meta = verify(chosen)
        tokenizer = Tokenizer.load(chosen)
        model = GPT(GPTConfig(**meta["model"]))
        load_weights(model, chosen)
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:  # damaged, or not ours
        message = error if isinstance(error, DamagedCheckpoint) else f"{chosen} cannot be used ({error!r})"
        raise UserError(f"{message}: train it again, or name an older --step") from error
    if not isinstance(device, Device):
        device = devices.init(str(device) if device else "auto")
    return model.to(device.torch_device).eval(), tokenizer, {**meta, "folder": str(chosen)}


def _newest_tag(stage: str) -> Path:
    folder = paths.base_dir() / "checkpoints" / stage
    tags = [path for path in folder.iterdir() if steps(path)] if folder.is_dir() else []
    if not tags:
        raise UserError(f"there is no {stage} checkpoint in {folder}: {_mend(stage)}")
    return max(tags, key=lambda path: (path / f"step_{steps(path)[-1]:06d}").stat().st_mtime)


def _furthest_stage(model_tag: str | None) -> str:
    """The last stage that has a checkpoint (of that tag); base when there is none."""
    for stage in reversed(paths.STAGES):
        folder = paths.base_dir() / "checkpoints" / stage
        tags = [paths.checkpoint_dir(stage, model_tag)] if model_tag else folder.iterdir() if folder.is_dir() else []
        if any(steps(tag) for tag in tags):
            return stage
    return "base"


def _mend(stage: str) -> str:
    if stage == "dpo":
        return "no script here makes one yet"
    return f"train one with `python -m scripts.{paths.STAGES[stage]}`"


def _unfinished(final: Path) -> Path:
    return final.with_name(final.name + ".tmp")


@contextlib.contextmanager
def _full_disk_told(final: Path, needed: int) -> Iterator[None]:
    """Turn a disk that fills up while saving into one line, and clear away what was begun."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors passes the system's error on in words only
        if getattr(error, "errno", None) != errno.ENOSPC and f"os error {errno.ENOSPC}" not in str(error):
            raise
        message = _disk_is_full(final.parent, needed)  # counted before the unfinished folder goes
        shutil.rmtree(_unfinished(final), ignore_errors=True)
        raise UserError(message) from error


def _disk_is_full(folder: Path, needed: int) -> str:
    return (
        f"the disk is full: a checkpoint needs {needed:,} bytes, {folder} has {shutil.disk_usage(folder).free:,} "
        f"free; make room, or point NANOCHAT_BASE_DIR elsewhere"
    )


def _barrier(device: Device) -> None:
    if device.world_size > 1:
        dist.barrier()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _flush_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
