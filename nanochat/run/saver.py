"""The folder of a run's checkpoints: written whole or not at all, resumed from the newest, or set aside.

The meta.json of a checkpoint describes the run that made it. A resumed run compares itself with this first: `Frozen`
flags, the source, the tokenizer and the fingerprints of its data have to be the same.

A save is atomic: a folder named `step_<n>` is complete, no matter when a process was killed. model_folder.py compares
every file with the manifest, so it also notices later damage on the disk.
"""

import contextlib
import copy
import dataclasses
import errno
import json
import math
import os
import platform
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanochat import model_folder, scaling
from nanochat.device import Device
from nanochat.gpt import GPT, GPTConfig
from nanochat.ground import provenance, storage
from nanochat.ground.cli import UserError, frozen_flags
from nanochat.ground.log import device_facts, noting, print0, time_text, warn
from nanochat.ground.paths import lock
from nanochat.ground.sharding import held_rows, local, trained_parameters, whole_weights
from nanochat.optim import Optimizer
from nanochat.ranks import decide_on_rank_zero, gather_values
from nanochat.run.flags import TrainFlags
from nanochat.run.progress import Progress
from nanochat.run.stage import Start
from nanochat.run.stop import Stop
from nanochat.tokenizer import FILE_NAME as TOKENIZER_NAME
from nanochat.tokenizer import Tokenizer

ROOM = 1.02  # the tensors of a checkpoint, and 2% for its JSON files and the file system
NICE = 10  # priority of the thread that writes: it gets a tenth of a core for which training competes

# ---------------------------------------------------------------------- saving

# A save of step 100 by two ranks, from top to bottom. No reader looks into the folder until the last line. While
# training continues, a thread of each rank does what follows the first wait, and the end is not waited for:
#
#     rank 0                                            rank 1
#     makes step_000100.tmp/
#     --------------------------------- all wait for rank 0 ---------------------------------
#     model.safetensors, meta.json, tokenizer.json
#     training.rank0.safetensors                        training.rank1.safetensors
#     ------------- all exchange their files' hashes and their entries of the index ---------
#     training.json, the index of both shares
#     manifest.json
#     renames step_000100.tmp to step_000100
#     --------------------------------- all wait for rank 0 ---------------------------------
#
# The manifest describes each file except itself:
#
#     {"model.safetensors": {"bytes": ..., "sha256": "..."}, "meta.json": {...}, "tokenizer.json": {...},
#      "training.rank0.safetensors": {...}, "training.rank1.safetensors": {...}, "training.json": {...}}


def save(*arguments: Any, **options: Any) -> Path:
    """Write a checkpoint and return its path; all ranks call this together, with the arguments of `prepare`."""
    return prepare(*arguments, **options)(None)


