"""From the folder of a model to the model: `model, tokenizer, meta = load_model("sft")`.

Every stage writes such folders, and the next one begins from the newest. A step of a run is a folder
`checkpoints/<stage>/<tag>/step_<n>/` of safetensors and JSON, never pickle:

    model.safetensors  meta.json  tokenizer.json     for later stages and the engine
    training.json  training.rank<r>.safetensors      for a resume, at any number of ranks: the state of the optimizer,
                                                     the loader and the random generators (ground/storage.py)
    manifest.json                                    size and sha256 of every other file

A run that trains only adapters saves adapter.safetensors instead of model.safetensors: a few MB. Its meta.json names
the weights of their base, with the sha256.

model_folder.py finds the folder and checks that it is whole. run/saver.py writes it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nanochat import device as devices
from nanochat import model_folder
from nanochat.device import Device
from nanochat.gpt import GPT, SCALAR_HEAD, GPTConfig
from nanochat.ground import rooms
from nanochat.ground.sharding import held_rows, local
from nanochat.model_folder import Weights
from nanochat.ranks import Layout
from nanochat.tokenizer import Tokenizer

MAX_LAYERS = 1000  # as --depth
MAX_ROTARY_BYTES = 256 << 20  # half a million tokens of context at a head_dim of 64, however small the model


class Preparation:
    """A change to a model between its file and its first use, such as new adapters. The defaults change nothing."""

    def configure(self, config: GPTConfig, meta: dict[str, Any]) -> tuple[GPTConfig, dict[str, Any]]:
        """The shape to load the model in, and its meta data."""
        return config, meta

    def reshape(self, model: GPT, device: Device) -> None:
        """Change the model while it is on the meta device, before it is sharded."""

    def fill(self, model: GPT) -> None:
        """Fill the parameters that `reshape` has added."""


def load_model(
    source: str | Path,
    device: str | torch.device | Device | None = None,
    *,
    model_tag: str | None = None,
    prepare: Sequence[Preparation] = (),
) -> tuple[GPT, Tokenizer, dict[str, Any]]:
    """`(model, tokenizer, meta)` of a stage, a folder or a repository of a hub, as `find_source` finds it.

    `device` is "npu:0", "cuda:0", "cpu" or nothing for the best one here. The model is in eval mode, its weights in
    fp32. `meta` always has "sampling", the settings with which the model's replies are drawn (all of SamplingParams but
    the seed), and "tasks", the names of those that it has learned. `prepare` changes the model on its way, in order.

    Raises UserError: when the checkpoint does not exist, or cannot be used.
    """
    # Verified, then built: no byte of a damaged file reaches a model.
    folder = model_folder.find_source(str(source), model_tag)
    if not isinstance(device, Device):
        device = devices.init(str(device) if device else "auto")
    return load_folder(folder, device, prepare=prepare)


def load_folder(
    folder: Path, device: Device, *, layout: Layout | None = None, prepare: Sequence[Preparation] = ()
) -> tuple[GPT, Tokenizer, dict[str, Any]]:
    """`load_model` for a folder that `find_source` has just read; it is not verified again.

    With a `layout` that shards, each rank reads and holds only its rows (ranks.py).
    """
    config, tokenizer, meta = load_config(folder, prepare)
    with model_folder.damage_of(folder):
        *adapters, base = model_folder.lineage(folder)
        weights = model_folder.format_of(base).weights(base, config)
        _require_agreement(weights, meta, config, tokenizer)
        if adapters:  # merged into the weights of their base as these are read
            weights = rooms.find("adapters", "weights")(weights, adapters, config)
        # Built on the meta device, then sharded, then allocated: a whole model is never in main memory, nor on the
        # device of a rank that keeps a part. Eight ranks would hold 224 GB of a model of 7 billion parameters.
        model, shapes = build(config, device, layout, prepare, weights)
        model.to_empty(device=device.torch_device)
        model.fill_rotary()
        _read_weights(model, shapes, weights)
        for one in prepare:
            one.fill(model)
    return model.eval(), tokenizer, meta


def load_config(folder: Path, prepare: Sequence[Preparation] = ()) -> tuple[GPTConfig, Tokenizer, dict[str, Any]]:
    """The config, tokenizer and meta data of a model, from the small files of a folder found by `find_source`.

    Raises UserError: when one of them cannot be used.
    """
    with model_folder.damage_of(folder):
        described, config, meta = describe(folder, prepare)
        tokenizer = Tokenizer.load(described)  # the folder is enough, wherever it was copied to
        return config, tokenizer, {"tokenizer": tokenizer.fingerprint(), **meta}


def describe(folder: Path, prepare: Sequence[Preparation] = ()) -> tuple[Path, GPTConfig, dict[str, Any]]:
    """The folder that describes a model, the shape in which it will be used, and its meta data.

    Raises ValueError: when its files contain what ours never do.
    """
    described = model_folder.described_by(folder)
    config, meta = model_folder.format_of(described).describe(described)
    if not 1 <= config.n_layer <= MAX_LAYERS:  # layers cost time and memory even without weights
        raise ValueError(f"{config.n_layer} layers: from 1 to {MAX_LAYERS}")
    for one in prepare:
        config, meta = one.configure(config, meta)
    return described, config, {**meta, **model_folder.facts_of_use(meta), "folder": str(folder)}


def build(
    config: GPTConfig,
    device: Device,
    layout: Layout | None,
    prepare: Sequence[Preparation],
    weights: Weights | None = None,
) -> tuple[GPT, dict[str, torch.Size]]:
    """The model, prepared and sharded, on the meta device, and the shapes of the parameters that its weights fill.

    Raises ValueError: when the `weights` are of another model.
    """
    with torch.device("meta"):
        model = GPT(config, device.kernels)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        if weights is not None:
            # Only the scalar head may be missing: in a model that gets one now, or that got one and never trained it.
            stored = {name: shape for name, shape in shapes.items() if name != SCALAR_HEAD or weights.holds(name)}
            weights.require_shapes(stored)
        for one in prepare:
            one.reshape(model, device)
    if layout is not None:
        layout.shard(model, device)
    return model, shapes


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
        if weights.holds(name):
            weights.read(name, shape[0], held_rows(target).start, local(target))
        else:  # a new scalar head
            local(target).zero_()


def _require_agreement(weights: Weights, meta: dict[str, Any], config: GPTConfig, tokenizer: Tokenizer) -> None:
    """Compare meta data with the other files before a model is built: wrong sizes could fill the memory.

    Raises ValueError: when they do not belong together.
    """
    if not isinstance(meta["step"], int) or not isinstance(meta.get("pretraining", {}), dict):
        raise ValueError("meta.json has no step, or pretraining that is not an object")
    # With another tokenizer a model reads and writes nonsense, or its ids are outside of the embedding.
    if meta["tokenizer"] != tokenizer.fingerprint():
        raise ValueError("tokenizer.json is not the tokenizer that meta.json names")
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"its tokenizer has {tokenizer.vocab_size:,} tokens, too large for the model, whose embedding has "
            f"{config.vocab_size:,} rows: they do not belong together"
        )
    if config.n_layer != weights.layers():
        raise ValueError(f"its config has {config.n_layer} layers, its weights have {weights.layers()}")
    # The rotary tables, (2, context, head_dim) in fp32, are not in the file: a context whose tables are larger than all
    # weights is not one that was trained.
    rotary_bytes = 8 * config.sequence_len * config.head_dim
    if rotary_bytes > max(sum(path.stat().st_size for path in weights.files), MAX_ROTARY_BYTES):
        raise ValueError(f"a context of {config.sequence_len} tokens takes {rotary_bytes:,} bytes")
