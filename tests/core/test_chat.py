"""A chat in Python: the reply's text, what the next prompt reads, settings, base models."""

from pathlib import Path

import pytest
from test_chat_cli import BASE, SUM, SUM_ANSWERED, add_checkpoint, table_model
from tiny import complaint, make_engine

from nanochat.chat import Chat
from nanochat.conversation import parse_reply, render_prompt
from nanochat.engine import Engine
from nanochat.ground.cli import UserError


def test_a_reply_in_two_lines(base_folder: Path) -> None:
    add_checkpoint("sft", table_model(SUM, SUM_ANSWERED))
    chat = Chat("sft", device="cpu")
    assert chat.say("What is 47 + 38?") == "S=."  # the text, without the call and its result
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    assert [part["type"] for part in chat.messages[1]["content"]] == ["text", "python", "python_output", "text"]
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


def test_a_message_is_a_text() -> None:
    chat = Chat(make_engine(), max_tokens=8)
    for wrong in (None, 5, b"hello", ["hello"]):
        with pytest.raises(UserError, match=r"say\(\) takes a text, not (NoneType|int|bytes|list)"):
            chat.say(wrong)  # pyright: ignore[reportArgumentType]
    assert chat.messages == []


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
    ids, _ = engine.generate_batch(render_prompt(engine.tokenizer, [{"role": "user", "content": "a"}]), max_tokens=8,
                                   temperature=0)  # fmt: skip
    chat.say("a")
    assert chat.messages[-1]["content"] == parse_reply(engine.tokenizer, ids[0][-8:])
    chat.say("b", temperature=1.0)
    assert chat.sampling.temperature == 0


def test_the_checkpoint_sets_what_is_left_open(base_folder: Path) -> None:
    add_checkpoint("sft", table_model(SUM, SUM_ANSWERED))
    chat = Chat("sft", device="cpu", top_k=7)
    assert (chat.sampling.temperature, chat.sampling.min_p, chat.sampling.top_k) == (0.8, 0.05, 7)


def test_a_base_model_continues_and_takes_no_system_message(base_folder: Path) -> None:
    add_checkpoint("base", table_model(BASE))
    chat = Chat("base", device="cpu")
    assert chat.say("Onc") != "" and chat.say("n") == " ago." and chat.messages == []
    assert "system" in complaint(lambda: Chat("base", device="cpu", system="Be kind."))


@pytest.mark.parametrize("count", [0, -1])
def test_a_reply_has_at_least_one_token(count: int) -> None:
    assert complaint(lambda: Chat(make_engine(), max_tokens=count)).startswith(f"max_tokens {count} ")
    assert len(Chat(make_engine(), max_tokens=1).say("a")) <= 1


def test_a_message_that_does_not_fit_leaves_the_conversation_as_it_was() -> None:
    chat = Chat(make_engine(), max_tokens=4)
    chat.say("a")
    before = list(chat.messages)
    assert "shorten" in complaint(lambda: chat.say("x" * 500))
    assert chat.messages == before
