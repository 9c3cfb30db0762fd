"""Folders that hold adapters: their bases, and the adapters themselves, in our layout or in peft's."""

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanochat.adapters import lora, peft
from nanochat.adapters.lora import SCALAR_HEAD, Adapters
from nanochat.device import Device
from nanochat.gpt import GPTConfig
from nanochat.ground import paths
from nanochat.ground.cli import UserError
from nanochat.ground.untrusted import read_json
from nanochat.model_folder import (
    MAX_NAME,
    UNREADABLE,
    Weights,
    is_foreign,
    weights_sha256,
)
from nanochat.ranks import decide_on_rank_zero


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


def base_of(source: Path, device: Device) -> dict[str, str]:
    """What meta.json of adapters says about their base. All ranks call this together, and rank 0 reads the base."""
    folder = source.resolve()
    checkpoints = (paths.base_dir() / "checkpoints").resolve()
    where = folder.relative_to(checkpoints) if folder.is_relative_to(checkpoints) else folder
    sha256 = decide_on_rank_zero(device, lambda: weights_sha256(source))
    return {"base": where.as_posix(), "base_sha256": sha256}


def read_adapters(folder: Path, config: GPTConfig) -> Adapters:
    """The adapters of a checkpoint, or of a folder that peft has saved.

    Raises UserError: when there are none, or they are not of a model of this shape.
    """
    if peft.is_folder(folder):
        return peft.read(folder, config)
    entry = {} if is_foreign(folder) else read_json(folder / "meta.json")
    if "adapter" not in entry:
        raise UserError(f"{folder} holds no adapters: it is not a run with --lora_rank, and has no {peft.SETTINGS}")
    found = lora.read_adapters(folder / "adapter.safetensors", entry["adapter"])
    found.require_fit(config, str(folder))
    return found


class MergedWeights(Weights):
    """The weights of a base with adapters merged into them, one after the other, as they are read."""

    def __init__(self, base: Weights, merged: list[Adapters], config: GPTConfig):
        self.base = base
        self.merged = merged
        self.config = config
        self.files = base.files

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    def layers(self) -> int:
        return self.base.layers()

    def holds(self, name: str) -> bool:
        return self.base.holds(name) or any(name in adapters.tensors for adapters in self.merged)

    def require_shapes(self, shapes: dict[str, torch.Size]) -> None:
        # The head of a reward model may be among the adapters.
        its_own = {name: shape for name, shape in shapes.items() if name != SCALAR_HEAD or self.base.holds(name)}
        self.base.require_shapes(its_own)

    def read(self, name: str, rows: int, first: int, target: Tensor) -> None:
        for adapters in reversed(self.merged):
            if name in adapters.tensors:  # the scalar head of a reward model, which is saved with its adapters
                target.copy_(adapters.tensors[name][first : first + len(target)])
                return
        if not lora.parts_of(name, self.config):
            self.base.read(name, rows, first, target)
            return
        # The product of adapters needs the whole matrix: one is in main memory at a time.
        weight = torch.empty(rows, *target.shape[1:])
        self.base.read(name, rows, 0, weight)
        for adapters in self.merged:
            weight = adapters.merged(name, weight, self.config)
        target.copy_(weight[first : first + len(target)])


def with_saved_adapters(base: Weights, folders: list[Path], config: GPTConfig) -> Weights:
    """The weights of a checkpoint of adapters: its base with the adapters of `folders`, the first one last."""
    return MergedWeights(base, [read_adapters(folder, config) for folder in reversed(folders)], config)
