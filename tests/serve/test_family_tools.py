"""Tools and thoughts of imported models in the server.

The first models are tiny, fine-tuned to call, and know one conversation by heart. They go the whole way: template,
decoding, special tokens, parser, openai's client, and back through the template. The others have published templates
and say what a test wants, as far as a grammar allows it.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from connections import events_of
from fake_server import client_of, serving, until
from tiny import cpu_device, lively_model, tiny_config
from tiny_families import TOOL_FAMILIES, in_xml, published, save_family

from nanochat.conversation import render, render_prompt
from nanochat.engine import Engine, Slots
from nanochat.families.imported_tokenizer import ImportedTokenizer
from nanochat.serve import prompts
from nanochat.serve import tools as server_tools
from nanochat.serve.app import create_app
from nanochat.serve.batch import Batch, Line
from nanochat.serve.replies import ChatSerializer
from nanochat.serve.scheduler import Chunk, Scheduler
from nanochat.serve.schema import ApiError, ChatBody
from nanochat.serve.state import LoadedModel
from nanochat.tokenizer import Tokenizer
from nanochat.train import make_adamw, next_token_loss, train_step

openai = pytest.importorskip("openai", reason="the extra `dev` brings openai")

CONTEXT = 768
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}]
QUESTION: list[Any] = [{"role": "user", "content": "How is it in Paris?"}]
ARGUMENTS = {"city": "Paris"}
CALL = {"id": "012345678", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "012345678", "content": "rain, 9 degrees"}
SENT: list[Any] = [  # a call and its result as a client sends them
    {"role": "assistant", "content": None, "tool_calls": [
        {**CALL, "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}}
    ]},
    {"role": "tool", "tool_call_id": CALL["id"], "content": RESULT["content"]},
]  # fmt: skip
LEARNED = [
    *QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    RESULT,
    {"role": "assistant", "content": "It rains, and it has 9 degrees."},
]


def fine_tuned(tokenizer: Tokenizer) -> Engine:
    """A model that knows LEARNED by heart."""
    device = cpu_device()
    config = tiny_config(
        vocab_size=tokenizer.vocab_size, sequence_len=CONTEXT, n_layer=2, width=64, n_head=4, n_kv_head=4,
        window_pattern="L",
    )  # fmt: skip
    model = lively_model(config).train()
    optimizer = make_adamw(model, 3e-3, device)
    rows = [render(tokenizer, LEARNED[:2], tools=TOOLS), render(tokenizer, LEARNED, tools=TOOLS)]
    for _ in range(60):
        for row in rows:
            ids = torch.tensor([row.ids])
            batch = [ids[:, :-1].contiguous(), ids[:, 1:].contiguous()]
            train_step(model, optimizer, [batch], next_token_loss, device=device)
    return Engine(model.eval(), tokenizer, device)


@pytest.fixture(scope="module", params=TOOL_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base, template = TOOL_FAMILIES[family]
    return save_family(tmp_path_factory.mktemp("family") / "model", base, chat_template=template)


@pytest.fixture(scope="module")
def model(family: str, folder: Path) -> LoadedModel:
    tokenizer = Tokenizer.load(folder)
    scheduler = Scheduler(fine_tuned(tokenizer), slots=2, queue=8)
    scheduler.start()
    return LoadedModel(scheduler, tokenizer, family, CONTEXT, chats=True)


@pytest.fixture(scope="module")
def client(model: LoadedModel) -> Iterator[Any]:
    with (
        serving(create_app(lambda: model)) as port,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client


def chat(client: Any, messages: list[Any] = QUESTION, **settings: Any) -> Any:
    settings = {"model": "nanochat", "temperature": 0, "max_tokens": 120, "tools": TOOLS, **settings}
    return client.chat.completions.create(messages=messages, **settings)


def test_an_agent_calls_reads_the_result_and_answers(client: Any, monkeypatch: pytest.MonkeyPatch):
    """The loop of every agent, with the client's own objects handed back."""
    monkeypatch.setattr(server_tools, "new_id", lambda: CALL["id"])  # the only one that the model has seen
    messages: list[Any] = list(QUESTION)
    choice = chat(client, messages).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and call.function.name == "weather"
    assert json.loads(call.function.arguments) == ARGUMENTS
    assert choice.message.content is None  # the empty thought that Qwen3's template writes is in no field
    messages.append(choice.message)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT["content"]})
    answer = chat(client, messages).choices[0]
    assert answer.finish_reason == "stop" and not answer.message.tool_calls
    assert answer.message.content.endswith("It rains, and it has 9 degrees.")
    for settings in ({"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}):  # then nothing is parsed
        assert chat(client, max_tokens=8, **settings).choices[0].message.tool_calls is None
    for arguments, results, why in (("", 1, "no call before it"), ("{}", 0, "no result"), ("[1]", 1, "JSON object")):
        call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
        calls = [{"role": "assistant", "content": None, "tool_calls": [call]}] if arguments else []
        with pytest.raises(openai.BadRequestError, match=why):
            chat(client, [*QUESTION, *calls, *SENT[1:] * results])


def test_the_prompt_is_the_familys_own(client: Any, model: LoadedModel, folder: Path):
    """Tools, a call and its result become transformers' ids, from what a client sends."""
    transformers = pytest.importorskip("transformers")
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    for messages, theirs in ((QUESTION, QUESTION), ([*QUESTION, *SENT], LEARNED[:3])):
        (prompt,) = prompts.encode_prompts(model, ChatBody(messages=messages, tools=TOOLS))  # pyright: ignore
        expected = oracle.apply_chat_template(theirs, tools=TOOLS, add_generation_prompt=True, return_dict=False)
        assert prompt.ids == expected == render_prompt(model.tokenizer, theirs, tools=TOOLS)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "roll"}}])
