"""S1. No request can crash the server.

Seeded malformed bodies, raw bytes and all that the classes of the bodies allow: never a 5xx, and every error has
OpenAI's form `{"error": {message, type, param, code}}`. A table of bodies names the field that each error must name.
"""

import contextlib
import json
import random
import re
import socket
from collections import Counter
from typing import Any

import httpx
import pytest
from bodies import BODIES, CHAT, COMPLETIONS, HELLO
from connections import head_of
from fake_server import FakeScheduler, asking, client_of, error_of, make_app, serving
from pydantic.json_schema import models_json_schema

from nanochat.serve.schema import (
    MAX_CONTAINERS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    UpdateWeightsBody,
)

ask = pytest.fixture(asking, scope="module")


FIELDS = (
    *("messages", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n"),
    *("repetition_penalty", "seed", "stop", "stream", "stream_options", "logprobs", "top_logprobs", "logit_bias"),
    *("prompt", "echo", "tools", "response_format", "user", "truncation", "nonsense", "\u0000", "表"),
)
ODD = (
    *(None, True, False, 0, -1, 1, 3, 2**63, -(2**70), 10**300, 0.5, -0.0, 1e308, float("inf"), float("nan")),
    *("", "text", "\x00", "\ud800", "\U0001f642", "<|assistant_end|>", "9" * 5000, "a" * 20_000),
    *([], [[]], [None], ["x"], [1, 2, 3], [-1], [2**80], {}, {"a": 1}, {"role": "user"}, {"include_usage": 1}),
    *([{"role": "user", "content": "\ud83d"}], [{"role": "user", "content": None}], [{"role": [], "content": {}}]),
)


def malformed(rng: random.Random) -> bytes:
    """A body that is wrong in one of many ways; some are right."""
    body: Any = {**json.loads(json.dumps(HELLO)), "prompt": "x", "max_tokens": 2}
    for _ in range(rng.randint(0, 4)):
        body[rng.choice(FIELDS)] = rng.choice(ODD)
    for name, share in (("prompt", 0.5), ("messages", 0.3)):
        if rng.random() < share:
            body.pop(name, None)
    if isinstance(body.get("messages"), list) and body["messages"] and rng.random() < 0.3:
        message = {"role": "user", "content": "x", rng.choice(("role", "content", "name", "nanochat")): rng.choice(ODD)}
        body["messages"] = [message] * rng.randint(1, 3)
    if rng.random() < 0.1:
        body = rng.choice(ODD)
    content = json.dumps(body, ensure_ascii=rng.random() < 0.7).encode(errors="surrogatepass")
    match rng.randint(0, 9):
        case 0:
            content = content[: rng.randint(0, len(content))]
        case 1:
            place = rng.randint(0, len(content))
            content = content[:place] + rng.randbytes(rng.randint(1, 8)) + content[place:]
        case 2:
            content = rng.choice((b"[", b'{"messages":', b'{"a":[')) * rng.choice((5, 150, 250, 40_000))
        case 3:
            number = rng.choice((b"1e999", b"-1e999", b"9" * 5000, b"1" + b"0" * 400 + b".5", b"0x10", b"1_0"))
            content = b'{"messages":[{"role":"user","content":"x"}],"seed":' + number + b',"temperature":1}'
    return content


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.soak)])
def test_malformed_bodies_get_an_error_in_openais_form(count: int):
    rng = random.Random(1)
    statuses = set()
    with client_of(make_app(FakeScheduler(slots=64, queue=64))) as ask:
        for number in range(count):
            answer = ask("POST", (CHAT, COMPLETIONS)[number % 2], content=malformed(rng))
            statuses.add(answer.status_code)
            if answer.status_code != 200:
                error_of(answer)
        assert ask("GET", "/ready").status_code == 200
    assert {200, 400} <= statuses <= {200, 400, 404}


def test_raw_bytes_do_not_crash_it():
    rng = random.Random(2)
    starts = (b"", b"GET / HTTP/1.1\r\n", head_of(COMPLETIONS, 0)[:-5])
    with serving(make_app()) as port:
        for _ in range(60):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(rng.choice(starts) + rng.randbytes(rng.randint(1, 200)) + b"\r\n\r\n")
        assert httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200


