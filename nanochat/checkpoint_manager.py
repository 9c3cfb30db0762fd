"""Checkpoints: saved whole or not at all; loaded to resume, or as a model to use.

A step is a folder `checkpoints/<stage>/<tag>/step_<n>/` of safetensors and JSON, never pickle:

    model.safetensors  meta.json  tokenizer.json     for later stages and the engine
    training.json  training.rank<r>.safetensors      for a resume, at any number of ranks: the state of the optimizer,
                                                     the loader and the random generators (ground/storage.py)
    manifest.json                                    size and sha256 of every other file

A run that trains only adapters saves adapter.safetensors instead of model.safetensors: a few MB. Its meta.json names
the weights of their base, with the sha256.

A save is atomic: a folder named `step_<n>` is complete, no matter when a process was killed. model_folder.py finds and
verifies it: it compares every file with the manifest, so it also notices later damage on the disk.
"""

import contextlib
import errno
import json
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanochat import device as devices
from nanochat import model_folder
from nanochat.device import Device
from nanochat.gpt import GPT, SCALAR_HEAD, GPTConfig
from nanochat.ground import rooms, storage
from nanochat.ground.cli import UserError
from nanochat.ground.log import warn
from nanochat.ground.sharding import fill, held_rows, local, trained_parameters, whole_weights
from nanochat.ground.storage import load_whole
from nanochat.long_context import ContextMethod, with_context
from nanochat.model_folder import Weights
from nanochat.ranks import Layout, decide_on_rank_zero, gather_values
from nanochat.tokenizer import FILE_NAME as TOKENIZER_NAME
from nanochat.tokenizer import Tokenizer

MAX_LAYERS = 1000  # as --depth
MAX_ROTARY_BYTES = 256 << 20  # half a million tokens of context at a head_dim of 64, however small the model

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
    optimizer_state: dict[str, Tensor],
    loader_state: dict[str, Tensor],
    device: Device,
    *,
    keep_last: int = 0,
    replaces: int | None = None,
) -> Path:
    """Write `step_<n>` into a run's folder and return its path; all ranks call this together.

    `optimizer_state` is `Optimizer.state_dict()`, of which all ranks write a part. `loader_state` is this rank's
    position in the data. The rank's random generators are saved too.
    `keep_last` steps stay, the newest ones (0: all). The step that this one `replaces` is deleted.

    Raises UserError or OSError: on all ranks, when one of them cannot write its part. Older checkpoints are untouched.
    """
    final = model_folder.step_path(folder, step)
    unfinished = unfinished_path(final)

    device.synchronize()  # state that is kept in main memory has arrived there
    # What only a resume needs. The ranks share one optimizer state under the same names. Loaders and generators differ
    # from rank to rank; without the prefix the ranks would overwrite each other's.
    state = {f"optimizer/{name}": tensor for name, tensor in optimizer_state.items()}
    state |= {f"rank{device.rank}/loader/{name}": tensor for name, tensor in loader_state.items()}
    state |= {f"rank{device.rank}/rng/{name}": tensor for name, tensor in device.rng_state().items()}
    share, entries = storage.share_of(state, device.rank)  # the part that this rank writes
    needed_bytes = bytes_of_checkpoint(model, state, device)

    # Rank 0 makes an empty folder, without the leftovers of a save that was killed; then the others may use it.
    def prepare() -> None:
        with explained_full_disk(folder, needed_bytes):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(unfinished, ignore_errors=True)
            require_room(folder, needed_bytes)  # a full disk is found before anything is written
            unfinished.mkdir()

    decide_on_rank_zero(device, prepare)

    # Every rank writes its share; rank 0 also writes the model, whose sharded weights all ranks gather together. A rank
    # that fails reports it to the others instead of raising at once: they would wait for it in the next collective.
    weights = dict(whole_weights(model))
    files = {}
    failure: Exception | None = None
    try:
        with explained_full_disk(folder, needed_bytes):
            if device.is_main:
                about = {"step": step, "world_size": device.world_size}
                files = write_model(unfinished, model.config, weights, tokenizer, about | meta)
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
        _retire(final, keep_last, replaces)

    decide_on_rank_zero(device, finish)
    return final


