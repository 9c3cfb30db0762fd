"""A model's weights as a server needs them: once, in the dtype of its products, on one device.

A trainer may replace the weights of a running server, by the path of a folder (`reader_of_updates`).
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from nanochat.checkpoint_manager import Preparation, load_folder, load_model
from nanochat.device import Device
from nanochat.engine import Engine
from nanochat.gpt import GPT
from nanochat.ground import paths
from nanochat.ground.cli import UserError
from nanochat.model_folder import weights_sha256
from nanochat.run.long_context import NewContext
from nanochat.scaling import parameter_counts
from nanochat.serve.decoding_flags import DecodingFlags
from nanochat.serve.state import ReadUpdate


def load_engine(
    folder: Path, device: Device, max_seq_len: int, decoding: DecodingFlags
) -> tuple[Engine, dict[str, Any]]:
    """An engine with the model of a checkpoint, and the model's meta data with its number of "parameters"."""
    weights = ServedWeights(folder, is_cast=decoding.weights == "auto")
    model, tokenizer, meta = load_folder(folder, device, prepare=[NewContext(max_seq_len), weights])
    meta = {**meta, "parameters": parameter_counts(model)["total"]}
    # Nothing else keeps the model: the engine may have its own snapshot.
    return Engine(model, tokenizer, device, **asdict(decoding)), meta


class ServedWeights(Preparation):
    """Reads the weights directly in the device's dtype, and refuses a model that does not fit before anything is read.

    A model that is loaded to train is in fp32, and its engine makes a copy in bf16: 6 bytes for each parameter while
    both are there, instead of 2. A model of 7 billion parameters would need 42 GB to start where 14 are enough.
    """

    def __init__(self, folder: Path, is_cast: bool = True):
        """`folder` is the model's, for messages. Without `is_cast` the weights stay in fp32, to be packed."""
        self.folder = folder
        self.is_cast = is_cast

    def reshape(self, model: GPT, device: Device) -> None:
        if self.is_cast:
            model.to(device.dtype)
        needed = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        free = device.free_memory()
        if free is not None and needed > free:
            dtype = str(device.dtype if self.is_cast else torch.float32).removeprefix("torch.")
            raise UserError(
                f"the weights of {self.folder.name} take {needed / 2**30:,.1f} GiB in {dtype}, and the device has "
                f"{free / 2**30:,.1f} GiB free. This server uses one device: `python -m scripts.export --to hf` writes "
                "the model for vLLM or vllm-ascend, which divide it among several (docs/deploy.md)"
            )


def fingerprint_of(folder: Path) -> str:
    """An identifier of a checkpoint's weights, which every reply has as its `system_fingerprint`."""
    return f"fp_{weights_sha256(folder)[:12]}"


def reader_of_updates(engine: Engine, max_seq_len: int = 0) -> ReadUpdate:
    """A function for `LoadedModel.read_update`, which reads weights of the same model for this engine.

    It raises UserError: for a folder outside of NANOCHAT_BASE_DIR, or of another model or tokenizer.
    """

    engine.tempered_logprobs = True

    def read(path: str) -> tuple[str, Callable[[], None]]:
        folder = Path(path).resolve()
        base = paths.base_dir().resolve()
        if not folder.is_relative_to(base):
            raise UserError(f"{path} is not below {base}, the NANOCHAT_BASE_DIR of this server: write it there")
        model, tokenizer, _ = load_model(folder, engine.device, prepare=[NewContext(max_seq_len)])
        unlike = {"sequence_len": 0}  # the trainer's rows may be shorter
        if tokenizer.fingerprint() != engine.tokenizer.fingerprint():
            raise UserError(f"{path} has another tokenizer than this server: start it with the trainer's --source")
        if asdict(model.config) | unlike != asdict(engine.model.config) | unlike:
            raise UserError(f"{path} is a model of another shape: start this server with the trainer's --source")
        return fingerprint_of(folder), lambda: engine.update(model)

    return read
