"""records.py: any record of any format in any order, splits found in folders, and damage reported in one line."""

import csv
import gzip
import json
import random
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from tiny import complaint

from nanochat.data import formats, hub, parquet
from nanochat.data.records import find_split, open_records, open_split

WANTED = [{"question": f"What is {n}? é€😀", "answer": n, "list": [{"a": str(n)}] * (n % 3)} for n in range(1000)]


def write(path: Path, wanted: list, between: str = "\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(wanted), path, row_group_size=64)
        return path
    text = "".join(json.dumps(row, ensure_ascii=row != wanted[0]) + between for row in wanted)
    path.write_bytes(gzip.compress(text.encode()) if path.name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
@pytest.mark.parametrize("cache_bytes", [1, 20_000, 10**9])
def test_every_record_in_any_order(tmp_path, name, cache_bytes, monkeypatch):
    monkeypatch.setattr(parquet, "CACHE_BYTES", cache_bytes)
    opened = open_records([write(tmp_path / name, WANTED)])
    assert len(opened) == 1000 and [opened[n] for n in range(1000)] == WANTED
    order = random.Random(0).sample(range(1000), 200)
    assert [opened[n] for n in order] == [WANTED[n] for n in order]
    for index in (-1, 1000):
        with pytest.raises(IndexError):
            opened[index]


def test_no_more_than_the_cache_is_kept(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", WANTED)
    for cache_bytes, kept in ((1, 1), (10**9, 64)):
        monkeypatch.setattr(parquet, "CACHE_BYTES", cache_bytes)
        file = parquet.ParquetFile(path)
        assert [file.row(n)["answer"] for n in range(1000)] == list(
            range(1000)
        ) and file.cached_block.cache_info().currsize == kept


def test_blank_lines_line_ends_and_a_byte_order_mark(tmp_path):
    text = "\ufeff" + "\r\n\r\n  \n".join(json.dumps({"n": n}) for n in range(5))
    for name, data in (("a.jsonl", text.encode()), ("b.jsonl.gz", gzip.compress(text.encode()))):
        (tmp_path / name).write_bytes(data)
        opened = open_records([tmp_path / name])
        assert [opened[n] for n in range(len(opened))] == [{"n": n} for n in range(5)]
        assert str(opened.error(1, "")).strip() == f"{tmp_path / name} line 4"


def test_several_files_are_one_row_of_rows(tmp_path):
    first, second = write(tmp_path / "a.jsonl", WANTED[:3]), write(tmp_path / "b.parquet", WANTED[3:100])
    opened = open_records([str(first), second])
    assert len(opened) == 100 and [opened[n] for n in (0, 2, 3, 99)] == [WANTED[n] for n in (0, 2, 3, 99)]
    assert str(opened.error(2, "?")) == f"{first} line 3 ?" and str(opened.error(3, "?")) == f"{second} row 1 ?"
    folder = open_records([tmp_path])
    assert [folder[n] for n in (0, 99)] == [WANTED[0], WANTED[99]]


def test_only_the_wanted_fields_are_read_from_a_parquet(tmp_path):
    opened = open_records([write(tmp_path / "a.parquet", WANTED)], {"answer": int, "list": list})
    assert opened[7] == {"answer": 7, "list": [{"a": "7"}]}


def test_a_row_without_its_field_is_named(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": "one"}, {"ask": "two"}, {"question": 3}, ["four"]])
    opened = open_records([path], {"question": str})
    assert complaint(lambda: opened[1]) == f'{path} line 2 has no "question" that is a text: its fields are ask'
    assert complaint(lambda: opened[2]) == f'{path} line 3 has no "question" that is a text: it is 3'
    assert complaint(lambda: opened[3]) == f"{path} line 4 is not an object with question"
    path = write(tmp_path / "a.parquet", [{"question": "one"}, {"question": None}])
    assert complaint(lambda: open_records([path], {"question": str})[1]).startswith(f'{path} row 2 has no "question"')
    assert "has no column 'answer': its columns are question" in complaint(
        lambda: open_records([path], {"answer": str})
    )


def test_paths_that_cannot_be(tmp_path):
    assert complaint(lambda: open_records([tmp_path / "no.jsonl"])).endswith("no.jsonl: no such file or folder")
    assert "no file in this folder ends in .jsonl, .jsonl.gz, .parquet" in complaint(lambda: open_records([tmp_path]))
    (tmp_path / "a.xlsx").write_text("[]")
    assert "unknown suffix '.xlsx'" in complaint(lambda: open_records([tmp_path / "a.xlsx"]))
    (tmp_path / "a.jsonl").write_text("\n \n")
    assert "a.jsonl: it has no rows" in complaint(lambda: open_records([tmp_path / "a.jsonl"]))


# ---- .json, .csv -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("indent", [None, 1])
def test_the_items_of_a_json_list_are_records(tmp_path, indent):
    odd = [{"a": '], "b": {', "b": "\\\\"}, {"a": "\\", "b": ["[", {"}": '"'}]}, [], "text", 3, None]
    path = tmp_path / "a.json"
    path.write_text("\ufeff \n" + json.dumps([*WANTED[:50], *odd], indent=indent, ensure_ascii=False) + "\n")
    opened = open_records([path])
    assert [opened[n] for n in range(len(opened))] == [*WANTED[:50], *odd]
    assert str(opened.error(2, "?")) == f"{path} item 3 ?"
    path.write_text("\n".join(json.dumps(row) for row in WANTED[:9]))  # one value a line
    opened = open_records([path])
    assert [opened[n] for n in range(len(opened))] == WANTED[:9] and opened.where(8) == f"{path} line 9"


def test_a_damaged_json_list_is_named(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    for text, problem in (
        ('[{"a": 1}, {"a": "', "the list does not end"),
        ('[{"a": "x\\', "the list does not end"),
        ("[" * 100_000, "the list does not end"),
        ("[1]\n[2]", "something follows the list; for one JSON value a line name it .jsonl"),
        ("[]", "it has no rows"),
        ("", "it has no rows"),
    ):
        path.write_text(text)
        assert problem in complaint(lambda: open_records([path]))
    path.write_text('[{"a": 1}, {"a": 1], ' + "[" * 9000 + "]" * 9000 + "]")
    opened = open_records([path])
    assert opened[0] == {"a": 1}
    for place in (1, 2):
        assert complaint(lambda place=place: opened[place]).startswith(f"{path} item {place + 1} is not JSON")
    monkeypatch.setattr(formats, "MAX_LINE_BYTES", 1 << 20)
    path.write_text('["' + "x" * (1 << 20) + '"]')
    assert "the item at byte 1 is longer than 1 MiB" in complaint(lambda: open_records([path]))


def test_the_rows_of_a_csv_are_records(tmp_path):
    path = tmp_path / "a.csv"
    header, rows = ["question", "answer"], [['é, "1"\n2', "x" * 200_000], ["", "😀"], ["b\r\nc", "d"]]
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        writer.writerows([header, *rows[:2], [], rows[2]])
    opened = open_records([path])
    assert [opened[n] for n in range(len(opened))] == [dict(zip(header, row, strict=True)) for row in rows]
    assert (
        opened.where(2) == f"{path} line 6" and opened[2]["answer"] == "d"
    )  # after a row of two lines and a blank one


def test_a_damaged_csv_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "MAX_CSV_ROW_BYTES", 1000)
    path = tmp_path / "a.csv"
    for data, problem in (
        (b"a,b\n1\n", f"{path} line 2 has 1 values, and the header names 2"),
        (b"a,b\n1,2,3\n", f"{path} line 2 has 3 values"),
        (b"a,a\n1,2\n", "names the columns, each once"),
        (b"a,\n1,2\n", "names the columns, each once"),
        (b'a,b\n1,"' + b"2\n" * 600, "the row at byte 4 is longer than 0 MiB: is a quote not closed?"),
        (b'a,b\n1,"2', "is a damaged .csv"),
        (b'a,b\n1,"2"3\n', "is a damaged .csv"),
        (b"a,b\r1,2\r", "is a damaged .csv"),
        ("a,b\n1,你\n".encode("gb18030"), "is not UTF-8 (byte 6): convert it, for example iconv -f gb18030 -t utf-8"),
        ("a,b\n1,2\n".encode("utf-16-le"), "without a byte order mark: convert it, iconv -f utf-16le -t utf-8"),
        ("问题,答案\n一,二\n".encode("utf-16-le"), "without a byte order mark: convert it, iconv -f utf-16le -t utf-8"),
        ("问题,答案\n一,二\n".encode("utf-16-be"), "without a byte order mark: convert it, iconv -f utf-16be -t utf-8"),
        ("a,b\n1,2\n".encode("utf-16")[:-1], "is a damaged UTF-16 text"),
        (b"a,b\n1,2\0\n", "") if sys.version_info >= (3, 11) else (b"a,b\n1,2\0\n", "is a damaged .csv"),
        (b"a,b\n", "it has no rows"),
    ):
        path.write_bytes(data)
        if problem:
            assert problem in complaint(lambda: open_records([path])[0])
        else:
            assert open_records([path])[0] == {"a": "1", "b": "2\0"}


def test_settings_of_a_folder_are_no_records(tmp_path):
    (tmp_path / "dataset_infos.json").write_text("{}")
    write(tmp_path / "a.jsonl", WANTED[:3])
    assert len(open_records([tmp_path])) == 3


# ---- Splits ----------------------------------------------------------------------------------------------


def test_a_split_is_found_in_a_folder(tmp_path):
    def found(*names: str, split: tuple[str, ...] = ("test",), only: bool = False) -> list[str]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for name in names:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
        return [file.relative_to(folder).as_posix() for file in find_split(folder, split, "main", only)]

    assert found("train.jsonl", "test.jsonl") == ["test.jsonl"]
    assert found("train.jsonl", "test.jsonl.gz") == ["test.jsonl.gz"]
    shards = ["test-00000-of-00002.parquet", "test-00001-of-00002.parquet"]
    assert found("train-00000-of-00001.parquet", *shards) == shards
    assert found("test.jsonl", *shards) == ["test.jsonl"]
    assert found("main--test-00000-of-00001.parquet", "main--train-00000-of-00001.parquet") == [
        "main--test-00000-of-00001.parquet"
    ]
    assert found("main/test-00000-of-00001.parquet", "socratic/test-00000-of-00001.parquet") == [
        "main/test-00000-of-00001.parquet"
    ]
    assert found("train.jsonl", split=("auxiliary_train", "train")) == ["train.jsonl"]
    assert found("latest.jsonl", "contest.parquet", ".test.jsonl") == []
    assert found("HumanEval.jsonl.gz", "README.md", only=True) == ["HumanEval.jsonl.gz"]
    assert found("HumanEval.jsonl.gz") == []
    assert found("a.jsonl", "b.jsonl", only=True) == []


def test_a_split_of_a_task_from_a_path(tmp_path):
    write(tmp_path / "train.jsonl", WANTED[:5])
    write(tmp_path / "more.jsonl", WANTED[5:9])
    assert len(open_split("gsm8k", "train", str(tmp_path), "hf")) == 5
    assert len(open_split("gsm8k", "test", str(tmp_path / "more.jsonl"), "hf")) == 4
    assert "no test.jsonl[.gz] and no test*.parquet" in complaint(
        lambda: open_split("gsm8k", "test", str(tmp_path), "hf")
    )
    # One file for both splits would grade on what was learned.
    assert "is not the test split by its name" in complaint(
        lambda: open_split("gsm8k", "test", str(tmp_path / "train.jsonl"), "hf")
    )
    assert (
        complaint(lambda: open_split("humaneval", "train", str(tmp_path), "hf"))
        == "humaneval has no train split: only test"
    )
    assert "nowhere: no such file" in complaint(lambda: open_split("gsm8k", "test", "nowhere", "hf"))


def test_a_split_of_a_task_from_the_hub(tmp_path, monkeypatch):
    requested = []

    def fetch_split(*arguments) -> list[Path]:
        requested.append(arguments)
        return [write(tmp_path / f"main--test-{n}.parquet", WANTED[n * 10 : n * 10 + 10]) for n in range(2)]

    monkeypatch.setattr(hub, "fetch_split", fetch_split)
    opened = open_split("gsm8k", "test", None, "modelscope", {"question": str})
    assert requested == [("gsm8k", "test", "modelscope")]
    assert [opened[n] for n in (0, 19)] == [{"question": WANTED[n]["question"]} for n in (0, 19)]