def test_a_required_call_follows_the_schema(client: Any, family: str, choice: Any):
    """`roll` is not what the model has learned: its name and arguments come from the schema."""
    faces = {"type": "object", "properties": {"faces": {"enum": [6, 20]}}, "required": ["faces"]}
    tools = [*TOOLS, {"type": "function", "function": {"name": "roll", "parameters": faces}}]
    if family == "coder":
        with pytest.raises(openai.BadRequestError, match="writes calls in XML, which this server cannot require"):
            chat(client, tools=tools, tool_choice=choice)
        return
    (call,) = chat(client, tools=tools, tool_choice=choice).choices[0].message.tool_calls
    name, arguments = call.function.name, json.loads(call.function.arguments)
    stream = chat(client, tools=tools, tool_choice=choice, stream=True)
    fragments = [one.function for chunk in stream for one in chunk.choices[0].delta.tool_calls or ()]
    assert fragments[0].name == name and json.loads("".join(one.arguments for one in fragments)) == arguments
    assert name == ("weather" if choice == "required" else "roll")  # it takes the learned one of the two
    if name == "roll":
        assert arguments in ({"faces": 6}, {"faces": 20})
    elif family == "mistral named":  # a list, which this model has not learned: it has the name before the call
        assert list(arguments) == ["city"]
    else:
        assert arguments == ARGUMENTS


def test_the_thought_of_an_earlier_reply_goes_to_a_template_that_writes_it(model: LoadedModel):
    shown = []
    for more in ({}, {"reasoning_content": "a cloud"}):
        body = ChatBody(messages=[*QUESTION, {**SENT[0], **more}, SENT[1]], tools=TOOLS)  # pyright: ignore
        (prompt,) = prompts.encode_prompts(model, body)
        shown.append(model.tokenizer.decode(prompt.ids))
    assert isinstance(model.tokenizer, ImportedTokenizer)
    writes_thoughts = "</think>" in model.tokenizer.templates["default"]
    assert ("a cloud" in shown[1]) == writes_thoughts == (shown[0] != shown[1])
    # A template may have a field for it, and no marks.
    source = "{% for message in messages %}{{ message.reasoning_content }}: {{ message.content }}, {% endfor %}"
    own = replace(model, tokenizer=model.tokenizer.with_chat_template(source, "own.jinja"))
    reply = {"role": "assistant", "content": "Rain.", "reasoning_content": "a cloud"}
    (prompt,) = prompts.encode_prompts(own, ChatBody(messages=[*QUESTION, reply, *QUESTION]))  # pyright: ignore
    assert "a cloud: Rain., " in model.tokenizer.decode(prompt.ids)