def _retire(saved: Path, keep_last: int, replaces: int | None) -> None:
    """Delete the steps that are not to be kept, after reading back the saved step to check that it is whole."""
    if not keep_last and replaces is None:
        return
    # Read the new step back before deleting anything: if the disk damages it, only the old steps are left.
    if not model_folder.is_whole(saved):
        warn(f"{saved} is damaged as soon as it is saved: older steps are all kept, look at the disk")
        return
    if replaces is not None:
        _delete(model_folder.step_path(saved.parent, replaces))
    # A step after the one just saved is from before a resume that fell back; it stays.
    older = [step for step in model_folder.steps(saved.parent) if step < model_folder.step_of(saved)]
    older.reverse()  # the newest first
    for step in older[keep_last - 1 :] if keep_last else []:
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
    # The facts that a reader needs before it builds a model: sizes, tokenizer, number of shares.
    facts = {"model": asdict(config), "tokenizer": tokenizer.fingerprint(), "version": model_folder.FORMAT_VERSION}
    meta = {**facts, "world_size": 0, "trained_at": int(time.time()), **meta}
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
    unfinished = unfinished_path(final)
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


def unfinished_path(final: Path) -> Path:
    """The path at which a folder is written before it gets its name."""
    return final.with_name(final.name + ".tmp")


def bytes_of_checkpoint(model: GPT, state: dict[str, Tensor], device: Device) -> int:
    """What a checkpoint of this model and this training state takes, without its small files. Rank 0 knows it."""
    # What several ranks hold alike is written once, by the first of them. Rank 0's share is the largest: this sum is
    # never too small.
    share, _ = storage.share_of(state, device.rank)
    weight_bytes = sum(tensor.nbytes for tensor in trained_parameters(model).values())
    return weight_bytes + sum(tensor.nbytes for tensor in share.values()) * device.world_size


def require_room(folder: Path, needed_bytes: int) -> None:
    """Raises UserError: when the disk of a folder, which may be missing yet, has less room than a checkpoint needs."""
    # Two percent more, for the JSON files and the file system.
    if needed_bytes * 1.02 > free_bytes(folder):
        raise _full_disk(folder, needed_bytes)


def free_bytes(folder: Path) -> int:
    """What the disk of a folder, which may be missing yet, has free."""
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


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


# ---------------------------------------------------------------------- loading


def load_weights(model: GPT, step_folder: Path) -> None:
    """Copy the trained weights of a verified checkpoint into the same model; for a sharded one, this rank's rows."""
    path = step_folder / model_folder.weights_name({"adapter": model.extension})
    with model_folder.damage_of(path):
        load_whole(model, path)


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
    ranks = range(meta["world_size"])
    loader_states = [_with_prefix(own, f"rank{rank}/loader/") for rank in ranks]
    rng_states = [_with_prefix(own, f"rank{rank}/rng/") for rank in ranks]
    return loader_states, rng_states


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


class Preparation:
    """A change to a model between its file and its first use, such as new adapters. The defaults change nothing."""

    def reshape(self, model: GPT, device: Device) -> None:
        """Change the model while it is on the meta device, before it is sharded."""

    def reading(self, weights: Weights, config: GPTConfig, folder: Path) -> Weights:
        """The source from which the model's own parameters are read; by default `weights`."""
        return weights

    def fill(self, model: GPT) -> None:
        """Fill the parameters that `reshape` has added."""


class NewScalarHead(Preparation):
    """Gives a model a scalar head of zeros if it has none."""

    def reshape(self, model: GPT, device: Device) -> None:
        self.is_new = model.scalar_head is None
        model.add_scalar_head()

    def fill(self, model: GPT) -> None:
        if self.is_new:
            assert model.scalar_head is not None
            fill(model.scalar_head.weight, torch.zeros(model.config.width))


