"""nanochat.serve.batch, as `chat_batch` calls it: batched = alone, in order, resumed = straight through, bad lines."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from runs import call, refused
from tiny import cpu_device, lively_model, save_checkpoint, tiny_config, tiny_tokenizer

from nanochat.conversation import parse_reply, render_prompt, text_of
from nanochat.engine import Engine, SamplingParams
from nanochat.ground import paths
from nanochat.serve.scheduler import Scheduler

CONTEXT = 128
TOKENIZER = tiny_tokenizer()
MODEL = lively_model(tiny_config(vocab_size=TOKENIZER.vocab_size, sequence_len=CONTEXT))
QUESTIONS = [f"{'the other 从 ' * (number % 5)}{number}" for number in range(24)]


@pytest.fixture(autouse=True)
def base(base_folder: Path) -> Path:
    for stage in ("base", "sft"):
        save_checkpoint(paths.checkpoint_dir(stage, "tiny"), 1, MODEL, TOKENIZER, {"stage": stage})
    return base_folder


def answer(folder: Path, *flags: str, source: str = "sft", name: str = "in.jsonl") -> list[Any]:
    """The output's lines."""
    out = folder / "out.jsonl"
    argv = ["--source", source, "--device=cpu", "--slots=3", "--max_tokens=20", "--in", str(folder / name)]
    call("chat_batch", *argv, "--out", str(out), *flags)
    return [json.loads(line) for line in out.read_text().splitlines()]


