"""Checkpoints: saved whole or not at all, verified when read, found by stage and tag.

A step is a folder `checkpoints/<stage>/<tag>/step_<n>/` of safetensors and JSON, never pickle:

    model.safetensors  meta.json  tokenizer.json     what a later stage or the engine needs
    training.json  training.rank<r>.safetensors      what only a resume needs, at any number of ranks: the state of
                                                     optimizer, loader and random generators (shell/storage.py)
    manifest.json                                    size and sha256 of every other file

A run that trains adapters alone (lora.py) saves adapter.safetensors in place of model.safetensors: a few MB, and in
meta.json where the weights are that they belong to, with their sha256.

A save is atomic: a folder named `step_<n>` is complete, at whatever moment a process was killed. A reader compares
every file with the manifest, so it also notices what a disk damaged later, and falls back to the step before.
"""

import contextlib
import errno
import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanochat import device as devices
from nanochat import hf, lora, peft
from nanochat.data import hub
from nanochat.device import Device
from nanochat.gpt import GPT, GPTConfig
from nanochat.lora import Adapters, Lora
from nanochat.optim import Optimizer
from nanochat.parallel.collectives import decide_on_rank_zero, gather_values
from nanochat.parallel.fsdp import load_whole, require_shapes, shard, trained_parameters, whole_weights
from nanochat.parallel.mesh import Layout
from nanochat.sampling import CHAT_SAMPLING, NEUTRAL, read_settings
from nanochat.scaling import ContextMethod, with_context
from nanochat.shell import paths, storage
from nanochat.shell.cli import UserError
from nanochat.shell.log import warn
from nanochat.shell.untrusted import read_json, require_file
from nanochat.tokenizer import FILE_NAME as TOKENIZER_NAME
from nanochat.tokenizer import Tokenizer

FORMAT_VERSION = 2
MAX_TASKS = 1000
MAX_NAME = 4096  # characters of a task's name, or of the path of the pretraining data
MAX_TIME = 2**40  # seconds since 1970
MAX_LAYERS = 1000  # as --depth
MAX_BASES = 16  # adapters of adapters of adapters ...
MAX_ROTARY_BYTES = 256 << 20  # half a million tokens of context at a head_dim of 64, however small the model

# What a parser raises for a file that is damaged, or is not ours.
UNREADABLE = (
    OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RuntimeError, SafetensorError,
)  # fmt: skip


class DamagedCheckpoint(UserError):
    """A checkpoint whose files are not what was saved; `what` says which one, without the hint."""

    def __init__(self, what: str):
        super().__init__(f"{what}: train it again, or name an older --step")
        self.what = what


def _is_foreign(path: Path) -> bool:
    """Whether a folder is in another program's layout, which has no sums of its files."""
    return hf.is_folder(path) or peft.is_folder(path)


@contextlib.contextmanager
def _damage_of(path: Path) -> Iterator[None]:
    """Raises DamagedCheckpoint, naming the path, for whatever a parser raises in the block."""
    try:
        yield
    except UserError:  # it says what to do already
        raise
    except UNREADABLE as error:
        # A hostile file can put megabytes into a parser's message.
        if _is_foreign(path):
            raise UserError(f"--source {path} cannot be used: {str(error)[:500]}") from error
        raise DamagedCheckpoint(f"{path} is damaged ({str(error)[:500]})") from error


# ---------------------------------------------------------------------- saving

# A save of step 100 by two ranks, from top to bottom. No reader looks into the folder until the last line:
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


