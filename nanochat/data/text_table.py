"""The table of the text that --data names: its files, its rows, and what becomes of each.

What the index of a file knows is counted exactly: rows, and bytes of a .txt that are not UTF-8. What only reading shows
is counted in the first rows, up to `SAMPLE_CHARACTERS`: all rows of a small corpus, few of a large one.
"""

from collections import Counter
from pathlib import Path
from typing import Any

from nanochat.data.splits import HELD_OUT_WORDS, name_unread, shown, split_of
from nanochat.ground.corpus import Corpus, WeightedCorpora, parse_mixture, weighted_parts
from nanochat.ground.log import doubt, print_table
from nanochat.tokenizer import Tokenizer

COLUMNS = ("rows", "training", "held out", "left out")  # the first is the sum of the others
LOST = ("not UTF-8", "NUL", "U+FFFD")  # characters
OPTIONAL = (*LOST, "rows looked at")  # the last: where it is not all of them
SAMPLE_CHARACTERS = 4_000_000  # counted in the training text, and as many in the validation text
Uses = dict[Path, str]  # "training" or "held out", by file


def print_texts(
    flags: Any, train: Corpus | WeightedCorpora, val: Corpus | WeightedCorpora, tokenizer: Tokenizer
) -> None:
    """Print a line for each path and hub dataset of --data and --val_data in `flags`, which `open_corpus` has opened.

    Warns of files that are not read, of a test split that is learned, and of texts that spell marks of the tokenizer.
    """
    val_flag, val_data = ("--data", flags.data) if flags.val_data is None else ("--val_data", flags.val_data)
    sources: dict[str, tuple[Counter[str], Uses]] = {}  # by flag and name
    for use, flag, data, corpus in (("training", "--data", flags.data, train), ("held out", val_flag, val_data, val)):
        for name, part in zip(parse_mixture(data), weighted_parts(corpus), strict=True):
            texts: Any = part.corpus
            if hasattr(texts, "records"):  # demo and pydoc write their texts when they are read
                count, uses = sources.setdefault(f"{flag} {name}", (Counter(), {}))
                count.update(count_texts(texts, use, list(tokenizer.special_ids)))
                uses |= dict.fromkeys((file.path for file in texts.records.files), use)
    rows = []
    for source, (count, uses) in sources.items():
        name = source.partition(" ")[2]
        warn_of_files(source, Path(name).expanduser(), uses, flags.strict_data)
        spelled = [f"{mark} in {count[mark]:,}" for mark in tokenizer.special_ids if count[mark]]
        if spelled:
            doubt(
                f"{source}: {count['with marks']:,} of the first {count['documents']:,} documents spell marks of the "
                f"tokenizer ({', '.join(spelled)}), which are learned as letters: chat_sft reads such chats by "
                f"--columns rendered={(flags.columns or 'text').rpartition('=')[2]}",
                flags.strict_data,
            )
        lost = [f"{column} {count[column]:,}" for column in LOST if count[column]]
        if lost and flags.strict_data:  # otherwise the table has them
            doubt(f"{source}: characters were lost in a conversion ({', '.join(lost)})", flags.strict_data)
        if count["rows looked at"] == count["rows"]:
            del count["rows looked at"]  # a column of zeros is not shown
        rows.append([name, f"{len(uses):,}", *(f"{count[column]:,}" for column in (*COLUMNS, *OPTIONAL))])
    if rows:
        print_table(("data", "files", *COLUMNS, *OPTIONAL), rows, OPTIONAL)


def count_texts(texts: Any, use: str, marks: list[str]) -> Counter[str]:
    """The counts of a FileCorpus by column; of its documents looked at, and of those that spell each mark, and any."""
    count: Counter[str] = Counter()
    characters = 0
    for block in range(texts.block_count()):
        if characters >= SAMPLE_CHARACTERS:
            break
        rows = int(texts.records.starts[block + 1] - texts.records.starts[block])
        documents = texts.read_block(block)
        count.update({"rows looked at": rows, "documents": len(documents), "left out": rows - len(documents)})
        for text in documents:
            characters += len(text)
            found = [mark for mark in marks if mark in text]
            count.update([*found, *(["with marks"] if found else [])])
            count.update({"NUL": text.count("\0"), "U+FFFD": text.count("\N{REPLACEMENT CHARACTER}")})
    count["rows"] = len(texts.records)
    count[use] = count["rows"] - count["left out"]  # a row without text is left out
    count["not UTF-8"] = sum(getattr(file, "invalid", 0) for file in texts.records.files)
    return count


def warn_of_files(source: str, folder: Path, uses: Uses, strict_data: bool) -> None:
    """One line for the files of a folder that are not read, and one for test splits that are learned."""
    if folder in next(iter(uses)).parents:  # not of a file, nor of a hub's files
        name_unread(source, folder, {path.relative_to(folder).as_posix() for path in uses}, strict_data)
    held_out = [path.name for path, use in uses.items() if use == "held out"]
    tests = [path.name for path in uses if split_of(path.name).split("_")[0] in HELD_OUT_WORDS]
    if len(uses) > 1 and set(tests) - set(held_out):
        problem = f"{shown(tests)} is learned, {shown(held_out)} held out: name each by --data or --val_data"
        doubt(f"{source}: {problem}", strict_data)
