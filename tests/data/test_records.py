"""records.py: any record of any format in any order, splits found in folders, and damage reported in one line."""

import csv
import gzip
import json
import random
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from tiny import complaint

from nanochat.data import formats, parquet
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
@pytest.mark.parametrize("cache_bytes", [1, 20_000])
def test_every_record_in_any_order(tmp_path, name, cache_bytes, monkeypatch):
    monkeypatch.setattr(parquet, "CACHE_BYTES", cache_bytes)
    opened = open_records([write(tmp_path / name, WANTED)])
    assert len(opened) == 1000 and [opened[n] for n in range(1000)] == WANTED
    order = random.Random(0).sample(range(1000), 200)
    assert [opened[n] for n in order] == [WANTED[n] for n in order]
    for index in (-1, 1000):
        with pytest.raises(IndexError):
            opened[index]


def test_several_files_are_one_row_of_rows(tmp_path):
    first, second = write(tmp_path / "a.jsonl", WANTED[:3]), write(tmp_path / "b.parquet", WANTED[3:100])
    opened = open_records([str(first), second])
    assert len(opened) == 100 and [opened[n] for n in (0, 2, 3, 99)] == [WANTED[n] for n in (0, 2, 3, 99)]
    assert str(opened.error(2, "?")) == f"{first} line 3 ?" and str(opened.error(3, "?")) == f"{second} row 1 ?"
    folder = open_records([tmp_path])
    assert [folder[n] for n in (0, 99)] == [WANTED[0], WANTED[99]]


# What a file holds, the fields that are wanted, the number of the record, and the words of the error.
REFUSED: list[tuple[str, list | str, dict[str, type], int, str]] = [
    ("a.jsonl", [{"question": "one"}, {"ask": "two"}], {"question": str}, 1, 'line 2 has no "question"'),
    ("a.jsonl", [{"question": "one"}, {"question": 3}], {"question": str}, 1, 'line 2 has no "question"'),
    ("a.jsonl", [{"question": "one"}, ["two"]], {"question": str}, 1, "line 2 is not an object with question"),
    ("a.jsonl", '{\n"a": 1}', {}, 0, "a file with values in several lines is named .json"),
    ("a.parquet", [{"question": "one"}, {"question": None}], {"question": str}, 1, 'row 2 has no "question"'),
    ("a.parquet", [{"question": "one"}], {"answer": str}, 0, "'answer': its columns are question"),
    ("a.xlsx", "[]", {}, 0, "'.xlsx'"),
    ("a.jsonl", "\n \n", {}, 0, "no rows"),
    ("a.json", '[{"a": 1}, {"a": "', {}, 0, "does not end"),
    ("a.json", '[{"a": "x\\', {}, 0, "does not end"),
    ("a.json", "[" * 100_000, {}, 0, "does not end"),
    ("a.json", "[1]\n[2]", {}, 0, ".jsonl"),
    ("a.json", '{"data": [{}], "test": [{}]}', {}, 0, "something follows the list"),
    ("a.json", '{\n"a": 1\n}\n{\n"a":', {}, 0, "does not end"),
    ("a.json", '{\n"a": 1\n}\nmore', {}, 0, "something follows the last object"),
    ("a.json", "[]", {}, 0, "no rows"),
    ("a.json", "", {}, 0, "no rows"),
    ("a.json", '[{"a": 1}, {"a": 1], 2]', {}, 1, "item 2 is not JSON"),
    ("a.json", f"[1, {'[' * 9000}{']' * 9000}]", {}, 1, "item 2 is not JSON"),
    ("a.json", f'["{"x" * (1 << 20)}"]', {}, 0, "byte 1 is longer than 1 MiB"),
]


