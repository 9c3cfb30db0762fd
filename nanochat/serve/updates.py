"""Load other weights into a running server, from a folder: a trainer hands over weights for sampling."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from nanochat.checkpoint_manager import load_model
from nanochat.engine import Engine
from nanochat.ground import paths
from nanochat.ground.cli import UserError
from nanochat.model_folder import weights_sha256
from nanochat.run.long_context import NewContext
from nanochat.serve.state import ReadUpdate


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
