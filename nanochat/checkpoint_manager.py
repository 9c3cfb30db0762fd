"""Checkpoints: saved whole or not at all, verified when read, found by stage and tag.

A step is a folder `checkpoints/<stage>/<tag>/step_<n>/` of safetensors and JSON, never pickle:

    model.safetensors  meta.json  tokenizer.json     what a later stage or the engine needs
    training.json  training.rank<r>.safetensors      what only a resume needs, at any number of ranks: the state of
                                                     optimizer, loader and random generators (shell/storage.py)
    manifest.json                                    size and sha256 of every other file

A save is atomic: a folder named `step_<n>` is complete, at whatever moment a process was killed. A reader compares
every file with the manifest, so it also notices what a disk damaged later, and falls back to the step before.

Training stops only while its state is copied to the host's memory; a thread writes the copy (`Saver`).
"""

import contextlib
import copy
import errno
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
WEIGHTS_VERSIONS = (1, 2)  # version 1 has the same weights, and a training state that this code cannot read
PATIENCE_SECONDS = 900.0  # how long rank 0, when it has written its own share, waits for those of the others
POLL_SECONDS = 0.02

# What a parser raises for a file that is damaged, or is not ours.
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RuntimeError)


class DamagedCheckpoint(ValueError):
    """A checkpoint whose files differ from its manifest."""


# ---------------------------------------------------------------------- saving

# A save of step 100 by two ranks, from top to bottom. No reader looks into the folder until the last line:
#
#     rank 0                                            rank 1
#     makes step_000100.tmp/
#     ---------------------------------- barrier ----------------------------------
#     copies weights and its share to the host          copies its share to the host
#     (both train on; a thread on each rank does the rest)
#     model.safetensors, meta.json, tokenizer.json
#     training.rank0.safetensors                        training.rank1.safetensors
#                                                       rank1.done: its file's hash, its entries of the index
#     reads and deletes rank1.done
#     training.json, the index of both shares
#     manifest.json
#     renames step_000100.tmp to step_000100
#
# The manifest describes each file except itself:
#
#     {"model.safetensors": {"bytes": ..., "sha256": "..."}, "meta.json": {...}, "tokenizer.json": {...},
#      "training.rank0.safetensors": {...}, "training.rank1.safetensors": {...}, "training.json": {...}}
#
# Under 200 random kills of these processes, all 2,498 steps that were saved could be used (docs/measurements.md).


@dataclass
class Training:
    """What only a resume needs, as one rank holds it."""

    optimizer: dict[str, Tensor]  # DTensors are shards of a tensor, other tensors are the same on all ranks
    loader: dict[str, Tensor]  # this rank's position in the data
    rng: dict[str, Tensor]  # this rank's random generators

    def to_state(self, rank: int) -> dict[str, Tensor]:
        """All tensors in one dictionary. Names of one rank's own tensors begin with `rank<r>/`."""
        # The ranks share one optimizer state under the same names. Loaders and generators differ from rank to rank;
        # without the prefix the ranks would overwrite each other's.
        state = {f"optimizer/{name}": tensor for name, tensor in self.optimizer.items()}
        state |= {f"rank{rank}/loader/{name}": tensor for name, tensor in self.loader.items()}
        state |= {f"rank{rank}/rng/{name}": tensor for name, tensor in self.rng.items()}
        return state


@dataclass
class Snapshot:
    """One rank's part of a checkpoint, copied to the host's memory, where training does not change it."""

    folder: Path  # its final name, `step_<n>`
    needed_bytes: int  # of all ranks together
    weights: dict[str, Tensor]  # whole on rank 0, empty on the others
    share: dict[str, Tensor]  # what this rank writes of the training state
    entries: dict[str, Any]  # the share's entries in training.json
    tokenizer: Tokenizer
    meta: dict[str, Any]