@pytest.mark.parametrize(("name", "content", "fields", "number", "words"), REFUSED)
def test_a_record_that_cannot_be_read_is_named(tmp_path, monkeypatch, name, content, fields, number, words):
    monkeypatch.setattr(formats, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / name
    path.write_text(content) if isinstance(content, str) else write(path, content)
    line = complaint(lambda: open_records([path], fields)[number])
    assert str(path) in line
    assert words in line


def test_paths_that_cannot_be(tmp_path):
    assert "no.jsonl" in complaint(lambda: open_records([tmp_path / "no.jsonl"]))
    assert ".jsonl, .jsonl.gz, .parquet" in complaint(lambda: open_records([tmp_path]))
    (tmp_path / "dataset_infos.json").write_text("{}")  # a folder's settings are left out
    opened = open_records([write(tmp_path / "a.parquet", WANTED)], {"answer": int, "list": list})
    assert opened[7] == {"answer": 7, "list": [{"a": "7"}]}  # only the wanted fields are read
    assert len(open_records([tmp_path])) == 1000


def test_a_column_with_one_prompt_in_every_row_is_no_bomb(tmp_path):
    """A dictionary stores it once: 72 MB of text are in 0.2 MB. See test_a_parquet_bomb (S15)."""
    path = tmp_path / "chats.parquet"
    questions = [f"What is {n}?" for n in range(24_000)]
    columns = {"system": ["Answer in one line. " * 150] * len(questions), "question": questions}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    assert path.stat().st_size < 400_000
    assert open_records([path])[23_999] == {"system": "Answer in one line. " * 150, "question": questions[-1]}


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


OBJECTS = [{"a": "}\n{", "b": [1, {"c": "]"}]}, {"a": "\\", "data": [{"d": {}}]}, {"data": []}]
JSON_FILES: dict[str, str] = {
    "objects in several lines": "".join(f"{json.dumps(one, indent=1)}\n" for one in OBJECTS),
    "objects that begin on their first line": "".join(
        json.dumps(one, indent=1).replace("{\n", "{", 1) for one in OBJECTS
    ),
    "objects with commas between": ",\n".join(json.dumps(one, indent=1) for one in OBJECTS),
    "an object with a list": json.dumps({"version": 1, "note": 'a " [', "data": OBJECTS, "next": None}, indent=1),
    "in one line": "\ufeff" + json.dumps({"train": OBJECTS}),
    "LMFlow's": json.dumps({"type": "text2text", "instances": OBJECTS}),
}


@pytest.mark.parametrize("name", JSON_FILES)
def test_the_objects_of_a_json_are_records(tmp_path, name):
    path = tmp_path / "a.json"
    path.write_text(JSON_FILES[name])
    opened = open_records([path])
    assert [opened[n] for n in range(len(opened))] == OBJECTS
    assert opened.where(2) == f"{path} item 3"


def test_a_row_with_a_list_is_a_row(tmp_path):
    """Only a list under a name for rows holds rows."""
    row = {"messages": [{"role": "user"}], "data": [1, 2]}
    for text in (json.dumps(row), json.dumps(row, indent=2), f"{json.dumps(row)}\n" * 2):
        (tmp_path / "a.json").write_text(text)
        assert open_records([tmp_path / "a.json"])[0] == row


def test_the_rows_of_a_tsv_have_tabs(tmp_path):
    (tmp_path / "a.tsv").write_text("question, asked\tanswer\na, b\tc\n")
    assert open_records([tmp_path])[0] == {"question, asked": "a, b", "answer": "c"}


def test_the_rows_of_a_csv_are_records(tmp_path):
    path = tmp_path / "a.csv"
    header, rows = ["question", "answer"], [['é, "1"\n2', "x" * 200_000], ["", "😀"], ["b\r\nc", "d"]]
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        writer.writerows([header, *rows[:2], [], rows[2]])
    opened = open_records([path])
    assert [opened[n] for n in range(len(opened))] == [dict(zip(header, row, strict=True)) for row in rows]
    # After a row of two lines and a blank one.
    assert opened.where(2) == f"{path} line 6" and opened[2]["answer"] == "d"


DAMAGED_CSV: list[tuple[bytes, str]] = [
    (b"a,b\n1\n", "line 2 has 1 values"),
    (b"a,b\n1,2,3\n", "line 2 has 3 values"),
    (b"a,a\n1,2\n", "once"),
    (b"a,\n1,2\n", "line 2 has 2 values, and the header names 1"),
    (b"sep=;\na;\n1;2\n", "line 3 has 2 values, and the header names 1"),
    (b"a,,b\n1,2,3\n", "once"),
    (b'a,b\n1,"' + b"2\n" * 600, "byte 4 is longer"),
    (b'a,b\n1,"2', "damaged"),
    (b'a,b\n1,"2"3\n', "damaged"),
    (b"a,b\r1,2\r", "damaged"),
    ("a,b\n1,你\n".encode("gb18030"), "(byte 6): it is probably gb18030: convert it, iconv -f gb18030 -t utf-8"),
    ("问题,答案\n一,二\n".encode("utf-16-le"), "iconv -f utf-16le -t utf-8"),
    ("一条一只一次\n".encode("utf-16-be") * 9, "iconv -f utf-16be -t utf-8"),
    (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ("a,b\n1,2\n".encode("utf-16")[:-1], "damaged UTF-16"),
    (b"a,b\n", "no rows"),
]


@pytest.mark.parametrize(("data", "words"), DAMAGED_CSV)
def test_a_damaged_csv_is_named(tmp_path, monkeypatch, data, words):
    monkeypatch.setattr(formats, "MAX_CSV_ROW_BYTES", 1000)
    path = tmp_path / "a.csv"
    path.write_bytes(data)
    line = complaint(lambda: open_records([path])[0])
    assert str(path) in line
    assert words in line


# ---- Splits ----------------------------------------------------------------------------------------------


def test_a_split_is_found_in_a_folder(tmp_path):
    whole = "HumanEval.jsonl.gz"
    shards = ["test-00000-of-00002.parquet", "test-00001-of-00002.parquet"]
    one = "test-00000-of-00001.parquet"
    cases = [
        (["train.jsonl", "test.jsonl"], ["test"], False, ["test.jsonl"]),
        (["train.jsonl", "test.jsonl.gz"], ["test"], False, ["test.jsonl.gz"]),
        (["train-00000-of-00001.parquet", *shards], ["test"], False, shards),
        (["test.jsonl", *shards], ["test"], False, ["test.jsonl"]),
        ([f"main--{one}", "main--train-00000-of-00001.parquet"], ["test"], False, [f"main--{one}"]),
        ([f"main/{one}", f"socratic/{one}"], ["test"], False, [f"main/{one}"]),
        (["train.jsonl"], ["auxiliary_train", "train"], False, ["train.jsonl"]),
        (["latest.jsonl", "contest.parquet", ".test.jsonl"], ["test"], False, []),
        ([whole, "README.md"], ["test"], True, [whole]),
        ([whole], ["test"], False, []),
        (["a.jsonl", "b.jsonl"], ["test"], True, []),
    ]
    for number, (names, split, only, wanted) in enumerate(cases):
        folder = tmp_path / str(number)
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}")
        assert [file.relative_to(folder).as_posix() for file in find_split(folder, split, "main", only)] == wanted


def test_a_split_of_a_task_from_a_path(tmp_path):
    write(tmp_path / "train.jsonl", WANTED[:5])
    write(tmp_path / "more.jsonl", WANTED[5:9])
    assert len(open_split("gsm8k", "train", str(tmp_path), "hf")) == 5
    assert len(open_split("gsm8k", "test", str(tmp_path / "more.jsonl"), "hf")) == 4
    for name, split, path, words in (
        ("gsm8k", "test", str(tmp_path), "test.jsonl[.gz]"),
        ("gsm8k", "test", str(tmp_path / "train.jsonl"), "not the test split"),  # it would grade what was learned
        ("humaneval", "train", str(tmp_path), "no train split: only test"),
        ("gsm8k", "test", "nowhere", "nowhere"),
    ):
        assert words in complaint(lambda name=name, split=split, path=path: open_split(name, split, path, "hf"))
