"""Corpora and files: every byte of a text comes back once, splits do not overlap, mistakes end in one line."""

import gzip
import json
import os
import random
import re
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import tiny
from tiny import complaint

from nanochat import loader
from nanochat.data import hub, parquet
from nanochat.ground.cli import UserError
from nanochat.ground.corpus import fingerprint, open_corpus, read_texts

SEPARATOR = "<|endoftext|>"


def documents(corpus) -> list[str]:
    return [document for index in range(corpus.block_count()) for document in corpus.read_block(index)]


def write(path: Path, content: bytes | str) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def prose(size: int, seed: int = 0, line_end: str = "\n") -> str:
    """Paragraphs of English, Chinese and emoji, `size` characters of them."""
    rng = random.Random(seed)
    words = ["tide", "the", "lamp", "潮水", "灯塔", "é", "🌊", "of", "a", "harbour"]
    parts: list[str] = []
    left = size
    while left > 0:
        line = " ".join(rng.choices(words, k=rng.randint(3, 90)))
        parts.append(line + line_end * rng.choice((1, 1, 2, 3)))
        left -= len(parts[-1])
    return "".join(parts)[:size]


def rows(count: int) -> list[str]:
    return [f"row {index} " + "x" * (index % 97) for index in range(count)]


def write_rows(path: Path, texts: list[str | None], group: int | None = None) -> str:
    if path.suffix == ".parquet":
        table = pyarrow.table({"id": list(range(len(texts))), "text": pyarrow.array(texts, pyarrow.string())})
        pyarrow.parquet.write_table(table, path, row_group_size=group or max(len(texts), 1))
    else:
        body = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts).encode()
        path.write_bytes(gzip.compress(body) if path.suffix == ".gz" else body)
    return str(path)


# --- .txt ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "line_end"), [(30, "\n"), (4096, "\r\n"), (5000, "\n"), (300_000, "\r\n")])
def test_text_comes_back_exactly(tmp_path, size, line_end):
    text = prose(size, seed=size, line_end=line_end)
    train, val = open_corpus(write(tmp_path / "a.txt", text))
    assert "".join(documents(train) + documents(val)) == text
    cut = len("".join(documents(train)).encode())
    assert 0 <= len(text.encode()) * 9 // 10 - cut <= 3  # the first 90%, moved to a whole character


def test_text_breaks_at_blank_lines_then_lines_then_characters(tmp_path):
    paragraphs = "".join("word " * 150 + "\n\n" for _ in range(40))
    lines = "".join("word " * 150 + "\n" for _ in range(40))
    dense = "潮" * 5000
    for text, end in ((paragraphs, "\n\n"), (lines, "\n"), (dense, "潮")):
        path = write(tmp_path / "a.txt", text)
        found = documents(open_corpus(path, path)[0])
        assert "".join(found) == text
        assert all(document.endswith(end) for document in found)
        assert all(2000 < len(document.encode()) <= 4096 for document in found[:-1])
        assert "\ufffd" not in "".join(found)
    short = write(tmp_path / "short.txt", "a\n\n" * 1300)
    assert documents(open_corpus(short, short)[0]) == ["a\n\n" * 1300]
    far = write(tmp_path / "far.txt", "title\n\n" + "word " * 2000)  # a far blank line makes no crumb
    assert len(documents(open_corpus(far, far)[0])[0]) == 4096


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_separators_make_documents(tmp_path, line_end):
    wanted = [f"story {index}{line_end}" + prose(index * 30, index) + line_end for index in range(200)]
    mark = SEPARATOR + line_end
    wanted[3] += f"not alone on its line: {SEPARATOR}{line_end} {SEPARATOR}{line_end}"
    text = mark + mark.join(wanted) + mark + mark
    path = write(tmp_path / "a.txt", text)
    assert documents(open_corpus(path, path)[0]) == wanted
    train, val = open_corpus(path)
    assert documents(train) + documents(val) == wanted  # no document is torn by the split
    share = len("".join(documents(train))) / len("".join(wanted))
    assert 0.89 < share < 0.93


