"""Copy a checkpoint's weights and tokenizer into a folder of their own, to share or to keep.

python -m scripts.export --to safetensors --source sft --out my_model --dtype bfloat16

The folder holds model.safetensors, config.json, tokenizer.json, meta.json (where the weights come from) and
manifest.json (every file's size and sha256), and no training state. `load_model("my_model")`, and `--source my_model`
of chat_web and the other commands, take it as it is.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nanochat.shell.cli import run
from nanochat.shell.log import print0


@dataclass(frozen=True)
class Config:
    out: str  # the folder to make; it must not be there yet
    to: Literal["safetensors"] = "safetensors"  # the format
    source: str = "auto"  # base, mid, sft, dpo, rl, the furthest of them (auto), or a checkpoint's folder
    model_tag: str | None = None  # of the source; default: the tag last written
    step: int | None = None  # of the source; default: its newest whole step
    dtype: Literal["bfloat16", "float32"] = "float32"  # of the weights; bfloat16 halves the file and rounds


def main(config: Config) -> None:
    # The heavy imports stand here so that --help answers at once.
    import torch

    from nanochat import checkpoint_manager

    source = checkpoint_manager.find_source(config.source, config.model_tag, config.step)
    out = Path(config.out).expanduser()
    files = checkpoint_manager.export(source, out, getattr(torch, config.dtype))
    size = sum(file["bytes"] for file in files.values())
    print0(f"exported {source} to {out}: {size:,} bytes, weights in {config.dtype}")


if __name__ == "__main__":
    run(main, Config)