def test_a_long_chat_loses_old_turns_but_no_result_loses_its_call(model: LoadedModel):
    turn = [*SENT, {"role": "assistant", "content": "Rain."}]
    long = [*QUESTION, *turn] * 20 + QUESTION + SENT
    (whole,) = prompts.encode_prompts(model, ChatBody(messages=long, tools=TOOLS))  # pyright: ignore
    (prompt,) = prompts.encode_prompts(model, ChatBody(messages=long, tools=TOOLS, truncation="auto"))  # pyright: ignore
    assert len(whole.ids) > CONTEXT > len(prompt.ids)
    assert prompt.first_message_read is not None and prompt.first_message_read % 4 == 0  # a question
    shown = model.tokenizer.decode(prompt.ids)
    assert shown.count("rain, 9 degrees") == 1 + (len(long) - 3 - prompt.first_message_read) // 4


def test_a_model_whose_template_has_no_tools_says_so(family_tokenizers: Any):
    for family in ("qwen2", "llama3"):
        tokenizer = family_tokenizers[family]
        assert isinstance(tokenizer, ImportedTokenizer)
        model = LoadedModel(cast(Any, SimpleNamespace(size=4)), tokenizer, "plain", CONTEXT, chats=True)
        with pytest.raises(ApiError) as refused:
            prompts.encode_prompts(model, ChatBody(messages=QUESTION, tools=TOOLS))  # pyright: ignore
        assert refused.value.body["error"]["param"] == "tools" and "template of plain" in refused.value.detail


def test_several_calls_are_several_fragments(model: LoadedModel, family: str):
    """By the serializer: whole and streamed, and one where the client wants one (Llama's template takes no more)."""
    call = '{"name": "weather", "arguments": {"city": "%s"}}'
    replies = {
        "qwen": "So.\n" + "\n".join(f"<tool_call>\n{call % city}\n</tool_call>" for city in "AB"),
        "coder": "So.\n" + "\n".join(in_xml("weather", city=city) for city in "AB"),
        "llama": "; ".join(call % city for city in "AB"),
        "mistral": f"[TOOL_CALLS] [{call % 'A'}, {call % 'B'}]",
        "mistral named": '[TOOL_CALLS]weather[ARGS]{"city": "A"}[TOOL_CALLS]weather[ARGS]{"city": "B"}',
    }
    for parallel in (None, False):
        body = ChatBody(messages=QUESTION, tools=TOOLS, parallel_tool_calls=parallel)  # pyright: ignore
        prompts.encode_prompts(model, body)
        count = 1 if parallel is False or family == "llama" else 2
        serializer = ChatSerializer(model, body)
        chunks = [Chunk((1,), character) for character in replies[family]] + [Chunk(finish_reason="stop")]
        deltas = [serializer.chunk(0, chunk)["delta"] for chunk in chunks]
        for chunk in chunks:
            serializer.add(0, chunk)
        fragments = [one for delta in deltas for one in delta.get("tool_calls", ())]
        (choice,) = json.loads(b"".join(serializer.whole({})))["choices"]
        assert [one["index"] for one in fragments] == list(range(count))
        assert [one["function"] for one in fragments] == [one["function"] for one in choice["message"]["tool_calls"]]
        assert len({one["id"] for one in fragments}) == count and {len(one["id"]) for one in fragments} == {9}
        assert {one["type"] for one in fragments} == {"function"} and choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == ("So." if family in ("qwen", "coder") else None)


# ---------------------------------------------------------------------- thoughts

ENDING = "<|im_end|>"
INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
DOCUMENT: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": INTEGER}}}
THINKERS = ("qwen3", "qwen3_5_think", "deepseek_r1_distill")  # the prompts of the last two begin the thought
XML_THINKERS = ("qwen3_5_think", "qwen3_8")