class Saver:
    """Saves a run's checkpoints while its training continues; every rank makes one and calls it alike.

    `save` copies the state and returns; a thread writes the copy. There is one thread at a time: the next `save` waits
    for it.

    An error of the thread is raised by the next `save` or `wait`, or at the end of the `with` block. It never harms an
    older checkpoint.

    `keep_last` whole steps stay, the newest ones (0: all), and every step that `keep_every` divides (0: none). A
    damaged step does not count. `on_saved` is called on rank 0, on the thread, with every step that is on the disk.
    """

    def __init__(
        self,
        folder: Path,
        device: Device,
        *,
        keep_last: int = 0,
        keep_every: int = 0,
        on_saved: Callable[[Path], object] = lambda path: None,
    ):
        self.folder = folder
        self.device = device
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.on_saved = on_saved
        self.patience_seconds = PATIENCE_SECONDS
        self._whole: dict[int, bool] = {}  # step -> whether it was whole when it was read back
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.patience_seconds = min(self.patience_seconds, 10.0)  # the other ranks may be dead
        try:
            self.wait()
        except Exception:
            if error is None:  # otherwise training's own error is the one to show
                raise
        finally:
            paths.unlock(self.folder)

    def wait(self) -> None:
        """Wait for the save under way. Raises what it failed with: UserError for a full disk or a lost rank."""
        if self._thread is not None:
            self._thread.join()
        error = self._error
        self._thread = None
        self._error = None
        if error is not None:
            raise error

    def save(self, step: int, model: GPT, tokenizer: Tokenizer, meta: dict[str, Any], training: Training) -> Path:
        """Begin to write `step_<n>` and return its path. The model may change as soon as this returns.

        Raises UserError: when the disk cannot hold it, or when the save before this one failed.
        """
        # One save at a time: two copies of the state would need twice the memory. An earlier failure is raised here.
        self.wait()
        device = self.device
        final = step_path(self.folder, step)

        # Which part of the training state this rank writes, and how much all ranks write together. What several ranks
        # hold alike is written once, by the first of them. Rank 0's share is the largest: this sum is never too small.
        share, entries = storage.share_of(training.to_state(device.rank), device.rank)
        weight_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
        share_bytes = sum(tensor.nbytes for tensor in share.values())
        needed_bytes = weight_bytes + share_bytes * device.world_size

        # Rank 0 makes an empty folder, without the leftovers of a save that was killed; then the others may use it.
        if device.is_main:
            with explained_full_disk(self.folder, needed_bytes):
                self.folder.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(unfinished_path(final), ignore_errors=True)
                # Two percent more, for the JSON files and the file system. A full disk is found before training waits.
                if needed_bytes * 1.02 > shutil.disk_usage(self.folder).free:
                    raise OSError(errno.ENOSPC, "too little room for a checkpoint")
                unfinished_path(final).mkdir()
        # The other ranks write into this folder. A barrier is safe here: this is the thread that trains.
        if device.world_size > 1:
            dist.barrier()

        # The copy: the only part for which training waits, 0.16 to 0.53 s of the 2.9 to 10.4 s that a save of 504 MB
        # takes (docs/measurements.md). All ranks gather a sharded weight together, one at a time.
        weights: dict[str, Tensor] = {}
        for name, tensor in whole_weights(model):
            if device.is_main:
                weights[name] = _to_host(tensor)
        share = {name: _to_host(tensor) for name, tensor in share.items()}
        device.synchronize()  # the copies run asynchronously

        # What a reader must know before it builds a model: its sizes, its tokenizer, how many ranks wrote a share.
        meta = {
            "version": FORMAT_VERSION,
            "step": step,
            "model": asdict(model.config),
            "tokenizer": tokenizer.fingerprint(),
            "world_size": device.world_size,
            **copy.deepcopy(meta),
        }
        snapshot = Snapshot(final, needed_bytes, weights, share, entries, tokenizer, meta)
        self._thread = threading.Thread(target=self._write, args=[snapshot], name=f"save-rank{device.rank}")
        self._thread.start()
        return final

    def _write(self, snapshot: Snapshot) -> None:
        """The work of the thread. It keeps its error for the thread that trains."""
        try:
            with explained_full_disk(self.folder, snapshot.needed_bytes):
                if self.device.is_main:
                    self._write_main(snapshot)
                else:
                    self._write_share(snapshot)
        except BaseException as error:
            if self.device.is_main:  # give the room back
                shutil.rmtree(unfinished_path(snapshot.folder), ignore_errors=True)
            self._error = error
            warn(f"step {snapshot.meta['step']} was not saved: {error}")

    def _write_main(self, snapshot: Snapshot) -> None:
        """Rank 0: the model, its share of the training state, the index, the manifest, the rename."""
        folder = unfinished_path(snapshot.folder)
        files = write_model(folder, snapshot.weights, snapshot.tokenizer, snapshot.meta)
        # The other ranks write their shares at the same time. Each reports which part of which tensor it wrote. Merged,
        # these entries are the index, in which any number of ranks finds its own parts.
        name = storage.share_name(0)
        files[name] = storage.write_tensors(folder / name, snapshot.share)
        all_entries = [snapshot.entries]
        for rank, report in self._wait_for_reports(snapshot.folder).items():
            files[storage.share_name(rank)] = report["file"]
            all_entries.append(report["entries"])
        files["training.json"] = storage.write_json(folder / "training.json", storage.merge(all_entries))
        # All ranks are done: only now may the folder get its name, and only this rank gives it.
        commit(folder, snapshot.folder, files)
        self.on_saved(snapshot.folder)
        self._retire(snapshot.folder)

    def _write_share(self, snapshot: Snapshot) -> None:
        """Any other rank: its share, and the report that rank 0 waits for."""
        folder = unfinished_path(snapshot.folder)
        path = folder / storage.share_name(self.device.rank)
        try:
            file = storage.write_tensors(path, snapshot.share)
            self._report(folder, {"file": file, "entries": snapshot.entries})
        except OSError as error:
            # Rank 0 deletes the folder when it fails. Then its error is the cause, and this one only follows from it.
            if not folder.is_dir():
                raise UserError(f"rank 0 gave up saving {snapshot.folder}: see its error") from error
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)  # makes room for the report
                self._report(folder, {"error": f"rank {self.device.rank}: {error}"})
            raise

    def _report(self, folder: Path, report: dict[str, Any]) -> None:
        """Write `rank<r>.done`. It gets its name by a rename, so that rank 0 never reads half of it."""
        path = folder / f"rank{self.device.rank}.done"
        storage.write_json(path.with_suffix(".part"), report)
        path.with_suffix(".part").rename(path)

    def _wait_for_reports(self, final: Path) -> dict[int, dict[str, Any]]:
        """The reports of all other ranks, in rank order.

        Raises UserError: when a rank reports an error, or nothing for `patience_seconds`.
        """
        # Files and not collectives: this is a thread, and its collectives would mix with those of training. A rank that
        # died writes no report; the time limit then ends the wait.
        reports: dict[int, dict[str, Any]] = {}
        missing = list(range(1, self.device.world_size))
        began = time.monotonic()
        while missing:
            path = unfinished_path(final) / f"rank{missing[0]}.done"
            if path.exists():
                report = json.loads(path.read_text(encoding="utf-8"))
                if "error" in report:
                    raise UserError(f"{final} could not be saved: {report['error']}")
                path.unlink()
                reports[missing.pop(0)] = report
            elif time.monotonic() - began > self.patience_seconds:
                raise UserError(
                    f"{final} has no share of rank {missing[0]} after {self.patience_seconds:.0f} s; "
                    "older checkpoints are whole: look at that rank, then --resume"
                )
            else:
                time.sleep(POLL_SECONDS)
        return reports

    def _retire(self, final: Path) -> None:
        """Delete the steps that need not stay, once the step just saved is read back and whole."""
        if not self.keep_last:
            return
        # Delete nothing before the new step was read back: if the disk damages what it writes, the old steps are all
        # there is.
        saved_step = _step_of(final)
        self._whole.pop(saved_step, None)  # it may have replaced a damaged one
        if not self._is_whole(saved_step):
            warn(f"{final} is damaged as soon as it is saved: older steps are all kept, look at the disk")
            return
        # With keep_last 2 and keep_every 1000, steps 900, 1000, 1100, 1200 and 1300 become 1000, 1200 and 1300.
        # A step after the one just saved is from before a resume that fell back; it is left alone.
        whole_steps = 0
        for step in reversed(steps(self.folder)):  # the newest first
            if whole_steps < self.keep_last:
                if self._is_whole(step):
                    whole_steps += 1
            elif step < saved_step and not (self.keep_every and step % self.keep_every == 0):
                self._delete(step_path(self.folder, step))

    def _is_whole(self, step: int) -> bool:
        """`is_whole`, reading each step once."""
        if step not in self._whole:
            self._whole[step] = is_whole(step_path(self.folder, step))
        return self._whole[step]

    def _delete(self, path: Path) -> None:
        try:
            shutil.rmtree(_replaced_path(path), ignore_errors=True)
            path.rename(_replaced_path(path))  # a kill in the middle of rmtree leaves nothing that is called step_<n>
            shutil.rmtree(_replaced_path(path))
        except OSError as error:
            warn(f"--keep_last: {path} could not be deleted ({error})")