def test_a_document_of_megabytes_between_separators_is_cut(tmp_path):
    big = prose(900_000, 1)
    path = write(tmp_path / "a.txt", f"{big}\n{SEPARATOR}\nsmall\n")
    found = documents(open_corpus(path, path)[0])
    assert "".join(found) == f"{big}\nsmall\n" and found[-1] == "small\n"
    assert max(len(document.encode()) for document in found) <= 1 << 20 and len(found) >= 3


def test_a_byte_order_mark_separators_at_the_ends_and_bad_bytes(tmp_path, capsys):
    mark = f"{SEPARATOR}\n"
    for text, found in (("hello\nworld\n", ["hello\nworld\n"]), (f"{mark}1\n{mark}2\n{SEPARATOR}", ["1\n", "2\n"])):
        path = write(tmp_path / "a.txt", f"\ufeff{text}")
        assert documents(open_corpus(path, path)[0]) == found
    path = write(tmp_path / "bad.txt", b"good\xff\n" + b"line \xfe here \xef\xbf\xbd\n" * 2 + b"fine\n" * 2000)
    corpus = open_corpus(path)[0]
    for _ in range(2):
        assert documents(corpus)[0].startswith("good\ufffd\nline \ufffd here \ufffd\n")
    (line,) = capsys.readouterr().err.splitlines()  # once
    assert line.startswith(f"warning: {path}: 3 ")


def test_a_text_in_another_encoding_is_refused(tmp_path):
    """A bad byte in a thousand characters is damage, and two are another encoding."""
    path = write(tmp_path / "a.txt", (b"0123456789" * 99 + b"01234567\xff\n") * 40)
    assert "\ufffd" in documents(open_corpus(path)[0])[0]
    write(tmp_path / "a.txt", (b"0123456789" * 98 + b"01234567\xff\n") * 40)
    assert mistake(path).startswith(f"{path} is not UTF-8 ")


ENCODINGS = {
    "gb18030": ("你好，世界。今天天气很好。\n", ["gbk", "gb18030"]),
    "latin1": ("Été à la plage, où les élèves lisent déjà.\n", ["latin-1", "cp1252"]),
    "utf-16": ("The boat. 小船。\n", ["utf-16"]),
    "utf-16le": ("The boat. 小船。\n", ["utf-16-le"]),
    "utf-16be": ("The boat. 小船。\n", ["utf-16-be"]),
    "utf-32": ("The boat. 小船。\n", ["utf-32", "utf-32-le", "utf-32-be"]),
}


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
@pytest.mark.parametrize("name", ENCODINGS)
def test_the_encoding_of_a_text_is_named(tmp_path, name, suffix):
    text, encodings = ENCODINGS[name]
    for encoding in encodings:
        body = text * 200 if suffix == "txt" else json.dumps({"text": text}, ensure_ascii=False) + "\n"
        assert f"iconv -f {name} -t utf-8" in mistake(write(tmp_path / f"a.{suffix}", (body * 4).encode(encoding)))


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_texts_as_other_tools_write_them_for_pretraining(tmp_path, suffix):
    """A field `text`, or ms-swift's conversation of one reply."""
    texts = [{"text": "one"}, {"messages": [{"role": "assistant", "content": "two"}]}, {"text": "three"}]
    body = json.dumps(texts) if suffix == "json" else "".join(f"{json.dumps(row)}\n" for row in texts)
    path = write(tmp_path / f"a.{suffix}", body)
    assert documents(open_corpus(path, path)[0]) == ["one", "two", "three"]
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    assert 'has no "text"' in mistake(write(tmp_path / "b.jsonl", f"{json.dumps(chat)}\n" * 3))


def test_one_long_line(tmp_path):
    text = "ab 潮" * 500_000
    path = write_rows(tmp_path / "a.jsonl", ["x", text, "y", "z"])
    assert documents(open_corpus(path)[0]) == ["x", text, "y"]