class Script:
    """A server of a tiny model, whose replies are what a test says, token by token."""

    def __init__(self, folder: Path, template: str, monkeypatch: pytest.MonkeyPatch):
        self.template = template
        source = TOOL_FAMILIES["coder"][1] if template == "coder" else published(template)
        self.folder = save_family(folder, "qwen3", chat_template=source)
        self.tokenizer = cast(ImportedTokenizer, Tokenizer.load(self.folder))
        config = tiny_config(vocab_size=self.tokenizer.vocab_size, sequence_len=8192, n_layer=1)
        scheduler = Scheduler(Engine(lively_model(config), self.tokenizer, cpu_device()), slots=2)
        scheduler.start()
        self.model = LoadedModel(scheduler, self.tokenizer, template, 8192, chats=True)
        self.ask: Any = None  # httpx's, set by the fixture
        self.says: list[int] = []
        self.prompt: list[int] = []  # of the last request
        masked = Slots._masked

        def scripted(slots: Slots, logits: torch.Tensor) -> torch.Tensor:
            allowed = masked(slots, logits).clone()
            for row, choices in zip(slots.rows, allowed, strict=True):
                self.prompt = list(row.prompt)
                token = self.says[row.made] if row.made < len(self.says) else -1
                if token >= 0 and choices[token] > -torch.inf:
                    choices.fill_(-torch.inf)
                    choices[token] = 0.0
            return allowed

        monkeypatch.setattr(Slots, "_masked", scripted)

    def reply(self, says: str, thought: str | None = None, **body: Any) -> Any:
        """The first choice of the reply to a body, and its usage. Whole and in a stream it is the same. `says` has its
        thought, if `thought` is None.

        Raises ValueError: with the message of a refusal.
        """
        if thought is not None:
            is_begun = self.template != "qwen3" or "response_format" in body or "tool_choice" in body
            begin = "" if is_begun else "\n<think>\n"
            says = f"{begin}{thought}\n</think>\n\n{says}"
        self.says = self.tokenizer.chat_format.encode_begun(says)
        body = {"messages": QUESTION, "temperature": 0, "max_tokens": 200, **body}
        whole = self.ask("POST", "/v1/chat/completions", json=body)
        if whole.status_code != 200:
            raise ValueError(whole.json()["error"]["message"])
        choice = whole.json()["choices"][0]
        message = choice.pop("message")
        text = self.ask("POST", "/v1/chat/completions", json={**body, "stream": True}).text
        events = [event["choices"][0] for event in events_of(text)]
        events = [event for event in events if event["index"] == 0]
        for name in ("reasoning_content", "content"):
            assert "".join(event["delta"].get(name, "") for event in events) == (message.get(name) or "")
        calls = message.get("tool_calls", [])
        fragments = [one for event in events for one in event["delta"].get("tool_calls", ())]
        for name in ("name", "arguments"):
            streamed = "".join(one["function"].get(name, "") for one in fragments)
            assert streamed == "".join(call["function"][name] for call in calls)
        assert events[-1]["finish_reason"] == choice["finish_reason"]
        thought = message.pop("reasoning_content", None)
        return SimpleNamespace(**choice, **message, calls=calls, thought=thought, usage=whole.json()["usage"])


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    script = Script(tmp_path / "model", request.param, monkeypatch)
    with client_of(create_app(lambda: script.model)) as ask:
        until(lambda: ask("GET", "/ready").status_code == 200)
        script.ask = ask
        yield script


@pytest.mark.parametrize("script", THINKERS, indirect=True)
def test_a_thought_is_apart_from_the_content(script: Script, tmp_path: Path):
    said = {"thought": "I <b> weigh it.", "says": f"Yes. <b>{ENDING}"}
    whole = script.reply(**said, n=2, logprobs=True)
    assert (whole.thought, whole.content, whole.finish_reason) == ("I <b> weigh it.", "Yes. <b>", "stop")
    assert "".join(one["token"] for one in whole.logprobs["content"]) == "Yes. <b>"
    assert whole.usage["completion_tokens"] == 2 * (len(script.says) - 1)
    stopped = script.reply(**said, stop=["weigh", "es"])  # it counts in the content only
    assert (stopped.thought, stopped.content) == ("I <b> weigh it.", "Y")
    for max_tokens in range(1, len(script.says) - 1):
        cut = script.reply(**said, max_tokens=max_tokens)
        assert cut.finish_reason == "length" and whole.thought.startswith(cut.thought or "")
        if cut.content and cut.content.strip():
            assert cut.thought == whole.thought and whole.content.startswith(cut.content)
        elif cut.thought:
            assert cut.content is None
    # As training data of scripts.chat_batch.
    Batch(script.model, 200).answer([Line(1, {"messages": QUESTION}), Line(2, "Is it?")], tmp_path / "out.jsonl")
    chat, completion = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    expected = {"reasoning_content": whole.thought, "content": whole.content}
    assert chat["messages"][-1] == {"role": "assistant", **expected}
    assert completion == {"prompt": "Is it?", "reasoning_content": whole.thought, "completion": whole.content}
    # Without a thought, and what a client continues.
    if script.template == "qwen3":
        assert script.reply(f"Yes <think>{ENDING}").content == "Yes <think>"
    for begun, says, expected in (
        ({"content": None, "reasoning_content": "I w"}, f"eigh.\n</think>\n\nYes.{ENDING}", ("eigh.", "Yes.")),
        ({"content": "Y", "reasoning_content": "I weigh."}, f"es. <think>{ENDING}", (None, "es. <think>")),
        ({"content": "Y"}, f"es.{ENDING}", (None, "es.")),
    ):
        rest = script.reply(says, messages=[*QUESTION, {"role": "assistant", **begun}])
        assert (rest.thought, rest.content) == expected
        opens = "reasoning_content" in begun or script.template != "qwen3"
        assert script.tokenizer.decode(script.prompt).count("<think>") == opens