def write_model(folder: Path, weights: dict[str, Tensor], tokenizer: Tokenizer, meta: dict[str, Any]) -> dict[str, Any]:
    """Write what a later stage or the engine needs into a folder; returns the files for its manifest."""
    about = {"format": "pt", "step": str(meta["step"]), "tokenizer": meta["tokenizer"]}
    return {
        "model.safetensors": storage.write_tensors(folder / "model.safetensors", weights, about),
        "meta.json": storage.write_json(folder / "meta.json", meta),
        "tokenizer.json": storage.facts(tokenizer.save(folder)),  # `save` flushes it
    }


def commit(unfinished: Path, final: Path, files: dict[str, Any]) -> None:
    """Give a folder, whose files are all on the disk, its manifest and its final name."""
    # The manifest is last: a folder that has one has everything else.
    storage.write_json(unfinished / "manifest.json", files)
    # Flush the list of the folder's names: a file whose name is lost is lost, though its bytes are on the disk.
    storage.flush(unfinished)
    # A step of that name is there when it was damaged, or when a run began anew. A folder cannot be replaced in one
    # operation. A kill between these two renames leaves a whole .tmp, which `clean_up` finds.
    shutil.rmtree(_replaced_path(final), ignore_errors=True)
    if final.exists():
        final.rename(_replaced_path(final))
    # The one operation that makes the checkpoint: before it there is none, after it there is a complete one.
    unfinished.rename(final)
    # Flush the parent: until then, a power failure could undo the rename.
    storage.flush(final.parent)
    shutil.rmtree(_replaced_path(final), ignore_errors=True)


