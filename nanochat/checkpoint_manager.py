"""Checkpoints: saved whole or not at all, verified when read, found by stage and tag.

A step is a folder `checkpoints/<stage>/<tag>/step_<n>/` of safetensors and JSON, never pickle:

    model.safetensors  meta.json  tokenizer.json     what a later stage or the engine needs
    training.json  training.rank<r>.safetensors      what only a resume needs, at any number of ranks (storage.py):
                                                     the optimizer's state, the loader's, the random generators'
    manifest.json                                    size and sha256 of every other file; written last

The folder is written as `step_<n>.tmp`, every file flushed to the disk, and renamed by rank 0 once all ranks are done.
Training stops only while its state is copied to the host's memory (`Saver`).
"""

import contextlib
import copy
import errno
import importlib
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from nanochat import device as devices
from nanochat.device import Device
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import Optimizer
from nanochat.parallel.collectives import decide_on_rank_zero
from nanochat.parallel.fsdp import load_whole, whole_weights
from nanochat.shell import paths, storage
from nanochat.shell.cli import UserError
from nanochat.shell.log import warn
from nanochat.tokenizer import Tokenizer

FORMAT_VERSION = 2
WEIGHTS_VERSIONS = (1, 2)  # 1 kept the training state in another way
PATIENCE_SECONDS = 900.0  # from when rank 0 has written its share until all others must have
POLL_SECONDS = 0.02


class DamagedCheckpoint(ValueError):
    """A checkpoint whose files are not what its manifest says."""


@dataclass
class Training:
    """What only a resume needs, as one rank holds it."""

    optimizer: dict[str, Tensor]  # DTensors are shares, what is not one is alike on all ranks
    loader: dict[str, Tensor]
    rng: dict[str, Tensor]

    def to_state(self, device: Device) -> dict[str, Tensor]:
        """All under names that no other rank uses for something else."""
        own = f"rank{device.rank}/"
        parts = {"optimizer/": self.optimizer, f"{own}loader/": self.loader, f"{own}rng/": self.rng}
        return {prefix + name: tensor for prefix, part in parts.items() for name, tensor in part.items()}


