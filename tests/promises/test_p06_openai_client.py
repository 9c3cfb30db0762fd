"""P6. The unmodified `openai` Python client works.

Chat and completions, streaming and not, usage, stop, seed, n, logprobs, formats, tools, models and errors; lm-eval as
well. A tiny model of random weights answers, through the real scheduler.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import pydantic
import pytest
import tiny
import torch
from bodies import CONTEXT, KEY
from fake_server import error_of, serving

from nanochat.conversation import parse_reply, render_prompt, text_of
from nanochat.engine import Engine, SamplingParams
from nanochat.serve.app import create_app
from nanochat.serve.scheduler import Scheduler
from nanochat.serve.state import LoadedModel

openai = pytest.importorskip("openai", reason="the extra `dev` brings openai")

MODEL = "tiny"
KEY_HEADER = {"authorization": f"Bearer {KEY}"}
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def engine() -> Engine:
    tokenizer = tiny.tiny_tokenizer()
    config = tiny.tiny_config(vocab_size=tokenizer.vocab_size, sequence_len=CONTEXT, n_layer=2)
    return Engine(tiny.lively_model(config), tokenizer, tiny.cpu_device())


@pytest.fixture(scope="module")
def app(engine: Engine) -> Any:
    def load() -> LoadedModel:
        scheduler = Scheduler(engine, slots=4, queue=16)
        scheduler.start()
        return LoadedModel(scheduler, engine.tokenizer, MODEL, CONTEXT, chats=True, created=1, fingerprint="fp_0123")

    return create_app(load, api_key=KEY)


@pytest.fixture(scope="module")
def port(app: Any) -> Iterator[int]:
    with serving(app) as port:
        yield port


@pytest.fixture(scope="module")
def client(port: int) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def chat(client: Any, **settings: Any) -> Any:
    return client.chat.completions.create(
        **{"model": MODEL, "messages": HELLO, "max_tokens": 24, "temperature": 0, **settings}
    )


def complete(client: Any, **settings: Any) -> Any:
    return client.completions.create(
        **{"model": MODEL, "prompt": "the", "max_tokens": 24, "temperature": 0, **settings}
    )


def long_reply(client: Any, **settings: Any) -> Any:
    """A chat reply of more than a few characters: of random weights, the first seed that gives one."""
    for seed in range(50):
        answer = chat(client, temperature=1, seed=seed, **settings)
        if len(answer.choices[0].message.content) > 8:
            return seed, answer
    raise AssertionError("no seed gives a reply")


# ---------------------------------------------------------------------- chat


def test_chat_is_what_the_engine_generates(client: Any, engine: Engine):
    answer = chat(client)
    prompt = render_prompt(engine.tokenizer, HELLO)
    (made,), _ = engine.generate([prompt], max_tokens=24, sampling=SamplingParams(temperature=0))
    message = answer.choices[0].message
    assert message.role == "assistant" and message.content == text_of(parse_reply(engine.tokenizer, made))
    assert answer.object == "chat.completion" and answer.model == MODEL and answer.id.startswith("chatcmpl-")
    usage = answer.usage
    assert usage.prompt_tokens == len(prompt)
    assert 0 < usage.completion_tokens <= 24 and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_seed_gives_the_same_again_and_another_or_none_does_not(client: Any):
    seed, first = long_reply(client)
    again = chat(client, temperature=1, seed=seed).choices[0].message.content
    others = {chat(client, temperature=1, seed=seed + 100 + more).choices[0].message.content for more in range(4)}
    assert again == first.choices[0].message.content and others - {again}
    assert len({chat(client, temperature=1).choices[0].message.content for _ in range(8)}) > 1


def test_stop_ends_the_text_before_it(client: Any):
    seed, answer = long_reply(client)
    text = answer.choices[0].message.content
    stop = text[3:5]
    stopped = chat(client, temperature=1, seed=seed, stop=stop)
    assert stopped.choices[0].message.content == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


def test_chat_logprobs(client: Any):
    answer = chat(client, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) >= answer.usage.completion_tokens - 1 > 0
    for one in content:
        assert one.logprob <= 0 and len(one.top_logprobs) == 3
        likely = [other.logprob for other in one.top_logprobs]
        assert likely == sorted(likely, reverse=True)
        assert one.logprob == likely[0] and one.token == one.top_logprobs[0].token  # greedy takes the best
        assert bytes(one.bytes).decode(errors="replace") == one.token
    assert chat(client).choices[0].logprobs is None


# ---------------------------------------------------------------------- replies that follow a schema

SUM = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "maximum": 99, "minimum": 0}, "sure": {"type": "boolean"}},
    "required": ["sum", "sure"],
    "additionalProperties": False,
}
AS_SUM: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM, "strict": True}}
AS_OBJECT: Any = {"type": "json_object"}


class Person(pydantic.BaseModel):
    name: str
    age: int
    notes: list[str]
    friend: "Person | None"


# Without `strict` a schema is open: further properties would be allowed.
OPEN = {key: value for key, value in Person.model_json_schema().items() if key != "additionalProperties"}
AS_PERSON: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": OPEN}}


@pytest.mark.parametrize(
    ("form", "schema", "settings"),
    [
        (AS_SUM, SUM, {"temperature": 0, "max_tokens": 80}),
        (AS_PERSON, OPEN, {"temperature": 1.5, "n": 3, "seed": 5, "max_tokens": 120}),
        (AS_OBJECT, {"type": "object"}, {"temperature": 1.5, "n": 3, "seed": 5, "max_tokens": 6}),
        (AS_OBJECT, {"type": "object"}, {"max_tokens": 10**6}),  # the context has no room for it
    ],
)
def test_a_reply_follows_its_format(client: Any, form: Any, schema: Any, settings: dict[str, Any]):
    """test_s17_a_reply_closes.py has the schemas themselves."""
    answer = chat(client, response_format=form, **settings)
    for choice in answer.choices:
        document = json.loads(choice.message.content)
        assert jsonschema_rs.is_valid(schema, document) and choice.finish_reason == "stop"
        assert list(document)[: len(schema.get("required", ()))] == schema.get("required", [])
    assert answer.usage.completion_tokens <= settings["max_tokens"] * len(answer.choices)
    if form is AS_SUM:
        completion = complete(client, max_tokens=80, extra_body={"response_format": form})
        assert list(json.loads(completion.choices[0].text)) == ["sum", "sure"]


# ---------------------------------------------------------------------- tools

# It does not say so, but there are no other arguments: `call_schema` adds it.
PLACE: dict[str, Any] = {"type": "object", "properties": {"city": {"enum": ["Bern", "Rome"]}}, "required": ["city"]}
ROLL = {"type": "object", "properties": {"die": {"$ref": "#/$defs/Die"}}, "required": ["die"],
        "additionalProperties": False, "$defs": {"Die": {"type": "integer", "minimum": 1, "maximum": 6}}}  # fmt: skip
EXPRESSION = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}


def tool(name: str, parameters: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}


NOTES = [tool("note", {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]})]
TOOLS = [tool("weather", PLACE), tool("roll", ROLL), tool("calculator", EXPRESSION)]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "roll"}}])
def test_a_required_call_follows_the_tools_schema(client: Any, choice: Any):
    elsewhere = tool("weather", {"type": "object", "properties": {}, "allOf": [PLACE]})
    settings = {"tools": [elsewhere, TOOLS[1]], "tool_choice": choice, "temperature": 1, "seed": 3, "n": 3}
    for one in chat(client, max_tokens=80, **settings).choices:
        (call,) = one.message.tool_calls
        assert one.finish_reason == "tool_calls" and one.message.content is None and call.id.startswith("call_")
        arguments = json.loads(call.function.arguments)
        if call.function.name == "weather" and choice == "required":
            assert arguments["city"] in ("Bern", "Rome")
        else:
            assert call.function.name == "roll" and 1 <= arguments["die"] <= 6


def test_what_changes_nothing_in_a_history_is_ignored(client: Any):
    cache = {"cache_control": {"type": "ephemeral"}}
    system = {"role": "system", "name": "s", "content": [{"type": "text", "text": "s", **cache}], **cache}
    reply = {"role": "assistant", "content": "b", "reasoning_content": "a thought"}
    plain = [{"role": "system", "content": "s"}, *HELLO, {"role": "assistant", "content": "b"}, *HELLO]
    same = [system, *HELLO, reply, {**HELLO[0], "name": "me"}]
    left, right = (chat(client, messages=messages, max_tokens=8) for messages in (plain, same))
    assert left.choices == right.choices and left.usage == right.usage
    assert chat(client, tools=[{**tool("now", {}), **cache}], max_tokens=2).choices


def test_no_line_ends_within_a_text(port: int):
    """httpx and requests end a line also at these characters: an event would be cut in two."""
    text = "one\u2028two\u0085three\u2029four"
    body = {"model": MODEL, "prompt": text, "max_tokens": 1, "echo": True}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=KEY_HEADER) as http:
        events = http.post("/v1/completions", json={**body, "stream": True}).text
        read = [json.loads(line.removeprefix("data: ")) for line in events.splitlines() if "choices" in line]
        assert "".join(event["choices"][0]["text"] for event in read).startswith(text)
        whole = http.post("/v1/completions", json=body).text
        error = http.post("/v1/completions", json={**body, text: 1}).text
    for content in (whole, error):
        assert len(content.splitlines()) == 1
    assert json.loads(whole)["choices"][0]["text"].startswith(text)


def test_the_calculators_call_goes_to_the_client(client: Any, engine: Engine):
    named = {"type": "function", "function": {"name": "calculator"}}
    answer = chat(client, tools=TOOLS, tool_choice=named, max_tokens=60, temperature=1, seed=1).choices[0]
    (call,) = answer.message.tool_calls
    prompt = [*render_prompt(engine.tokenizer, HELLO), engine.call_start]
    (made,), _ = engine.generate([prompt], max_tokens=60, sampling=SamplingParams(temperature=1, seed=1))
    ends = [place for place, token in enumerate(made) if token in engine.stop_ids or token == engine.call_end]
    expected = engine.tokenizer.decode(made[: ends[0]] if ends else made)
    if answer.finish_reason == "tool_calls":
        assert json.loads(call.function.arguments) == {"expression": expected}
    assert call.function.name == "calculator" and call.function.arguments.startswith('{"expression":"')


def test_results_of_tools_are_read_where_the_model_learned_to_read_them(client: Any, engine: Engine):
    call = {"id": "a", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "2+3"}'}}
    other = {"id": "b", "type": "function", "function": {"name": "roll", "arguments": '{"die":1}'}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call, other]}
    results = [{"role": "tool", "tool_call_id": one, "content": text} for one, text in (("b", "six"), ("a", "5"))]
    parts = [{"type": "python", "text": "2+3"}, {"type": "python_output", "text": "5"},
             {"type": "python", "text": '{"name":"roll","arguments":{"die":1}}'},
             {"type": "python_output", "text": "six"}]  # fmt: skip
    expected = render_prompt(engine.tokenizer, [*HELLO, {"role": "assistant", "content": parts}])
    answer = chat(client, messages=[*HELLO, turn, *results], tools=TOOLS)
    assert answer.usage.prompt_tokens == len(expected)
    for wrong in ([*HELLO, turn, results[0]], [*HELLO, results[0]], [*HELLO, turn, *HELLO]):
        with pytest.raises(openai.BadRequestError, match="call"):
            chat(client, messages=wrong)


def test_without_its_calculator_tools_leave_a_free_reply_as_it_is(client: Any):
    plain = chat(client).choices[0].message.content
    for settings in ({"tools": TOOLS[:2]}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        answer = chat(client, parallel_tool_calls=True, **settings).choices[0]
        assert answer.message.content == plain and answer.message.tool_calls is None


# ---------------------------------------------------------------------- streams

STREAMED: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"n": 3},
    {"logprobs": True, "top_logprobs": 1, "temperature": 0},
    {"response_format": AS_SUM, "max_tokens": 80},
    {"response_format": AS_OBJECT, "max_tokens": 6},
    {"tools": TOOLS[:2], "tool_choice": "required", "max_tokens": 80},
    {"tools": TOOLS[:2], "tool_choice": {"type": "function", "function": {"name": "roll"}}, "max_tokens": 80},
    *({"tools": NOTES, "tool_choice": "required", "max_tokens": count} for count in (40, 60)),
]


@pytest.mark.parametrize("settings", STREAMED)
def test_a_stream_says_the_same_as_the_whole(client: Any, settings: dict[str, Any]):
    seed, _ = long_reply(client)
    settings = {"temperature": 1, "seed": seed, **settings}
    whole = chat(client, **settings)
    *chunks, last = chat(client, stream=True, stream_options={"include_usage": True}, **settings)
    assert last.choices == [] and last.usage == whole.usage and all(chunk.usage is None for chunk in chunks)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"} and len({chunk.id for chunk in chunks}) == 1
    for choice in whole.choices:
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert own[0].delta.role == "assistant" and len(own) > 1
        assert "".join(one.delta.content or "" for one in own) == (choice.message.content or "")
        assert [one.finish_reason for one in own if one.finish_reason] == [choice.finish_reason]
        likely = [one.token for part in own if part.logprobs for one in part.logprobs.content]
        assert likely == [one.token for one in (choice.logprobs.content if choice.logprobs else ())]
        fragments = [call.function for one in own for call in one.delta.tool_calls or ()]
        calls = [call.function for call in choice.message.tool_calls or ()]
        assert [one.name for one in fragments if one.name] == [call.name for call in calls]
        assert "".join(one.arguments for one in fragments) == "".join(call.arguments for call in calls)


# ---------------------------------------------------------------------- completions


def test_several_prompts_and_choices_of_each(client: Any):
    answer = complete(client, prompt=["the", "an"], n=2, temperature=1, seed=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3] and answer.object == "text_completion"
    alone = [complete(client, prompt=prompt, temperature=1, seed=seed) for prompt in ("the", "an") for seed in (3, 4)]
    assert [choice.text for choice in answer.choices] == [one.choices[0].text for one in alone]
    assert answer.usage.completion_tokens == sum(one.usage.completion_tokens for one in alone)


def test_an_echo_measures_the_prompt(client: Any, engine: Engine):
    """`tokens` are the client's: the begin token is added before them, and listed only where the client sent it."""
    text = "the other then"
    ids = engine.tokenizer.encode(text)
    bos = engine.tokenizer.get_bos_token_id()
    measure: Any = {"echo": True, "logprobs": 1, "max_tokens": 0}
    (choice,) = complete(client, prompt=text, **measure).choices
    lists = choice.logprobs
    assert (choice.text, choice.finish_reason) == (text, "length")
    assert lists.tokens == [engine.tokenizer.decode([one]) for one in ids] and "".join(lists.tokens) == text
    assert lists.text_offset == [len(engine.tokenizer.decode(ids[:place])) for place in range(len(ids))]
    assert lists.token_logprobs[0] is None and lists.top_logprobs[0] is None
    assert all(logprob < 0 for logprob in lists.token_logprobs[1:])
    assert all(len(best) == 1 for best in lists.top_logprobs[1:])
    assert complete(client, prompt=ids, **measure).choices[0].logprobs == lists
    both = complete(client, prompt=[[bos, *ids], ids], **measure)  # for the model the same prompt
    assert [len(choice.logprobs.tokens) for choice in both.choices] == [1 + len(ids), len(ids)]
    begun = complete(client, prompt=[bos, *ids], **measure)
    assert begun.choices[0].text == text and begun.choices[0].logprobs.tokens[0] == "<|bos|>"
    assert begun.choices[0].logprobs.token_logprobs[2:] == lists.token_logprobs[1:]
    assert begun.usage.prompt_tokens == 1 + len(ids) and begun.usage.completion_tokens == 0

    # With a reply: after the prompt come the reply's own text and entries, streamed or not.
    reply = complete(client, prompt=text, max_tokens=5, logprobs=1).choices[0]
    whole = complete(client, prompt=text, max_tokens=5, logprobs=1, echo=True).choices[0]
    assert whole.text == text + reply.text
    assert whole.logprobs.token_logprobs[: len(ids)] == lists.token_logprobs
    made = reply.logprobs.token_logprobs
    assert whole.logprobs.token_logprobs[len(ids) :][: len(made)] == made
    chunks = [
        chunk.choices[0] for chunk in complete(client, prompt=text, max_tokens=5, echo=True, logprobs=1, stream=True)
    ]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    streamed = [one for chunk in chunks if chunk.logprobs for one in chunk.logprobs.token_logprobs]
    assert streamed == whole.logprobs.token_logprobs
    assert complete(client, prompt=text, max_tokens=0).choices[0].text == ""
    full = complete(client, prompt=[65] * (CONTEXT - 1), echo=True, logprobs=0, max_tokens=0).choices[0].logprobs
    assert len(full.token_logprobs) == CONTEXT - 1