def load_model(
    source: str | Path,
    device: str | torch.device | Device | None = None,
    *,
    model_tag: str | None = None,
    verified: bool = False,
    layout: Layout | None = None,
    activation_checkpointing: bool = False,
    max_seq_len: int = 0,
    rope_scaling: ContextMethod | None = None,
    prepare: Sequence[Preparation] = (),
    without_weights: bool = False,
) -> tuple[GPT, Tokenizer, dict[str, Any]]:
    """`(model, tokenizer, meta)` of a stage, a folder or a repository of a hub, as `find_source` finds it.

    `device` is "npu:0", "cuda:0", "cpu" or nothing for the best one here. The model is in eval mode, its weights in
    fp32. `meta` always has "sampling", the settings with which the model's replies are drawn (all of SamplingParams but
    the seed), and "tasks", the names of those that it has learned. `verified`: `source` is a folder that `find_source`
    has just read; it is not read again. With a `layout` that shards, each rank reads and holds only its rows
    (ranks.py). `max_seq_len` changes the model's context; 0 leaves it. A longer one than the model has been
    trained with needs `rope_scaling`. `prepare` changes the model on its way, in order. `without_weights` leaves it on
    the meta device, without a tokenizer: `meta` and the model's shape are all that a folder has to have.

    Raises UserError: when the checkpoint does not exist, or cannot be used.
    """
    # Verified, then built: no byte of a damaged file reaches a model.
    folder = Path(source) if verified else model_folder.find_source(str(source), model_tag)
    if not isinstance(device, Device):
        device = devices.init(str(device) if device else "auto")
    config, tokenizer, meta = load_config(folder, max_seq_len, rope_scaling, without_weights)
    with model_folder.damage_of(folder):
        weights = None
        if not without_weights:
            weights = _open_weights(folder, config, tokenizer, meta, prepare)
        elif config.n_layer > MAX_LAYERS:
            raise ValueError(f"{config.n_layer} layers: from 1 to {MAX_LAYERS}")
        meta |= model_folder.facts_of_use(meta)

        # ---- the model without memory, as its weights are, then as it will be used
        # Built on the meta device, then sharded, then allocated: a whole model is never in main memory, nor on the
        # device of a rank that keeps a part. Eight ranks would hold 224 GB of a model of 7 billion parameters.
        # A reward model's head is missing if it was created from another model and never trained.
        stores_head = config.scalar_head and weights is not None and weights.holds(SCALAR_HEAD)
        with torch.device("meta"):
            model = GPT(replace(config, scalar_head=stores_head), device.kernels)
        if weights is not None:
            weights.require_shapes(model)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        preparations = [NewScalarHead(), *prepare] if config.scalar_head else list(prepare)
        with torch.device("meta"):
            for one in preparations:
                one.reshape(model, device)
        if activation_checkpointing:
            model.recompute_activations()
        if layout is not None:
            layout.shard(model, device)

        # ---- memory, and the numbers in it
        if weights is not None:
            model.to_empty(device=device.torch_device)
            model.fill_rotary()
            _read_weights(model, shapes, weights)
            for one in preparations:
                one.fill(model)
    return model.eval(), tokenizer, {**meta, "folder": str(folder)}


def _open_weights(
    folder: Path, config: GPTConfig, tokenizer: Tokenizer, meta: dict[str, Any], prepare: Sequence[Preparation]
) -> Weights:
    """The weights in a folder, or in the base of its adapters, into which these are merged as they are read."""
    *adapters, base = model_folder.lineage(folder)
    weights = model_folder.format_of(base).weights(base, config)
    _require_agreement(model_folder.format_of(folder).described_by(folder), weights, meta, config, tokenizer)
    if adapters:
        weights = rooms.find("adapters", "weights")(weights, adapters, config)
    for one in prepare:
        weights = one.reading(weights, config, folder)
    return weights


