"""The folder of a model: found by what `--source` and `--adapter` name, verified, and what its small files say.

It is a step of a run (its files: checkpoint_manager.py), or a folder of Hugging Face's or of peft's.
"""

import contextlib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nanochat import paths, storage
from nanochat.adapters import lora, peft
from nanochat.adapters.lora import Adapters
from nanochat.cli import UserError
from nanochat.collectives import decide_on_rank_zero
from nanochat.data import hub
from nanochat.device import Device
from nanochat.families import hf
from nanochat.gpt import GPTConfig
from nanochat.log import warn
from nanochat.sampling import CHAT_SAMPLING, NEUTRAL, read_settings
from nanochat.untrusted import read_json, require_file

FORMAT_VERSION = 2
MAX_TASKS = 1000
MAX_NAME = 4096  # characters of a task's name, or of the path of the pretraining data
MAX_TIME = 2**40  # seconds since 1970
MAX_BASES = 16  # adapters of adapters of adapters ...

# What a parser raises for a file that is damaged, or is not ours.
UNREADABLE = (
    OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RuntimeError, SafetensorError,
)  # fmt: skip


class DamagedCheckpoint(UserError):
    """A checkpoint whose files are not what was saved; `what` says which one, without the hint."""

    def __init__(self, what: str):
        super().__init__(f"{what}: train it again, or name an older --step")
        self.what = what


def is_foreign(path: Path) -> bool:
    """Whether a folder is in another program's layout, which has no sums of its files."""
    return hf.is_folder(path) or peft.is_folder(path)


@contextlib.contextmanager
def damage_of(path: Path) -> Iterator[None]:
    """Raises DamagedCheckpoint, naming the path, for whatever a parser raises in the block."""
    try:
        yield
    except UserError:  # it says what to do already
        raise
    except UNREADABLE as error:
        # A hostile file can put megabytes into a parser's message.
        if is_foreign(path):
            raise UserError(f"--source {path} cannot be used: {str(error)[:500]}") from error
        raise DamagedCheckpoint(f"{path} is damaged ({str(error)[:500]})") from error


# ---------------------------------------------------------------------- finding


def find_source(
    source: str,
    model_tag: str | None = None,
    step: int | None = None,
    device: Device | None = None,
    flag: str = "--source ",
) -> Path:
    """The folder of a checkpoint, all of whose files were read and are whole.

    `source` is a stage ("base", "mid", "sft", "dpo", "rl"), "auto" for the furthest stage that has a checkpoint, "rm"
    for a reward model, one of these with a tag or with a tag and a step ("sft/big", "sft/big/step_000100"), a
    checkpoint's own folder, a folder in Hugging Face's layout, or a repository of such files, hf:ORG/NAME or
    modelscope:ORG/NAME, which is downloaded once. Without `model_tag` it is the tag last written,
    without `step` the newest whole step. With `device`, all of its ranks call this together and take what rank 0 finds.
    `flag` stands before the source in the messages.

    Raises UserError: when there is none.
    """
    # Rank 0 decides for all: ranks that looked by themselves could find different steps while a run still saves, and
    # each would read every file.
    if device is not None:
        found = decide_on_rank_zero(device, lambda: str(find_source(source, model_tag, step, flag=flag)))
        return Path(str(found))
    found = _find_source(source, model_tag, step, flag)
    # Adapters are as whole as their base.
    with damage_of(found):
        for base in lineage(found)[1:]:
            if not is_foreign(base):
                verify(base)
    return found