class Saver:
    """Saves a run's checkpoints while its training goes on; all ranks make one and call it alike.

    `save` copies to the host's memory, the rest is a thread's work. The threads use no collective, which would run
    into training's: what rank r has written it says in the unfinished folder's `rank<r>.done`, which rank 0 waits for.
    Whatever goes wrong is raised by the next `save` or `wait`, or when the `with` block ends, and never harms an older
    checkpoint.

    Of a folder's steps the newest `keep_last` that are whole stay (0: all), and those that `keep_every` divides (0:
    none); a damaged one counts for nothing, and goes once so many later ones are whole.
    """

    def __init__(
        self,
        folder: Path,
        device: Device,
        *,
        keep_last: int = 0,
        keep_every: int = 0,
        told: Callable[[Path], object] = lambda path: None,
    ):
        self.folder, self.device, self.keep_last, self.keep_every = folder, device, keep_last, keep_every
        self.told = told  # called on rank 0 with every step that is on the disk, on the thread that wrote it
        self.patience_seconds = PATIENCE_SECONDS
        importlib.import_module("torch.distributed.checkpoint.default_planner")  # now, not while training waits
        self._whole: dict[int, bool] = {}  # the steps that were read back, and whether they were whole
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is not None:
                self.patience_seconds = min(self.patience_seconds, 10.0)  # the others may never come
            self.wait()
        except Exception:
            if error is None:
                raise
        finally:
            paths.unlock(self.folder)

    def wait(self) -> None:
        """Until the save under way is done. Raises what it failed with: UserError for a full disk or a lost rank."""
        if self._thread is not None:
            self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    def save(
        self, step: int, model: GPT, tokenizer: Tokenizer, meta: dict[str, Any], training: Training | None
    ) -> Path:
        """Begin to write `step_<n>`, and return what will be its folder; the model may change right after.

        Raises UserError: when the disk cannot hold it, or the save before this one failed.
        """
        self.wait()
        final, device = self.folder / f"step_{step:06d}", self.device
        state = training.to_state(device) if training is not None else {}
        needed = sum(t.nbytes for t in model.state_dict().values())
        shares, entries = storage.share_of(state, device.rank) if training is not None else ({}, {})
        needed += sum(t.nbytes for t in shares.values()) * device.world_size
        with _full_disk_told(final, needed, device):
            if device.is_main:
                shutil.rmtree(_unfinished(final), ignore_errors=True)
                self.folder.mkdir(parents=True, exist_ok=True)
                if needed * 1.02 > shutil.disk_usage(self.folder).free:
                    raise UserError(_disk_is_full(self.folder, needed))
                _unfinished(final).mkdir()
        _barrier(device)  # the folder is there
        weights = {name: _to_host(tensor) for name, tensor in whole_weights(model) if device.is_main}
        shares = {name: _to_host(tensor) for name, tensor in shares.items()}
        device.synchronize()
        if training is None and not device.is_main:
            return final
        meta = {
            "version": FORMAT_VERSION,
            "step": step,
            "model": asdict(model.config),
            "tokenizer": tokenizer.fingerprint(),
            "world_size": device.world_size if training is not None else 0,
            **copy.deepcopy(meta),
        }

        def write() -> None:
            try:
                with _full_disk_told(final, needed, device):
                    if device.is_main:
                        files = write_model(_unfinished(final), weights, tokenizer, meta)
                        if training is not None:
                            files |= self._write_training(final, shares, entries)
                        commit(_unfinished(final), final, files)
                        self.told(final)
                        self._retire(final)
                    else:
                        self._write_share(final, shares, entries)
            except BaseException as error:  # kept for the thread that trains
                self._error = error
                warn(f"step {step} was not saved: {error}")

        self._thread = threading.Thread(target=write, name=f"save-rank{device.rank}")
        self._thread.start()
        return final

    def _write_share(self, final: Path, shares: dict[str, Tensor], entries: dict[str, Any]) -> None:
        """What a rank that is not the first does, and its word to the first."""
        folder, name = _unfinished(final), storage.share_name(self.device.rank)
        try:
            report = {"file": storage.write_tensors(folder / name, shares), "entries": entries}
            self._report(folder, report)
        except OSError as error:
            if not folder.is_dir():
                raise UserError(f"{final} was given up by rank 0: see its error") from error
            with contextlib.suppress(OSError):
                (folder / name).unlink(missing_ok=True)  # room for the word
                self._report(folder, {"error": f"rank {self.device.rank}: {error}"})
            raise

    def _report(self, folder: Path, report: dict[str, Any]) -> None:
        word = folder / f"rank{self.device.rank}.done"
        storage.write_json(word.with_suffix(".part"), report)
        word.with_suffix(".part").rename(word)

    def _write_training(self, final: Path, shares: dict[str, Tensor], entries: dict[str, Any]) -> dict[str, Any]:
        """Rank 0's share, the others' words and the index; returns the files."""
        folder = _unfinished(final)
        files = {storage.share_name(0): storage.write_tensors(folder / storage.share_name(0), shares)}
        all_entries, began, missing = [entries], time.monotonic(), set(range(1, self.device.world_size))
        while missing:
            for rank in sorted(missing):
                word = folder / f"rank{rank}.done"
                if not word.exists():
                    continue
                report = json.loads(word.read_text(encoding="utf-8"))
                if "error" in report:
                    raise UserError(f"{final} could not be saved: {report['error']}")
                word.unlink()
                files[storage.share_name(rank)] = report["file"]
                all_entries.append(report["entries"])
                missing.remove(rank)
            if missing and time.monotonic() - began > self.patience_seconds:
                raise UserError(
                    f"{final} was given up: no share of rank {', '.join(map(str, sorted(missing)))} after "
                    f"{self.patience_seconds:.0f} s; older checkpoints are whole: look at that rank, then --resume"
                )
            if missing:
                time.sleep(POLL_SECONDS)
        files["training.json"] = storage.write_json(folder / "training.json", storage.merge(all_entries))
        return files

    def _retire(self, final: Path) -> None:
        """Delete the steps that are not to be kept, once the one just saved is whole when read back."""
        if not self.keep_last:
            return
        newest_step = int(final.name.removeprefix("step_"))
        self._whole[newest_step] = is_whole(final)
        if not self._whole[newest_step]:
            warn(f"{final} is damaged as soon as it is saved: older steps are all kept, look at the disk")
            return
        there, kept = steps(self.folder), 0
        while kept < self.keep_last and there:  # from the newest on; behind it `there` holds those before the last kept
            step = there.pop()
            if step not in self._whole:  # of an earlier start of this run
                self._whole[step] = is_whole(self.folder / f"step_{step:06d}")
            kept += self._whole[step]
        for step in (s for s in there if s < newest_step and not (self.keep_every and s % self.keep_every == 0)):
            path = self.folder / f"step_{step:06d}"
            try:
                shutil.rmtree(_replaced(path), ignore_errors=True)
                path.rename(_replaced(path))  # in one move, so that no half of it looks whole
                shutil.rmtree(_replaced(path))
            except OSError as error:
                warn(f"--keep_last: {path} could not be deleted ({error})")


