"""The chat format: exact tokens, the mask, cutting, parsing replies; text never becomes a special token."""

import pytest
from tiny import learned, tiny_tokenizer

from nanochat.conversation import fit_prompt, parse_reply, parts_of, render, render_prompt, text_of
from nanochat.ground.cli import UserError
from nanochat.tasks.messages import check_messages
from nanochat.tokenizer import Tokenizer

CALL = [
    {"type": "text", "text": "It is "},
    {"type": "python", "text": "2+3"},
    {"type": "python_output", "text": "5"},
    {"type": "text", "text": "5."},
]
SUM = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "2+3?"},
    {"role": "assistant", "content": CALL},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def test_a_conversation_is_these_tokens_and_the_mask_is_what_the_assistant_chooses(tokenizer):
    rendered = render(tokenizer, SUM)
    assert tokenizer.decode(rendered.ids) == (
        "<|bos|><|system_start|>Be short.<|system_end|><|user_start|>2+3?<|user_end|><|assistant_start|>It is "
        "<|python_start|>2+3<|python_end|><|output_start|>5<|output_end|>5.<|assistant_end|>"
    )
    assert learned(tokenizer, rendered) == "It is <|python_start|>2+3<|python_end|>5.<|assistant_end|>"
    assert not rendered.cut


def test_a_prompt_is_the_beginning_of_the_conversation_and_the_reply_reads_back(tokenizer):
    whole = render(tokenizer, SUM).ids
    prompt = render_prompt(tokenizer, SUM[:-1])
    assert whole[: len(prompt)] == prompt
    assert parse_reply(tokenizer, whole[len(prompt) :]) == CALL
    assert text_of(CALL) == "It is 5."


def test_a_reply_with_marks_out_of_place_loses_nothing_else(tokenizer):
    mark = tokenizer.encode_special
    ids = [mark("<|python_end|>"), *tokenizer.encode("a"), mark("<|user_start|>"), *tokenizer.encode("b")]
    ids += [mark("<|python_start|>"), *tokenizer.encode("1+1")]  # never closed
    parts = parse_reply(tokenizer, ids)
    assert text_of(parts) == "ab1+1"  # a call that was not closed is text, or a reader would see nothing of it
    assert parse_reply(tokenizer, [*tokenizer.encode("a"), mark("<|assistant_end|>"), 1, 2]) == parts_of("a")
    assert parse_reply(tokenizer, []) == []


@pytest.mark.parametrize(
    "reply",
    [{"content": ""}, {"content": []}, {"content": [{"type": "text", "text": ""}]}, {"content": "no", "train": False}],
)
def test_an_empty_or_masked_reply_has_no_target(tokenizer, reply):
    first = [SUM[1], {"role": "assistant", **reply}]
    assert render(tokenizer, first).target_count == 0
    turns = [*first, {"role": "user", "content": "and?"}, {"role": "assistant", "content": "two"}]
    assert learned(tokenizer, render(tokenizer, turns)) == "two<|assistant_end|>"


def test_a_long_conversation_is_cut_at_its_end(tokenizer):
    whole = render(tokenizer, SUM)
    for most in range(1, len(whole.ids) + 2):
        cut = render(tokenizer, SUM, most)
        assert cut.ids == whole.ids[:most] and cut.mask == whole.mask[:most]
        assert cut.cut == (most < len(whole.ids))
    assert render(tokenizer, SUM, 5).target_count == 0


def long_chat() -> list:
    turns = [SUM[0]]
    for number in range(6):
        turns += [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": f"a{number}"}]
    return [*turns, {"role": "user", "content": "last"}]


def test_a_long_chat_forgets_its_oldest_turns_first(tokenizer):
    turns = long_chat()
    room = len(render_prompt(tokenizer, turns)) - 1
    text = tokenizer.decode(render_prompt(tokenizer, turns, room))
    assert "Be short." in text and "q0" not in text and "a0" not in text and "q1" in text and text.count("last") == 1
    smallest = len(render_prompt(tokenizer, [turns[0], turns[-1]]))
    assert "a5" not in tokenizer.decode(render_prompt(tokenizer, turns, smallest))
    with pytest.raises(UserError, match=f"{smallest} tokens.* {smallest - 1}"):
        render_prompt(tokenizer, turns, smallest - 1)


def test_a_part_of_the_context_is_kept_for_the_reply(tokenizer):
    turns = long_chat()
    whole = render_prompt(tokenizer, turns)
    fits = 8 * (len(whole) - 1) // 5 + 1
    for context, reply_tokens, oldest in (
        (fits, None, 1),  # all is read
        (fits - 1, None, 3),
        (fits - 1, 10**6, 3),  # more than 3/8 are never kept free
        (len(whole) + 9, 9, 1),  # and no more than the longest reply takes
        (len(whole) + 8, 9, 3),
        (9, None, 13),  # the question stays, however long
    ):
        prompt = fit_prompt(tokenizer, turns, context, reply_tokens)
        assert prompt.oldest == oldest
        assert prompt.ids == render_prompt(tokenizer, [turns[0], *turns[oldest:]])


def test_a_long_chat_encodes_each_message_once_at_most(tokenizer, monkeypatch):
    turns = [{"role": role, "content": "x"} for _ in range(300) for role in ("user", "assistant")] + [SUM[1]]
    encode, encoded = Tokenizer.encode, []
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, text, **marks: encoded.append(text) or encode(self, text, **marks)
    )
    assert len(render_prompt(tokenizer, turns, 60)) <= 60
    assert len(encoded) < 30
    encoded.clear()
    render_prompt(tokenizer, turns)
    assert len(encoded) == len(turns)


# Other mistakes are rows of BAD_ROWS in tests/tasks/test_own_data.py.
NO_CONVERSATIONS = [
    ([], "non-empty"),
    ("hello", "list of messages"),
    ([1], "message 0"),
    ([{"role": "robot", "content": "x"}], "'robot'"),
    ([{"role": "user"}], "no content"),
    ([SUM[0]], "nothing else"),
    ([SUM[0], SUM[0]], "message 1 is by system"),
    ([{"role": "user", "content": CALL}], "only the assistant"),
    ([SUM[1], {"role": "assistant", "content": [{"type": ["text"], "text": "x"}]}], "type"),
    ([SUM[1], {"role": "assistant", "content": "x", "train": 1}], "true or false"),
]


@pytest.mark.parametrize(("messages", "problem"), NO_CONVERSATIONS)
def test_what_is_no_conversation_is_an_error(messages, problem):
    check_messages(SUM)
    check_messages(SUM[1:])
    with pytest.raises(ValueError, match=problem):
        check_messages(messages)
