"""A chat in Python: the reply's text, what the next prompt reads, settings, base models."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from test_chat_cli import BASE, ROOT, SUM, SUM_ANSWERED, add_checkpoint, ids, table_model
from tiny import complaint, make_engine

import nanochat
from nanochat.chat import Chat
from nanochat.conversation import parse_reply, render_prompt, text_of
from nanochat.engine import Engine


def test_a_reply_in_two_lines(base_folder: Path) -> None:
    add_checkpoint("sft", table_model(SUM, SUM_ANSWERED))
    chat = Chat("sft", device="cpu", top_k=7)
    assert chat.say("What is 47 + 38?") == "S=."  # the text, without the call and its result
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    assert [part["type"] for part in chat.messages[1]["content"]] == ["text", "python", "python_output", "text"]
    # The checkpoint sets what is left open.
    assert (chat.sampling.temperature, chat.sampling.min_p, chat.sampling.top_k) == (0.8, 0.2, 7)
    assert Chat(device="cpu").say("And 40 + 2?") == "S=."  # the furthest stage


def test_the_next_prompt_reads_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    prompts = []
    stream = engine.stream
    monkeypatch.setattr(engine, "stream", lambda ids, **more: prompts.append(ids[0]) or stream(ids, **more))
    chat = Chat(engine, max_tokens=4, system="Be kind.", seed=5)
    chat.say("a")
    first = chat.messages[-1]["content"]
    chat.say("b")
    tokenizer = engine.tokenizer
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "a"}]
    assert prompts[0] == render_prompt(tokenizer, turns)
    turns += [{"role": "assistant", "content": first}, {"role": "user", "content": "b"}]
    assert prompts[1] == render_prompt(tokenizer, turns) and chat.messages[:4] == turns
    assert repr(chat) == "<Chat with an engine, on cpu: 5 messages>"
    chat.reset()
    chat("a")
    assert prompts[2] == prompts[0] and len(chat.messages) == 3


def replies(engine: Engine, count: int, **settings: float) -> list[str]:
    chat = Chat(engine, max_tokens=8)
    found = []
    for _ in range(count):
        found.append(chat.say("a", **settings))
        chat.reset()
    return found


def test_each_reply_draws_by_its_own_seed_and_a_setting_is_for_one_reply() -> None:
    engine = make_engine()
    assert len(set(replies(engine, 3))) == 3 and replies(engine, 3) == replies(engine, 3)
    assert len(set(replies(engine, 3, temperature=0))) == 1
    chat = Chat(engine, max_tokens=8, temperature=0.0)
    prompt = render_prompt(engine.tokenizer, [{"role": "user", "content": "a"}])
    generated, _ = engine.generate_batch(prompt, max_tokens=8, temperature=0)
    chat.say("a")
    assert chat.messages[-1]["content"] == parse_reply(engine.tokenizer, generated[0][-8:])
    chat.say("b", temperature=1.0)
    assert chat.sampling.temperature == 0


def test_a_reply_comes_in_pieces_and_one_that_is_left_is_kept(base_folder: Path) -> None:
    answer = ids("output_end", "从!".encode(), "assistant_end")  # three bytes, each a token, are one character
    add_checkpoint("sft", table_model(SUM, answer))
    chat = nanochat.Chat("sft", device="cpu")
    assert repr(chat) == "<Chat with sft, step 3, on cpu: 0 messages>"
    assert [piece for piece in chat.stream("What is 47 + 38?") if piece] == ["S", "=", "从", "!"]
    whole = chat.messages[-1]["content"]
    assert chat.say("a") == text_of(whole) == "S=从!" and chat.messages[-1]["content"] == whole
    chat.reset()
    for piece in chat.stream("a"):
        if piece == "从":
            break
    assert text_of(chat.messages[-1]["content"]) == "S=从" and len(chat.messages) == 2
    assert chat("a") == "S=从!" and len(chat.messages) == 4 and chat.sampling.seed == 4
    chat.stream("never begun")
    assert len(chat.messages) == 4


def test_a_base_model_continues_and_takes_no_system_message(base_folder: Path) -> None:
    add_checkpoint("base", table_model(BASE))
    chat = Chat("base", device="cpu")
    assert chat.say("Onc") != "" and chat.say("n") == " ago." and chat.messages == []
    assert "system" in complaint(lambda: Chat("base", device="cpu", system="Be kind."))


def test_the_package_has_a_chat_and_a_version_and_waits_with_torch() -> None:
    assert nanochat.Chat is Chat and f'version = "{nanochat.__version__}"' in (ROOT / "pyproject.toml").read_text()
    with pytest.raises(AttributeError, match="nanochat has no Chatt"):
        nanochat.Chatt  # noqa: B018
    assert in_python("import nanochat; print('torch' in sys.modules)").stdout == "False\n"


@pytest.mark.parametrize("module", ["scripts", "check_npu"])
def test_an_old_python_and_one_without_packages_say_what_to_run(module: str) -> None:
    (file,) = [*ROOT.glob(f"{module}/__init__.py"), *ROOT.glob(f"{module}.py")]
    ast.parse(file.read_text(), feature_version=(3, 6))
    old = in_python(f"sys.version_info = (3, 9, 1); import {module}")
    assert old.returncode == 1 and "bin/activate" in old.stderr.splitlines()[-1]
    bare = in_python(f"import {module}", "-IS")
    assert ("bin/activate" in bare.stderr) == (module != "check_npu")  # the standard library is enough for that one


def in_python(code: str, flags: str = "-I") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, flags, "-c", f"import sys; sys.path.append({str(ROOT)!r}); {code}"]
    return subprocess.run(command, capture_output=True, text=True)


def test_mistakes_are_one_line_and_leave_the_conversation_as_it_was() -> None:
    for count in (0, -1, "8"):
        assert f"max_tokens {count!r}" in complaint(lambda count=count: Chat(make_engine(), max_tokens=count))
    chat = Chat(make_engine(), max_tokens=4)
    chat.say("a")
    before = list(chat.messages)
    for wrong in (None, 5, b"hello", ["hello"]):
        assert type(wrong).__name__ in complaint(lambda wrong=wrong: chat.say(wrong))
    assert "shorten" in complaint(lambda: chat.say("x" * 500))
    mistakes = [
        *(({"temprature": 1}, "did you mean temperature?"), ({"temperature": "hot"}, "temperature='hot'")),
        *(({"top_k": 1.5}, "top_k=1.5"), ({"top_p": 2}, "--top_p 2"), ({"seed": True}, "seed=True")),
        ({"zzz": 1}, "are temperature, top_k"),
    ]
    for settings, word in mistakes:
        assert word in complaint(lambda settings=settings: chat.say("a", **settings))
        assert word in complaint(lambda settings=settings: Chat("nowhere", **settings))
    for keywords, word in (({"source": 5}, "source 5"), ({"source": "sfT"}, "did you mean sft?")):
        assert word in complaint(lambda keywords=keywords: Chat(**keywords))
    assert chat.messages == before
