"""How a run begins: with `--resume` from its newest checkpoint, otherwise with an earlier run of its tag set aside."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from nanochat import checkpoint_manager
from nanochat.checkpoint_manager import DamagedCheckpoint
from nanochat.device import Device
from nanochat.gpt import GPT
from nanochat.optim import Optimizer
from nanochat.parallel.collectives import decide_on_rank_zero
from nanochat.run.flags import TrainFlags, refuse_changed_flags
from nanochat.shell.cli import UserError
from nanochat.shell.log import print0
from nanochat.shell.paths import lock
from nanochat.tokenizer import Tokenizer
from nanochat.train import Progress


def resume(
    folder: Path,
    config: TrainFlags,
    steps: int,
    model: GPT,
    tokenizer: Tokenizer,
    optimizer: Optimizer,
    device: Device,
    *,
    source: Path | None = None,
    batch_tokens: int | None = None,
    fingerprints: dict[str, str],
) -> tuple[Progress, list[dict[str, Tensor]]]:
    """Load the weights, optimizer and generators of a folder's newest whole checkpoint.

    Returns the run's progress and the loader's state of every rank that saved; a new progress and no state where
    there is no checkpoint yet. `steps` is where the run is to end, `source` the checkpoint that it began from,
    `batch_tokens` the tokens of a step where all steps have equally many, `fingerprints` the digests of what must not
    change and is not a flag, by its name in a message.
    Raises UserError: when anything of this is not as in the checkpoint, or when no checkpoint is whole.
    """
    step_folder = _newest_step(folder, device)
    if step_folder is None:
        print0(f"--resume: nothing in {folder} yet, starting from the beginning")
        return Progress(), []
    meta = json.loads((step_folder / "meta.json").read_text(encoding="utf-8"))
    progress = Progress(**meta["progress"])
    changes = refuse_changed_flags(meta["config"], config, step_folder)
    if progress.step > steps:
        raise UserError(f"--resume: {step_folder} is beyond {steps} steps: raise --num_iterations to continue")
    _refuse_another_batch(progress, batch_tokens, step_folder)
    _refuse_other_inputs(meta, source, fingerprints, step_folder)
    _refuse_another_model(meta, model, tokenizer, step_folder)
    try:
        checkpoint_manager.load_weights(model, step_folder)
        loader_states, rng_states = checkpoint_manager.load_training(step_folder, meta, optimizer, device)
    except DamagedCheckpoint as error:
        raise UserError(f"--resume: {error}: move it away to continue from the step before it") from error
    except UserError:
        raise
    except ValueError as error:  # --optimizer is not the one it was trained with
        raise UserError(f"--resume: {step_folder}: {error}: use its flags, or another --model_tag") from error
    device.set_rng_state(rng_states[device.rank % len(rng_states)])
    print0(f"resumed from {step_folder}")
    if changes:
        print0(f"resumed with other settings: {', '.join(changes)}")
    return progress, loader_states


def _newest_step(folder: Path, device: Device) -> Path | None:
    """Lock a run's folder, clean it up and return its newest whole step, the same on all ranks; None: no step yet.

    Raises UserError: when another process trains there, or when there are steps and none is whole.
    """

    def look() -> str | None:
        lock(folder)
        checkpoint_manager.clean_up(folder)
        found = checkpoint_manager.newest(folder)
        if found is None and checkpoint_manager.steps(folder):
            raise UserError(f"--resume: no checkpoint in {folder} is whole: move the folder away to start over")
        return found[0].name if found else None

    name = decide_on_rank_zero(device, look)
    return folder / name if name else None


def _refuse_another_batch(progress: Progress, batch_tokens: int | None, step_folder: Path) -> None:
    """The schedule counts steps, so that a step must keep its number of tokens."""
    if batch_tokens and progress.tokens != progress.step * batch_tokens:
        before = progress.tokens // progress.step
        raise UserError(
            f"--resume: {step_folder} was trained with {before} tokens a step, not {batch_tokens}: use "
            f"--total_batch_size {before}, or another --model_tag"
        )


def _refuse_other_inputs(
    meta: dict[str, Any], source: Path | None, fingerprints: dict[str, str], step_folder: Path
) -> None:
    """What the run started from and what it reads."""
    if source is not None and meta["source"] != checkpoint_manager.short_name(source):
        raise UserError(
            f"--resume: {step_folder} was trained from {meta['source']}, the source is now "
            f"{checkpoint_manager.short_name(source)}: name the former with --source, --source_tag and --source_step, "
            "or give another --model_tag"
        )
    before = meta.get("fingerprints", {})
    for what, digest in fingerprints.items():
        if before.get(what, digest) != digest:
            raise UserError(
                f"--resume: {what} changed since {step_folder} was saved: restore it, or give another --model_tag"
            )


def _refuse_another_model(meta: dict[str, Any], model: GPT, tokenizer: Tokenizer, step_folder: Path) -> None:
    """The sizes of the model, and the tokenizer."""
    for name, value in asdict(model.config).items():
        if meta["model"][name] != value:
            raise UserError(
                f"--resume: {step_folder} has {name} {meta['model'][name]}, the flags request {value}: "
                "use its flags, or another --model_tag"
            )
    if meta["tokenizer"] != tokenizer.fingerprint():
        raise UserError(
            f"--resume: {step_folder} was trained with another tokenizer: restore it, or use another --model_tag"
        )


def set_aside(folder: Path, run_folder: Path, device: Device) -> Path | None:
    """Move an earlier run's checkpoints and metrics to `<tag>.<n>`, before a run of the same tag begins anew.

    Returns where the checkpoints are now, None if there were none.
    """

    def move() -> str | None:
        if not any(folder.glob("step_*")):  # an unfinished step of a killed run counts too
            return None
        number = 1
        while folder.with_name(f"{folder.name}.{number}").exists():
            number += 1
        name = f"{folder.name}.{number}"
        folder.rename(folder.with_name(name))
        if run_folder.is_dir() and not run_folder.with_name(name).exists():
            run_folder.rename(run_folder.with_name(name))
        return name

    name = decide_on_rank_zero(device, move)
    return folder.with_name(name) if name else None