@pytest.mark.parametrize("script", THINKERS, indirect=True)
def test_a_schema_begins_after_the_thought(script: Script):
    for thought, says in (
        ("So.", ""),
        (None, "so " * 200),  # it never ends
        (None, f"So.{ENDING}"),  # the turn ends in the thought
        ("So.", "No."),  # the schema has no place for it
    ):
        reply = script.reply(says, thought, **DOCUMENT)
        assert reply.finish_reason == "stop" and isinstance(json.loads(reply.content)["a"], int)
        assert reply.thought.strip().lower().startswith("so") and "think" not in reply.thought
        assert len(script.tokenizer.encode(reply.thought)) <= 100 and reply.usage["completion_tokens"] <= 200
    with pytest.raises(ValueError, match="takes 6 tokens, and 5 are left"):  # and 3 that end the thought
        script.reply("", **DOCUMENT, max_tokens=8)
    shortest = script.reply("so " * 200, **DOCUMENT, max_tokens=9)
    assert shortest.thought is None and json.loads(shortest.content) == {"a": 0}
    if script.template == "deepseek_r1_distill":  # it always thinks
        return
    prompts = []
    off: Any
    for off in ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}},
                {"reasoning_effort": "none"}, {"thinking": {"type": "disabled"}}):  # fmt: skip
        at_once = script.reply('{"a": 7}', **DOCUMENT, **off)
        assert (at_once.thought, at_once.content) == (None, '{"a": 7}')
        prompts.append(script.prompt)
    assert prompts.count(prompts[0]) == 4


CLOCK = {"name": "clock", "description": "The time", "parameters": {"type": "object", "properties": {}, "required": []}}
ADD_TYPES = {"a": {"type": "integer"}, "note": {"type": "string"}}
ADD = {"name": "add", "description": "Add", "parameters": {"type": "object", "properties": ADD_TYPES}}
THREE: list[Any] = [{"type": "function", "function": function} for function in (WEATHER, CLOCK, ADD)]


@pytest.mark.parametrize("script", ["qwen3"], indirect=True)
def test_a_required_call_comes_after_the_thought(script: Script):
    for tools, choice, name in (
        (THREE[1:2], "required", "clock"),
        (THREE, {"type": "function", "function": {"name": "add"}}, "add"),
    ):
        for says in ("So.\n</think>\n\n", "so " * 200, f"So.{ENDING}"):
            reply = script.reply(says, tools=tools, tool_choice=choice, max_tokens=140)
            (call,) = reply.tool_calls
            assert (reply.finish_reason, reply.content, call["function"]["name"]) == ("tool_calls", None, name)
            arguments = json.loads(call["function"]["arguments"])
            assert arguments == {} if name == "clock" else set(arguments) <= {"a", "note"}
            assert reply.thought.lower().startswith("so") and "think" not in reply.thought
    # Token by token as the template writes it.
    exact = 'So.\n</think>\n\n<tool_call>\n{"name": "clock", "arguments": {}}' + ENDING
    reply = script.reply(exact, tools=THREE, tool_choice="required")
    assert reply.calls[0]["function"]["name"] == "clock" and reply.usage["completion_tokens"] == len(script.says) - 1
    at_once = script.reply("", tools=THREE[1:2], tool_choice="required", enable_thinking=False)
    assert at_once.thought is None and at_once.tool_calls[0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize("script", XML_THINKERS, indirect=True)
def test_calls_in_xml_after_a_thought_and_with_thoughts_off(script: Script):
    says = f"I look.\n\n{in_xml('add', a='-12', note='12')}\n{in_xml('clock')}{ENDING}"
    calls = [("add", {"a": -12, "note": "12"}), ("clock", {})]
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    for thought, settings in (("So, <tool_call>?", {}), (None, off)):
        whole = script.reply(says, thought, tools=THREE, **settings)
        made = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in whole.calls]
        assert (whole.thought, whole.content, made) == (thought, "I look.", calls)
        assert whole.finish_reason == "tool_calls" and len({call["id"] for call in whole.calls}) == 2
        length = len(script.says)
        for max_tokens in range(length - 60, length - 1, 7):  # a call that is cut off stays text
            cut = script.reply(says, thought, tools=THREE, max_tokens=max_tokens, **settings)
            assert cut.thought == thought and cut.content.startswith("I look.") and len(cut.calls) < 2
            assert cut.finish_reason == "length" and (cut.calls or "<function=add>" in cut.content)


