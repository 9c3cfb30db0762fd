"""The folder of a run's checkpoints: room for them, resume from the newest, or set an earlier run's aside.

The meta.json of a checkpoint describes the run that made it. A resumed run compares itself with this first: `Frozen`
flags, the source, the tokenizer and the fingerprints of its data have to be the same.
"""

import dataclasses
import datetime
import json
import math
import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from nanochat import checkpoint_manager, model_folder, scaling
from nanochat.device import Device
from nanochat.ground import provenance
from nanochat.ground.cli import UserError, frozen_flags
from nanochat.ground.log import print0, warn
from nanochat.ground.paths import lock, naming
from nanochat.optim import Optimizer
from nanochat.ranks import decide_on_rank_zero
from nanochat.run.flags import TrainFlags
from nanochat.run.progress import Progress
from nanochat.run.stage import Start


def describe(
    stage: str,
    config: TrainFlags,
    start: Start,
    optimizer: Optimizer,
    tasks: Sequence[str],
    fingerprints: dict[str, Any],
) -> dict[str, Any]:
    """The meta data of a run's checkpoints, but for its progress.

    `fingerprints` are facts that must not change in a resumed run and that no flag states, by their names in a message.
    `tasks` are the names of the tasks that the run learns.
    """
    meta: dict[str, Any] = {
        "stage": stage,
        "config": dataclasses.asdict(config),
        "source": None if start.source is None else model_folder.short_name(start.source),
        "pretraining": start.pretraining,
        # A server reads the sampling settings, and the tasks to suggest.
        "sampling": start.sampling,
        "tasks": list(dict.fromkeys([*start.tasks, *tasks])),
    }
    optimizers = " and ".join(sorted({group.kind for group in optimizer.groups}))
    meta["fingerprints"] = {**fingerprints, "the optimizer": optimizers}
    if start.adapter is not None:
        meta["adapter"] = start.adapter
        meta["fingerprints"]["the base's weights"] = start.adapter["base_sha256"]
    if start.reference is not None:
        assert start.reference_source is not None
        meta["fingerprints"]["the reference's weights"] = model_folder.weights_sha256(start.reference_source)
    return meta


def require_room_for_run(folder: Path, config: TrainFlags, device: Device, needed_bytes: int, steps: int) -> None:
    """Compare what a checkpoint needs with the disk before the first of `steps` new steps.

    Raises UserError: when the disk has no room for a checkpoint; warns when it has none for all of them.
    """

    def compare() -> None:
        checkpoint_manager.require_room(folder, needed_bytes)
        if not config.save_every:
            return
        count = math.ceil(steps / config.save_every)
        if config.keep_last:
            count = min(count, config.keep_last + 1)  # an old one is deleted after the new one is saved
        free_bytes = checkpoint_manager.free_bytes(folder)
        if needed_bytes * count > free_bytes:
            warn(
                f"{count} checkpoints of {needed_bytes:,} bytes will not fit into the {free_bytes:,} free bytes of "
                f"{folder}: make room, set --keep_last, or raise --save_every"
            )

    decide_on_rank_zero(device, compare)


def divergence(folder: Path, last_good: int, first_step: int) -> UserError:
    """The advice after three steps in a row that were not finite; `last_good` is the step before them, or -1.

    `first_step` is the one that this process began with.
    """
    steps = model_folder.steps(folder)
    checkpoint = model_folder.step_path(folder, steps[-1]) if steps else "none"
    hint = ", then --resume" if steps else ""
    # A checkpoint whose next step was not finite has diverged itself; so has the one that this run resumed, if it
    # saved none since.
    earlier = [step for step in steps[:-1] if step <= last_good]
    if earlier and (steps[-1] > last_good or steps[-1] == first_step):
        good = model_folder.step_path(folder, earlier[-1])
        checkpoint = f"{checkpoint}, which diverges: move all after {good} away"
    return UserError(
        f"the loss or its gradient was not finite three steps in a row; last good step: "
        f"{last_good if last_good >= 0 else 'none'}, newest "
        f"checkpoint: {checkpoint}; lower the learning rates{hint}"
    )


# ---------------------------------------------------------------------- resume, or begin anew