def prepare(
    folder: Path,
    step: int,
    model: GPT,
    tokenizer: Tokenizer,
    meta: dict[str, Any],
    optimizer_state: dict[str, Tensor],
    loader_state: dict[str, Tensor],
    device: Device,
    *,
    keep_last: int = 0,
    replaces: Sequence[int] = (),
    best: int | None = None,
    beside: bool = False,
) -> Callable[[Stop | None], Path]:
    """Begin to write `step_<n>` into a run's folder; all ranks call this together. The function that is returned does
    the rest and returns the path: all ranks call it with None, or after `beside` with the run's stop in `in_thread`.

    `optimizer_state` is `Optimizer.state_dict()`, of which all ranks write a part. `loader_state` is this rank's
    position in the data. The rank's random generators are saved too.
    `keep_last` steps stay, the newest ones (0: all). The steps that this one `replaces` are deleted. The `best` stays.

    Both raise UserError or OSError: on all ranks, when one of them cannot write its part. Older checkpoints are
    untouched.
    """
    final = model_folder.step_path(folder, step)
    unfinished = final.with_name(final.name + ".tmp")

    device.synchronize()  # state that is kept in main memory has arrived there
    # What only a resume needs. The ranks share one optimizer state under the same names. Loaders and generators differ
    # from rank to rank; without the prefix the ranks would overwrite each other's.
    state = {f"optimizer/{name}": tensor for name, tensor in optimizer_state.items()}
    state |= {f"rank{device.rank}/loader/{name}": tensor for name, tensor in loader_state.items()}
    state |= {f"rank{device.rank}/rng/{name}": tensor for name, tensor in device.rng_state().items()}
    share, entries = storage.share_of(state, device.rank)  # the part that this rank writes
    needed_bytes = bytes_of_checkpoint(model, state, device)

    # Rank 0 makes an empty folder, without the leftovers of a save that was killed; then the others may use it.
    @explained_full_disk(folder, needed_bytes)
    def make_folder() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(unfinished, ignore_errors=True)
        require_room(folder, needed_bytes)  # a full disk is found before anything is written
        unfinished.mkdir()

    decide_on_rank_zero(device, make_folder)

    # Rank 0 also writes the model, whose sharded weights all ranks gather together. The next steps change all of this,
    # and the scripts what they have put into `meta`.
    weights = dict(whole_weights(model, copied=beside))
    if beside:
        share = {name: tensor.to("cpu", copy=True) for name, tensor in share.items()}
    about = copy.deepcopy({"step": step, "world_size": device.world_size, **meta})

    def write(stop: Stop | None) -> Path:
        # A rank that fails reports it to the others instead of raising at once: they would wait for it.
        files = {}
        failure: Exception | None = None
        try:
            with explained_full_disk(folder, needed_bytes):
                if device.is_main:
                    files = write_model(unfinished, model.config, weights, tokenizer, about)
                name = storage.share_name(device.rank)
                files[name] = storage.write_tensors(unfinished / name, share)
        except Exception as error:
            failure = error if isinstance(error, (UserError, OSError)) else UserError(repr(error))
        report = files, entries, None if failure is None else f"rank {device.rank}: {failure}"
        # A thread must not call a collective: training calls them at the same time, and they would mix.
        reports = gather_values(report, device) if stop is None else stop.collect(final.name, report)

        # All ranks are done: only now may the folder get its name, and only rank 0 gives it.
        @explained_full_disk(folder, needed_bytes)
        def finish() -> None:
            try:
                for other_files, _, failed in reports:
                    if failed:
                        raise failure or UserError(f"{final} could not be saved: {failed}")
                    files.update(other_files)
                # Which part of which tensor each rank wrote: the index, in which any number of ranks finds its parts.
                index = storage.merge(entries for _, entries, _ in reports)
                files["training.json"] = storage.write_json(unfinished / "training.json", index)
                commit(unfinished, final, files)
            except BaseException:
                shutil.rmtree(unfinished, ignore_errors=True)  # give the room back
                raise
            _retire(final, keep_last, replaces, best)

        if stop is None:
            decide_on_rank_zero(device, finish)
        elif device.is_main:
            finish()
        return final

    return write


def in_thread(write: Callable[[Stop | None], Path], stop: Stop) -> Future[str]:
    """Have a thread write what was prepared; what becomes of it on rank 0 counts for all ranks."""
    written: Future[str] = Future()

    def run() -> None:
        if sys.platform == "linux":  # where a thread has its own priority: training takes the cores first
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        try:
            written.set_result(str(write(stop)))
        except BaseException as error:
            written.set_exception(error)

    threading.Thread(target=run, daemon=True).start()  # it may wait for a rank that is gone
    return written


def _retire(saved: Path, keep_last: int, replaces: Sequence[int], best: int | None) -> None:
    """Delete the steps that are not to be kept, after reading back the saved step to check that it is whole.

    The best step (`Run.save`) is the first with the lowest val_bpb or val_loss, or the highest eval_reward.
    - Only a checkpoint whose own step was evaluated can be it; the loop evaluates before it saves. So --save_every
      should be a multiple of --eval_every, and without it a save waits for an evaluation that is near.
    - Each checkpoint's `progress.best_saved` names the best one up to then, so a resumed run keeps what a straight one
      does. After a kill between a save and its deletions, the next save makes up for them.
    - If it is damaged or gone, training continues, and the end of the run prints a line.
    """
    if not keep_last and not replaces:
        return
    # Read the new step back before deleting anything: if the disk damages it, only the old steps are left.
    if not model_folder.is_whole(saved):
        warn(f"{saved} is damaged as soon as it is saved: older steps are all kept, look at the disk")
        return
    old = list(replaces)
    if keep_last:
        # A step after the one just saved is from before a resume that fell back; it stays.
        old += [step for step in model_folder.steps(saved.parent) if step <= model_folder.step_of(saved)][:-keep_last]
    with noting(f"older steps in {saved.parent}", "they stay"):
        for step in set(old) - {best}:
            _delete(model_folder.step_path(saved.parent, step))