def save(
    folder: Path,
    step: int,
    model: GPT,
    tokenizer: Tokenizer,
    meta: dict[str, Any],
    training: Training | None,
    device: Device,
) -> Path:
    """Write `folder/step_<n>`, all ranks together, and return it once it is there.

    Raises UserError: when the disk cannot hold it; older checkpoints stay as they are.
    """
    with Saver(folder, device) as saver:
        final = saver.save(step, model, tokenizer, meta, training)
    _barrier(device)
    return final


def write_model(folder: Path, weights: dict[str, Tensor], tokenizer: Tokenizer, meta: dict[str, Any]) -> dict[str, Any]:
    """Write what a later stage or the engine needs into a folder; returns the files for its manifest."""
    about = {"format": "pt", "step": str(meta["step"]), "tokenizer": meta["tokenizer"]}
    return {
        "model.safetensors": storage.write_tensors(folder / "model.safetensors", weights, about),
        "meta.json": storage.write_json(folder / "meta.json", meta),
        "tokenizer.json": storage.facts(tokenizer.save(folder)),  # flushed already
    }


def commit(unfinished: Path, final: Path, files: dict[str, Any]) -> None:
    """Write the manifest of a folder whose files are all on the disk, and give the folder its name."""
    storage.write_json(unfinished / "manifest.json", files)
    storage.flush(unfinished)
    shutil.rmtree(_replaced(final), ignore_errors=True)
    if final.exists():  # a damaged one that was passed over, or a run begun anew: out of the way in one move
        final.rename(_replaced(final))
    unfinished.rename(final)
    storage.flush(final.parent)
    shutil.rmtree(_replaced(final), ignore_errors=True)


def mend(folder: Path) -> None:
    """Tidy up behind a run that was killed while it saved; one process calls it, while none saves.

    A checkpoint that lacked its last rename alone gets its name, other leftovers go.
    """
    leftovers = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d+\.(tmp|old)", path.name)]
    for path in sorted(leftovers, reverse=True):  # of a step, .tmp before .old: the newer one
        final = path.with_suffix("")
        if not final.exists() and is_whole(path):
            path.rename(final)
            storage.flush(folder)
        else:
            shutil.rmtree(path, ignore_errors=True)


def steps(folder: Path) -> list[int]:
    """Steps with a finished checkpoint, oldest first."""
    if not folder.is_dir():
        return []
    names = (re.fullmatch(r"step_(\d+)", path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in names if match)


def set_aside(folder: Path, run_folder: Path, device: Device) -> Path | None:
    """Before a run from the beginning: move an earlier run's checkpoints and metrics to `<tag>.<n>`, so that none is
    lost and none is taken for the new run's. Returns where the checkpoints are now, None if there were none."""

    def move() -> str | None:
        if not any(folder.glob("step_*")):  # an unfinished one of a killed run too
            return None
        names = (f"{folder.name}.{n}" for n in range(1, 10**6))
        name = next(name for name in names if not folder.with_name(name).exists())
        folder.rename(folder.with_name(name))
        if run_folder.is_dir() and not run_folder.with_name(name).exists():
            run_folder.rename(run_folder.with_name(name))
        return name

    name = decide_on_rank_zero(device, move)
    return folder.with_name(name) if name else None


def verify(step_folder: Path) -> dict[str, Any]:
    """Check every file against the manifest and return the meta data.

    Raises DamagedCheckpoint: naming the file that is missing, cut short or changed.
    """
    try:
        manifest = json.loads((step_folder / "manifest.json").read_text(encoding="utf-8"))
        for name, expected in manifest.items():
            path = step_folder / Path(name).name
            if path.stat().st_size != expected["bytes"] or storage.sha256(path) != expected["sha256"]:
                raise DamagedCheckpoint(f"{path} is damaged")
        meta = json.loads((step_folder / "meta.json").read_text(encoding="utf-8"))
        version, ranks = meta.get("version"), meta.get("world_size", 0)
        needed = {"model.safetensors", "meta.json", "tokenizer.json"}
        if version == FORMAT_VERSION and ranks:
            needed |= {"training.json", *map(storage.share_name, range(ranks))}
        if missing := needed - set(manifest):
            raise DamagedCheckpoint(f"{step_folder} is damaged (its manifest has no {', '.join(sorted(missing))})")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, DamagedCheckpoint):
            raise
        raise DamagedCheckpoint(f"{step_folder} is damaged ({error})") from error
    if version not in WEIGHTS_VERSIONS:
        raise UserError(f"{step_folder} has format version {version}, this code reads {FORMAT_VERSION}")
    return meta