def save(
    folder: Path,
    step: int,
    model: GPT,
    tokenizer: Tokenizer,
    meta: dict[str, Any],
    optimizer: Optimizer,
    loader_state: dict[str, Tensor],
    device: Device,
    *,
    keep_last: int = 0,
    keep_every: int = 0,
) -> Path:
    """Write `step_<n>` into a run's folder and return its path; all ranks call this together.

    `loader_state` is this rank's position in the data; its random generators are saved too.
    `keep_last` steps stay, the newest ones (0: all), and every step that `keep_every` divides (0: none).

    Raises UserError or OSError: on all ranks, when one of them cannot write its part. Older checkpoints are untouched.
    """
    final = step_path(folder, step)
    unfinished = unfinished_path(final)

    device.synchronize()  # state that is kept in main memory has arrived there
    # What only a resume needs. The ranks share one optimizer state under the same names. Loaders and generators differ
    # from rank to rank; without the prefix the ranks would overwrite each other's.
    state = {f"optimizer/{name}": tensor for name, tensor in optimizer.state_dict().items()}
    state |= {f"rank{device.rank}/loader/{name}": tensor for name, tensor in loader_state.items()}
    state |= {f"rank{device.rank}/rng/{name}": tensor for name, tensor in device.rng_state().items()}
    # Which part of it this rank writes, and how much all ranks write together. What several ranks hold alike is written
    # once, by the first of them. Rank 0's share is the largest: this sum is never too small.
    share, entries = storage.share_of(state, device.rank)
    weight_bytes = sum(tensor.nbytes for tensor in trained_parameters(model).values())
    share_bytes = sum(tensor.nbytes for tensor in share.values())
    needed_bytes = weight_bytes + share_bytes * device.world_size

    # Rank 0 makes an empty folder, without the leftovers of a save that was killed; then the others may use it.
    def prepare() -> None:
        with explained_full_disk(folder, needed_bytes):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(unfinished, ignore_errors=True)
            # Two percent more, for the JSON files and the file system. A full disk is found before anything is written.
            if needed_bytes * 1.02 > shutil.disk_usage(folder).free:
                raise OSError(errno.ENOSPC, "too little room for a checkpoint")
            unfinished.mkdir()

    decide_on_rank_zero(device, prepare)

    # Every rank writes its share; rank 0 also writes the model, whose sharded weights all ranks gather together. A rank
    # that fails tells the others instead of raising at once: they would wait for it in the next collective.
    weights = dict(whole_weights(model))
    files = {}
    failure: Exception | None = None
    try:
        with explained_full_disk(folder, needed_bytes):
            if device.is_main:
                # What a reader must know before it builds a model: its sizes, its tokenizer, how many shares there are.
                about = {"model": asdict(model.config), "tokenizer": tokenizer.fingerprint()}
                about |= {"version": FORMAT_VERSION, "step": step, "world_size": device.world_size}
                about["trained_at"] = int(time.time())
                files = write_model(unfinished, weights, tokenizer, about | meta)
            name = storage.share_name(device.rank)
            files[name] = storage.write_tensors(unfinished / name, share)
    except Exception as error:
        failure = error
    failed = None if failure is None else f"rank {device.rank}: {failure}"
    reports = gather_values((files, entries, failed), device)

    # All ranks are done: only now may the folder get its name, and only rank 0 gives it.
    def finish() -> None:
        try:
            for _, _, failed in reports:
                if failed:
                    raise failure or UserError(f"{final} could not be saved: {failed}")
            with explained_full_disk(folder, needed_bytes):
                for other_files, _, _ in reports:
                    files.update(other_files)
                # Which part of which tensor each rank wrote: the index, in which any number of ranks finds its parts.
                index = storage.merge(entries for _, entries, _ in reports)
                files["training.json"] = storage.write_json(unfinished / "training.json", index)
                commit(unfinished, final, files)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)  # give the room back
            raise
        _retire(final, keep_last, keep_every)

    decide_on_rank_zero(device, finish)
    return final


def _retire(saved: Path, keep_last: int, keep_every: int) -> None:
    """Delete the steps that need not stay, once the step just saved is read back and whole."""
    if not keep_last:
        return
    # Delete nothing before the new step was read back: if the disk damages what it writes, the old steps are all
    # there is.
    if not is_whole(saved):
        warn(f"{saved} is damaged as soon as it is saved: older steps are all kept, look at the disk")
        return
    # With keep_last 2 and keep_every 1000, steps 900, 1000, 1100, 1200 and 1300 become 1000, 1200 and 1300.
    # A step after the one just saved is from before a resume that fell back; it is left alone.
    older = [step for step in steps(saved.parent) if step < _step_of(saved)]
    older.reverse()  # the newest first
    for step in older[keep_last - 1 :]:
        if not (keep_every and step % keep_every == 0):
            _delete(step_path(saved.parent, step))