def _delete(folder: Path) -> None:
    """Delete a checkpoint, if it is there. A kill half-way leaves nothing that is called step_<n>."""
    replaced = folder.with_name(folder.name + ".old")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
        shutil.rmtree(replaced, ignore_errors=True)


def write_model(
    folder: Path,
    config: GPTConfig,
    weights: dict[str, Tensor],
    tokenizer: Tokenizer,
    meta: dict[str, Any],
    tokenizer_name: str = TOKENIZER_NAME,
) -> dict[str, Any]:
    """Write the files for later stages and the engine into a folder; returns them for its manifest.

    `meta` has at least the step. Without a `world_size` in it, the folder has no training state.
    """
    facts = {
        # What a reader needs before it builds a model: sizes, tokenizer, number of shares.
        "model": dataclasses.asdict(config),
        "tokenizer": tokenizer.fingerprint(),
        "version": model_folder.FORMAT_VERSION,
        "world_size": 0,
        "trained_at": int(time.time()),
    }
    meta = {**facts, **meta}
    about = {"format": "pt", "step": str(meta["step"]), "tokenizer": meta["tokenizer"]}
    weights_name = model_folder.weights_name(meta)
    return {
        weights_name: storage.write_tensors(folder / weights_name, weights, about),
        "meta.json": storage.write_json(folder / "meta.json", meta),
        tokenizer_name: storage.facts(tokenizer.save(folder, tokenizer_name)),  # `save` flushes it
    }


def commit(unfinished: Path, final: Path, files: dict[str, Any]) -> None:
    """Give a folder, whose files are all on the disk, its manifest and its final name."""
    # The manifest is last: a folder that has one has everything else.
    storage.write_json(unfinished / "manifest.json", files)
    publish(unfinished, final)


@contextlib.contextmanager
def new_folder(final: Path, needed_bytes: int = 0) -> Iterator[Path]:
    """A folder that gets its final name after the block has filled it. Raises UserError: when the disk is full."""
    unfinished = final.with_name(final.name + ".tmp")
    with explained_full_disk(final, needed_bytes):
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        publish(unfinished, final)


def publish(unfinished: Path, final: Path) -> None:
    """Give a folder, whose files are all on the disk, its final name."""
    # Flush the list of the folder's names: a file whose name is lost is lost, though its bytes are on the disk.
    storage.flush(unfinished)
    # A step of that name is there when it was damaged, or when a run began anew. A folder cannot be replaced in one
    # operation. A kill between these two lines leaves a whole .tmp, which `clean_up` finds.
    _delete(final)
    # This one operation creates the checkpoint: before it there is none, after it there is a complete one.
    unfinished.rename(final)
    # Flush the parent: until then, a power failure could undo the rename.
    storage.flush(final.parent)


def clean_up(folder: Path) -> None:
    """Remove the leftovers of a killed save. A checkpoint that lacks only its last rename gets its name.

    One process calls it, while none saves.
    """
    # step_<n>.tmp is a save that did not end, or one that lacks its rename. step_<n>.old is a step that was being
    # replaced or deleted: if its replacement never came, it is still the best there is.
    leftovers = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d+\.(tmp|old)", path.name)]
    for path in sorted(leftovers, reverse=True):  # .tmp, the newer one, before .old
        final = path.with_suffix("")
        if not final.exists() and model_folder.is_whole(path):
            path.rename(final)
            storage.flush(folder)
        else:
            shutil.rmtree(path, ignore_errors=True)


# ---------------------------------------------------------------------- room on the disk