@pytest.mark.parametrize("as_ids", [False, True])
def test_lm_eval_itself(port: int, engine: Engine, as_ids: bool, monkeypatch: pytest.MonkeyPatch):
    """Unmodified, and with this server's tokenizer."""
    lm_eval = pytest.importorskip("lm_eval.models.openai_completions", reason="the extra `clients` brings lm-eval")
    from lm_eval.api.instance import Instance

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    client = lm_eval.LocalCompletionsAPI(
        f"http://127.0.0.1:{port}/v1/completions", model="nanochat", auth_token=KEY, tokenized_requests=as_ids,
        max_length=CONTEXT, batch_size=2,
    )  # fmt: skip
    pairs = [("the", " other"), ("then", " the an"), ("an", " x")]
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    found = client.loglikelihood(requests, disable_tqdm=True)
    for (context, continuation), (logprob, is_greedy) in zip(pairs, found, strict=True):
        ids = engine.tokenizer.encode(context + continuation, prepend="<|bos|>")
        first = len(engine.tokenizer.encode(context)) + 1
        with torch.no_grad():
            exact = engine.model(torch.tensor([ids]))[0].log_softmax(dim=-1)
        wanted = sum(float(exact[place - 1, ids[place]]) for place in range(first, len(ids)))
        assert logprob == pytest.approx(wanted, abs=1e-3)
        assert is_greedy == all(exact[place - 1].argmax() == ids[place] for place in range(first, len(ids)))