def _delete(folder: Path) -> None:
    """Delete a checkpoint, if it is there. A kill half-way leaves nothing that is called step_<n>."""
    replaced = folder.with_name(folder.name + ".old")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
        shutil.rmtree(replaced, ignore_errors=True)


def write_model(
    folder: Path,
    weights: dict[str, Tensor],
    tokenizer: Tokenizer,
    meta: dict[str, Any],
    tokenizer_name: str = TOKENIZER_NAME,
) -> dict[str, Any]:
    """Write what a later stage or the engine needs into a folder; returns the files for its manifest."""
    about = {"format": "pt", "step": str(meta["step"]), "tokenizer": meta["tokenizer"]}
    weights_name = _weights_name(meta)
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


def publish(unfinished: Path, final: Path) -> None:
    """Give a folder, whose files are all on the disk, its final name."""
    # Flush the list of the folder's names: a file whose name is lost is lost, though its bytes are on the disk.
    storage.flush(unfinished)
    # A step of that name is there when it was damaged, or when a run began anew. A folder cannot be replaced in one
    # operation. A kill between these two lines leaves a whole .tmp, which `clean_up` finds.
    _delete(final)
    # The one operation that makes the checkpoint: before it there is none, after it there is a complete one.
    unfinished.rename(final)
    # Flush the parent: until then, a power failure could undo the rename.
    storage.flush(final.parent)


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
    manifest_path = step_folder / "manifest.json"
    with _damage_of(manifest_path):
        manifest = read_json(manifest_path)
        expected = {Path(name).name: (file["bytes"], file["sha256"]) for name, file in manifest.items()}
    for name, (size, sha256) in expected.items():
        path = step_folder / name  # a manifest cannot name a file of another folder
        if not path.exists():
            raise DamagedCheckpoint(f"{path} is damaged (there is no such file)")
        with _damage_of(path):
            require_file(path)
            # The size first: it finds a file cut short without reading it. A changed byte shows in the hash alone.
            if path.stat().st_size != size or storage.sha256(path) != sha256:
                raise DamagedCheckpoint(f"{path} is damaged, or its line in manifest.json")
    with _damage_of(step_folder / "meta.json"):
        meta = read_json(step_folder / "meta.json")
        needed = {_weights_name(meta), "meta.json", "tokenizer.json"}
        version = meta.get("version")
        ranks = meta.get("world_size", 0)
        if ranks:
            needed.add("training.json")
            needed.update(storage.share_name(rank) for rank in range(min(ranks, len(manifest))))
    missing = needed - set(manifest)
    if missing:  # a manifest that leaves out a file must not pass
        raise DamagedCheckpoint(f"{manifest_path} is damaged (it has no {', '.join(sorted(missing))})")
    # An unknown version is not damage: falling back to an older step would hide that the code is too old.
    if version != FORMAT_VERSION:
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
    return sorted(_step_of(path) for path in folder.glob("step_*") if re.fullmatch(r"step_\d+", path.name))


def newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that is whole, with its meta data; damaged ones are passed over with a warning."""
    # Only what is tried is read: in the usual case that is one step, however many there are.
    left = steps(folder)
    while left:
        path = step_path(folder, left.pop())
        try:
            return path, verify(path)
        except DamagedCheckpoint as error:
            warn(f"{error.what}; " + (f"falling back to step {left[-1]}" if left else "there is no step before it"))
    return None


def load_weights(model: GPT, step_folder: Path) -> None:
    """Copy what a verified checkpoint's run has trained into the same model; of a sharded one, this rank's rows."""
    path = step_folder / _weights_name({"adapter": lora.settings_of(model)})
    with _damage_of(path):
        load_whole(model, path)


def load_training(
    step_folder: Path, meta: dict[str, Any], optimizer: Optimizer, device: Device
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Load the optimizer's state in place; returns the loader's and the generators' states of every rank that saved.

    The number of ranks may have changed.

    Raises UserError: for weights alone. Raises ValueError: when the state is of another model or optimizer;
    DamagedCheckpoint: when the files cannot be read.
    """
    if not meta["world_size"]:
        raise UserError(f"{step_folder} holds weights only: it cannot be resumed; train from it with --source")
    # What each rank saved for itself is small, and all ranks read all of it: from the loader states of 8 ranks, 2 ranks
    # compute where they begin (`LoaderState.merge`). The index has the shapes.
    own = {}
    with _damage_of(step_folder):
        index = json.loads((step_folder / "training.json").read_text(encoding="utf-8"))
        storage.check(index)
        for name, entry in index.items():
            if name.startswith("rank"):
                own[name] = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        storage.read(step_folder, index, own)
    # The optimizer's state is large: each rank reads its own part, from whichever files hold it. An error here is a
    # mismatch, not damage: the state is of another model or optimizer.
    state = {f"optimizer/{name}": tensor for name, tensor in optimizer.state_dict().items()}
    storage.read(step_folder, index, state)
    ranks = range(meta["world_size"])
    loader_states = [_with_prefix(own, f"rank{rank}/loader/") for rank in ranks]
    rng_states = [_with_prefix(own, f"rank{rank}/rng/") for rank in ranks]
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
    layout: Layout | None = None,
    activation_checkpointing: bool = False,
    max_seq_len: int = 0,
    rope_scaling: ContextMethod | None = None,
    new_adapters: Callable[[GPTConfig], Lora | None] | None = None,
    seed: int = 0,
    adapter: str = "",
    without_weights: bool = False,
) -> tuple[GPT, Tokenizer, dict[str, Any]]:
    """`(model, tokenizer, meta)` of a stage, a folder or a repository of a hub, as `find_source` finds it.

    `device` is "npu:0", "cuda:0", "cpu" or nothing for the best one here. The model is in eval mode, its weights in
    fp32. `meta` always has "sampling", the settings with which the model's replies are drawn (all of SamplingParams but
    the seed), and "tasks", the names of those that it has learned. `verified`: `source` is a folder that `find_source`
    has just read; it is not read again. With a `layout` that shards, each rank reads and holds its rows alone
    (parallel/fsdp.py). `max_seq_len` changes the model's context; 0 leaves it. A longer one than the model has been
    trained with needs `rope_scaling`.

    Adapters of a checkpoint are merged into the weights of their base, and then those of `adapter`, as `load_adapters`
    takes it. Where `new_adapters` returns settings for the model's shape, it gets new ones to train, drawn by `seed`;
    all else is frozen, and in the dtype of the products. `without_weights` leaves the model on the meta device.

    Raises UserError: when there is no such checkpoint, or it cannot be used.
    """
    # Verified, then built: no byte of a damaged file reaches a model.
    folder = Path(source) if verified else find_source(str(source), model_tag, step)
    if not isinstance(device, Device):
        device = devices.init(str(device) if device else "auto")
    config, tokenizer, meta = load_config(folder, max_seq_len, rope_scaling)
    with _damage_of(folder):
        described = _described_by(folder)
        *tuned, base = _lineage(folder)
        _require_agreement(described, base, meta, config, tokenizer)
        meta |= _facts_of_use(described, meta)
        merged = [_read_adapters(path, config) for path in reversed(tuned)]
        if adapter:
            merged.append(load_adapters(adapter, config, folder)[0])
        # Built without memory, then sharded, then allocated: a whole model is never in main memory, nor on the device
        # of a rank that keeps a part. Eight ranks would hold 224 GB of a model of 7 billion parameters.
        with torch.device("meta"):
            model = GPT(config, device.kernels)
        if hf.is_folder(base):
            hf.require_shapes(model, base)
        else:
            require_shapes(model, base / "model.safetensors")
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        settings = new_adapters(config) if new_adapters is not None else None
        if settings is not None:
            with torch.device("meta"):
                lora.attach(model.to(device.dtype), settings)
        shard(model, layout or Layout(), device, activation_checkpointing)
        if without_weights:
            return model.eval(), tokenizer, {**meta, "folder": str(folder)}
        model.to_empty(device=device.torch_device)
        model.fill_rotary()
        lora.load_base(model, shapes, _row_reader(base, config), merged)
        lora.init_adapters(model, seed)
    return model.eval(), tokenizer, {**meta, "folder": str(folder)}