def resume(
    folder: Path, config: TrainFlags, start: Start, optimizer: Optimizer, steps: int, meta: dict[str, Any]
) -> tuple[Progress, list[dict[str, Tensor]]]:
    """Load the weights, optimizer and generators of a folder's newest whole checkpoint.

    Returns the run's progress and the loader's state of every rank that saved; without a checkpoint, a new progress and
    no state. `steps` is the end of the run, `meta` its own meta data.
    Raises UserError: when any of this differs from the checkpoint, or when no checkpoint is whole.
    """

    def find() -> str | None:
        lock(folder)
        checkpoint_manager.clean_up(folder)
        found = model_folder.newest(folder)
        if found is None and model_folder.steps(folder):
            raise UserError(f"--resume: no checkpoint in {folder} is whole: move the folder away to start over")
        return str(found[0]) if found else None

    found = decide_on_rank_zero(start.device, find)
    if found is None:
        print0(f"--resume: nothing in {folder} yet, starting from the beginning")
        others = [path.name for path in model_folder.tags(folder.parent.name)]
        if others:  # the tag may be mistyped
            warn(f"--resume found nothing in {folder}; the tags that could be resumed are {', '.join(others)}")
        return Progress(), []
    step_folder = Path(found)
    saved = json.loads((step_folder / "meta.json").read_text(encoding="utf-8"))
    meta = {"model": dataclasses.asdict(start.model.config), "tokenizer": start.tokenizer.fingerprint(), **meta}
    changes = _refuse_changes(saved, meta, frozen_flags(type(config)), step_folder)
    progress = Progress(**saved["progress"])
    if progress.step > steps:
        flag = "--num_iterations" if getattr(config, "num_epochs", None) is None else "--num_epochs"
        raise UserError(f"--resume: {step_folder} is beyond {steps} steps: raise {flag} to continue")
    try:
        checkpoint_manager.load_weights(start.model, step_folder)
        state = optimizer.state_dict()
        loader_states, rng_states = checkpoint_manager.load_training(step_folder, saved, state)
    except ValueError as error:  # a damaged file, weights only, or the state of another optimizer
        raise UserError(f"--resume: {error}; or move {step_folder} away to continue from the step before it") from error
    if start.device.rank < len(rng_states):  # a rank that the saving run did not have keeps the generators of its seed
        start.device.set_rng_state(rng_states[start.device.rank])
    print0(f"resumed from {step_folder}")
    if changes:
        print0(f"resumed with other settings: {', '.join(changes)}")
    return progress, loader_states


def _refuse_changes(saved: dict[str, Any], meta: dict[str, Any], frozen: list[str], step_folder: Path) -> list[str]:
    """Compare a run with its checkpoint; returns `--flag old -> new` for changed flags that may change.

    Raises UserError: when anything else changed.
    """
    free = {f"--{flag}" for flag in meta["config"] if flag not in frozen}
    before = _facts(saved)
    changes = []
    for name, now in _facts(meta).items():
        was = before.get(name)  # another script's checkpoint may lack it
        if was == now:
            continue
        if name not in free:
            flag = "--total_batch_size (tokens a step)" if name == "tokens a step" else name
            was, requested = ("(default)" if value in ("", None) else value for value in (was, now))
            raise UserError(
                f"--resume: {step_folder} was trained with {flag} {was}, not {requested}: use its flags, or another "
                "--model_tag"
            )
        changes.append(f"{name} {was} -> {now}")
    return changes


def _facts(meta: dict[str, Any]) -> dict[str, Any]:
    """The facts about a run in its checkpoint's meta data, by the name in a message."""
    facts = {f"--{flag}": value for flag, value in meta["config"].items() if flag != "resume"}
    # Steps draw examples by weight, epochs take each example once: another order.
    facts["the horizon in"] = "steps" if meta["config"].get("num_epochs") is None else "epochs"
    facts |= {"source": meta["source"], "tokenizer": meta["tokenizer"]}
    return {**facts, **meta["model"], **meta["fingerprints"]}


def set_aside(folder: Path, run_folder: Path, device: Device) -> Path | None:
    """Move an earlier run's checkpoints and metrics to `<tag>.<n>`, before a run of the same tag begins anew.

    Returns where the checkpoints are now, None if there were none.
    """

    def move() -> str | None:
        if not any(folder.glob("step_*")):  # an unfinished step of a killed run counts too
            return None
        # A run that cannot start must not move anything: try its folder first.
        run_folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=run_folder).close()
        number = 1
        while folder.with_name(f"{folder.name}.{number}").exists():
            number += 1
        name = f"{folder.name}.{number}"
        folder.rename(folder.with_name(name))
        if not run_folder.with_name(name).exists():
            run_folder.rename(run_folder.with_name(name))
        return name

    name = decide_on_rank_zero(device, move)
    return folder.with_name(name) if name else None


def write_facts(path: Path, start: Start, stage: str, steps: int) -> None:
    """Write `run.json`, the report's header: the run's configuration, data and versions. Only rank 0 writes."""
    device = start.device
    if not device.is_main:
        return
    model = start.model.config
    facts = {
        "stage": stage,
        "tag": start.tag,
        "started": datetime.datetime.fromtimestamp(start.began, datetime.timezone.utc).isoformat(timespec="seconds"),
        "steps": steps,
        "parameters": scaling.parameter_counts(start.model)["total"],
        "adapter": start.adapter,
        "layers": model.n_layer,
        "context": model.sequence_len,
        "vocab_size": model.vocab_size,
        "data": start.pretraining["data"],
        "world_size": device.world_size,
        "device": device.name,
        "kind": device.kind,
        "dtype": str(device.dtype).removeprefix("torch."),
        "system": f"{platform.platform()}, {os.cpu_count()} cores",
        "commit": provenance.commit(),
        "versions": provenance.versions(),
    }
    with naming(path):
        path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
