"""The folder of a model: where it is, in which format, and whether it is whole. checkpoint_manager.py reads the model.

It is a step of one of our runs (checkpoint_manager.py lists its files). A folder without our manifest goes to the
readers of other formats (ground/rooms.py), such as Hugging Face's. A folder that holds only adapters has a base:
another folder, to whose weights they belong.
"""

import contextlib
import difflib
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanochat.device import Device
from nanochat.gpt import GPTConfig
from nanochat.ground import paths, rooms, storage
from nanochat.ground.cli import UserError
from nanochat.ground.log import warn
from nanochat.ground.untrusted import read_json, require_file
from nanochat.ranks import decide_on_rank_zero
from nanochat.sampling import CHAT_SAMPLING, NEUTRAL, read_settings

FORMAT_VERSION = 2
MAX_TASKS = 1000
MAX_NAME = 4096  # characters of a task's name, or of the path of the pretraining data
MAX_TIME = 2**40  # seconds since 1970
MAX_BASES = 16  # adapters of adapters of adapters ...

# The errors of a parser for a file that is damaged, or is not ours.
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RuntimeError, SafetensorError)


class DamagedCheckpoint(UserError):
    """A checkpoint whose files have changed since they were saved; `what` names the file, without the hint."""

    def __init__(self, what: str):
        super().__init__(f"{what}: train it again, or name an older step")
        self.what = what


@contextlib.contextmanager
def damage_of(path: Path) -> Iterator[None]:
    """Raises DamagedCheckpoint, which names the path, for every error of a parser in the block."""
    try:
        yield
    except UserError:  # it names the fix
        raise
    except UNREADABLE as error:
        # A full device is no damage; an older runtime raises a plain RuntimeError. A host that cannot allocate what a
        # damaged header asks for has other words.
        if isinstance(error, RuntimeError) and "out of memory" in str(error):
            raise
        # A hostile file can put megabytes into a parser's message.
        if is_foreign(path):
            raise UserError(f"--source {path} cannot be used: {str(error)[:500]}") from error
        raise DamagedCheckpoint(f"{path} is damaged ({str(error)[:500]})") from error


# ---------------------------------------------------------------------- formats


class Weights:
    """The weights of one model, under our names, read a part at a time: model.safetensors of a checkpoint.

    A reader of another format overrides all methods.
    """

    def __init__(self, path: Path):
        self.path = path
        self.files = [path]
        self.stored = storage.header(path)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrices."""
        return storage.torch_dtype(self.stored["embedding.weight"][1])

    def layers(self) -> int:
        return len({name.split(".")[1] for name in self.stored if name.startswith("blocks.")})

    def holds(self, name: str) -> bool:
        return name in self.stored

    def require_shapes(self, shapes: dict[str, torch.Size]) -> None:
        """Raises ValueError: when a model with parameters of these shapes is another one."""
        differing = set(shapes) ^ set(self.stored)
        if differing:
            raise ValueError(f"{self.path} belongs to another model: {', '.join(sorted(differing)[:3])}")
        for name, wanted in shapes.items():
            shape, _ = self.stored[name]
            if list(wanted) != shape:
                raise ValueError(f"{self.path}: {name} is {shape}, the model's is {list(wanted)}")

    def read(self, name: str, rows: int, first: int, target: Tensor) -> None:
        """Fill `target` with rows of the parameter `name` from row `first` on; the whole parameter has `rows`."""
        # A mapped file's pages count as this process's memory until the mapping ends: one tensor at a time.
        with safe_open(self.path, framework="pt") as file:
            target.copy_(file.get_slice(name)[first : first + len(target)])


class FolderFormat:
    """How the folder of a model is laid out: a step of a run, or an export of one, with a manifest of its files.

    A reader of another program's folders overrides all methods; one for folders that hold only adapters may leave out
    `describe` and `weights`.
    """

    def is_folder(self, path: Path) -> bool:
        return (path / "manifest.json").is_file()

    def check(self, folder: Path, without_weights: bool = False) -> None:
        """Read the files that are quick to read. Raises UserError or ValueError: when the folder cannot be used."""
        verify(folder, without_weights)

    def find_base(self, folder: Path) -> Path | None:
        """The folder of the weights to which the adapters in this one belong; None: it holds a model's weights.

        Raises UserError: when the base is missing, or is not the one that the adapters were trained on.
        """
        adapter = read_json(folder / "meta.json").get("adapter")
        return None if adapter is None else rooms.find("adapters", "find_base")(folder, adapter)

    def describe(self, folder: Path) -> tuple[GPTConfig, dict[str, Any]]:
        """The model's shape, and meta data as in a checkpoint of ours."""
        meta = read_json(folder / "meta.json")
        unknown = meta["model"].keys() - GPTConfig.__dataclass_fields__.keys()
        if unknown:  # another version, or an extension that is not here
            names = ", ".join(sorted(unknown))[:200]
            raise UserError(
                f"{folder} was saved by other code: GPTConfig has no {names!r} here: use that code, or train it again"
            )
        return GPTConfig(**meta["model"]), meta

    def weights(self, folder: Path, config: GPTConfig) -> Weights:
        return Weights(folder / "model.safetensors")

    def weights_sha256(self, folder: Path) -> str:
        """The sha256 of the weights or adapters in a folder. A manifest of ours, once verified, names it."""
        manifest = read_json(folder / "manifest.json")
        file = manifest.get("model.safetensors") or manifest["adapter.safetensors"]
        return file["sha256"]