def load_config(
    folder: Path, max_seq_len: int = 0, rope_scaling: ContextMethod | None = None
) -> tuple[GPTConfig, Tokenizer, dict[str, Any]]:
    """What a model is without its weights, from the small files of a folder that `find_source` has found.

    Raises UserError: when one of them cannot be used.
    """
    with _damage_of(folder):
        folder = _described_by(folder)
        tokenizer = Tokenizer.load(folder)  # the folder is enough, wherever it was copied to
        if hf.is_folder(folder):
            family, config = hf.read_config(folder)
            meta = {"model": asdict(config), **hf.describe(folder, family, config, tokenizer.fingerprint())}
        else:
            meta = read_json(folder / "meta.json")
            config = GPTConfig(**meta["model"])
        # A stage may have trained with shorter rows than the model can read.
        pretraining = meta.get("pretraining", {})
        context = pretraining.get("context")
        trained = max(config.sequence_len, context if isinstance(context, int) else 0)
        if max_seq_len or rope_scaling not in (None, "auto"):
            max_seq_len = max_seq_len or config.sequence_len
            config = with_context(config, max_seq_len, trained, rope_scaling)
            meta["pretraining"] = {**pretraining, "context": max(trained, max_seq_len)}
        return config, tokenizer, meta


def _described_by(folder: Path) -> Path:
    """The folder with a model's tokenizer and shape. Those of peft's have neither: their base has."""
    return _base_of_peft(folder) if peft.is_folder(folder) else folder


def _weights_name(meta: dict[str, Any]) -> str:
    """The file of what a checkpoint's run has trained."""
    return "model.safetensors" if meta.get("adapter") is None else "adapter.safetensors"


def _lineage(folder: Path) -> list[Path]:
    """A checkpoint and, where it holds adapters, what they were trained on, and so on down to whole weights.

    Raises UserError: when a base is missing, or is not the one that its adapters were trained on.
    """
    lineage = [folder]
    while len(lineage) <= MAX_BASES:
        if peft.is_folder(folder):
            folder = _base_of_peft(folder)
        else:
            entry = _adapter_entry(folder)
            if entry is None:
                return lineage
            folder = find_base(folder, entry)
        lineage.append(folder)
    raise ValueError("its base is adapters, too, and so on without end")


def _adapter_entry(folder: Path) -> dict[str, Any] | None:
    """What meta.json says of a checkpoint's adapters; None: it holds whole weights."""
    return None if hf.is_folder(folder) else read_json(folder / "meta.json").get("adapter")


def load_adapters(source: str, config: GPTConfig, base: Path | None = None) -> tuple[Adapters, dict[str, Any]]:
    """The adapters of a checkpoint, or of a folder that peft has saved, and their meta data, as of `load_model`; of
    peft's it is "folder" alone.

    Raises UserError: when there are none, or they are not of the model `base`, or not of its shape.
    """
    folder = _find_source(source, None, None, flag="--adapter")
    with _damage_of(folder):
        if peft.is_folder(folder):
            read = peft.read(folder, config)
            trained_on = peft.base_of(folder)
            if base is not None and trained_on.rpartition(":")[2] not in _names_of(base):
                warn(
                    f"--adapter {source} names {trained_on} as its base: over {base} it is right with the same weights"
                )
            return read, {"folder": str(folder)}
        entry = _adapter_entry(folder)
        if entry is None:
            raise UserError(f"{folder} holds no adapters: it is no run with --lora_rank, and has no {peft.SETTINGS}")
        if base is not None and weights_sha256(base) != entry["base_sha256"]:
            raise UserError(
                f"--adapter {source} was trained on {entry['base']}, and --source is {short_name(base)}, which has "
                "other weights: name the first as --source"
            )
        meta = read_json(folder / "meta.json")
        return _read_adapters(folder, config), {**meta, **_facts_of_use(folder, meta), "folder": str(folder)}


def _names_of(folder: Path) -> set[str]:
    """What the settings of peft can call a model: a path, our short name, or a repository of a hub."""
    return {str(folder), str(folder.resolve()), short_name(folder), folder.name.replace("--", "/")}