@torch.no_grad()
def _read_weights(model: GPT, shapes: dict[str, torch.Size], weights: Weights) -> None:
    """Fill the parameters that a model had before it was prepared, with these `shapes`; of a sharded model this rank's
    rows."""
    for name, shape in shapes.items():
        layer: Any = model.get_submodule(name.rpartition(".")[0])
        if hasattr(layer, "set_weight") and name.endswith(".weight"):
            # A layer that stores its matrix in another form (adapters/nf4.py) needs the whole of it.
            whole = torch.empty(shape)
            weights.read(name, shape[0], 0, whole)
            layer.set_weight(whole)
            continue
        target = model.get_parameter(name)
        weights.read(name, shape[0], held_rows(target).start, local(target))


def load_config(
    folder: Path, max_seq_len: int = 0, rope_scaling: ContextMethod | None = None, without_tokenizer: bool = False
) -> tuple[GPTConfig, Any, dict[str, Any]]:
    """The config, tokenizer and meta data of a model, from the small files of a folder found by `find_source`.

    Raises UserError: when one of them cannot be used.
    """
    with model_folder.damage_of(folder):
        described = model_folder.format_of(folder).described_by(folder)
        tokenizer: Any = None
        if not without_tokenizer:
            tokenizer = Tokenizer.load(described)  # the folder is enough, wherever it was copied to
        config, meta = model_folder.format_of(described).describe(described)
        if tokenizer is not None:
            meta.setdefault("tokenizer", tokenizer.fingerprint())
        # A stage may have trained with shorter rows than the model can read.
        pretraining = meta.get("pretraining", {})
        context = pretraining.get("context")
        trained = max(config.sequence_len, context if isinstance(context, int) else 0)
        if max_seq_len or rope_scaling not in (None, "auto"):
            max_seq_len = max_seq_len or config.sequence_len
            config = with_context(config, max_seq_len, trained, rope_scaling)
            meta["pretraining"] = {**pretraining, "context": max(trained, max_seq_len)}
        return config, tokenizer, meta


def _require_agreement(
    folder: Path, weights: Weights, meta: dict[str, Any], config: GPTConfig, tokenizer: Tokenizer
) -> None:
    """Compare meta data with the other files before a model is built: wrong sizes could fill the memory.

    Raises ValueError: when they do not belong together.
    """
    if not isinstance(meta["step"], int) or not isinstance(meta.get("pretraining", {}), dict):
        raise ValueError("meta.json has no step, or pretraining that is not an object")
    # With another tokenizer a model reads and writes nonsense, or its ids are outside of the embedding.
    if model_folder.is_foreign(folder):
        if tokenizer.vocab_size > config.vocab_size:
            raise ValueError(
                f"its tokenizer has {tokenizer.vocab_size:,} tokens and its embedding {config.vocab_size:,} rows: they "
                "do not belong together"
            )
    elif meta["tokenizer"] != tokenizer.fingerprint() or tokenizer.vocab_size > config.vocab_size:
        raise ValueError("tokenizer.json is not the tokenizer that meta.json names, or too large for the model")
    # Layers cost time and memory even without weights. The rotary tables, (2, context, head_dim) in fp32, are not in
    # the file: a context whose tables are larger than all weights is not one that was trained.
    layers = weights.layers()
    if config.n_layer != layers:
        raise ValueError(f"its config has {config.n_layer} layers, its weights have {layers}")
    if not 1 <= layers <= MAX_LAYERS:
        raise ValueError(f"{layers} layers: from 1 to {MAX_LAYERS}")
    rotary_bytes = 8 * config.sequence_len * config.head_dim
    if rotary_bytes > max(sum(path.stat().st_size for path in weights.files), MAX_ROTARY_BYTES):
        raise ValueError(f"a context of {config.sequence_len} tokens takes {rotary_bytes:,} bytes")