OURS = FolderFormat()


def format_of(folder: Path) -> FolderFormat:
    """The format of a folder; ours if it is unknown, so that our reader reports what is missing."""
    if not OURS.is_folder(folder):
        for name in rooms.names("folders"):
            known = rooms.find("folders", name)
            if known.is_folder(folder):
                return known
    return OURS


def is_foreign(folder: Path) -> bool:
    """Whether a folder is in another program's format, which has no sums of its files."""
    return format_of(folder) is not OURS


def lineage(folder: Path) -> list[Path]:
    """A folder and, if it holds adapters, their base, and so on down to whole weights.

    Raises UserError: as `FolderFormat.find_base`.
    """
    folders = [folder]
    while (base := format_of(folders[-1]).find_base(folders[-1])) is not None:
        if len(folders) > MAX_BASES:
            raise ValueError("its base is adapters, too, and so on without end")
        folders.append(base)
    return folders


def described_by(folder: Path) -> Path:
    """The folder with a model's shape and tokenizer: the first checkpoint of ours in its lineage, or the base."""
    if OURS.is_folder(folder):
        return folder
    *adapters, base = lineage(folder)
    return next((one for one in adapters if OURS.is_folder(one)), base)


# ---------------------------------------------------------------------- finding


def find_source(
    source: str,
    model_tag: str | None = None,
    device: Device | None = None,
    flag: str = "--source ",
    without_weights: bool = False,
) -> Path:
    """The folder of a checkpoint, all of whose files were read and are whole.

    `source` is a stage ("base", "mid", "sft", "dpo", "rl"), "auto" for the furthest stage that has a checkpoint, "rm"
    for a reward model, one of these with a tag or with a tag and a step ("sft/big", "sft/big/step_000100"), a
    checkpoint's own folder, a folder in Hugging Face's layout, or a repository of such files, hf:ORG/NAME or
    modelscope:ORG/NAME, which is downloaded once. Without a tag it is the tag last written, without a step the newest
    whole one. With `device`, all of its ranks call this together and take what rank 0 finds. `flag` precedes the source
    in the messages. `without_weights`: only the small files are downloaded and read.

    Raises UserError: when it does not exist.
    """

    def find() -> str:
        found = find_folder(source, model_tag, flag, without_weights)
        if not without_weights:
            with damage_of(found):
                for base in lineage(found)[1:]:  # adapters are as whole as their base
                    format_of(base).check(base)
        return str(found)

    # Rank 0 decides for all: ranks that each looked could find different steps while a run still saves, and
    # each would read every file.
    return Path(find() if device is None else decide_on_rank_zero(device, find))


def find_folder(
    source: str, model_tag: str | None = None, flag: str = "--source ", without_weights: bool = False
) -> Path:
    """`find_source` for one folder, without a look at the base of its adapters."""
    # A stage, its tag, its step: choose the parts that are not given.
    if source == "auto":
        stages = paths.STAGES  # in the order in which they are trained
        trained = [stage for stage in stages if any(model_tag in (None, path.name) for path in tags(stage))]
        source = trained[-1] if trained else "base"
    step = None
    short = re.fullmatch(rf"({'|'.join(paths.SCRIPTS)})/([^/]+)(?:/step_(\d+))?", source)
    if short is not None and not Path(source).exists():
        if model_tag is not None:
            raise UserError(f"{flag}{source} names a tag: leave out the flag for a tag")
        source, model_tag = short[1], short[2]
        step = int(short[3]) if short[3] else None
    if source in paths.SCRIPTS:
        return _find_in_stage(source, model_tag, step, flag, without_weights)
    hub, _, name = source.partition(":")
    is_of_hub = bool(name) and hub in rooms.names("hubs")
    chosen = rooms.find("hubs", hub).model(source, without_weights) if is_of_hub else Path(source).expanduser()
    its_format = format_of(chosen)
    if not its_format.is_folder(chosen):
        near = difflib.get_close_matches(source.lower(), ("auto", *paths.SCRIPTS), n=1)
        why = f" (did you mean {near[0]}?)" if near else ""
        if chosen.is_dir():
            why = ", it has neither manifest.json nor config.json"
        raise UserError(
            f"{flag}{source} is neither a stage (auto, {', '.join(paths.SCRIPTS)}), a tag of one (sft/TAG), nor a "
            f"checkpoint's folder (.../step_<n>){why}: name one of them, a folder in Hugging Face's or peft's form, or "
            "hf:ORG/NAME"
        )
    if model_tag is not None:
        raise UserError(f"{flag}{source} is one checkpoint's folder: leave out the flag for a tag, or name a stage")
    with damage_of(chosen):
        its_format.check(chosen, without_weights)
    return chosen