def test_there_are_enough_blocks_to_shuffle(tmp_path):
    """Of a small text one for each shard of the loader: shards without one would repeat the rows of others."""
    assert open_corpus(write(tmp_path / "a.txt", prose(30_000)))[0].block_count() >= loader.CANONICAL_SHARDS
    small = write_rows(tmp_path / "a.jsonl", rows(500))
    assert open_corpus(small)[0].block_count() >= loader.CANONICAL_SHARDS
    assert open_corpus(write(tmp_path / "a.txt", prose(900_000)))[0].block_count() >= 64
    assert open_corpus(write_rows(tmp_path / "a.jsonl", rows(16_000)))[0].block_count() >= 64
    assert open_corpus(write_rows(tmp_path / "a.parquet", rows(16_000)))[0].block_count() >= 57  # 90% of one group


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet"])
@pytest.mark.parametrize("count", [2, 10, 1003])
def test_rows_split_nine_to_one(tmp_path, suffix, count):
    texts = rows(count)
    train, val = open_corpus(write_rows(tmp_path / f"a{suffix}", texts))
    assert documents(train) + documents(val) == texts
    assert len(documents(val)) == max(1, count - count * 9 // 10)


@pytest.mark.parametrize("change", ["overwritten", "cut", "replaced", "deleted"])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_a_file_that_changes_is_an_error_that_names_it(tmp_path, suffix, change):
    path = tmp_path / f"a{suffix}"
    write(path, prose(60_000)) if suffix == ".txt" else write_rows(path, rows(1000))
    train, _ = open_corpus(str(path))
    whole = train.read_block(3)
    shutil.copy2(path, tmp_path / "copy")
    if change == "overwritten":  # in place, and with the old time
        path.write_bytes(bytes(path.stat().st_size))
        shutil.copystat(tmp_path / "copy", path)
    elif change == "cut":
        os.truncate(path, 1000)
    elif change == "deleted":
        path.unlink()
    else:
        (tmp_path / "copy").replace(path)
        if suffix != ".parquet":  # each row is compared; a table may be another one by the next block
            assert train.read_block(3) == whole
            return
    with pytest.raises((UserError, FileNotFoundError), match=f"{path} has changed|No such file"):
        train.read_block(3)
    assert whole


@pytest.mark.parametrize("group", [1, 7, 1000])
def test_parquet_row_groups_of_any_size(tmp_path, monkeypatch, group):
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 2000)
    texts = [f"{index:06d}" + "y" * 94 for index in range(500)]
    path = write_rows(tmp_path / "a.parquet", texts, group)
    whole = open_corpus(path, path)[0]
    assert documents(whole) == texts
    train, val = open_corpus(path)
    assert (documents(train), documents(val)) == (texts[:450], texts[450:])
    if group == 1000:
        assert (whole.block_count() or 0) >= 23  # 50,000 bytes in shares of 2,000 at most


def test_empty_rows_and_blank_lines_and_surrogates(tmp_path):
    path = write_rows(tmp_path / "a.parquet", ["a", None, "", "b"])
    assert documents(open_corpus(path, path)[0]) == ["a", "b"]
    lines = [b'\xef\xbb\xbf{"text": "a"}\r', b"", b"  ", b'{"text": "\\ud83c\\udf0a \\ud800!"}', b'{"text":""}']
    path = write(tmp_path / "a.jsonl", b"\n".join(lines))
    found = documents(open_corpus(path, path)[0])
    assert found == ["a", "🌊 \ufffd\ufffd\ufffd!"] and found[1].encode()


# --- folders, names --------------------------------------------------------------------------------------------------