def _read_adapters(folder: Path, config: GPTConfig) -> Adapters:
    """Raises UserError: when they are not of a model of this shape."""
    if peft.is_folder(folder):
        return peft.read(folder, config)
    found = lora.read_adapters(folder / "adapter.safetensors", _adapter_entry(folder) or {})
    found.require_fit(config, str(folder))
    return found


def _row_reader(folder: Path, config: GPTConfig) -> lora.RowReader:
    """Reads rows of a folder's weights, one parameter at a time."""
    if hf.is_folder(folder):
        stored = hf.index(folder)
        return lambda name, rows, first, target: hf.read_rows(stored, config, name, rows, first, target)

    def read(name: str, rows: int, first: int, target: Tensor) -> None:
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            target.copy_(file.get_slice(name)[first : first + len(target)])

    return read


def find_base(step_folder: Path, entry: dict[str, Any]) -> Path:
    """The folder of the weights that a checkpoint's adapters belong to: where they were, or wherever below the base
    folder the same weights are now.

    Raises UserError: when they are missing, or others are in their place.
    """
    wanted = str(entry["base_sha256"])
    checkpoints = paths.base_dir() / "checkpoints"
    named = checkpoints / str(entry["base"])[:MAX_NAME]  # an absolute path replaces what is before it
    for folder in (named, *sorted(checkpoints.glob("*/*/step_*"))):
        with contextlib.suppress(*UNREADABLE):  # not a checkpoint, or a damaged one
            if weights_sha256(folder) == wanted:
                return folder
    why = "has other weights now" if named.is_dir() else "is missing"
    raise UserError(
        f"{step_folder} holds adapters, and {named}, which they were trained on, {why}: put the weights of sha256 "
        f"{wanted[:12]}... back there"
    )


def _base_of_peft(folder: Path) -> Path:
    """The model that peft's adapters belong to: a path as it is or below our checkpoints, or a repository of a hub."""
    name = peft.base_of(folder)[:MAX_NAME]
    for path in (Path(name).expanduser(), paths.base_dir() / "checkpoints" / name):
        if path.is_dir() and not peft.is_folder(path):
            return _find_source(str(path), None, None)
    if name.count("/") != 1:
        raise UserError(
            f"{folder} holds adapters for {name}, which is no model here: put the model there, or change "
            f"base_model_name_or_path in {peft.SETTINGS}"
        )
    return _find_source(name if name.partition(":")[0] in hub.HUBS else f"hf:{name}", None, None)


def base_of(source: Path) -> dict[str, str]:
    """What meta.json of adapters says about their base."""
    folder = source.resolve()
    checkpoints = (paths.base_dir() / "checkpoints").resolve()
    where = folder.relative_to(checkpoints) if folder.is_relative_to(checkpoints) else folder
    return {"base": where.as_posix(), "base_sha256": weights_sha256(source)}


def _require_agreement(folder: Path, base: Path, meta: dict[str, Any], config: GPTConfig, tokenizer: Tokenizer) -> None:
    """Compare meta data with the other files before a model is built: what they ask for could fill the memory.

    Raises ValueError: when they do not belong together.
    """
    if not isinstance(meta["step"], int) or not isinstance(meta.get("pretraining", {}), dict):
        raise ValueError("meta.json has no step, or pretraining that is not an object")
    # With another tokenizer a model reads and writes nonsense, or its ids are outside of the embedding.
    if hf.is_folder(folder):
        if tokenizer.vocab_size > config.vocab_size:
            raise ValueError(
                f"its tokenizer has {tokenizer.vocab_size:,} tokens and its embedding {config.vocab_size:,} rows: they "
                "do not belong together"
            )
    elif meta["tokenizer"] != tokenizer.fingerprint() or tokenizer.vocab_size > config.vocab_size:
        raise ValueError("tokenizer.json is not the tokenizer that meta.json names, or too large for the model")
    # Layers cost time and memory even without weights. The rotary tables, (2, context, head_dim) in fp32, are not in
    # the file: a context whose tables are larger than all weights is not one that was trained.
    if hf.is_folder(base):
        stored = hf.index(base)
        layers = hf.layers(stored)
        files = {tensor.path for tensor in stored.values()}
    else:
        files = {base / "model.safetensors"}
        layers = storage.layers(base / "model.safetensors")
    if config.n_layer != layers:
        raise ValueError(f"its config has {config.n_layer} layers, its weights have {layers}")
    if not 1 <= layers <= MAX_LAYERS:
        raise ValueError(f"{layers} layers: from 1 to {MAX_LAYERS}")
    rotary_bytes = 8 * config.sequence_len * config.head_dim
    if rotary_bytes > max(sum(path.stat().st_size for path in files), MAX_ROTARY_BYTES):
        raise ValueError(f"a context of {config.sequence_len} tokens takes {rotary_bytes:,} bytes")