def is_whole(step_folder: Path) -> bool:
    """Whether every file is what the manifest says."""
    try:
        verify(step_folder)
    except ValueError:
        return False
    return True


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
        load_whole(model, step_folder / "model.safetensors")
    except (SafetensorError, ValueError) as error:
        raise DamagedCheckpoint(f"{step_folder}/model.safetensors cannot be used ({error})") from error


def load_training(
    step_folder: Path, meta: dict[str, Any], optimizer: Optimizer, device: Device
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Load the optimizer's state in place; returns the loader's and the generators' states of every rank that saved.

    Raises UserError: for weights alone. Raises ValueError: when the state is of another model or optimizer;
    DamagedCheckpoint: when the files cannot be read.
    """
    if not meta["world_size"] or meta["version"] != FORMAT_VERSION:
        raise UserError(f"{step_folder} holds weights only: it cannot be resumed; train from it with --source")
    try:
        index = storage.check(json.loads((step_folder / "training.json").read_text(encoding="utf-8")))
        rest = {
            name: torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
            for name, entry in index.items()
            if name.startswith("rank")
        }
        storage.read(step_folder, index, rest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{step_folder} is damaged ({error})") from error

    def of_each_rank(part: str) -> list[dict[str, Tensor]]:
        prefixes = [f"rank{rank}/{part}/" for rank in range(meta["world_size"])]
        return [{k.removeprefix(p): t for k, t in rest.items() if k.startswith(p)} for p in prefixes]

    state = optimizer.state_dict()
    storage.read(step_folder, index, {f"optimizer/{name}": tensor for name, tensor in state.items()})
    return of_each_rank("loader"), of_each_rank("rng")


def newest_to_resume(folder: Path, device: Device) -> Path | None:
    """Lock a run's folder, tidy it and return its newest whole step, the same on all ranks; None: no step yet.

    Raises UserError: when there are steps and none is whole.
    """

    def look() -> str | None:
        paths.lock(folder)
        mend(folder)
        found = newest(folder)
        if found is None and steps(folder):
            raise UserError(f"--resume: no checkpoint in {folder} is whole: move the folder away to begin anew")
        return found[0].name if found else None

    name = decide_on_rank_zero(device, look)
    return None if name is None else folder / name


def find_source(
    source: str, model_tag: str | None = None, step: int | None = None, device: Device | None = None
) -> Path:
    """The folder of a stage's checkpoint ("base", "mid", "sft", "dpo", "rl"), or of one given by its path; "auto" is
    the furthest stage that has one. All of its files were read, and are whole.

    Without `model_tag` the tag last written, without `step` its newest whole step. With `device`, all of its ranks
    call it together and take what rank 0 finds.
    Raises UserError: when there is none.
    """
    if device is not None:
        found = decide_on_rank_zero(device, lambda: str(find_source(source, model_tag, step)))
        return Path(str(found))
    if source == "auto":
        source = _furthest_stage(model_tag)
    if source in paths.STAGES:
        folder = paths.checkpoint_dir(source, model_tag) if model_tag else _newest_tag(source)
        if step is None:
            if newest_whole := newest(folder):
                return newest_whole[0]
            tags = folder.parent.iterdir() if folder.parent.is_dir() else ()
            there = sorted(path.name for path in tags if steps(path))
            hint = f", or name one of the tags {', '.join(there)}" if there else ""
            raise UserError(f"there is no whole checkpoint in {folder}: {_mend(source)}{hint}")
        chosen = folder / f"step_{step:06d}"
        if not chosen.is_dir():
            raise UserError(f"there is no step {step} in {folder}: it has {steps(folder) or 'none'}")
    else:
        chosen = Path(source).expanduser()
        if not (chosen / "manifest.json").is_file():
            raise UserError(
                f"{source!r} is neither a stage (auto, {', '.join(paths.STAGES)}) nor a checkpoint's folder (step_<n>)"
            )
    try:
        verify(chosen)
    except DamagedCheckpoint as error:
        raise UserError(f"{error}: train it again, or name an older --step") from error
    return chosen


def short_name(step_folder: Path) -> str:
    """`<stage>/<tag>/step_<n>`: the same wherever the base folder is."""
    return "/".join(step_folder.resolve().parts[-3:])


def weights_sha256(step_folder: Path) -> str:
    """Of the model's weights, by the manifest of a checkpoint that was verified."""
    manifest = json.loads((step_folder / "manifest.json").read_text(encoding="utf-8"))
    return manifest["model.safetensors"]["sha256"]


def tag_of(step_folder: Path) -> str:
    """The tag that a checkpoint's folder belongs to."""
    return step_folder.resolve().parent.name


def load_model(
    source: str | Path,
    device: str | torch.device | Device | None = None,
    *,
    model_tag: str | None = None,
    step: int | None = None,
    verified: bool = False,
) -> tuple[GPT, Tokenizer, dict[str, Any]]:
    """`(model, tokenizer, meta)` of a stage or of a checkpoint's folder, as `find_source` finds it.

    `device` is "npu:0", "cuda:0", "cpu" or nothing for the best one here. The model is in eval mode, its weights in
    fp32. `verified`: `source` is a folder that `find_source` has just read, which is not read twice.
    Raises UserError: when there is none, or it is damaged.
    """
    chosen = source if isinstance(source, Path) else find_source(source, model_tag, step)
    try:
        if not verified and isinstance(source, Path):
            verify(chosen)
        meta = json.loads((chosen / "meta.json").read_text(encoding="utf-8"))
        tokenizer = Tokenizer.load(chosen)
        model = GPT(GPTConfig(**meta["model"]))
        load_weights(model, chosen)
    except UserError:
        raise
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
    ) as error:  # damaged, or not ours
        message = error if isinstance(error, DamagedCheckpoint) else f"{chosen} cannot be used ({error!r})"
        raise UserError(f"{message}: train it again, or name an older --step") from error
    if not isinstance(device, Device):
        device = devices.init(str(device) if device else "auto")
    return model.to(device.torch_device).eval(), tokenizer, {**meta, "folder": str(chosen)}