def write(folder: Path, *records: Any) -> None:
    (folder / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def alone(messages: list[dict[str, Any]], max_tokens: int = 20) -> str:
    """The greedy reply by itself."""
    engine = Engine(MODEL, TOKENIZER, cpu_device())
    prompt = render_prompt(TOKENIZER, messages)
    ((reply,), _) = engine.generate([prompt], max_tokens=max_tokens, sampling=SamplingParams(temperature=0))
    return text_of(parse_reply(TOKENIZER, reply))


def test_each_line_gets_the_reply_that_it_gets_alone(base: Path):
    """In the order of the file, whatever ends first, and in the form of the line."""
    source = random.Random(0)
    chats = [[{"role": "user", "content": text}] for text in QUESTIONS]
    records: list[Any] = []
    for number, (text, messages) in enumerate(zip(QUESTIONS, chats, strict=True)):
        body = {"model": "gpt-9", "messages": messages, "max_tokens": source.randrange(1, 30)}
        request = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        records.append([{"messages": messages, "id": 5}, {"prompt": text, "id": 5}, text, request][number % 4])
    write(base, *records)
    found = answer(base, "--temperature=0")
    lengths = set()
    for text, messages, record, line in zip(QUESTIONS, chats, records, found, strict=True):
        if isinstance(record, str):
            assert line == {"prompt": text, "completion": alone(messages)}
        elif "prompt" in record:
            assert line == {"prompt": text, "id": 5, "completion": alone(messages)}
        elif "messages" in record:
            reply = {"role": "assistant", "content": alone(messages)}
            assert line == {"messages": [*messages, reply], "id": 5}
        else:
            assert (line["custom_id"], line["error"]) == (record["custom_id"], None)
            assert line["response"]["status_code"] == 200
            response = line["response"]["body"]
            limit = record["body"]["max_tokens"]
            assert response["choices"][0]["message"]["content"] == alone(messages, limit)
            assert response["usage"]["completion_tokens"] <= limit
            assert response["usage"]["prompt_tokens"] == len(render_prompt(TOKENIZER, messages))
            lengths.add(response["usage"]["completion_tokens"])
    assert len(lengths) > 2  # replies of one length would end in order by themselves


def test_a_stopped_run_goes_on_and_ends_as_if_it_was_never_stopped(base: Path, monkeypatch: pytest.MonkeyPatch):
    """Drawn replies, too: a line's seed follows from its place."""
    write(base, *QUESTIONS)
    whole = answer(base)
    out = base / "out.jsonl"
    text = out.read_bytes()
    assert len(set(text.splitlines())) == len(QUESTIONS)
    submitted = []
    submit_all = Scheduler.submit_all

    def counted(self: Scheduler, requests: Any, on_chunk: Any = None) -> Any:
        submitted.extend(requests)
        return submit_all(self, requests, on_chunk)

    monkeypatch.setattr(Scheduler, "submit_all", counted)
    cut = text.index(b"\n", len(text) // 2) + 9  # within a line
    for remains in (text[:cut], text):
        out.write_bytes(remains)
        assert answer(base) == whole
        assert out.read_bytes() == text
        assert len(submitted) == len(QUESTIONS) - remains.count(b"\n")
        submitted.clear()


def test_a_bad_line_is_named_and_costs_no_other(base: Path, capsys: Any):
    good = {"messages": [{"role": "user", "content": "hello"}]}
    bad = [
        '{"messages": [', "7", "{}", '{"messages": 3}', '{"messages": [{"role": "cook", "content": "a"}]}',
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
        json.dumps({"prompt": "the " * CONTEXT * 2}),
        '{"custom_id": "x", "body": {"messages": [{"role": "user", "content": "%s"}]}}' % ("a" * CONTEXT),
        '{"custom_id": "y", "body": {"prompt": "a", "n": 4}}',
    ]  # fmt: skip
    lines = [json.dumps(good), "", *bad, json.dumps(good)]
    (base / "in.jsonl").write_text("\n".join(lines))
    found = answer(base, "--temperature=0")
    printed = capsys.readouterr()
    assert {str(len(bad) + 2), str(len(bad))} <= {*re.findall(r"\b\d+\b", printed.out)}
    reply = {"role": "assistant", "content": alone(good["messages"])}
    assert found[0] == found[-1] == {"messages": [*good["messages"], reply]}
    for number, line in enumerate(found[1:-1], 3):
        assert f"line {number} of --in" in printed.err
        assert line.get("error") or line["response"]["status_code"] == 400
    assert found[8]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert answer(base, "--temperature=0") == found  # nothing is left to do


def test_a_base_model_continues_each_line_of_a_text(base: Path):
    (base / "in.txt").write_text("the other\n\n{not json\r\n")
    found = answer(base, "--temperature=0", source="base", name="in.txt")
    engine = Engine(MODEL, TOKENIZER, cpu_device())
    for line, text in zip(found, ("the other", "{not json"), strict=True):
        prompt = TOKENIZER.encode(text, prepend=TOKENIZER.get_bos_token_id())
        ((reply,), _) = engine.generate([prompt], max_tokens=20, sampling=SamplingParams(temperature=0))
        assert line["prompt"] == text
        assert line["completion"] == b"".join(TOKENIZER.token_texts[token] for token in reply).decode(errors="replace")


def test_the_system_message_goes_before_conversations_that_have_none(base: Path):
    own = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "hello"}]
    write(base, {"messages": own}, {"messages": own[1:]})
    first, second = answer(base, "--temperature=0", "--system", "Be brief.")
    assert first["messages"][-1]["content"] == alone(own)
    assert second["messages"][-1]["content"] == alone([{"role": "system", "content": "Be brief."}, own[1]])
    assert [message["role"] for message in second["messages"]] == ["user", "assistant"]


def test_a_mistake_costs_one_line(base: Path, capsys: Any):
    write(base, "hello")
    (base / "empty.jsonl").write_text("\n")
    (base / "noise.jsonl").write_bytes(b"\x00\xff\xfe{")
    (base / "other.jsonl").write_text('{"prompt": "hi", "completion": "a"}\n')
    for source, out, named in (
        ("no.jsonl", "out.jsonl", "no.jsonl"),
        ("empty.jsonl", "out.jsonl", "empty.jsonl"),
        ("in.jsonl", "other.jsonl", "other.jsonl"),
        ("in.jsonl", ".", str(base)),
    ):
        flags = ("--device=cpu", "--in", f"{base}/{source}", "--out", f"{base}/{out}")
        refused(capsys, ("chat_batch", *flags), named)
    with pytest.raises(SystemExit):
        call("chat_batch", "--device=cpu", "--in", f"{base}/noise.jsonl", "--out", f"{base}/out.jsonl")
    assert [("line 1" in line, "noise.jsonl" in line) for line in capsys.readouterr().err.splitlines()] == [
        (True, False),
        (False, True),
    ]