def bytes_of_checkpoint(model: GPT, state: dict[str, Tensor], device: Device) -> int:
    """What a checkpoint of this model and this training state takes, without its small files. Rank 0 knows it."""
    # What several ranks hold alike is written once, by the first of them. Rank 0's share is the largest: this sum is
    # never too small.
    share, _ = storage.share_of(state, device.rank)
    weight_bytes = sum(tensor.nbytes for tensor in trained_parameters(model).values())
    return weight_bytes + sum(tensor.nbytes for tensor in share.values()) * device.world_size


def require_room_for_run(folder: Path, config: TrainFlags, device: Device, needed_bytes: int, steps: int) -> None:
    """`require_room` for the checkpoints of `steps` steps, before the first of them. All ranks call this together."""
    count = math.ceil(steps / config.save_every) if config.save_every else 1
    if config.keep_last:
        count = min(count, config.keep_last + 2)  # the best; and an old one is deleted after the new one is saved
    decide_on_rank_zero(device, lambda: require_room(folder, needed_bytes, count))


def require_room(folder: Path, needed_bytes: int, count: int = 1) -> None:
    """Compare `count` checkpoints with the disk of a folder, which may be missing yet.

    Raises UserError: when the disk has no room for a checkpoint; warns when it has none for all of them.
    """
    free = free_bytes(folder)
    if ROOM * needed_bytes > free:
        raise _full_disk(folder, needed_bytes)
    if needed_bytes * count > free:
        warn(
            f"{count} checkpoints of {needed_bytes:,} bytes will not fit into the {free:,} free bytes of {folder}: "
            "make room, set --keep_last, or raise --save_every"
        )


def free_bytes(folder: Path) -> int:
    """The free bytes on the disk of a folder, which may be missing yet; sys.maxsize where the system does not say."""
    with noting(f"the room on the disk of {folder}", "whether it is enough will show at the next save"):
        return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    return sys.maxsize