def test_the_stable_name_and_the_fingerprint(client: Any):
    for answer in (chat(client, model="nanochat"), complete(client, model="nanochat")):
        assert (answer.model, answer.system_fingerprint) == (MODEL, "fp_0123")
    assert {chunk.system_fingerprint for chunk in chat(client, stream=True)} == {"fp_0123"}
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by, model.created) == (MODEL, "model", "nanochat", 1)
    assert client.models.retrieve("nanochat").id == client.models.retrieve(MODEL).id == MODEL


def test_texts_are_tokenized_as_the_model_reads_them(client: Any, engine: Engine):
    def post(path: str, **body: Any) -> Any:
        answer = httpx.post(f"{client.base_url.copy_with(path=path)}", json=body, headers=KEY_HEADER)
        return answer.json() if answer.status_code == 200 else error_of(answer)["param"]

    text = "the 从 <|bos|>"
    plain = engine.tokenizer.encode(text)
    bos = engine.tokenizer.get_bos_token_id()
    answer = post("/tokenize", model="nanochat", prompt=text)
    assert answer["tokens"] == [bos, *plain] and answer["count"] == 1 + len(plain)
    assert answer["max_model_len"] == CONTEXT
    assert post("/tokenize", prompt=text, add_special_tokens=False)["tokens"] == plain
    assert post("/tokenize", prompt="<|bos|>", add_special_tokens=False)["tokens"] == [bos]
    info = httpx.get(f"{client.base_url.copy_with(path='/tokenizer_info')}", headers=KEY_HEADER).json()
    assert info == {"bos_token": "<|bos|>", "eos_token": "<|assistant_end|>"}
    assert post("/detokenize", tokens=plain) == {"prompt": text}
    assert post("/detokenize", tokens=[bos]) == {"prompt": "<|bos|>"}
    assert post("/detokenize", tokens=[100_000]) == post("/detokenize", tokens=[0] * 100_001) == "tokens"
    assert post("/tokenize", prompt="x" * 200_000) == post("/tokenize", prompt="x" * 900_000) == "prompt"


# ---------------------------------------------------------------------- errors


def test_errors_are_the_clients_own_exceptions(client: Any):
    for error, code, settings in (
        (openai.BadRequestError, "invalid_value", {"temperature": 5}),
        (openai.BadRequestError, "context_length_exceeded", {"messages": [{"role": "user", "content": "x" * CONTEXT}]}),
        (openai.NotFoundError, "model_not_found", {"model": "gpt-4"}),
        (openai.AuthenticationError, "invalid_api_key", {"extra_headers": {"Authorization": "Bearer wrong"}}),
    ):
        with pytest.raises(error) as refused:
            chat(client, **settings)
        assert refused.value.code == code
