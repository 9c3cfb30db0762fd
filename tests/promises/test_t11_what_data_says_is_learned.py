"""T11. What data says is what is learned.

`preview` marks the tokens that SFT and DPO learn, and its numbers are those of what training renders; every row of a
file is learned, held out or left out with its cause; what nothing reads is named; and it never commands the terminal.
"""

import re
from typing import Any

import pytest
from runs import call, chat, mistake, refused, write_lines
from tiny import lively_model, save_checkpoint, tiny_config, tiny_tokenizer

from nanochat.conversation import render
from nanochat.ground import paths
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
    replies = ("Yes.", "\x1b[2J é", "a long reply " * 9, "", "x", "held out")
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
    row = next(line for line in shown.out.splitlines() if line.startswith("mine"))
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
    rows = [{"prompt": "Hi?", "chosen": reply, "rejected": "No."} for reply in ("Yes.", "Yes.", "No.")]
    path = write_lines(tmp_path / "pairs.jsonl", rows * 4)
    call("preview", "--stage=dpo", f"--tasks={path}", "--examples=6", "--count=11")
    out = capsys.readouterr().out
    assert HEAD + "[[Yes.<|assistant_end|>]]\nrejected: " in out and HEAD + "[[No.<|assistant_end|>]]" in out
    mixture = open_mixture(path, "train", Reading(files="pairs"))
    pairs = [mixture.rendered_pair(tiny_tokenizer(), number, 33) for number in range(11)]
    same = sum(chosen.ids == rejected.ids for chosen, rejected in pairs)
    row = next(line for line in out.splitlines() if line.startswith("preferences"))
    assert row.split()[1] == "11" and row.split()[5] == str(same) and same
    assert "10 pairs: the 11 of the table repeat them" in out


def test_every_row_is_learned_held_out_or_left_out(model, tmp_path, capsys):
    path = write_lines(tmp_path / "mine.jsonl", [chat("Hi?", f"reply {n}") for n in range(11)])
    call("preview", f"--tasks={path}", "--examples=20", "--count=1", "--val_share=0")
    out = capsys.readouterr().out
    assert [out.count(f"[[reply {n}<|") for n in range(11)] == [1] * 11 and out.count("--- example ") == 11
    assert "examples held out: none\n" in out
    other = write_lines(tmp_path / "other.jsonl", [with_robot(chat("Hi?", "bad")), *[chat("Hi?", "other")] * 3])
    call("preview", f"--tasks=mine={path}:9,yours={other}", "--examples=10", "--count=1", "--val_share=0.5")
    shown = capsys.readouterr()
    held_out = re.search(r"held out: mine (\d+), yours (\d+)\n", shown.out)
    left_out = sum(int(count) for count in re.findall(r"(\d+) of \d+ records left out", shown.err))
    learned = shown.out.count("--- example ")
    assert held_out and learned + int(held_out[1]) + int(held_out[2]) + left_out == 15 and left_out == 1


@pytest.mark.parametrize("flags", [[], ["--val_share=0"]])
def test_a_last_line_that_is_cut_off_is_counted(model, tmp_path, capsys, flags):
    path = tmp_path / "mine.jsonl"
    write_lines(path, [chat("Hi?", "Yes.")] * 11)
    path.write_text(path.read_text() + '{"messages": [')
    call("preview", f"--tasks={path}", "--examples=1", "--count=1", *flags)
    part = "(train): 1 of 12" if flags else "(test): 1 of 3"
    assert f"{part} records left out: first {path} line 12 is not JSON" in capsys.readouterr().err


def test_mistakes(model, tmp_path, capsys):
    path = write_lines(tmp_path / "text.jsonl", [{"text": "Once"}] * 3)
    refused(capsys, ("preview", f"--tasks={path}"), "line 1", "unknown form (with text)")
    refused(capsys, ("preview", "--stage=dpo", "--tasks=smoltalk"), "a dialogue has one reply")
    path = write_lines(tmp_path / "bad.jsonl", [chat("Hi?", "x"), with_robot(chat("Hi?", "y")), chat("Hi?", "z")])
    code, err = mistake(capsys, "preview", f"--tasks={path}", "--bad_records=fail")
    assert code == 1 and "line 2 cannot be used" in err