# In which field each client sends a thought back; the first two leave it out, and so send the same.
HISTORY = {"openai-agents, LangChain": "", "Pydantic AI": "reasoning_content", "vLLM's": "reasoning"}
# A thought, a text, and calls of a reply.
TURNS: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]] = [
    ("It wants the weather.", "", [("weather", {"city": "Paris"})]),
    ("Rain.", "It rains in Paris.", []),
    ("Two of them:\n- a city\n- a time", "I look.", [("weather", {"city": "Rome <b>"}), ("clock", {})]),
    ("", "", [("add", {"a": -12, "note": '12\n"two" lines'})]),
    ("Hm.", "12 it is.", []),
    ("I know <it>.", "Yes.", []),
    ("Once more.", "", [("clock", {})]),
    ("And again.", "", [("clock", {})]),
    ("", "At noon.", []),
    ("Bye.", "Good bye.", []),
]


@pytest.mark.parametrize(
    ("script", "client_name"),
    [
        *(("qwen3", name) for name in HISTORY),
        *((template, "Pydantic AI") for template in ("qwen3_5_think", "qwen3_8", "coder", "deepseek_r1_distill")),
    ],
    indirect=["script"],
)
def test_ten_turns_are_the_templates_own_rendering(script: Script, client_name: str):
    """What a client sends back of the replies becomes transformers' ids of the same history."""
    oracle = pytest.importorskip("transformers").PreTrainedTokenizerFast.from_pretrained(script.folder)
    has_tools = script.template != "deepseek_r1_distill"
    tools = {"tools": THREE} if has_tools else {}
    sent: list[Any] = list(QUESTION)
    history: list[Any] = list(QUESTION)  # as a template reads it
    for thought, text, calls in TURNS:
        if not has_tools:
            text, calls = text or "So.", []
        written = [
            in_xml(name, **{key: str(value) for key, value in arguments.items()})
            if script.tokenizer.templates["default"].count("<function=")
            else f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
            for name, arguments in calls
        ]
        says = "\n".join([*filter(None, [text]), *written]) + ENDING
        thinks = script.template in THINKERS or script.template in XML_THINKERS
        reply = script.reply(says, thought if thinks else None, messages=sent, **tools)
        written, ids = (
            oracle.apply_chat_template(
                history, **tools, add_generation_prompt=True, return_dict=False, tokenize=tokenize
            )
            for tokenize in (False, True)
        )
        assert script.tokenizer.decode(script.prompt) == written
        # Qwen3.5's prompts end with a line end, which stays a token where the template writes two after <think>.
        assert script.prompt == ids or script.template in XML_THINKERS

        # The reply as the server writes it, as the client sends it back, and as a template reads it.
        assert reply.thought == (thought if thought and thinks else None)
        assert reply.content == (text or None)
        made = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in reply.calls]
        assert made == calls
        reply = {"role": "assistant", "content": reply.content, "tool_calls": reply.calls, "reasoning": reply.thought}
        fields = {"role", "content", *["tool_calls"] * bool(calls)}
        sent.append({name: value for name, value in reply.items() if name in fields})
        if reply["reasoning"] and HISTORY[client_name]:
            sent[-1][HISTORY[client_name]] = reply["reasoning"]
        history.append({**sent[-1], "content": text})
        if calls:
            functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
            history[-1]["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        if "reasoning" in history[-1]:
            history[-1]["reasoning_content"] = history[-1].pop("reasoning")
        following = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in reply["tool_calls"]]
        sent += following or [{"role": "user", "content": "And then?"}]
        history += following or [{"role": "user", "content": "And then?"}]