@contextlib.contextmanager
def explained_full_disk(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Raises UserError, naming the bytes needed and free, when the disk fills up in the block."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _full_disk(folder, needed_bytes) from error


def _full_disk(folder: Path, needed_bytes: int) -> UserError:
    return UserError(
        f"the disk is full: a checkpoint needs {needed_bytes:,} bytes, {folder} has {free_bytes(folder):,} free; "
        "make room, or point NANOCHAT_BASE_DIR elsewhere"
    )


# ---------------------------------------------------------------------- resume, or begin anew


def describe(
    stage: str,
    config: TrainFlags,
    start: Start,
    optimizer: Optimizer,
    tasks: Sequence[str],
    fingerprints: dict[str, Any],
) -> dict[str, Any]:
    """The meta data of a run's checkpoints, but for its progress.

    `fingerprints` are facts that must not change in a resumed run and that no flag states, by their names in a message.
    `tasks` are the names of the tasks that the run learns.
    """
    meta: dict[str, Any] = {
        "stage": stage,
        "config": dataclasses.asdict(config),
        "source": None if start.source is None else model_folder.short_name(start.source),
        "pretraining": start.pretraining,
        # A server reads the sampling settings, and the tasks to suggest.
        "sampling": start.sampling,
        "tasks": list(dict.fromkeys([*start.tasks, *tasks])),
    }
    optimizers = " and ".join(sorted({group.kind for group in optimizer.groups}))
    meta["fingerprints"] = {**fingerprints, "the optimizer": optimizers}
    if start.adapter is not None:
        meta["adapter"] = start.adapter
        meta["fingerprints"]["the base's weights"] = start.adapter["base_sha256"]
    if start.reference is not None:
        assert start.reference_source is not None
        meta["fingerprints"]["the reference's weights"] = model_folder.weights_sha256(start.reference_source)
    return meta


def resume(
    folder: Path, config: TrainFlags, start: Start, optimizer: Optimizer, steps: int, meta: dict[str, Any]
) -> tuple[Progress, list[dict[str, Tensor]]]:
    """Load the weights, optimizer and generators of a folder's newest whole checkpoint.

    Returns the run's progress and the loader's state of every rank that saved; without a checkpoint, a new progress and
    no state. `steps` is the end of the run, `meta` its own meta data.
    Raises UserError: when any of this differs from the checkpoint, or when no checkpoint is whole.
    """

    def find() -> str | None:
        lock(folder)
        clean_up(folder)
        found = model_folder.newest(folder)
        if found is None and model_folder.steps(folder):
            raise UserError(f"--resume: no checkpoint in {folder} is whole: move the folder away to start over")
        return str(found[0]) if found else None

    found = decide_on_rank_zero(start.device, find)
    if found is None:
        print0(f"--resume: nothing in {folder} yet, starting from the beginning")
        others = [path.name for path in model_folder.tags(folder.parent.name)]
        if others:  # the tag may be mistyped
            warn(f"--resume found nothing in {folder}; the tags that could be resumed are {', '.join(others)}")
        return Progress(), []
    step_folder = Path(found)
    shape, saved = model_folder.OURS.describe(step_folder)
    # A flag or a field of the model that the saving code lacked counts as its default.
    saved["model"] = dataclasses.asdict(shape)
    saved["config"] = dataclasses.asdict(type(config)()) | saved["config"]
    meta = {"model": dataclasses.asdict(start.model.config), "tokenizer": start.tokenizer.fingerprint(), **meta}
    changes = _refuse_changes(saved, meta, frozen_flags(type(config)), step_folder)
    known = Progress.__dataclass_fields__
    progress = Progress(**{name: value for name, value in saved["progress"].items() if name in known})
    if progress.step > steps:
        flag = "--num_iterations" if getattr(config, "num_epochs", None) is None else "--num_epochs"
        raise UserError(f"--resume: {step_folder} is beyond {steps} steps: raise {flag} to continue")
    try:
        weights = step_folder / model_folder.weights_name(saved)
        with model_folder.damage_of(weights):
            load_trained(start.model, weights)
        state = optimizer.state_dict()
        loader_states, rng_states = load_training(step_folder, saved, state)
    except ValueError as error:  # a damaged file, weights only, or the state of another optimizer
        raise UserError(f"--resume: {error}; or move {step_folder} away to continue from the step before it") from error
    if start.device.rank < len(rng_states):  # a rank that the saving run did not have keeps the generators of its seed
        start.device.set_rng_state(rng_states[start.device.rank])
    print0(f"resumed from {step_folder}")
    if changes:
        print0(f"resumed with other settings: {', '.join(changes)}")
    return progress, loader_states


def _refuse_changes(saved: dict[str, Any], meta: dict[str, Any], frozen: list[str], step_folder: Path) -> list[str]:
    """Compare a run with its checkpoint; returns `--flag old -> new` for changed flags that may change.

    Raises UserError: when anything else changed.
    """
    free = {f"--{flag}" for flag in meta["config"] if flag not in frozen}
    before = _facts(saved)
    changes = []
    for name, now in _facts(meta).items():
        was = before.get(name)  # another script's checkpoint may lack it
        if was == now:
            continue
        if name not in free:
            flag = "--total_batch_size (tokens a step)" if name == "tokens a step" else name
            was, requested = ("(default)" if value in ("", None) else value for value in (was, now))
            back = "put the old data back" if name.startswith("what --") else "use its flags"
            raise UserError(
                f"--resume: {step_folder} was trained with {flag} {was}, not {requested}: {back}, or take another "
                "--model_tag"
            )
        changes.append(f"{name} {was} -> {now}")
    return changes


def _facts(meta: dict[str, Any]) -> dict[str, Any]:
    """The facts about a run in its checkpoint's meta data, by the name in a message."""
    facts = {f"--{flag}": value for flag, value in meta["config"].items() if flag != "resume"}
    # Steps draw examples by weight, epochs take each example once: another order.
    facts["the horizon in"] = "steps" if meta["config"].get("num_epochs") is None else "epochs"
    facts |= {"source": meta["source"], "tokenizer": meta["tokenizer"]}
    return {**facts, **meta["model"], **meta["fingerprints"]}


def load_trained(model: GPT, path: Path) -> None:
    """Read this process's rows of every trained parameter from a file of whole weights.

    Raises ValueError: when the file holds other names or shapes. Raises SafetensorError: when it cannot be read.
    """
    weights = model_folder.Weights(path)
    targets = trained_parameters(model)
    weights.require_shapes({name: target.shape for name, target in targets.items()})
    for name, target in targets.items():
        weights.read(name, len(target), held_rows(target).start, local(target))


def load_training(
    step_folder: Path, meta: dict[str, Any], optimizer_state: dict[str, Tensor]
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Load `Optimizer.state_dict()` in place; returns the loader's and the generators' states of every rank that saved.

    The number of ranks may have changed.

    Raises UserError: when there are only weights. Raises ValueError: when the state is of another model or optimizer;
    DamagedCheckpoint: when the files cannot be read.
    """
    if not meta["world_size"]:
        raise UserError(f"{step_folder} holds weights only: it cannot be resumed; train from it with --source")
    # What each rank saved for itself is small, and all ranks read all of it: from the loader states of 8 ranks, 2 ranks
    # compute where they begin (`LoaderState.merge`). The index has the shapes.
    own = {}
    with model_folder.damage_of(step_folder):
        index = json.loads((step_folder / "training.json").read_text(encoding="utf-8"))
        storage.check(index)
        for name, entry in index.items():
            if name.startswith("rank"):
                own[name] = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        storage.read(step_folder, index, own)
    # The optimizer's state is large: each rank reads its own part, from whichever files hold it. An error here is a
    # mismatch, not damage: the state is of another model or optimizer.
    state = {f"optimizer/{name}": tensor for name, tensor in optimizer_state.items()}
    storage.read(step_folder, index, state)

    def with_prefix(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): tensor for name, tensor in own.items() if name.startswith(prefix)}

    ranks = range(meta["world_size"])
    return [with_prefix(f"rank{rank}/loader/") for rank in ranks], [with_prefix(f"rank{rank}/rng/") for rank in ranks]


def set_aside(folder: Path, run_folder: Path, device: Device) -> Path | None:
    """Move an earlier run's checkpoints and metrics to `<tag>.<n>`, before a run of the same tag begins anew.

    Returns where the checkpoints are now, None if there were none.
    """

    def move() -> str | None:
        if not any(folder.glob("step_*")):  # an unfinished step of a killed run counts too
            return None
        # A run that cannot start must not move anything: try its folder first.
        run_folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=run_folder).close()
        number = 1
        while folder.with_name(f"{folder.name}.{number}").exists():
            number += 1
        name = f"{folder.name}.{number}"
        folder.rename(folder.with_name(name))
        if not run_folder.with_name(name).exists():
            run_folder.rename(run_folder.with_name(name))
        return name

    name = decide_on_rank_zero(device, move)
    return folder.with_name(name) if name else None


def write_facts(path: Path, start: Start, stage: str, steps: int) -> None:
    """Write `run.json`, the report's header: the run's configuration, data and versions."""
    model = start.model.config
    facts = {
        "stage": stage,
        "tag": start.tag,
        "started": time_text(start.began),
        "steps": steps,
        "parameters": scaling.parameter_counts(start.model)["total"],
        "adapter": start.adapter,
        "layers": model.n_layer,
        "context": model.sequence_len,
        "vocab_size": model.vocab_size,
        "data": start.pretraining["data"],
        **device_facts(start.device),
        "system": f"{platform.platform()}, {os.cpu_count()} cores",
        "commit": provenance.commit(),
        "versions": provenance.versions(),
    }
    with noting(str(path), "the report will not have the run's settings"):
        path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def divergence(folder: Path, last_good: int, first_step: int) -> UserError:
    """The advice after three steps in a row that were not finite; `last_good` is the step before them, or -1.

    `first_step` is the one that this process began with.
    """
    steps = model_folder.steps(folder)
    checkpoint = model_folder.step_path(folder, steps[-1]) if steps else "none"
    hint = ", then --resume" if steps else ""
    # A checkpoint whose next step was not finite has diverged itself; so has the one that this run resumed, if it
    # saved none since.
    earlier = [step for step in steps[:-1] if step <= last_good]
    if earlier and (steps[-1] > last_good or steps[-1] == first_step):
        good = model_folder.step_path(folder, earlier[-1])
        checkpoint = f"{checkpoint}, which diverges: move all after {good} away"
    return UserError(
        f"the loss or its gradient was not finite three steps in a row; last good step: "
        f"{last_good if last_good >= 0 else 'none'}, newest "
        f"checkpoint: {checkpoint}; lower the learning rates{hint}"
    )