def _find_in_stage(stage: str, model_tag: str | None, step: int | None, flag: str, without_weights: bool) -> Path:
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
        verify(chosen, without_weights)
        return chosen
    found = newest(folder, without_weights)
    if found is None:
        others = [f"{flag}{stage}/{path.name}" for path in folders if path != folder]
        hint = f", or name another tag: {' or '.join(others[:5])}" if others else ""
        if not any(tags(one) for one in paths.SCRIPTS):
            hint = "; `bash speedrun.sh` trains all stages of a first model, in minutes on a CPU"
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
    """`<stage>/<tag>/step_<n>`: the same wherever the base folder is. A model from elsewhere has only a name."""
    if is_foreign(step_folder):
        return step_folder.resolve().name
    return "/".join(step_folder.resolve().parts[-3:])


def tag_of(step_folder: Path) -> str:
    """The tag that a checkpoint's folder belongs to; for a model from elsewhere, the folder's name."""
    if is_foreign(step_folder):
        name = re.sub(r"[^A-Za-z0-9_.=+-]", "-", step_folder.resolve().name)
        return name.lstrip(".=+-")[:100] or "model"
    return step_folder.resolve().parent.name


# ---------------------------------------------------------------------- verifying and reading


def verify(step_folder: Path, without_weights: bool = False) -> dict[str, Any]:
    """Check every file against the manifest and return the meta data; `without_weights` only the small files.

    Raises DamagedCheckpoint: naming the file that is missing, cut short or changed.
    """
    manifest_path = step_folder / "manifest.json"
    with damage_of(manifest_path):
        manifest = read_json(manifest_path)
        expected = {Path(name).name: (file["bytes"], file["sha256"]) for name, file in manifest.items()}
    for name, (size, sha256) in expected.items():
        path = step_folder / name  # a manifest cannot name a file of another folder
        if without_weights and path.suffix == ".safetensors":
            continue
        if not path.exists():
            raise DamagedCheckpoint(f"{path} is damaged (there is no such file)")
        with damage_of(path):
            require_file(path)
            # The size first: it finds a file cut short without reading it. Only the hash shows a changed byte.
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


def newest(folder: Path, without_weights: bool = False) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that is whole, with its meta data; damaged ones are passed over with a warning."""
    # Read only the steps that are tried: usually that is one step, whatever their number.
    left = steps(folder)
    while left:
        path = step_path(folder, left.pop())
        try:
            return path, verify(path, without_weights)
        except DamagedCheckpoint as error:
            warn(f"{error.what}; " + (f"falling back to step {left[-1]}" if left else "there is no step before it"))
    return None


def weights_name(meta: dict[str, Any]) -> str:
    """The file with the trained weights of a checkpoint."""
    return "model.safetensors" if meta.get("adapter") is None else "adapter.safetensors"


def weights_sha256(folder: Path) -> str:
    return format_of(folder).weights_sha256(folder)


def facts_of_use(meta: dict[str, Any]) -> dict[str, Any]:
    """The facts about a checkpoint for a server, its page and the terminal chat, checked.

    Where it was saved without settings, a stage or tasks, it counts as a chat model that has learned no task.

    Raises ValueError: for facts that our checkpoints never contain.
    """
    params = asdict(CHAT_SAMPLING if "sampling" not in meta else read_settings(meta["sampling"]))
    stage = meta.get("stage", "model")
    tasks = meta.get("tasks", [])
    trained_at = meta["trained_at"]
    if not isinstance(tasks, list) or len(tasks) > MAX_TASKS:
        raise ValueError(f"tasks in meta.json is not a list of at most {MAX_TASKS} names")
    for text in (stage, *tasks, meta.get("pretraining", {}).get("data", "")):
        if not isinstance(text, str) or len(text) > MAX_NAME:
            raise ValueError(f"stage, tasks or data in meta.json is not a text of at most {MAX_NAME} characters")
    if not isinstance(trained_at, int) or not 0 <= trained_at < MAX_TIME:
        raise ValueError("trained_at in meta.json is not a time in seconds since 1970")
    sampling = {name: params[name] for name in NEUTRAL}
    return {"stage": stage, "tasks": tasks, "trained_at": trained_at, "sampling": sampling}