def test_a_failed_reply_is_an_error():
    with client_of(make_app(FakeScheduler(fails=True))) as ask:
        for stream in (False, True):  # nothing of the stream is sent yet
            answer = ask("POST", CHAT, json={**HELLO, "stream": stream})
            error = error_of(answer)
            assert (answer.status_code, error["message"]) == (500, "out of memory")
            assert error["code"] == "generation_failed"


# ---------------------------------------------------------------------- a table of bodies


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **more}]}


NOTE = {"type": "url_citation", "url_citation": {"url": "x"}}
CALLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": {"type": kind}}}
    for name, kind in (("f", "object"), ("g", "strin"))
)
MANY = {"logprobs": True, "top_logprobs": 20, "max_tokens": 500}


def call_of(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def schema(of: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": of}}


# What each route refuses: the field that the error names, and what the message must name besides. ALLOWED is just
# within the limits.
REFUSED: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    CHAT: [
        ({"temperature": 3}, "temperature", ""),
        ({"repetition_penalty": 101}, "repetition_penalty", ""),
        ({"temperature": "warm"}, "temperature", ""),
        ({"n": 0}, "n", ""),
        ({"n": 4}, "n", "1 x 4.* 3 "),  # three slots: the queue is for other clients
        ({"messages": []}, "messages", ""),
        (user(5), "messages.0.content", ""),
        (user([{"type": "image_url"}]), "messages.0.content.0.type", ""),
        (user("x", annotations=[0] * 400_000), "messages.0.annotations", ""),  # also what is ignored is bounded
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", ""),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata", ""),
        ({"metadata": {"a": [[]] * 40_000}}, "", "20,000"),
        ({"temprature": 1}, "temprature", ""),
        ({"model": "gpt-4"}, "model", ""),
        ({"presence_penalty": 2.5}, "presence_penalty", ""),
        ({"logit_bias": {"5": 101}}, "logit_bias", ""),
        ({"logit_bias": {"x": 1}}, "logit_bias", ""),
        ({"logit_bias": {"100000": 1}}, "logit_bias", ""),
        ({"logit_bias": {str(token): 1 for token in range(301)}}, "logit_bias", ""),
        ({"stop_token_ids": [100_000]}, "stop_token_ids", ""),
        ({"stop_token_ids": list(range(65))}, "stop_token_ids", ""),
        ({"top_k": -2}, "top_k", ""),
        ({"typ_p": 0.9}, "typ_p", "leave it out"),  # other servers' settings, with another value than the neutral one
        ({"skip_special_tokens": False}, "skip_special_tokens", "leave it out"),
        ({"stop": ["x"] * 17}, "stop", "16"),
        ({"stream_options": {}}, "", "stream_options"),
        ({"tools": [{}]}, "tools.0.type", ""),
        ({"tool_choice": "required"}, "tool_choice", ""),
        ({"tool_choice": "any"}, "tool_choice", '"name"'),  # the other form
        ({"tool_choice": call_of("f")}, "tool_choice", ""),
        ({"tools": CALLS[:1], "tool_choice": call_of("other")}, "tool_choice", ""),
        ({"tools": CALLS[:1], "tool_choice": call_of("any")}, "tool_choice", ""),
        ({"tools": CALLS[:1] * 2}, "tools", ""),
        ({"tools": CALLS[1:], "tool_choice": "required"}, "tools", "strin"),
        ({"tools": [call_of("no spaces")]}, "tools.0.function.name", ""),
        ({"function_call": {"name": "f"}}, "function_call", ""),
        ({"store": True}, "store", ""),
        ({"continue_final_message": True}, "continue_final_message", ""),
        ({"add_generation_prompt": False}, "add_generation_prompt", ""),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs", ""),  # ours has no template
        ({"chat_template_kwargs": {"x": [1]}}, "chat_template_kwargs", ""),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {**schema({}), "type": "json_object"}}, "response_format", "json_schema"),
        ({"response_format": schema({"type": "strin"})}, "response_format", "strin"),
        ({"response_format": schema({"not": {}})}, "response_format", "not"),
        ({"response_format": {"type": "xml"}}, "response_format.type", ""),
        (
            {"messages": [*HELLO["messages"], {"role": "assistant", "content": "{"}], "response_format": schema({})},
            "response_format",
            "",
        ),
        # more logprobs than the server can write in a moment
        ({**MANY, "n": 24}, "max_tokens", "250,000"),
        ({**MANY, "n": 24, "stream": True}, "max_tokens", "250,000"),
        ({"logprobs": True, "top_logprobs": 10, "n": 64}, "max_tokens", "250,000"),  # as long as the context allows
    ],
    COMPLETIONS: [
        ({"prompt": ["x"] * 3, "n": 2}, "n", "3 x 2.* 3 "),
        ({"prompt": ["x"] * 32, "n": 2, "max_tokens": 500, "logprobs": 9}, "max_tokens", "250,000"),
        ({"prompt": ["x"] * 32, "n": 2, "max_tokens": 500, "logprobs": 9, "stream": True}, "max_tokens", "250,000"),
        ({"prompt": [[]] * MAX_CONTAINERS}, "", "20,000"),
        ({"prompt": [[]] * (MAX_CONTAINERS - 5)}, "prompt.0", ""),
    ],
}  # fmt: skip
# Bodies as clients of other servers send them, with a reply of such a server in their history.
VLLM_REPLY = {
    "role": "assistant", "content": "b", "refusal": None, "annotations": None, "audio": None, "function_call": None,
    "tool_calls": [], "reasoning_content": None,
}  # fmt: skip
VLLM = {
    "messages": [*HELLO["messages"], VLLM_REPLY, *HELLO["messages"]],
    "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": False},
    "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "length_penalty": 1.0, "stop_token_ids": [], "seed": None,
    "include_stop_str_in_output": False, "ignore_eos": False, "min_tokens": 0, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "use_beam_search": False, "add_generation_prompt": True,
    "continue_final_message": False, "logprobs": False, "top_logprobs": 0, "priority": 0, "request_id": "chat-1",
}  # fmt: skip
LLAMA_CPP = {  # its web page's
    "messages": [*HELLO["messages"], {"role": "assistant", "content": "b"}, *HELLO["messages"]],
    "stream": True, "max_tokens": -1, "reasoning_format": "auto", "dynatemp_range": 0, "dynatemp_exponent": 1,
    "xtc_probability": 0, "xtc_threshold": 0.1, "typ_p": 1, "repeat_last_n": 64, "repeat_penalty": 1.1,
    "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1, "cache_prompt": True,
    "samplers": ["top_k", "typ_p", "top_p", "min_p", "temperature"], "backend_sampling": False, "id_slot": -1,
    "timings_per_token": True, "return_progress": True, "seed": -1, "stop": [""],
}  # fmt: skip
DEEPSEEK = {
    "messages": [*HELLO["messages"], {"role": "assistant", "content": "b", "prefix": True}],
    "frequency_penalty": 0, "presence_penalty": 0, "response_format": {"type": "text"}, "stop": None, "stream": False,
    "stream_options": None, "tools": None, "tool_choice": "none", "logprobs": False, "top_logprobs": None,
    "temperature": 1, "top_p": 1, "thinking": {"type": "disabled"},
}  # fmt: skip
LM_STUDIO = {
    "guided_json": None, "messages": [{**HELLO["messages"][0], "id": None}], "reasoning_format": "deepseek",
    "temperature": 0.7, "max_tokens": -1, "ttl": 300, "repeat_penalty": 1.1, "stop": "", "logit_bias": {},
}  # fmt: skip
CALL = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "2+3"}}}
NO_IDS = {  # llama.cpp's calls may have no ids: results answer them in their order
    "messages": [
        *HELLO["messages"],
        {"role": "assistant", "content": None, "tool_calls": [{**CALL, "id": ""}, {**CALL, "id": None, "index": 1}]},
        {"role": "tool", "tool_call_id": "", "content": "5"},
        {"role": "tool", "content": "five"},
    ]
}
ALLOWED: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {"presence_penalty": -2, "frequency_penalty": 2, "logit_bias": {"5": -100}, "stop_token_ids": [5]},
        {"metadata": {str(number): "x" for number in range(16)}},
        user("x", annotations=[NOTE] * 128),
        {"n": 3},
        *(VLLM, LLAMA_CPP, DEEPSEEK, LM_STUDIO, NO_IDS),
        {"response_format": {"type": "json_object", "schema": {"enum": ["a"]}}, "max_tokens": 9},
    ],
    COMPLETIONS: [{"prompt": ["x"] * 3}, {"max_tokens": -1, "stop": ""}],
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_wrong_with_a_body_is_named(path: str):
    with client_of(make_app(FakeScheduler(slots=3))) as few, client_of(make_app(FakeScheduler(slots=64))) as many:
        for change, param, named in REFUSED[path]:
            answer = (few if param == "n" else many)("POST", path, json={**BODIES[path], **change})
            error = error_of(answer)
            assert answer.status_code == (404 if param == "model" else 400), change
            assert (error["param"] or "", error["type"]) == (param, "invalid_request_error"), change
            assert re.search(named, error["message"]), change
        for change in ALLOWED[path]:
            assert few("POST", path, json={**BODIES[path], "max_tokens": 1, **change}).status_code == 200, change


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("GET", "/nowhere", b"", 404),
        ("POST", "/v1/responses", b"{}", 404),
        ("GET", "/v1/models/other", b"", 404),
        ("GET", "/v1/models/a%00b", b"", 404),
        ("GET", "/%ED%A0%80", b"", 404),
        ("GET", "/../../etc/passwd", b"", 404),
        ("PUT", "/v1/models", b"", 405),
        ("GET", CHAT, b"", 405),
        ("POST", CHAT, b"", 400),
        ("POST", CHAT, b'{"messages": ' + b"[" * 300 + b"]" * 300 + b"}", 400),
        ("POST", COMPLETIONS, b'{"prompt":[]}', 400),
    ],
)
def test_every_error_has_openais_form(ask: Any, method: str, path: str, content: bytes, status: int):
    answer = ask(method, path, content=content)
    error = error_of(answer)
    assert answer.status_code == status and error["type"] == "invalid_request_error"
    assert status != 404 or CHAT in error["message"] or error["code"] == "model_not_found"