def clean_up(folder: Path) -> None:
    """Remove what a killed save left. A checkpoint that lacks only its last rename gets its name.

    One process calls it, while none saves.
    """
    # step_<n>.tmp is a save that did not end, or one that lacks its rename. step_<n>.old is a step that was being
    # replaced or deleted: if its replacement never came, it is still the best there is.
    leftovers = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d+\.(tmp|old)", path.name)]
    for path in sorted(leftovers, reverse=True):  # .tmp, the newer one, before .old
        final = path.with_suffix("")
        if not final.exists() and is_whole(path):
            path.rename(final)
            storage.flush(folder)
        else:
            shutil.rmtree(path, ignore_errors=True)


# ---------------------------------------------------------------------- verifying and loading


def verify(step_folder: Path) -> dict[str, Any]:
    """Check every file against the manifest and return the meta data.

    Raises DamagedCheckpoint: naming the file that is missing, cut short or changed.
    """
    try:
        manifest = json.loads((step_folder / "manifest.json").read_text(encoding="utf-8"))
        for name, expected in manifest.items():
            path = step_folder / Path(name).name  # a manifest cannot name a file of another folder
            # The size first: it finds a file cut short without reading it. A changed byte shows in the hash alone.
            if path.stat().st_size != expected["bytes"] or storage.sha256(path) != expected["sha256"]:
                raise DamagedCheckpoint(f"{path} is damaged")
        meta = json.loads((step_folder / "meta.json").read_text(encoding="utf-8"))
        version = meta.get("version")
        ranks = meta.get("world_size", 0)
        # A manifest that leaves out a file must not pass: these have to be in it.
        needed = {"model.safetensors", "meta.json", "tokenizer.json"}
        if version == FORMAT_VERSION and ranks:
            needed.add("training.json")
            needed.update(storage.share_name(rank) for rank in range(min(ranks, len(manifest))))
        missing = needed - set(manifest)
        if missing:
            raise DamagedCheckpoint(f"{step_folder} is damaged (its manifest has no {', '.join(sorted(missing))})")
    except DamagedCheckpoint:
        raise
    # Damaged JSON can fail anywhere above: as no JSON, as a list, as a name without "bytes".
    except UNREADABLE as error:
        raise DamagedCheckpoint(f"{step_folder} is damaged ({error})") from error
    # An unknown version is not damage: falling back to an older step would hide that the code is too old.
    if version not in WEIGHTS_VERSIONS:
        raise UserError(f"{step_folder} has format version {version}, this code reads {FORMAT_VERSION}")
    return meta


def is_whole(step_folder: Path) -> bool:
    """Whether every file is as the manifest describes it."""
    try:
        verify(step_folder)
    except ValueError:
        return False
    return True