def test_a_folder_is_read_in_order_and_its_last_file_is_validation(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    write(tmp_path / "b" / "2.txt", "two")
    write_rows(tmp_path / "b" / "1.jsonl", ["one", "uno"])
    write(tmp_path / "a.txt", "zero")
    write_rows(tmp_path / "c.parquet", ["three", "tres"])
    write(tmp_path / ".hidden" / "x.txt", "hidden")
    write(tmp_path / "readme.md", "not text for us")
    write(tmp_path / "z.txt.partial", "half")
    train, val = open_corpus(str(tmp_path))
    assert (documents(train), documents(val)) == (["zero", "one", "uno", "two"], ["three", "tres"])
    order = [3, 1, 0, 2, 1]
    assert train.block_count() == 4  # a document each, because the files are so small
    with pytest.raises(IndexError):
        train.read_block(4)
    assert [train.read_block(index) for index in order] == [["two"], ["one"], ["zero"], ["uno"], ["one"]]


def test_val_data_leaves_the_training_text_whole(tmp_path, monkeypatch):
    first, second = write(tmp_path / "a.txt", "train\n" * 50), write_rows(tmp_path / "b.jsonl", ["v1", "v2"])
    train, val = open_corpus(first, second)
    assert ("".join(documents(train)), documents(val)) == ("train\n" * 50, ["v1", "v2"])
    (tmp_path / "c").mkdir()
    write_rows(tmp_path / "c" / "1.jsonl", rows(20))
    train, val = open_corpus(str(tmp_path / "c"))  # the only file of a folder is split
    assert (documents(train), documents(val)) == (rows(20)[:18], rows(20)[18:])
    write(tmp_path / "c" / "2.txt", "two")
    assert documents(open_corpus(str(tmp_path / "c"), first)[0]) == [*rows(20), "two"]
    monkeypatch.setattr("nanochat.demo.writer.block", lambda index, split: [f"{index} {split}"])
    train, val = open_corpus("demo")
    assert train.block_count() is None and val.block_count() is None
    assert (train.read_block(7), val.read_block(8)) == (["7 train"], ["8 val"])


def test_pydoc_reads_the_standard_library():
    train, val = open_corpus("pydoc")
    items = [str(item) for item in train.items + val.items]  # type: ignore[attr-defined]
    assert len(items) == len(set(items)) > 400
    assert 0.09 < len(val.items) / len(items) < 0.11  # type: ignore[attr-defined]
    assert not [item for item in items if "site-packages" in item or "/test/" in f"/{item}"]
    where = {str(item): (corpus, n) for corpus in (train, val) for n, item in enumerate(corpus.items)}  # type: ignore
    corpus, index = where["textwrap.py"]
    [text] = corpus.read_block(index)
    assert text.startswith("module textwrap\n\nText wrapping and filling.")
    assert "def dedent(text)\n    Remove any common leading whitespace" in text
    assert "\n    def fill(self, text)\n        fill(text : string) -> string" in text
    corpus, index = where["with"]  # a topic of the language reference
    assert "context manager" in corpus.read_block(index)[0]


def test_a_hub_name_opens_its_shards(tmp_path, monkeypatch):
    paths = [Path(write_rows(tmp_path / f"{n}.parquet", [f"{n} {row}" for row in range(3)])) for n in range(3)]
    requested = []

    def fetch(name, hub_name, shards):
        requested.append((name, hub_name, shards))
        return paths[: (shards or 8)][:2] + paths[-1:]

    monkeypatch.setattr(hub.Hub, "texts", fetch)
    train, val = open_corpus("climbmix", hub="modelscope", shards=2)
    assert (documents(train)[::3], documents(val)) == (["0 0", "1 0"], ["2 0", "2 1", "2 2"])
    here = write(tmp_path / "a.txt", "mine")
    train, val = open_corpus(here, "org/name")
    assert (documents(train), documents(val)) == (["mine"], ["2 0", "2 1", "2 2"])
    assert requested == [("climbmix", "modelscope", 2), ("org/name", "hf", 1)]


def test_a_mixture_has_shares_and_its_paths_may_have_colons_and_commas(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b:2.txt", "c,d:3.txt"):
        write(tmp_path / name, f"{name} " * 5000)
    train, val = open_corpus("a.txt:3, b:2.txt,demo:0.5")
    assert [(part.name, part.weight) for part in train.parts] == [
        ("a.txt", 3 / 4.5),
        ("b:2.txt", 1 / 4.5),
        ("demo", 0.5 / 4.5),
    ]
    assert [part.weight for part in val.parts] == [part.weight for part in train.parts]
    assert train.block_count() is None and train.parts[1].corpus.read_block(0)[0].startswith("b:2.txt")
    assert documents(open_corpus("c,d:3.txt")[0])[0].startswith("c,d")  # a single path stays as it is
    # Each has its share of the characters that a tokenizer is trained on.
    texts = list(read_texts(train, 4500))
    assert sum(len(text) for text in texts if text.startswith("a.txt")) == 3000
    # Held-out text of its own, and the training text whole.
    train, val = open_corpus("a.txt:1,demo:1", "b:2.txt")
    assert not hasattr(val, "parts") and "".join(documents(train.parts[0].corpus)) == "a.txt " * 5000
    prints = {fingerprint(open_corpus(data)[0]) for data in ("a.txt,demo", "demo,a.txt", "a.txt,pydoc", "a.txt")}
    assert len(prints) == 4


# --- mistakes --------------------------------------------------------------------------------------------------------


def mistake(data: Path | str, val_data: str | None = None) -> str:
    """The one line of an error, at opening or at reading."""
    return complaint(lambda: documents(open_corpus(str(data), val_data)[0]))


def test_mistakes_with_paths(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    assert "'.csv'" in mistake(write(tmp_path / "a.csv", "a"))
    assert "no file in this folder" in mistake(tmp_path / "empty")

    def offline(name, hub_name, shards):
        raise UserError("cannot reach it")

    monkeypatch.setattr(hub.Hub, "texts", offline)
    line = mistake("org/name")
    assert line.startswith("--data org/name") and line.endswith("cannot reach it")


GOOD = '{"text": "a"}\n'
LONG = '{"text": "%s"}\n' % ("a" * 500)
# Other mistakes of a line are in tests/data/test_records.py.
BAD_JSON_LINES = [
    (GOOD + "\n" + '{"body": 1, "id": 2}\n' + GOOD * 5, "line 3 .*body, id"),
    (LONG * 100 + '{"text": 5}\n' + GOOD * 300, 'line 101 has no "text"'),
]


@pytest.mark.parametrize(("lines", "problem"), BAD_JSON_LINES)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_bad_line_is_named(tmp_path, lines, problem, suffix):
    body = lines.encode("utf-8", "surrogateescape")
    path = write(tmp_path / f"a{suffix}", gzip.compress(body) if suffix.endswith("gz") else body)
    assert re.search(f"{re.escape(path)} {problem}", mistake(path))


def test_damaged_files(tmp_path):
    packed = gzip.compress(b'{"text": "a"}\n' * 5000)
    for damaged in (packed[:60], packed[:30] + bytes(20) + packed[50:], b'{"text": "a"}\n'):
        assert "damaged gzip" in mistake(write(tmp_path / "a.jsonl.gz", damaged))
    path = Path(write_rows(tmp_path / "b.parquet", ["some text " * 50] * 50))
    body, about = path.read_bytes(), pyarrow.parquet.read_metadata(path).row_group(0).column(1)
    page = about.dictionary_page_offset
    assert "damaged parquet" in mistake(write(path, body[:page] + b"\xff" * 40 + body[page + 40 :]))
    not_utf8 = pyarrow.array([b"good", b"\xff\xfe"]).view(pyarrow.string())  # Python cannot hold this text
    for columns, words in (
        ({"content": ["a"], "n": [1]}, "'text': its columns are content, n"),
        ({"text": [1, 2]}, 'row 1 has no "text"'),
        ({"text": not_utf8}, "damaged parquet file ('utf-8' codec"),
    ):
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "c.parquet")
        assert words in mistake(tmp_path / "c.parquet")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_empty_files(tmp_path, name):
    path = tmp_path / name
    write(path, "") if name.endswith((".txt", ".jsonl")) else write_rows(path, [])
    assert "no text for training" in mistake(path)
    good = write(tmp_path / "0.txt", "good")
    assert "no text for validation" in mistake(good, str(path))
    assert "(a." in mistake(tmp_path) and "--val_data" in mistake(tmp_path)
    if name != "a.txt":  # one row cannot be split
        assert "no text for training" in mistake(write_rows(path, ["one"]))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_the_text_may_have_another_name(tmp_path, name):
    rows = [{"content": f"text {number}", "text": "no"} for number in range(20)]
    path = tiny.write_rows(tmp_path / name, rows)
    train, val = open_corpus(path, columns="text = content")
    assert documents(train) + documents(val) == [row["content"] for row in rows]
    whole, _ = open_corpus(path, path, columns="text=content")
    assert documents(whole) == [row["content"] for row in rows]
    for columns in ("content", "question=content", "text=", "text=absent"):
        assert columns.partition("=")[2] in complaint(lambda columns=columns: open_corpus(path, columns=columns))
