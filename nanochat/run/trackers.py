"""`--track` of the training scripts: send the metrics of a run to services and viewers as well.

Each tracker is optional, and imported only on request. A tracker that fails never stops a run.
"""

import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nanochat.ground.cli import UserError
from nanochat.ground.log import warn

TRACKERS = {"wandb": "wandb", "swanlab": "swanlab", "tensorboard": "torch.utils.tensorboard.writer"}  # their modules


def check(trackers: str) -> list[str]:
    """The names in `--track`.

    Raises UserError: when a name is unknown, or the package is not installed where rank 0 runs.
    """
    names = [name.strip() for name in trackers.split(",") if name.strip()]
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"--track {name!r} is unknown: use {', '.join(TRACKERS)}, with commas between several")
        if int(os.environ.get("RANK", "0")) == 0:
            try:
                importlib.import_module(TRACKERS[name])
            except ImportError as error:
                raise UserError(f"--track {name}: {error}; pip install -e '.[track]'") from error
    return names


def start(trackers: str, run: str, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Start each tracker; a tracker that fails does not stop the run."""
    started = {}
    for name in check(trackers):
        try:
            started[name] = _start_tracker(name, run, folder, config)
        except Exception as error:
            warn(f"tracker {name} did not start; the run continues without it: {error!r}")
    return started


def _start_tracker(name: str, run: str, folder: Path, config: dict[str, Any]) -> Any:
    """An object with `log(metrics, step=...)` and `finish()`."""
    if name == "wandb":
        import wandb  # pyright: ignore[reportMissingImports]

        return wandb.init(project="nanochat", name=run, config=config, dir=str(folder))
    if name == "swanlab":
        import swanlab  # pyright: ignore[reportMissingImports]

        swanlab.init(project="nanochat", experiment_name=run, config=config, logdir=str(folder / "swanlab"))
        return swanlab
    from torch.utils.tensorboard.writer import SummaryWriter  # needs the tensorboard package

    writer = SummaryWriter(str(folder / "tensorboard" / run))
    writer.add_text("config", json.dumps(config, default=str, indent=1))

    def log(metrics: Mapping[str, Any], step: int) -> None:
        for key, value in metrics.items():
            writer.add_scalar(key, value, step)

    return SimpleNamespace(log=log, finish=writer.close)
