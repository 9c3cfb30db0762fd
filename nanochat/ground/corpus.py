"""Names and paths become addressable text: `open_corpus(data) -> (train, validation)`.

A corpus is a list of blocks. A block is a handful of documents, sometimes none, and the same ones at every call, in any
order of calls. The next block is read fast, any other correctly. The loader addresses text by block, so that the order
of training is a function of (seed, index) at any world size.

    names    demo and pydoc, the rows "corpora" of the rooms (rooms.py); some datasets, any `org/name` of a hub
    paths    .txt, .jsonl[.gz] with a `text` field, .parquet with a `text` column (text_files.py)

Several with commas are a mixture, `a:0.7,b:0.3`: a loader draws from each its share of the tokens.
"""

import difflib
import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nanochat.ground import rooms
from nanochat.ground.cli import UserError

HUB_NAMES = ("climbmix", "fineweb-edu", "fineweb-edu-chinese", "ORG/NAME")  # data/catalog.py has their places
NAMES = (*rooms.names("corpora"), *HUB_NAMES)
ORG_AND_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class Corpus(Protocol):
    """Blocks of documents. A document is a text, or its int32 tokens with a begin token."""

    name: str

    def block_count(self) -> int | None:
        """None: the corpus never ends."""
        ...

    def read_block(self, index: int) -> Sequence[Any]:
        """The documents of a block."""
        ...


@dataclass(frozen=True)
class Part:
    """A corpus in a mixture."""

    name: str  # as in --data
    corpus: Corpus
    weight: float = 1.0  # its share of the tokens


@dataclass(frozen=True)
class WeightedCorpora:
    """Several corpora. A loader draws from each its share of the tokens; the shares add up to 1."""

    name: str
    parts: list[Part]

    def block_count(self) -> int | None:
        counts = [part.corpus.block_count() for part in self.parts]
        return None if None in counts else sum(filter(None, counts))


def weighted_parts(corpus: Corpus | WeightedCorpora) -> list[Part]:
    """The corpora of a mixture; a single corpus is one part."""
    return corpus.parts if isinstance(corpus, WeightedCorpora) else [Part(corpus.name, corpus)]


def by_part(name: str, values: Sequence[float], corpus: Corpus | WeightedCorpora) -> dict[str, float]:
    """One value of each corpus, for a log: `name_<corpus>` in a mixture, `name` for a single corpus."""
    if not isinstance(corpus, WeightedCorpora):
        return {name: values[0]}
    return {f"{name}_{part.name}": value for part, value in zip(corpus.parts, values, strict=True)}


def mean_by_weight(values: Sequence[float], corpus: Corpus | WeightedCorpora) -> float:
    """The weighted mean of one value of each corpus. The mean of losses is what a run on the mixture lowers."""
    return sum(part.weight * value for part, value in zip(weighted_parts(corpus), values, strict=True))


