"""Copy a checkpoint's weights and tokenizer into a folder of their own, to share or to keep.

python -m scripts.export --to safetensors --source sft --out my_model --dtype bfloat16

The folder holds model.safetensors, config.json, tokenizer.json, meta.json (which checkpoint it was) and manifest.json
(every file's size and sha256), and no training state. `load_model("my_model")`, and `--source my_model` of chat_web and
the other commands, read it as it is.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nanochat.shell.cli import UserError, run
from nanochat.shell.log import print0


@dataclass(frozen=True)
class Config:
    out: str  # the folder to make; it must not exist yet
    to: Literal["safetensors"] = "safetensors"  # the format; there is one so far
    source: str = "auto"  # base, mid, sft, dpo, rl, the furthest of them (auto), or a checkpoint's folder
    model_tag: str | None = None  # of the source; default: the tag last written
    step: int | None = None  # of the source; default: its newest whole step
    dtype: Literal["bfloat16", "float32"] = "float32"  # of the weights; bfloat16 halves the file and rounds


# What meta.json keeps of a checkpoint's. The rest, such as paths, describes the machine that trained it.
KEPT = ("model", "tokenizer", "step", "stage", "source", "pretraining", "sampling", "tasks", "trained_at")


def main(config: Config) -> None:
    # The heavy imports are here so that --help answers at once.
    import shutil

    import torch

    from nanochat import checkpoint_manager
    from nanochat.shell import storage

    # ------------------------------------------------------------------ the checkpoint, in the dtype requested
    source = checkpoint_manager.find_source(config.source, config.model_tag, config.step)
    model, tokenizer, meta = checkpoint_manager.load_model(source, "cpu", verified=True)
    weights = {}
    for name, tensor in model.state_dict().items():
        weights[name] = tensor.to(getattr(torch, config.dtype)) if tensor.is_floating_point() else tensor

    exported = {key: meta[key] for key in KEPT if key in meta}
    exported["version"] = checkpoint_manager.FORMAT_VERSION
    exported["world_size"] = 0  # no training state
    exported["exported_from"] = checkpoint_manager.short_name(source)

    # ------------------------------------------------------------------ the folder, as atomically as a checkpoint
    out = Path(config.out).expanduser().absolute()
    unfinished = checkpoint_manager.unfinished_path(out)
    if out.exists():
        raise UserError(f"--out {config.out} exists already: name another folder, or remove it")
    with checkpoint_manager.explained_full_disk(out, sum(tensor.nbytes for tensor in weights.values())):
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        files = checkpoint_manager.write_model(unfinished, weights, tokenizer, exported)
        description = {"model_type": "nanochat", "dtype": config.dtype, **meta["model"]}
        files["config.json"] = storage.write_json(unfinished / "config.json", description)
        checkpoint_manager.commit(unfinished, out, files)

    size = sum(file["bytes"] for file in files.values())
    print0(f"exported {source} to {out}: {size:,} bytes, weights in {config.dtype}")


if __name__ == "__main__":
    run(main, Config)
