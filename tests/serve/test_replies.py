"""nanochat.serve.replies: a reply streamed is the reply whole, and many streams wake the event loop once a step."""

import asyncio
import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import tiny
from bodies import CHAT, HELLO
from connections import events_of
from fake_server import FakeScheduler, body_of, client_of, loaded, make_app

from nanochat.serve.replies import ChatSerializer, ChunkQueue, CompletionSerializer, Waker
from nanochat.serve.scheduler import Chunk, Stream, TokenLogprob


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("serializer_type", [ChatSerializer, CompletionSerializer])
def test_an_event_of_plain_text_is_written_as_every_other_one(serializer_type: Any, include_usage: bool):
    serializer = serializer_type(loaded(FakeScheduler()), body_of(include_usage=include_usage))
    texts = ["word ", '"quoted" \\ {}\n\t', "\x00\x1f\x7f", "\u2028 \u4f60\u597d \U0001f600", "null", '",":']
    for number, text in itertools.product((0, 1, 12), texts):
        chunk = Chunk((65,), text)
        event = serializer.event(number, chunk)
        assert event == serializer.choices_event(serializer.chunk(number, chunk))
        (choice,) = json.loads(event.removeprefix(b"data: "))["choices"]
        assert choice["index"] == number and text in (choice.get("text"), choice.get("delta", {}).get("content"))
    assert serializer.event(0, Chunk((65,))) == b""  # half a character
    schema = ChatSerializer(loaded(FakeScheduler()), body_of(calls="schema"))
    assert b"content" not in schema.event(0, Chunk((65,), '{"name":"f","arguments":{"a":'))  # text that is a call


def on_a_loop(monkeypatch: pytest.MonkeyPatch, work: Callable[[Waker, Counter[str]], Any]) -> Counter[str]:
    """Run with a waker; returns how often its event loop was called from other threads, by the name of what it ran."""
    calls: Counter[str] = Counter()

    async def counted() -> None:
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe

        def count(callback: Any, *arguments: Any) -> Any:
            calls[callback.__name__] += 1
            return call(callback, *arguments)

        monkeypatch.setattr(loop, "call_soon_threadsafe", count)
        await work(Waker(), calls)

    asyncio.run(counted())
    return calls


def test_the_tokens_of_a_step_wake_the_event_loop_once(monkeypatch: pytest.MonkeyPatch):
    """Whatever the number of clients; the ends of replies come at once."""

    async def work(waker: Waker, calls: Counter[str]) -> None:
        queues = [ChunkQueue(waker) for _ in range(50)]
        taking = [asyncio.create_task(queue.take(15)) for queue in queues]
        await asyncio.sleep(0)

        def step(**settings: Any) -> None:
            for queue in queues:
                queue.put(0, Chunk((65,), "word ", **settings))

        thread = threading.Thread(target=step)
        thread.start()
        thread.join()  # the event loop is blocked meanwhile, as it is by a device's thread that has Python's lock
        assert await asyncio.gather(*taking) == [[(0, Chunk((65,), "word "))]] * 50
        assert calls.total() == 1
        # More steps before the loop has rested: one more call for all of them, and one event for each client.
        taking = [asyncio.create_task(queue.take(15)) for queue in queues]
        for _ in range(3):
            step()
        assert await asyncio.gather(*taking) == [[(0, Chunk((65,) * 3, "word word word "))]] * 50
        assert calls.total() == 2
        monkeypatch.setattr("nanochat.serve.replies.ROUND_SECONDS", 1000.0)
        for _ in range(2):
            taking = [asyncio.create_task(queue.take(15)) for queue in queues]
            await asyncio.sleep(0)
            step(finish_reason="stop")
            await asyncio.gather(*taking)

    on_a_loop(monkeypatch, work)


def test_a_closed_event_loop_cancels_every_stream(monkeypatch: pytest.MonkeyPatch):
    streams: list[Stream] = []

    async def work(waker: Waker, calls: Counter[str]) -> None:
        streams.extend(Stream(lambda: None, partial(ChunkQueue(waker).put, number)) for number in range(3))

    on_a_loop(monkeypatch, work)
    for stream in streams:
        stream.put(Chunk((65,), "word "))
    assert all(stream.cancelled for stream in streams)


