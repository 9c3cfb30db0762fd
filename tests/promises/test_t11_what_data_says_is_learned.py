"""T11. What data says is what is learned.

`preview` marks the tokens that SFT and DPO learn, and its numbers are those of what training renders; every row of a
file is learned, held out or left out with its cause; what nothing reads is named; and it never commands the terminal.
"""

import gzip
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from runs import CPU, TINY, call, chat, mistake, refused, write_lines
from tiny import lively_model, save_checkpoint, tiny_config, tiny_tokenizer

from nanochat.conversation import render
from nanochat.data import text_table
from nanochat.ground import paths
from nanochat.ground.corpus import open_corpus, weighted_parts
from nanochat.tasks.data_table import passes
from nanochat.tasks.flag import Reading, open_mixture

HEAD = "<|bos|><|user_start|>Hi?<|user_end|><|assistant_start|>"


@pytest.fixture
def model(base) -> None:
    tokenizer = tiny_tokenizer()
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    save_checkpoint(paths.checkpoint_dir("sft", "d1"), 1, lively_model(config), tokenizer, {"stage": "sft"})


def with_robot(row: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*row["messages"], {"role": "robot", "content": "beep"}]}


def test_what_sft_learns_is_marked(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("nanochat.checkpoint_manager._read_weights", None)  # those of a large model take minutes
    replies = ("Yes.", "\x1b[2J é", "a long reply " * 9, "", "x")
    rows = [chat("Hi?", reply) for reply in replies]
    rows[4] = with_robot(rows[4])
    path = write_lines(tmp_path / "chats.jsonl", rows)
    call("preview", f"--tasks=mine={path}", "--examples=4", "--count=8", "--too_long=cut")
    shown = capsys.readouterr()
    assert HEAD + "[[Yes.<|assistant_end|>]]" in shown.out
    assert HEAD + r"[[\x1b[2J é<|assistant_end|>]]" in shown.out and "\x1b" not in shown.out
    assert HEAD + "<|assistant_end|>" in shown.out  # an empty reply is not learned
    assert "1 of 5 records left out" in shown.err and "line 5: message 2 has the role 'robot'" in shown.err

    # The numbers are those of what the training renders: a context of 32 tokens and one more target.
    mixture = open_mixture(f"mine={path}", "train")
    examples = [task.example(number) for task, number in map(mixture.draw, range(8))]
    texts = [render(tiny_tokenizer(), example.messages, 33) for example in examples]
    targets = sum(text.target_count for text in texts)
    tokens = sum(len(text.ids) for text in texts)
    assert [sum(text.cut for text in texts), sum(not text.target_count for text in texts)] == [2, 2]
    (row,) = [line for line in shown.out.splitlines() if line.startswith("mine ") and len(line.split()) == 7]
    assert row.split() == ["mine", "8", f"{tokens / 8:.0f}", "33", "2", "2", f"{targets / tokens:.1%}"]
    assert re.search(rf"6 conversations fill 4 rows .* {targets} targets", shown.out)


def test_marks_in_the_data_are_obeyed_and_what_nothing_reads_is_named(model, tmp_path, capsys):
    marked = [chat("Hi?", f"no {key}", **{key: value}) for key, value in (("train", False), ("weight", 0), ("loss", 0))]
    rows = [*marked, chat("Hi?", "yes", mood="glad"), {**chat("Hi?", "also"), "notes": "mine"}]
    path = write_lines(tmp_path / "mine.jsonl", rows)
    call("preview", f"--tasks={path}", "--examples=9", "--count=5", "--val_share=0")
    shown = capsys.readouterr()
    assert sorted(re.findall(r"\[\[(\w+)<", shown.out)) == ["also", "yes"]
    assert "3 of 5 replies" in shown.out and re.search("learned: 100.0% of the replies", shown.out)
    assert "notes" in shown.out and re.search("warning: .*mood", shown.err)


def test_what_dpo_compares_is_marked(model, tmp_path, capsys):
    rows = [{"prompt": "Hi?", "chosen": "Yes.", "rejected": "No."}] * 2
    rows.append({"prompt": "Hi?", "chosen": "1" * 40, "rejected": "1" * 41})  # equal within a row of the model
    path = write_lines(tmp_path / "pairs.jsonl", [*rows * 3, rows[0]])
    call("preview", "--stage=dpo", f"--tasks={path}", "--examples=6", "--count=11")
    out = capsys.readouterr().out
    assert HEAD + "[[Yes.<|assistant_end|>]]\nrejected: " in out and HEAD + "[[No.<|assistant_end|>]]" in out
    mixture = open_mixture(path, "train", Reading(files="pairs"))
    pairs = [mixture.rendered_pair(tiny_tokenizer(), number, 33) for number in range(11)]
    same = sum(chosen.ids == rejected.ids for chosen, rejected in pairs)
    (row,) = [line for line in out.splitlines() if line.startswith("preferences ") and len(line.split()) == 7]
    assert row.split()[1] == "11" and row.split()[5] == str(same) and same
    assert "10 pairs: the 11 of the table repeat them" in out


def test_every_row_is_learned_held_out_or_left_out(model, tmp_path, capsys):
    path = write_lines(tmp_path / "mine.jsonl", [chat("Hi?", f"reply {n}") for n in range(11)])
    call("preview", f"--tasks={path}", "--examples=20", "--count=1", "--val_share=0")
    out = capsys.readouterr().out
    assert [out.count(f"[[reply {n}<|") for n in range(11)] == [1] * 11 and out.count("--- example ") == 11
    assert table_row(out, "conversations") == [11, 11, 0, 0]
    other = write_lines(tmp_path / "other.jsonl", [with_robot(chat("Hi?", "bad")), *[chat("Hi?", "other")] * 3])
    call("preview", f"--tasks=mine={path}:9,yours={other}", "--examples=10", "--count=1", "--val_share=0.5")
    shown = capsys.readouterr()
    counted = [table_row(shown.out, name) for name in ("mine", "yours")]
    assert [rows for rows, *_ in counted] == [11, 4] and all(rows == sum(parts) for rows, *parts in counted)
    assert [row[-1] for row in counted] == [0, 1] and " records left out" in shown.err
    assert sum(row[1] for row in counted) == shown.out.count("--- example ")


def test_passes_over_few_rows_are_said(tmp_path):
    mine = write_lines(tmp_path / "mine.jsonl", [chat("Hi?", f"reply {n}") for n in range(30)])
    mixture = open_mixture(f"mine={mine}:3,addition", "train", Reading(val_share=0.0))
    assert passes(mixture, 79) == "" and passes(mixture, 400) == "10 passes over the 30 rows of mine"


def table_row(printed: str, name: str) -> list[int]:
    """The numbers of a task in the table of the data: rows, learned from, held out, left out."""
    table = printed.partition("data  ")[2]
    (line,) = re.findall(rf"^{name} +([\d, ]+)$", table.partition("\n--- example")[0], re.MULTILINE)
    return [int(number.replace(",", "")) for number in line.split()]


@pytest.mark.parametrize(
    ("files", "read", "unread"),
    [
        (("train-0000.jsonl", "train-0001.jsonl", "math.jsonl", "code.jsonl"), "train-0000.jsonl, train-0001.jsonl", 2),
        (("chats.jsonl", "more.tsv2"), "chats.jsonl", 1),
        (("chats.jsonl", "README.md", ".cache/old.jsonl"), "", 0),
        (("chats.jsonl", "test_drive_reviews.jsonl"), "chats.jsonl", 1),
    ],
)
def test_files_that_are_not_read_are_named(model, tmp_path, capsys, files, read, unread):
    for file in files:
        write_lines(tmp_path / "data" / file, [chat("Hi?", "Yes.")] * 3)
    call("preview", f"--tasks={tmp_path / 'data'}", "--examples=0", "--count=1")
    shown = capsys.readouterr()
    assert bool(shown.err) == bool(unread) and (not unread or f"it reads {read}, and not " in shown.err)
    assert all(name in shown.err for name in files[len(files) - unread :])
    rows, learned, held_out, _ = table_row(shown.out, "conversations")
    assert rows == learned + held_out == 3 * read.count(".jsonl") or not unread


def test_links_are_named_and_what_is_hidden_is_not(model, tmp_path, capsys):
    write_lines(tmp_path / "data" / "chats.jsonl", [chat("Hi?", "Yes.")] * 3)
    write_lines(tmp_path / "data" / "__MACOSX" / "chats.jsonl", [chat("Hi?", "No.")])
    write_lines(tmp_path / "other" / "more.jsonl", [chat("Hi?", "No.")])
    (tmp_path / "data" / "extra").symlink_to(tmp_path / "other")
    (tmp_path / "data" / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    call("preview", f"--tasks={tmp_path / 'data'}", "--examples=0", "--count=1")
    shown = capsys.readouterr()
    assert "it reads chats.jsonl, and not extra, gone.jsonl: " in shown.err
    assert table_row(shown.out, "conversations") == [3, 3, 0, 0]


def test_rows_with_nothing_to_learn_are_not_in_the_column_of_what_is_learned(model, tmp_path, capsys):
    rows = [chat("Hi?", "Yes."), chat("Hi?", " "), {**chat("Hi?", "No."), "weight": 0}]
    call("preview", f"--tasks={write_lines(tmp_path / 'mine.jsonl', rows)}", "--examples=0", "--count=1")
    assert table_row(capsys.readouterr().out, "conversations") == [3, 1, 0, 2]


def test_a_last_line_that_is_cut_off_is_counted(model, tmp_path, capsys):
    path = tmp_path / "mine.jsonl"
    write_lines(path, [chat("Hi?", "Yes.")] * 11)
    path.write_text(path.read_text() + '{"messages": [')
    call("preview", f"--tasks={path}", "--examples=1", "--count=1")
    assert f"(train): 1 of 12 records left out: first {path} line 12 is not JSON" in capsys.readouterr().err


# ---------------------------------------------------------------------- raw text


def write_texts(path: Path, texts: list[str]) -> None:
    """Texts in the form of the file's suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"text": text} for text in texts]
    name = path.name.lower()
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.table({"text": [text or None for text in texts]}), path)
    elif name.endswith(".json"):
        path.write_text(json.dumps(rows))
    elif name.endswith(".jsonl.gz"):
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    elif name.endswith(".jsonl"):
        write_lines(path, rows)
    else:
        path.write_bytes("<|endoftext|>\n".join(text + "\n" for text in texts).encode("utf-8", "surrogateescape"))


def text_row(printed: str, name: str) -> dict[str, int]:
    """The line of a path in the table of texts, by column."""
    head, _, *lines = printed.partition("data  ")[2].splitlines()
    line = next(line for line in lines if line.split()[0] == name)
    numbers = [int(number.replace(",", "")) for number in line.split()[1:]]
    return dict(zip(re.split("  +", head.strip()), numbers, strict=True))


def table_of(capsys, data: object, val_data: object = None) -> tuple[dict[str, int], list[int], str]:
    """The line of `data`, the documents that training and validation read of it, and the warnings."""
    flags = SimpleNamespace(data=str(data), val_data=val_data and str(val_data), columns="", strict_data=False)
    corpora = open_corpus(flags.data, flags.val_data)
    text_table.print_texts(flags, *corpora, tiny_tokenizer())
    shown = capsys.readouterr()
    read = []
    for corpus in corpora:
        (texts,) = [part.corpus for part in weighted_parts(corpus)]
        read.append(sum(len(texts.read_block(block)) for block in range(texts.block_count() or 0)))
    return text_row(shown.out, flags.data), read, shown.err


@pytest.mark.parametrize("looked_at", [10**9, 300])
def test_every_row_of_a_folder_of_texts_is_in_the_table(tmp_path, capsys, monkeypatch, looked_at):
    """Names and forms at random: the rows add up, and each file is read or named, hidden ones and readmes aside."""
    monkeypatch.setattr(text_table, "SAMPLE_CHARACTERS", looked_at)
    suffixes = (".jsonl", ".jsonl.gz", ".parquet", ".txt", ".JSONL", ".json", ".csv", ".md", ".text", "")
    for trial in range(30):
        rng = random.Random(trial)
        folder, written = tmp_path / f"data{trial}", {}
        for number in range(rng.randint(2, 6)):
            name = f"{rng.choice(['', '', 'sub/', '.cache/'])}{rng.choice('abz')}{number}{rng.choice(suffixes)}"
            count = rng.randint(1, 40)
            empty = 0 if name.endswith((".txt", ".csv", ".md")) else rng.randint(0, 1)
            write_texts(folder / name, [*[""] * empty, *[f"text {n} of {name}" for n in range(count)]])
            written[name] = (count + empty, empty)
        write_texts(folder / "z9.jsonl", ["the end"] * 3)
        write_texts(folder / "README.md", ["about"])
        written["z9.jsonl"] = (3, 0)
        row, (train, held_out), err = table_of(capsys, folder)
        unread = err.partition(", and not ")[2]
        shown = {
            name for name in written if not name.startswith(".") and not name.endswith(".md") and name not in unread
        }
        assert row["files"] == len(shown) and row["rows"] == sum(written[name][0] for name in shown)
        assert row["rows"] == row["training"] + row["held out"] + row["left out"] and "README" not in err
        if looked_at > 10**6:
            assert (row["training"], row["held out"]) == (train, held_out) and "rows looked at" not in row
            assert row["left out"] == sum(written[name][1] for name in shown)
        else:
            assert 0 < row.get("rows looked at", row["rows"]) <= row["rows"]


def test_texts_that_hold_no_text_are_counted(tmp_path, capsys):
    texts = ["a\0b\0", *["plain"] * 5000]
    for suffix, more, column in ((".txt", "caf\udce9 \udcff", "not UTF-8"), (".jsonl", "half \ud800", "U+FFFD")):
        write_texts(tmp_path / f"mine{suffix}", [*texts, more])
        row, _, _ = table_of(capsys, tmp_path / f"mine{suffix}", tmp_path / f"mine{suffix}")
        assert row["NUL"] == 2 and row[column] == {".txt": 2, ".jsonl": 3}[suffix]
    (tmp_path / "mine.txt").write_text("plain\n")
    assert list(table_of(capsys, tmp_path / "mine.txt", tmp_path / "mine.txt")[0]) == ["files", *text_table.COLUMNS]


def test_a_split_that_is_held_out_by_its_name_is_not_learned_in_silence(tmp_path, capsys):
    for name in ("test", "train"):
        write_texts(tmp_path / f"data/{name}.jsonl", ["text"] * 9)
    assert "test.jsonl is learned, train.jsonl held out" in table_of(capsys, tmp_path / "data")[2]
    (tmp_path / "data/test.jsonl").rename(tmp_path / "data/val.jsonl")
    assert not table_of(capsys, tmp_path / "data")[2]


@pytest.mark.slow
def test_both_commands_print_the_table_of_texts_and_the_marks_in_them(start, tmp_path, capsys):
    texts = [f"<|user_start|>Sum {n}?<|user_end|>" if n % 4 == 0 else f"The boat {n}. " * 9 for n in range(40)]
    write_texts(tmp_path / "data/a.jsonl", texts)
    write_texts(tmp_path / "data/b.jsonl", ["held out"] * 5)
    data = (f"--data={tmp_path / 'data'}:1,demo:1", "--num_iterations=1", "--model_tag=texts", "--device_batch_size=1")
    flags = (*CPU, "--source=base/d1", "--eval_tokens=128")
    for command in (("base_train", *TINY), ("mid_train", *flags)):
        call(*command, *data)
        shown = capsys.readouterr()
        assert text_row(shown.out, str(tmp_path / "data")) == {
            "files": 2, "rows": 45, "training": 40, "held out": 5, "left out": 0
        }  # fmt: skip
        assert "10 of the first 45 documents spell marks of the tokenizer (<|user_start|> in 10, <|user_" in shown.err
        assert "--columns rendered=text" in shown.err


def test_mistakes(model, tmp_path, capsys):
    path = write_lines(tmp_path / "text.jsonl", [{"text": "Once"}] * 3)
    refused(capsys, ("preview", f"--tasks={path}"), "line 1", "unknown form (with text)")
    refused(capsys, ("preview", "--stage=dpo", "--tasks=smoltalk"), "a dialogue has one reply")
    path = write_lines(tmp_path / "bad.jsonl", [chat("Hi?", "x"), with_robot(chat("Hi?", "y")), chat("Hi?", "z")])
    code, err = mistake(capsys, "preview", f"--tasks={path}", "--strict_data")
    assert code == 1 and "1 of 3 records left out" in err and "line 2" in err
