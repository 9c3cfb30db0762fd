"""preview.py: it shows the tokens that SFT and DPO learn, counts what is left out, and never commands the terminal."""

import json
from pathlib import Path

import pytest
from runs import call, mistake, refused
from test_scripts import base  # noqa: F401 (base is a fixture)
from tiny import lively_model, save_checkpoint, tiny_config, tiny_tokenizer

from nanochat.conversation import render
from nanochat.ground import paths
from nanochat.tasks.flag import Reading, open_mixture

QUESTION = {"role": "user", "content": "Hi?"}


def chat(reply: str) -> dict:
    return {"messages": [QUESTION, {"role": "assistant", "content": reply}]}


@pytest.fixture
def model(base) -> None:  # noqa: F811
    tokenizer = tiny_tokenizer()
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    save_checkpoint(paths.checkpoint_dir("sft", "d1"), 1, lively_model(config), tokenizer, {"stage": "sft"})


def write(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_what_sft_learns_is_marked(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("nanochat.checkpoint_manager._read_weights", None)  # those of a large model take minutes
    rows = [chat("Yes."), chat("\x1b[2J é"), chat("a long reply " * 9), chat(""), chat("x"), chat("held out")]
    rows[4]["messages"].append({"role": "robot", "content": "beep"})
    path = write(tmp_path / "chats.jsonl", rows)
    call("preview", f"--tasks=mine={path}", "--examples=4", "--count=8")
    shown = capsys.readouterr()
    head = "<|bos|><|user_start|>Hi?<|user_end|><|assistant_start|>"
    assert head + "[[Yes.<|assistant_end|>]]" in shown.out
    assert head + r"[[\x1b[2J é<|assistant_end|>]]" in shown.out and "\x1b" not in shown.out
    assert head + "<|assistant_end|>" in shown.out  # an empty reply is not learned
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
    assert "6 conversations fill 4 rows to" in shown.out and f"and have {targets} targets" in shown.out
    assert "33 tokens, " in shown.out and "cut at 33" in shown.out


def test_what_dpo_compares_is_marked(model, tmp_path, capsys):
    rows = [{"prompt": "Hi?", "chosen": reply, "rejected": "No."} for reply in ("Yes.", "Yes.", "No.")]
    path = write(tmp_path / "pairs.jsonl", rows * 4)
    call("preview", "--stage=dpo", f"--tasks={path}", "--examples=6", "--count=11")
    out = capsys.readouterr().out
    head = "<|bos|><|user_start|>Hi?<|user_end|><|assistant_start|>"
    assert head + "[[Yes.<|assistant_end|>]]\nrejected: " in out and head + "[[No.<|assistant_end|>]]" in out
    mixture = open_mixture(path, "train", Reading(files="pairs"))
    pairs = [mixture.rendered_pair(tiny_tokenizer(), number, 33) for number in range(11)]
    same = sum(chosen.ids == rejected.ids for chosen, rejected in pairs)
    row = next(line for line in out.splitlines() if line.startswith("preferences"))
    assert row.split()[1] == "11" and row.split()[5] == str(same) and same
    assert "preferences has 10 pairs: the 11 of the table repeat them" in out


def test_each_row_is_shown_once(model, tmp_path, capsys):
    path = write(tmp_path / "mine.jsonl", [chat(f"reply {n}") for n in range(11)])
    call("preview", f"--tasks={path}", "--examples=20", "--count=1", "--val_share=0")
    out = capsys.readouterr().out
    assert [out.count(f"[[reply {n}<|") for n in range(11)] == [1] * 11 and out.count("--- example ") == 11
    assert "examples held out: none\n" in out
    other = write(tmp_path / "other.jsonl", [chat("other")] * 2)
    call("preview", f"--tasks=mine={path}:9,yours={other}", "--examples=10", "--count=1", "--val_share=0.5")
    out = capsys.readouterr().out
    assert out.count("[[other<|") == 1 and out.count("--- example ") == 6  # of 5 rows and one
    assert "examples held out: mine 6, yours 1\n" in out


@pytest.mark.parametrize("flags", [[], ["--val_share=0"]])
def test_a_last_line_that_is_cut_off_is_counted(model, tmp_path, capsys, flags):
    path = tmp_path / "mine.jsonl"
    write(path, [chat("Yes.")] * 11)
    path.write_text(path.read_text() + '{"messages": [')
    call("preview", f"--tasks={path}", "--examples=1", "--count=1", *flags)
    part = "(train): 1 of 12" if flags else "(test): 1 of 3"
    assert f"{part} records left out: first {path} line 12 is not JSON" in capsys.readouterr().err


def test_mistakes(model, tmp_path, capsys):
    path = write(tmp_path / "text.jsonl", [{"text": "Once"}] * 3)
    refused(capsys, ("preview", f"--tasks={path}"), "line 1 cannot be used: unknown form (with text); known forms:")
    refused(capsys, ("preview", "--stage=dpo", "--tasks=smoltalk"), "a dialogue has one reply")
    path = write(tmp_path / "bad.jsonl", [chat("x"), {"messages": [QUESTION, QUESTION]}, chat("y")])
    code, err = mistake(capsys, "preview", f"--tasks={path}", "--bad_records=fail")
    assert code == 1 and "line 2 cannot be used: the assistant has no message" in err
