"""Where runs live: every folder the project writes to, below one base folder.

`NANOCHAT_BASE_DIR` moves the base folder; its default is `~/.cache/nanochat`.
"""

import os
import re
from pathlib import Path

from nanochat.cli import UserError

# Each stage and the script that makes its checkpoints.
STAGES = {"base": "base_train", "mid": "mid_train", "sft": "chat_sft", "dpo": "chat_dpo", "rl": "chat_rl"}


def base_dir() -> Path:
    """The base folder, read from the environment at each call."""
    return Path(os.environ.get("NANOCHAT_BASE_DIR") or Path.home() / ".cache" / "nanochat").expanduser()


def tokenizer_dir() -> Path:
    return base_dir() / "tokenizer"


def data_dir(name: str) -> Path:
    """Downloaded shards of one dataset."""
    return base_dir() / "data" / name


def checkpoint_dir(stage: str, tag: str) -> Path:
    """`checkpoints/<stage>/<tag>`: holds `step_<n>/` folders."""
    return base_dir() / "checkpoints" / _stage(stage) / safe_tag(tag)


def run_dir(stage: str, tag: str) -> Path:
    """`runs/<stage>/<tag>`: holds `metrics.jsonl`."""
    return base_dir() / "runs" / _stage(stage) / safe_tag(tag)


def safe_tag(tag: str) -> str:
    """The tag itself if it is one plain folder name.

    Raises UserError: for anything that could leave its folder (`..`, a slash, a leading dot).
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]{0,99}", tag):
        raise UserError(
            f"--model_tag {tag!r} is not a plain folder name: use letters, digits, '_', '-', '.' (at most 100)"
        )
    return tag


def _stage(stage: str) -> str:
    if stage not in STAGES:
        raise UserError(f"unknown stage {stage!r}: one of {', '.join(STAGES)}")
    return stage