def _facts_of_use(folder: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """What a server, its page and the terminal chat read of a checkpoint, checked; older ones lack some of it.

    Raises ValueError: for what no checkpoint of ours contains.
    """
    params = asdict(CHAT_SAMPLING if "sampling" not in meta else read_settings(meta["sampling"]))
    stage = meta.get("stage", "model")
    tasks = meta.get("tasks", [])
    trained_at = meta.get("trained_at")
    if trained_at is None:
        trained_at = int((folder / "meta.json").stat().st_mtime)
    if not isinstance(tasks, list) or len(tasks) > MAX_TASKS:
        raise ValueError(f"tasks in meta.json is not a list of at most {MAX_TASKS} names")
    for text in (stage, *tasks, meta.get("pretraining", {}).get("data", "")):
        if not isinstance(text, str) or len(text) > MAX_NAME:
            raise ValueError(f"stage, tasks or data in meta.json is not a text of at most {MAX_NAME} characters")
    if not isinstance(trained_at, int) or not 0 <= trained_at < MAX_TIME:
        raise ValueError("trained_at in meta.json is not a time in seconds since 1970")
    sampling = {name: params[name] for name in NEUTRAL}
    return {"stage": stage, "tasks": tasks, "trained_at": trained_at, "sampling": sampling}


# ---------------------------------------------------------------------- finding


def find_source(
    source: str, model_tag: str | None = None, step: int | None = None, device: Device | None = None
) -> Path:
    """The folder of a checkpoint, all of whose files were read and are whole.

    `source` is a stage ("base", "mid", "sft", "dpo", "rl"), "auto" for the furthest stage that has a checkpoint, a
    checkpoint's own folder, a folder in Hugging Face's layout, or a repository of such files, hf:ORG/NAME or
    modelscope:ORG/NAME, which is downloaded once. Without `model_tag` it is the tag last written, without `step` the
    newest whole step. With `device`, all of its ranks call this together and take what rank 0 finds.

    Raises UserError: when there is none.
    """
    # Rank 0 decides for all: ranks that looked by themselves could find different steps while a run still saves, and
    # each would read every file.
    if device is not None:
        found = decide_on_rank_zero(device, lambda: str(find_source(source, model_tag, step)))
        return Path(str(found))
    found = _find_source(source, model_tag, step)
    # Adapters are as whole as their base.
    with _damage_of(found):
        for base in _lineage(found)[1:]:
            if not _is_foreign(base):
                verify(base)
    return found


def _find_source(source: str, model_tag: str | None, step: int | None, flag: str = "--source") -> Path:
    # A stage, its tag, its step: what is not given is chosen here.
    if source == "auto":
        source = "base"
        for stage in paths.STAGES:  # in the order in which they are trained
            if any(model_tag in (None, path.name) for path in tags(stage)):
                source = stage
    if source in paths.STAGES:
        return _find_in_stage(source, model_tag, step)
    is_of_hub = source.partition(":")[0] in hub.HUBS
    chosen = hub.fetch_model(source) if is_of_hub else Path(source).expanduser()
    if not _is_foreign(chosen) and not (chosen / "manifest.json").is_file():
        why = ", there is no manifest.json in it, and no config.json" if chosen.is_dir() else ""
        raise UserError(
            f"{flag} {source} is neither a stage (auto, {', '.join(paths.STAGES)}) nor a checkpoint's folder "
            f"(.../step_<n>){why}: name one of them, a folder in Hugging Face's or peft's form, or hf:ORG/NAME"
        )
    if model_tag is not None or step is not None:
        raise UserError(
            f"{flag} {source} is one checkpoint's folder: leave out the flags for a tag and a step, or name a stage"
        )
    if _is_foreign(chosen):
        # Such a folder has no sums to compare with. Its headers are read: a file that is cut short is found.
        if hf.is_folder(chosen):
            with _damage_of(chosen):
                hf.read_config(chosen)
                hf.index(chosen)
    else:
        verify(chosen)
    return chosen


def _find_in_stage(stage: str, model_tag: str | None, step: int | None) -> Path:
    # The tag written last, by the time of its newest step: a folder's own time also changes when a step is deleted.
    folders = tags(stage)
    folder = paths.base_dir() / "checkpoints" / stage
    if model_tag is not None:
        folder = paths.checkpoint_dir(stage, model_tag)
    elif folders:
        folder = max(folders, key=lambda folder: step_path(folder, steps(folder)[-1]).stat().st_mtime)
    if step is not None and steps(folder):
        chosen = step_path(folder, step)
        if not chosen.is_dir():
            raise UserError(f"there is no step {step} in {folder}: it has {steps(folder)}; without one, the newest")
        verify(chosen)
        return chosen
    found = newest(folder)
    if found is None:
        others = [path.name for path in folders if path != folder]
        hint = f", or name one of the tags {', '.join(others)}" if others else ""
        raise UserError(
            f"there is no {stage} checkpoint in {folder} that is whole: train one with "
            f"`python -m scripts.{paths.STAGES[stage]}`{hint}"
        )
    return found[0]


def tags(stage: str) -> list[Path]:
    """The folders of a stage that have a finished step, by name."""
    return sorted(path for path in (paths.base_dir() / "checkpoints" / stage).glob("*") if steps(path))


def short_name(step_folder: Path) -> str:
    """`<stage>/<tag>/step_<n>`: the same wherever the base folder is. A model from elsewhere has a name alone."""
    if _is_foreign(step_folder):
        return step_folder.resolve().name
    return "/".join(step_folder.resolve().parts[-3:])


def tag_of(step_folder: Path) -> str:
    """The tag that a checkpoint's folder belongs to; that of a model from elsewhere is the folder's name."""
    if _is_foreign(step_folder):
        name = re.sub(r"[^A-Za-z0-9_.=+-]", "-", step_folder.resolve().name)
        return name.lstrip(".=+-")[:100] or "model"
    return step_folder.resolve().parent.name


def weights_sha256(step_folder: Path) -> str:
    """The sha256 of the model's weights or adapters, from the manifest of a checkpoint that was verified."""
    if hf.is_folder(step_folder):  # it has none: all files are read
        paths = sorted({tensor.path for tensor in hf.index(step_folder).values()})
        return hashlib.sha256("".join(storage.sha256(path) for path in paths).encode()).hexdigest()
    if peft.is_folder(step_folder):
        return storage.sha256(step_folder / peft.WEIGHTS)
    manifest = json.loads((step_folder / "manifest.json").read_text(encoding="utf-8"))
    file = manifest.get("model.safetensors") or manifest["adapter.safetensors"]
    return file["sha256"]


def stored_dtype(step_folder: Path) -> torch.dtype:
    """The dtype in which a folder holds a model's matrices: fp32, unless it was exported or comes from elsewhere."""
    with _damage_of(step_folder):
        step_folder = _lineage(step_folder)[-1]
    if hf.is_folder(step_folder):
        return hf.stored_dtype(step_folder)
    with _damage_of(step_folder), safe_open(step_folder / "model.safetensors", framework="pt") as file:
        return hf.DTYPES[file.get_slice("embedding.weight").get_dtype()]


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"  # zeros in front: `ls` then lists the steps in order


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def unfinished_path(final: Path) -> Path:
    """Where a folder is written before it gets its name."""
    return final.with_name(final.name + ".tmp")


@contextlib.contextmanager
def explained_full_disk(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Raises UserError, naming the bytes needed and free, when the disk fills up in the block."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free_bytes = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
        raise UserError(
            f"the disk is full: a checkpoint needs {needed_bytes:,} bytes, {folder} has {free_bytes:,} free; "
            "make room, or point NANOCHAT_BASE_DIR elsewhere"
        ) from error