# ---------------------------------------------------------------------- what the classes of the bodies allow

POSTED = {
    CHAT: ChatBody,
    COMPLETIONS: CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/update_weights_from_disk": UpdateWeightsBody,
}


def description() -> dict[str, Any]:
    """The routes that take a body, in the form of OpenAPI."""
    place = "#/components/schemas/{model}"
    _, schemas = models_json_schema([(body, "validation") for body in POSTED.values()], ref_template=place)
    paths = {}
    for path, body in POSTED.items():
        content = {"application/json": {"schema": {"$ref": place.format(model=body.__name__)}}}
        answers = {"200": {"description": "a reply"}}
        paths[path] = {"post": {"requestBody": {"required": True, "content": content}, "responses": answers}}
    about = {"title": "nanochat", "version": "1"}
    return {"openapi": "3.1.0", "info": about, "paths": paths, "components": {"schemas": schemas["$defs"]}}


@pytest.mark.slow
@pytest.mark.parametrize("examples", [10, pytest.param(1500, marks=pytest.mark.soak)])
def test_no_body_of_its_class_makes_it_fail(ask: Any, examples: int):
    """This many requests for each route, the same at every run."""
    schemathesis = pytest.importorskip("schemathesis", reason="the extra `dev` brings schemathesis")
    hypothesis = pytest.importorskip("hypothesis")
    described = schemathesis.openapi.from_dict(description())
    failures: list[str] = []
    statuses: Counter[str] = Counter()
    for result in described.get_all_operations():
        operation = result.ok()
        calls = hypothesis.settings(
            max_examples=examples, deadline=None, database=None, derandomize=True, phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip

        @calls
        @hypothesis.given(case=operation.as_strategy())
        def tried(case: Any) -> None:
            sent = case.as_transport_kwargs(base_url="http://localhost")
            sent = {name: value for name, value in sent.items() if name in ("params", "json", "data", "headers")}
            answer = ask(case.method, case.formatted_path, **sent)
            statuses[f"{case.method} {answer.status_code}"] += 1
            if answer.status_code >= 500:
                failures.append(f"{case.method} {case.path} {case.body!r}: {answer.status_code} {answer.text}")
            elif answer.status_code >= 400:
                error_of(answer)

        tried()
    assert not failures, "\n".join(failures[:5])
    assert statuses["POST 400"]