def steps(folder: Path) -> list[int]:
    """The steps of a run that have a finished checkpoint, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(_step_of(path) for path in folder.iterdir() if re.fullmatch(r"step_\d+", path.name))


def newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that is whole, with its meta data; damaged ones are passed over with a warning."""
    # Only what is tried is read: in the usual case that is one step, however many there are.
    for step in reversed(steps(folder)):
        path = step_path(folder, step)
        try:
            return path, verify(path)
        except DamagedCheckpoint as error:
            warn(f"{error}; falling back to the step before it")
    return None


def load_weights(model: GPT, step_folder: Path) -> None:
    """Copy a verified checkpoint's weights into a model of the same config; of a sharded model, this rank's rows."""
    try:
        load_whole(model, step_folder / "model.safetensors")
    except (SafetensorError, ValueError) as error:
        raise DamagedCheckpoint(f"{step_folder}/model.safetensors cannot be used ({error})") from error


def load_training(
    step_folder: Path, meta: dict[str, Any], optimizer: Optimizer, device: Device
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Load the optimizer's state in place; returns the loader's and the generators' states of every rank that saved.

    The number of ranks may have changed.

    Raises UserError: for weights alone. Raises ValueError: when the state is of another model or optimizer;
    DamagedCheckpoint: when the files cannot be read.
    """
    if not meta["world_size"] or meta["version"] != FORMAT_VERSION:
        raise UserError(f"{step_folder} holds weights only: it cannot be resumed; train from it with --source")
    # What each rank saved for itself is small, and all ranks read all of it: from the loader states of 8 ranks, 2 ranks
    # compute where they begin (`LoaderState.merge`). The index has the shapes.
    own = {}
    try:
        index = json.loads((step_folder / "training.json").read_text(encoding="utf-8"))
        storage.check(index)
        for name, entry in index.items():
            if name.startswith("rank"):
                own[name] = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        storage.read(step_folder, index, own)
    except UNREADABLE as error:
        raise DamagedCheckpoint(f"{step_folder} is damaged ({error})") from error
    # The optimizer's state is large: each rank reads its own part, from whichever files hold it. An error here is a
    # mismatch, not damage: the state is of another model or optimizer.
    state = {f"optimizer/{name}": tensor for name, tensor in optimizer.state_dict().items()}
    storage.read(step_folder, index, state)
    loader_states = []
    rng_states = []
    for rank in range(meta["world_size"]):
        loader_states.append(_with_prefix(own, f"rank{rank}/loader/"))
        rng_states.append(_with_prefix(own, f"rank{rank}/rng/"))
    return loader_states, rng_states


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


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
    fp32. `verified`: `source` is a folder that `find_source` has just read; it is not read again.

    Raises UserError: when there is no such checkpoint, or it cannot be used.
    """
    folder = source if isinstance(source, Path) else find_source(source, model_tag, step)
    # Verified, then built: no byte of a damaged file reaches a model.
    if not isinstance(device, Device):
        device = devices.init(str(device) if device else "auto")
    try:
        if isinstance(source, Path) and not verified:
            verify(folder)
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        tokenizer = Tokenizer.load(folder)  # the folder is enough, wherever it was copied to
        model = GPT(GPTConfig(**meta["model"]), device.kernels)
        load_weights(model, folder)
    except DamagedCheckpoint as error:
        raise UserError(f"{error}: {TRAIN_AGAIN}") from error
    except UserError:
        raise
    except UNREADABLE as error:
        raise UserError(f"{folder} cannot be used ({error!r}): {TRAIN_AGAIN}") from error
    return model.to(device.torch_device).eval(), tokenizer, {**meta, "folder": str(folder)}


# ---------------------------------------------------------------------- finding

TRAIN_AGAIN = "train it again, or name an older --step"


def find_source(
    source: str, model_tag: str | None = None, step: int | None = None, device: Device | None = None
) -> Path:
    """The folder of a checkpoint, all of whose files were read and are whole.

    `source` is a stage ("base", "mid", "sft", "dpo", "rl"), "auto" for the furthest stage that has a checkpoint, or a
    checkpoint's own folder. Without `model_tag` it is the tag last written, without `step` the newest whole step. With
    `device`, all of its ranks call this together and take what rank 0 finds.

    Raises UserError: when there is none.
    """
    # Rank 0 decides for all: ranks that looked by themselves could find different steps while a run still saves, and
    # each would read every file.
    if device is not None:
        found = decide_on_rank_zero(device, lambda: str(find_source(source, model_tag, step)))
        return Path(str(found))
    # A stage, its tag, its step: what is not given is chosen here.
    if source == "auto":
        source = _furthest_stage(model_tag)
    if source in paths.STAGES:
        folder = paths.checkpoint_dir(source, model_tag) if model_tag else _newest_tag(source)
        if step is None:
            return _newest_whole(folder, source)
        chosen = step_path(folder, step)
        if not chosen.is_dir():
            raise UserError(
                f"there is no step {step} in {folder}: it has {steps(folder) or 'none'}; without one, the newest"
            )
    else:
        chosen = Path(source).expanduser()
        if not (chosen / "manifest.json").is_file():
            raise UserError(
                f"--source {source} is neither a stage (auto, {', '.join(paths.STAGES)}) nor a checkpoint's folder "
                "(.../step_<n>): name one of them"
            )
    try:
        verify(chosen)
    except DamagedCheckpoint as error:
        raise UserError(f"{error}: {TRAIN_AGAIN}") from error
    return chosen


def _newest_whole(folder: Path, stage: str) -> Path:
    found = newest(folder)
    if found is not None:
        return found[0]
    other_tags = sorted(path.name for path in _tags(stage) if path != folder)
    hint = f", or name one of the tags {', '.join(other_tags)}" if other_tags else ""
    raise UserError(f"there is no whole checkpoint in {folder}: {_how_to_train(stage)}{hint}")


def _newest_tag(stage: str) -> Path:
    tags = _tags(stage)
    if not tags:
        folder = paths.base_dir() / "checkpoints" / stage
        raise UserError(f"there is no {stage} checkpoint in {folder}: {_how_to_train(stage)}")
    # By the time of its newest step. A folder's own time would also change when an old step is deleted.
    return max(tags, key=lambda folder: step_path(folder, steps(folder)[-1]).stat().st_mtime)


def _furthest_stage(model_tag: str | None) -> str:
    """The last stage that has a checkpoint (of that tag); base when there is none."""
    for stage in reversed(paths.STAGES):
        if steps(paths.checkpoint_dir(stage, model_tag)) if model_tag else _tags(stage):
            return stage
    return "base"


def _tags(stage: str) -> list[Path]:
    """The folders of a stage that have a finished step."""
    folder = paths.base_dir() / "checkpoints" / stage
    return [path for path in folder.iterdir() if steps(path)] if folder.is_dir() else []


def _how_to_train(stage: str) -> str:
    return f"train one with `python -m scripts.{paths.STAGES[stage]}`"


def short_name(step_folder: Path) -> str:
    """`<stage>/<tag>/step_<n>`: the same wherever the base folder is."""
    return "/".join(step_folder.resolve().parts[-3:])


def tag_of(step_folder: Path) -> str:
    """The tag that a checkpoint's folder belongs to."""
    return step_folder.resolve().parent.name


def weights_sha256(step_folder: Path) -> str:
    """The sha256 of the model's weights, from the manifest of a checkpoint that was verified."""
    manifest = json.loads((step_folder / "manifest.json").read_text(encoding="utf-8"))
    return manifest["model.safetensors"]["sha256"]


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"  # zeros in front: `ls` then lists the steps in order


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def unfinished_path(final: Path) -> Path:
    """Where a folder is written before it gets its name."""
    return final.with_name(final.name + ".tmp")


def _replaced_path(final: Path) -> Path:
    """Where a folder is moved before it is deleted."""
    return final.with_name(final.name + ".old")


# ---------------------------------------------------------------------- small parts of a save


def _to_host(tensor: Tensor) -> Tensor:
    """A copy in the host's memory, complete once the device was synchronised."""
    tensor = tensor.detach()
    # A device copies into pinned memory without the processor: the copies of all tensors overlap.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
    return host.copy_(tensor, non_blocking=True)


@contextlib.contextmanager
def explained_full_disk(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Raises UserError, naming the bytes needed and free, when the disk fills up in the block."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free_bytes = shutil.disk_usage(existing).free
        raise UserError(
            f"the disk is full: a checkpoint needs {needed_bytes:,} bytes, {folder} has {free_bytes:,} free; "
            "make room, or point NANOCHAT_BASE_DIR elsewhere"
        ) from error
