"""A chat in Python: the reply's text, what the next prompt reads, settings, base models."""

from pathlib import Path

import pytest
from test_chat_cli import BASE, SUM, SUM_ANSWERED, add_checkpoint, table_model
from tiny import complaint, make_engine

from nanochat.chat import Chat
from nanochat.conversation import parse_reply, render_prompt
from nanochat.engine import Engine


def test_a_reply_in_two_lines(base_folder: Path) -> None:
    add_checkpoint("sft", table_model(SUM, SUM_ANSWERED))
    chat = Chat("sft", device="cpu", top_k=7)
    assert chat.say("What is 47 + 38?") == "S=."  # the text, without the call and its result
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    assert [part["type"] for part in chat.messages[1]["content"]] == ["text", "python", "python_output", "text"]
    # The checkpoint sets what is left open.
    assert (chat.sampling.temperature, chat.sampling.min_p, chat.sampling.top_k) == (0.8, 0.05, 7)
    assert Chat(device="cpu").say("And 40 + 2?") == "S=."  # the furthest stage


def test_the_next_prompt_reads_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    prompts = []
    generate = engine.generate
    monkeypatch.setattr(engine, "generate", lambda ids, **more: prompts.append(ids[0]) or generate(ids, **more))
    chat = Chat(engine, max_tokens=4, system="Be kind.", seed=5)
    chat.say("a")
    first = chat.messages[-1]["content"]
    chat.say("b")
    tokenizer = engine.tokenizer
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "a"}]
    assert prompts[0] == render_prompt(tokenizer, turns)
    turns += [{"role": "assistant", "content": first}, {"role": "user", "content": "b"}]
    assert prompts[1] == render_prompt(tokenizer, turns) and chat.messages[:4] == turns


def replies(engine: Engine, count: int, **settings: float) -> list[str]:
    chat = Chat(engine, max_tokens=8)
    found = []
    for _ in range(count):
        found.append(chat.say("a", **settings))
        chat.messages = []
    return found


def test_each_reply_draws_by_its_own_seed_and_a_setting_is_for_one_reply() -> None:
    engine = make_engine()
    assert len(set(replies(engine, 3))) == 3 and replies(engine, 3) == replies(engine, 3)
    assert len(set(replies(engine, 3, temperature=0))) == 1
    chat = Chat(engine, max_tokens=8, temperature=0.0)
    prompt = render_prompt(engine.tokenizer, [{"role": "user", "content": "a"}])
    ids, _ = engine.generate_batch(prompt, max_tokens=8, temperature=0)
    chat.say("a")
    assert chat.messages[-1]["content"] == parse_reply(engine.tokenizer, ids[0][-8:])
    chat.say("b", temperature=1.0)
    assert chat.sampling.temperature == 0


def test_a_base_model_continues_and_takes_no_system_message(base_folder: Path) -> None:
    add_checkpoint("base", table_model(BASE))
    chat = Chat("base", device="cpu")
    assert chat.say("Onc") != "" and chat.say("n") == " ago." and chat.messages == []
    assert "system" in complaint(lambda: Chat("base", device="cpu", system="Be kind."))


def test_mistakes_are_one_line_and_leave_the_conversation_as_it_was() -> None:
    for count in (0, -1):
        assert f"max_tokens {count}" in complaint(lambda count=count: Chat(make_engine(), max_tokens=count))
    chat = Chat(make_engine(), max_tokens=4)
    chat.say("a")
    before = list(chat.messages)
    for wrong in (None, 5, b"hello", ["hello"]):
        assert type(wrong).__name__ in complaint(lambda wrong=wrong: chat.say(wrong))
    assert "shorten" in complaint(lambda: chat.say("x" * 500))
    assert chat.messages == before
