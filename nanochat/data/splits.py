"""Which files of a data set are its training split, and which are held out: by their names.

    data/train-00000-of-00004.parquet, test.jsonl, en/dev.csv      train, test, dev
    data/train_sft-00000-of-00001.parquet                          train_sft, held out by test_sft
    alpaca_data.json, code.jsonl                                   alpaca_data, code: parts of the training split

A hub's table of splits is not read: ModelScope and folders have none.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nanochat.ground.cli import UserError
from nanochat.ground.log import doubt
from nanochat.ground.text_files import SETTINGS, is_hidden

TRAIN_WORDS = ("train", "training")
HELD_OUT_WORDS = ("test", "testing", "validation", "valid", "val", "dev", "eval")  # the first that is there is taken
# A single word, or more words after underscores: `train` in `alpaca-train-1`, `train_sft` in `train_sft_0`.
SPLIT = re.compile(rf"(?<![a-z])({'|'.join(TRAIN_WORDS + HELD_OUT_WORDS)})((?:_[a-z]+)*)(?![a-z])")
SHARD = re.compile(r"(.+?)-\d{5}-of-\d{5}")  # as the `datasets` library numbers files
KINDS = (".parquet", ".jsonl", ".jsonl.gz", ".csv", ".tsv", ".json")  # in this order, if a repo has several copies
SHOWN_NAMES = 12
NO_DATA = re.compile(rf"(readme|license|licence)\b.*|.*\.(md|py|lock)|{'|'.join(map(re.escape, SETTINGS))}")


@dataclass(frozen=True)
class Chosen:
    """The files to learn from and those that are held out; without any a share of the others is."""

    train: list[str]
    held_out: list[str]


def split_of(path: str) -> str:
    """The split that a file belongs to; the file's own name without suffix where no name of a split is in its path."""
    *folders, name = path.lower().replace("--", "/").split("/")  # `--`: hub.py's flat names
    stem = name.removesuffix(".gz").rpartition(".")[0] or name
    shard = SHARD.match(stem)
    for part in (shard[1] if shard else stem, *reversed(folders)):
        if match := SPLIT.search(part):
            return match[0]
    return shard[1] if shard else stem


def choose_files(paths: Sequence[str], requested: str | None = None) -> Chosen:
    """The files of a data set's training split, or of the split `requested`, and those that are held out.

    Raises UserError: when the split is not there, or there are several of which one has to be named.
    """
    files: dict[str, list[str]] = {}
    for path in sorted(paths):
        files.setdefault(split_of(path), []).append(path)
    if requested is None or (requested == "train" and requested not in files):
        names = _training_splits(list(files))
    elif requested.lower() in files:
        names = [requested.lower()]
    else:
        raise UserError(f"split {requested} is missing: it has {shown(files)}")
    train = [path for name in names for path in files[name]]
    for word in HELD_OUT_WORDS:
        # train_sft is tested by test_sft; parts without a split's name by `test`.
        match = SPLIT.match(names[0])
        counterpart = word + (match[2] if match else "")
        if counterpart in files and (match is None or match[1] in TRAIN_WORDS):
            return Chosen(train, files[counterpart])
    return Chosen(train, [])


def _training_splits(names: list[str]) -> list[str]:
    """The training split, or all parts that bear no split's name."""
    for word in TRAIN_WORDS:
        if word in names:
            return [word]
    words = {name: match[1] for name in names if (match := SPLIT.match(name))}
    training = [name for name in names if words.get(name) in TRAIN_WORDS]
    parts = training or [name for name in names if name not in words]
    if len(training) > 1 or not parts:
        raise UserError(f"its splits are {shown(names)}: name one by @{(training or names)[0]}")
    return parts


def choose_config(paths: Iterable[str], config: str | None) -> list[str]:
    """The data files of a repo: of one configuration (a folder, or the beginning of a file's name), of one format.

    Raises UserError: when there is none, or there are several configurations and none is named.
    """
    data = []
    for path in paths:
        if path.lower().endswith(KINDS) and not is_hidden(path) and PurePosixPath(path).name not in SETTINGS:
            data.append(path)
    if not data:
        raise UserError(f"no file in it ends in {', '.join(KINDS)}")
    configs: dict[str, list[str]] = {}  # by folder, without `data` and the folders of splits
    for path in data:
        folders = [part for part in path.split("/")[:-1] if part != "data" and not SPLIT.fullmatch(part.lower())]
        configs.setdefault("/".join(folders), []).append(path)
    if config is not None:
        found = [path for name, files in configs.items() if config in name.split("/") for path in files]
        found = found or [path for path in configs.get("", []) if PurePosixPath(path).name.startswith(config)]
        if not found:
            raise UserError(f"configuration {config} is missing: it has {shown(filter(None, configs))}")
    elif "" in configs or "default" in configs or len(configs) == 1:
        found = next(configs[name] for name in ("", "default", *configs) if name in configs)
    else:
        raise UserError(f"its configurations are {shown(configs)}: name one, ORG/NAME/{next(iter(configs))}")
    kind = next(kind for kind in KINDS if any(path.lower().endswith(kind) for path in found))
    return [path for path in found if path.lower().endswith(kind)]


def name_unread(source: str, folder: Path, used: Collection[str], strict_data: bool) -> None:
    """Name the files of a folder that are in no part of the data; `used` are paths in the folder."""
    unread = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_entry = path.is_file() or path.is_symlink()  # a link to a folder is not followed, and one may lead nowhere
        is_data = is_entry and not is_hidden(name) and not NO_DATA.fullmatch(path.name.lower())
        if is_data and name not in used:
            unread.append(name)
    if unread:
        what = ", ".join(sorted(used)) if len(used) < 4 else f"{len(used)} of its files"
        doubt(f"{source}: it reads {what}, and not {shown(unread)}: name them too, or move them", strict_data)


def shown(names: Iterable[str]) -> str:
    """Some names, for messages."""
    names = sorted(names)
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return (", ".join(names[:SHOWN_NAMES]) or "none") + more