def _find_source(source: str, model_tag: str | None, step: int | None, flag: str = "--source ") -> Path:
    # A stage, its tag, its step: what is not given is chosen here.
    if source == "auto":
        source = "base"
        for stage in paths.STAGES:  # in the order in which they are trained
            if any(model_tag in (None, path.name) for path in tags(stage)):
                source = stage
    short = re.fullmatch(rf"({'|'.join(paths.SCRIPTS)})/([^/]+)(?:/step_(\d+))?", source)
    if short is not None and not Path(source).exists():
        if model_tag is not None or step is not None:
            raise UserError(f"{flag}{source} names a tag: leave out the flags for a tag and a step")
        source, model_tag = short[1], short[2]
        step = int(short[3]) if short[3] else None
    if source in paths.SCRIPTS:
        return _find_in_stage(source, model_tag, step, flag)
    is_of_hub = source.partition(":")[0] in hub.HUBS
    chosen = hub.fetch_model(source) if is_of_hub else Path(source).expanduser()
    if not is_foreign(chosen) and not (chosen / "manifest.json").is_file():
        why = ", there is no manifest.json in it, and no config.json" if chosen.is_dir() else ""
        raise UserError(
            f"{flag}{source} is neither a stage (auto, {', '.join(paths.SCRIPTS)}), a tag of one (sft/TAG), nor a "
            f"checkpoint's folder (.../step_<n>){why}: name one of them, a folder in Hugging Face's or peft's form, or "
            "hf:ORG/NAME"
        )
    if model_tag is not None or step is not None:
        raise UserError(
            f"{flag}{source} is one checkpoint's folder: leave out the flags for a tag and a step, or name a stage"
        )
    if is_foreign(chosen):
        # Such a folder has no sums to compare with. Its headers are read: a file that is cut short is found.
        if hf.is_folder(chosen):
            with damage_of(chosen):
                hf.read_config(chosen)
                hf.index(chosen)
    else:
        verify(chosen)
    return chosen


def _find_in_stage(stage: str, model_tag: str | None, step: int | None, flag: str) -> Path:
    # The tag written last, by the time of its newest step: a folder's own time also changes when a step is deleted.
    folders = tags(stage)
    folder = paths.base_dir() / "checkpoints" / stage
    if model_tag is not None:
        folder = paths.checkpoint_dir(stage, model_tag)
    elif folders:
        folder = max(folders, key=lambda folder: step_path(folder, steps(folder)[-1]).stat().st_mtime)
    if step is not None and steps(folder):
        chosen = step_path(folder, step)
        if not chosen.is_dir():
            raise UserError(f"there is no step {step} in {folder}: it has {steps(folder)}; without one, the newest")
        verify(chosen)
        return chosen
    found = newest(folder)
    if found is None:
        others = [f"{flag}{stage}/{path.name}" for path in folders if path != folder]
        hint = f", or name another tag: {' or '.join(others[:5])}" if others else ""
        raise UserError(
            f"there is no {stage} checkpoint in {folder} that is whole: train one with "
            f"`python -m scripts.{paths.SCRIPTS[stage]}`{hint}"
        )
    return found[0]


def tags(stage: str) -> list[Path]:
    """The folders of a stage that have a finished step, by name."""
    return sorted(path for path in (paths.base_dir() / "checkpoints" / stage).glob("*") if steps(path))


def steps(folder: Path) -> list[int]:
    """The steps of a run that have a finished checkpoint, oldest first."""
    return sorted(step_of(path) for path in folder.glob("step_*") if re.fullmatch(r"step_\d+", path.name))


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"  # zeros in front: `ls` then lists the steps in order


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def short_name(step_folder: Path) -> str:
    """`<stage>/<tag>/step_<n>`: the same wherever the base folder is. A model from elsewhere has a name alone."""
    if is_foreign(step_folder):
        return step_folder.resolve().name
    return "/".join(step_folder.resolve().parts[-3:])


def tag_of(step_folder: Path) -> str:
    """The tag that a checkpoint's folder belongs to; that of a model from elsewhere is the folder's name."""
    if is_foreign(step_folder):
        name = re.sub(r"[^A-Za-z0-9_.=+-]", "-", step_folder.resolve().name)
        return name.lstrip(".=+-")[:100] or "model"
    return step_folder.resolve().parent.name


# ---------------------------------------------------------------------- verifying and reading