def fingerprint(corpus: Corpus | WeightedCorpora) -> str:
    """A sha256 that identifies a corpus. It covers the number of blocks, and eight blocks at even distances."""
    if isinstance(corpus, WeightedCorpora):
        prints = [fingerprint(part.corpus) for part in corpus.parts]
        return hashlib.sha256("".join(prints).encode()).hexdigest()
    count = corpus.block_count()
    digest = hashlib.sha256(str(count).encode())
    for index in sorted({i * (8 if count is None else count) // 8 for i in range(8)}):
        for document in corpus.read_block(index):
            digest.update(document.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def read_texts(corpus: Corpus | WeightedCorpora, max_chars: int) -> Iterator[str]:
    """The documents of a corpus in order, up to `max_chars` characters; the last one may be cut. Each corpus of a
    mixture has its share of the characters."""
    if isinstance(corpus, WeightedCorpora):
        for part in corpus.parts:
            yield from read_texts(part.corpus, round(part.weight * max_chars))
        return
    blocks = corpus.block_count()
    for index in itertools.count() if blocks is None else range(blocks):
        for document in corpus.read_block(index):
            yield document[:max_chars]
            max_chars -= len(document)
            if max_chars <= 0:
                return


def parse_mixture(data: str, flag: str = "--data") -> dict[str, float]:
    """The weights of `NAME_OR_PATH[:WEIGHT],...` by name. Without a comma, or where such a path exists, it is one name.

    Raises UserError: when a weight is not a positive number, or a name occurs twice.
    """
    if _is_here(data) or "," not in data:
        return {data: 1.0}
    weights: dict[str, float] = {}
    for entry in filter(None, map(str.strip, data.split(","))):
        name, colon, number = entry.rpartition(":")
        if not colon or _is_here(entry):  # a path may have colons
            name = entry
            number = "1"
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not 0 < weight < math.inf:
            no_path = "no such path, and " if math.isnan(weight) else ""
            raise UserError(f"{flag} {entry}: {no_path}the weight {number!r} is not a number above 0")
        if name in weights:
            raise UserError(f"{flag} {data} names {name} twice: once, with the sum of its weights")
        weights[name] = weight
    return weights or {"": 1.0}


def open_corpus(
    data: str, val_data: str | None = None, *, hub: str = "hf", shards: int | None = None, columns: str = ""
) -> tuple[Corpus | WeightedCorpora, Corpus | WeightedCorpora]:
    """Open --data (and --val_data) as (train, validation); either may be a mixture.

    Without `val_data` a folder's last file is validation, or the last 10% of a single file. A name has its own
    validation split. `shards`: the number of training shards of a hub dataset. `columns`: `text=COLUMN`, where the text
    of files has another name. Raises UserError: in one line.
    """
    role, _, column = (part.strip() for part in (columns or "text=text").partition("="))
    if role != "text" or not column:
        raise UserError(f"--columns {columns}: of --data only the text is read: text=COLUMN")
    weights = parse_mixture(data)
    if shards is not None and all(name in rooms.names("corpora") or _is_here(name) for name in weights):
        raise UserError(f"--shards {shards}: --data {data} has no shards, a hub dataset has: leave --shards out")
    opened = {name: _open(name, "--data", val_data is not None, hub, shards, column) for name in weights}
    train = _weighted(data, weights, [pair[0] for pair in opened.values()])
    val = _weighted(data, weights, [pair[1] for pair in opened.values()])
    if val_data is not None:
        val_weights = parse_mixture(val_data, "--val_data")
        val_corpora = [_open(name, "--val_data", True, hub, 1, column)[1] for name in val_weights]
        val = _weighted(val_data, val_weights, val_corpora)
    roles = [(part.corpus, "training") for part in weighted_parts(train)]
    roles += [(part.corpus, "validation") for part in weighted_parts(val)]
    for corpus, role in roles:
        if corpus.block_count() == 0:
            raise UserError(f"{corpus.name}: no text for {role}: use more text, or a separate file with --val_data")
        if corpus.block_count() is not None:
            corpus.read_block(0)  # a file that cannot be read is found now, not after the first steps
    return train, val


def _weighted(data: str, weights: dict[str, float], corpora: list[Corpus]) -> Corpus | WeightedCorpora:
    """Corpora as a mixture; a single one stays as it is."""
    if len(corpora) == 1:
        return corpora[0]
    total = sum(weights.values())
    parts = [
        Part(name, corpus, weight / total) for (name, weight), corpus in zip(weights.items(), corpora, strict=True)
    ]
    return WeightedCorpora(data, parts)


def _open(data: str, flag: str, whole: bool, hub: str, shards: int | None, column: str) -> tuple[Corpus, Corpus]:
    """(train, validation) of one name or path; with `whole`, both are all of a path's text."""
    if not data:
        raise UserError(f"{flag} is empty: name a file, a folder, or one of {', '.join(NAMES)}")
    if data in rooms.names("corpora"):
        open_split = rooms.find("corpora", data)
        return open_split("train"), open_split("val")
    from nanochat.ground import text_files  # here: the demo has no files

    if _is_here(data):
        paths = text_files.list_files(Path(data).expanduser(), text_files.SUFFIXES, flag)
        return text_files.open_texts(data, paths, whole, column)
    is_hub_name = ORG_AND_NAME.fullmatch(data) and not data.lower().endswith(text_files.SUFFIXES)
    if data not in NAMES and not is_hub_name:
        near = difflib.get_close_matches(data, NAMES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"{flag} {data}: no such file or folder; {hint}the names are {', '.join(NAMES)}")
    try:
        paths = rooms.find("hubs", hub).texts(data, hub, shards)
    except UserError as error:
        lead = f"{flag} {data} is not a file or folder here; as a hub dataset, " if is_hub_name else ""
        raise UserError(f"{lead}{error}") from error
    return text_files.open_texts(data, paths, False, column)


def _is_here(data: str) -> bool:
    """Whether it is a file or a folder, and not a name."""
    return data not in NAMES and bool(data) and Path(data).expanduser().exists()