def export(source: Path, out: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Write the weights, config and tokenizer of a checkpoint that `find_source` has found, without what only training
    needs, as a folder that `load_model` takes; returns its files.

    Raises UserError: when the folder is there already, cannot be made or does not fit on the disk.
    """
    device = devices.init("cpu")
    model, tokenizer, meta = load_model(source, device, verified=True)
    weights = {n: t.to(dtype) if t.is_floating_point() else t for n, t in model.state_dict().items()}
    final, unfinished = out.absolute(), _unfinished(out.absolute())
    if final.exists():
        raise UserError(f"--out {out} is there already: name another folder, or remove it")
    with _full_disk_told(final, sum(t.nbytes for t in weights.values()), device):
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(f"--out {out} cannot be made ({error.strerror}): name another folder") from error
        kept = "step stage source pretraining"  # nothing of the machine it was trained on
        meta = {
            "version": FORMAT_VERSION, "model": meta["model"], "tokenizer": meta["tokenizer"], "world_size": 0,
            "exported_from": short_name(source), **{key: meta[key] for key in kept.split() if key in meta},
        }  # fmt: skip
        config = {"model_type": "nanochat", "dtype": storage.dtype_name(next(iter(weights.values()))), **meta["model"]}
        files = write_model(unfinished, weights, tokenizer, meta)
        files["config.json"] = storage.write_json(unfinished / "config.json", config)
        commit(unfinished, final, files)
    return files


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
    return f"train one with `python -m scripts.{paths.STAGES[stage]}`"


def _unfinished(final: Path) -> Path:
    return final.with_name(final.name + ".tmp")


def _replaced(final: Path) -> Path:
    return final.with_name(final.name + ".old")


def _to_host(tensor: Tensor) -> Tensor:
    """A copy in the host's memory, there once the device was synchronised."""
    tensor = tensor.detach()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
    return host.copy_(tensor, non_blocking=True)


@contextlib.contextmanager
def _full_disk_told(final: Path, needed: int, device: Device) -> Iterator[None]:
    """Turn a disk that fills up while saving into one line, and clear away what was begun."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        message = _disk_is_full(final.parent, needed)  # counted before the unfinished folder goes
        if device.is_main:
            shutil.rmtree(_unfinished(final), ignore_errors=True)
        raise UserError(message) from error


def _disk_is_full(folder: Path, needed: int) -> str:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return (
        f"the disk is full: a checkpoint needs {needed:,} bytes, {folder} has {shutil.disk_usage(there).free:,} "
        f"free; make room, or point NANOCHAT_BASE_DIR elsewhere"
    )


def _barrier(device: Device) -> None:
    if device.world_size > 1:
        dist.barrier()