def verify(step_folder: Path) -> dict[str, Any]:
    """Check every file against the manifest and return the meta data.

    Raises DamagedCheckpoint: naming the file that is missing, cut short or changed.
    """
    manifest_path = step_folder / "manifest.json"
    with damage_of(manifest_path):
        manifest = read_json(manifest_path)
        expected = {Path(name).name: (file["bytes"], file["sha256"]) for name, file in manifest.items()}
    for name, (size, sha256) in expected.items():
        path = step_folder / name  # a manifest cannot name a file of another folder
        if not path.exists():
            raise DamagedCheckpoint(f"{path} is damaged (there is no such file)")
        with damage_of(path):
            require_file(path)
            # The size first: it finds a file cut short without reading it. A changed byte shows in the hash alone.
            if path.stat().st_size != size or storage.sha256(path) != sha256:
                raise DamagedCheckpoint(f"{path} is damaged, or its line in manifest.json")
    with damage_of(step_folder / "meta.json"):
        meta = read_json(step_folder / "meta.json")
        needed = {weights_name(meta), "meta.json", "tokenizer.json"}
        version = meta.get("version")
        ranks = meta.get("world_size", 0)
        if ranks:
            needed.add("training.json")
            needed.update(storage.share_name(rank) for rank in range(min(ranks, len(manifest))))
    missing = needed - set(manifest)
    if missing:  # a manifest that leaves out a file must not pass
        raise DamagedCheckpoint(f"{manifest_path} is damaged (it has no {', '.join(sorted(missing))})")
    # An unknown version is not damage: falling back to an older step would hide that the code is too old.
    if version != FORMAT_VERSION:
        raise UserError(f"{step_folder} has format version {version}, this code reads {FORMAT_VERSION}")
    return meta


def is_whole(step_folder: Path) -> bool:
    """Whether every file is as the manifest describes it."""
    try:
        verify(step_folder)
    except ValueError:
        return False
    return True


def newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that is whole, with its meta data; damaged ones are passed over with a warning."""
    # Only what is tried is read: in the usual case that is one step, however many there are.
    left = steps(folder)
    while left:
        path = step_path(folder, left.pop())
        try:
            return path, verify(path)
        except DamagedCheckpoint as error:
            warn(f"{error.what}; " + (f"falling back to step {left[-1]}" if left else "there is no step before it"))
    return None


def weights_name(meta: dict[str, Any]) -> str:
    """The file of what a checkpoint's run has trained."""
    return "model.safetensors" if meta.get("adapter") is None else "adapter.safetensors"


def weights_sha256(step_folder: Path) -> str:
    """The sha256 of the model's weights or adapters, from the manifest of a checkpoint that was verified."""
    if hf.is_folder(step_folder):  # it has none: all files are read
        paths = sorted({tensor.path for tensor in hf.index(step_folder).values()})
        return hashlib.sha256("".join(storage.sha256(path) for path in paths).encode()).hexdigest()
    if peft.is_folder(step_folder):
        return storage.sha256(step_folder / peft.WEIGHTS)
    manifest = read_json(step_folder / "manifest.json")
    file = manifest.get("model.safetensors") or manifest["adapter.safetensors"]
    return file["sha256"]


def stored_dtype(step_folder: Path) -> torch.dtype:
    """The dtype in which a folder holds a model's matrices: fp32, unless it was exported or comes from elsewhere."""
    with damage_of(step_folder):
        step_folder = lineage(step_folder)[-1]
    if hf.is_folder(step_folder):
        return hf.stored_dtype(step_folder)
    with damage_of(step_folder), safe_open(step_folder / "model.safetensors", framework="pt") as file:
        return hf.DTYPES[file.get_slice("embedding.weight").get_dtype()]