def test_only_a_silent_stream_has_heartbeats(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nanochat.serve.replies.HEARTBEAT_SECONDS", 0.2)
    for tick, beats in ((0.05, False), (0.5, True)):
        with client_of(make_app(FakeScheduler(tick=tick))) as ask:
            text = ask("POST", CHAT, json={**HELLO, "stream": True, "max_tokens": 10 if not beats else 3}).text
        assert (": waiting\n\n" in text) == beats
        assert text.count("word") == (10 if not beats else 3) and text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("text", "finish_reason", "arguments"),
    [
        ('{"name":"f","arguments":{"a":1}}', "stop", '{"a":1}'),
        ('{"name":"f","arguments":{"a":1}}', "length", '{"a":1}'),  # complete with its last token
        ('{"name":"f","arguments":{"a":', "length", '{"a"'),  # what may be the last brace is held back
        ('{"name":"f', "length", None),
        ('{"name":"f', "stop", None),  # by one of the client's stop_token_ids
    ],
)
def test_a_call_is_the_same_whole_and_streamed(text: str, finish_reason: str, arguments: str | None):
    serializer = ChatSerializer(loaded(FakeScheduler()), body_of(calls="schema"))
    logprobs = (TokenLogprob(65, -0.5),)
    chunks = [Chunk((65,), character, logprobs=logprobs) for character in text]
    chunks.append(Chunk(finish_reason=finish_reason))
    events = [serializer.chunk(0, chunk) for chunk in chunks]
    for chunk in chunks:
        serializer.add(0, chunk)
    (choice,) = json.loads(b"".join(serializer.whole({})))["choices"]
    fragments = [one for event in events for one in event["delta"].get("tool_calls", ())]
    calls = choice["message"].get("tool_calls")
    assert "".join(one["function"]["arguments"] for one in fragments) == (arguments or "")
    assert (calls and calls[0]["function"]) == (arguments and {"name": "f", "arguments": arguments})
    reason = "tool_calls" if arguments and finish_reason == "stop" else finish_reason
    assert choice["finish_reason"] == events[-1]["finish_reason"] == reason
    # The call is in no content, so its tokens are in no list of logprobs.
    assert not choice["message"]["content"] and not any(event["delta"].get("content") for event in events)
    assert choice["logprobs"] is None and not any(event["logprobs"] for event in events)


def test_a_call_of_the_calculator_is_the_same_whole_and_streamed():
    """test_openai.py compares the rest of a stream with the whole."""
    with client_of(make_app(FakeScheduler(calls=True))) as ask:
        body = {**HELLO, "max_tokens": 4, "n": 2, "seed": 5}
        whole = ask("POST", CHAT, json=body).json()
        answer = ask("POST", CHAT, json={**body, "stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        choices = [event["choices"][0] for event in events_of(answer.text)]
        for number, choice in enumerate(whole["choices"]):
            assert choice["index"] == number and choice["message"]["content"] == "word 1 word 2 word 3 "
            calls = [{"type": "python", "text": "2+3"}, {"type": "python_output", "text": "5"}]
            assert choice["message"]["nanochat"]["parts"][:2] == calls
            own = [one for one in choices if one["index"] == number]
            assert own[0]["delta"] == {"role": "assistant", "content": ""} and own[-1]["finish_reason"] == "length"
            assert "".join(one["delta"].get("content", "") for one in own) == choice["message"]["content"]
            shown = [one["delta"]["nanochat"] for one in own if "nanochat" in one["delta"]]
            for call in calls:
                assert "".join(one["text"] for one in shown if one.get("kind") == call["type"]) == call["text"]


def test_parts_of_a_character_have_names_and_places_of_their_own():
    tokenizer = tiny.tiny_tokenizer()
    serializer = CompletionSerializer(loaded(FakeScheduler()), body_of())
    tokens = [*"é!".encode(), 0xC3]  # bytes come first in every vocabulary
    single = {tokenizer.decode_bytes([token]): token for token in range(256)}
    ids = [single[bytes([byte])] for byte in tokens]
    likely = [TokenLogprob(one, -1.0, ((ids[0], -1.0), (ids[1], -2.0))) for one in ids]
    lists = serializer.chunk(0, Chunk(tuple(ids), "é!", logprobs=tuple(likely)))["logprobs"]
    assert lists["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!", "bytes:\\xc3"]
    assert lists["text_offset"] == [0, 0, 1, 2]
    assert lists["top_logprobs"][0] == {"bytes:\\xc3": -1.0, "bytes:\\xa9": -2.0}