def facts_of_use(folder: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """What a server, its page and the terminal chat read of a checkpoint, checked; older ones lack some of it.

    Raises ValueError: for what no checkpoint of ours contains.
    """
    params = asdict(CHAT_SAMPLING if "sampling" not in meta else read_settings(meta["sampling"]))
    stage = meta.get("stage", "model")
    tasks = meta.get("tasks", [])
    trained_at = meta.get("trained_at")
    if trained_at is None:
        trained_at = int((folder / "meta.json").stat().st_mtime)
    if not isinstance(tasks, list) or len(tasks) > MAX_TASKS:
        raise ValueError(f"tasks in meta.json is not a list of at most {MAX_TASKS} names")
    for text in (stage, *tasks, meta.get("pretraining", {}).get("data", "")):
        if not isinstance(text, str) or len(text) > MAX_NAME:
            raise ValueError(f"stage, tasks or data in meta.json is not a text of at most {MAX_NAME} characters")
    if not isinstance(trained_at, int) or not 0 <= trained_at < MAX_TIME:
        raise ValueError("trained_at in meta.json is not a time in seconds since 1970")
    sampling = {name: params[name] for name in NEUTRAL}
    return {"stage": stage, "tasks": tasks, "trained_at": trained_at, "sampling": sampling}


# ---------------------------------------------------------------------- adapters and their bases


def described_by(folder: Path) -> Path:
    """The folder with a model's tokenizer and shape. Those of peft's have neither: their base has."""
    return _base_of_peft(folder) if peft.is_folder(folder) else folder


def lineage(folder: Path) -> list[Path]:
    """A checkpoint and, where it holds adapters, what they were trained on, and so on down to whole weights.

    Raises UserError: when a base is missing, or is not the one that its adapters were trained on.
    """
    folders = [folder]
    while len(folders) <= MAX_BASES:
        if peft.is_folder(folder):
            folder = _base_of_peft(folder)
        else:
            entry = _adapter_entry(folder)
            if entry is None:
                return folders
            folder = find_base(folder, entry)
        folders.append(folder)
    raise ValueError("its base is adapters, too, and so on without end")


def _adapter_entry(folder: Path) -> dict[str, Any] | None:
    """What meta.json says of a checkpoint's adapters; None: it holds whole weights."""
    return None if hf.is_folder(folder) else read_json(folder / "meta.json").get("adapter")


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


def _base_of_peft(folder: Path) -> Path:
    """The model that peft's adapters belong to: a path as it is or below our checkpoints, or a repository of a hub."""
    name = peft.base_of(folder)[:MAX_NAME]
    for path in (Path(name).expanduser(), paths.base_dir() / "checkpoints" / name):
        if path.is_dir() and not peft.is_folder(path):
            return _find_source(str(path), None, None)
    if name.count("/") != 1:
        raise UserError(
            f"{folder} holds adapters for {name}, which is no model here: put the model there, or change "
            f"base_model_name_or_path in {peft.SETTINGS}"
        )
    return _find_source(name if name.partition(":")[0] in hub.HUBS else f"hf:{name}", None, None)


def base_of(source: Path) -> dict[str, str]:
    """What meta.json of adapters says about their base."""
    folder = source.resolve()
    checkpoints = (paths.base_dir() / "checkpoints").resolve()
    where = folder.relative_to(checkpoints) if folder.is_relative_to(checkpoints) else folder
    return {"base": where.as_posix(), "base_sha256": weights_sha256(source)}


def load_adapters(source: str, config: GPTConfig, base: Path | None = None) -> tuple[Adapters, dict[str, Any]]:
    """The adapters of a checkpoint, or of a folder that peft has saved, and their meta data, as of `load_model`; of
    peft's it is "folder" alone.

    Raises UserError: when there are none, or they are not of the model `base`, or not of its shape.
    """
    folder = _find_source(source, None, None, flag="--adapter ")
    with damage_of(folder):
        if peft.is_folder(folder):
            read = peft.read(folder, config)
            trained_on = peft.base_of(folder)
            if base is not None and trained_on.rpartition(":")[2] not in _names_of(base):
                warn(
                    f"--adapter {source} names {trained_on} as its base: over {base} it is right with the same weights"
                )
            return read, {"folder": str(folder)}
        entry = _adapter_entry(folder)
        if entry is None:
            raise UserError(f"{folder} holds no adapters: it is no run with --lora_rank, and has no {peft.SETTINGS}")
        if base is not None and weights_sha256(base) != entry["base_sha256"]:
            raise UserError(
                f"--adapter {source} was trained on {entry['base']}, and --source is {short_name(base)}, which has "
                "other weights: name the first as --source"
            )
        meta = read_json(folder / "meta.json")
        return read_adapters(folder, config), {**meta, **facts_of_use(folder, meta), "folder": str(folder)}


def _names_of(folder: Path) -> set[str]:
    """What the settings of peft can call a model: a path, our short name, or a repository of a hub."""
    return {str(folder), str(folder.resolve()), short_name(folder), folder.name.replace("--", "/")}


def read_adapters(folder: Path, config: GPTConfig) -> Adapters:
    """Raises UserError: when they are not of a model of this shape."""
    if peft.is_folder(folder):
        return peft.read(folder, config)
    found = lora.read_adapters(folder / "adapter.safetensors", _adapter_entry(folder) or {})
    found.require_fit(config, str(folder))
    return found
