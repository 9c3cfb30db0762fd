"""Tools of imported models in the server: an agent with openai's client, and a model that was fine-tuned to call.

The models are tiny and know one conversation by heart. They go the whole way: template, decoding, special tokens,
parser, client, and back through the template.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from fake_server import serving
from tiny import cpu_device, lively_model, tiny_config
from tiny_families import TOOL_FAMILIES, save_family

from nanochat.conversation import render, render_prompt
from nanochat.engine import Engine
from nanochat.families.imported_tokenizer import ImportedTokenizer
from nanochat.serve import prompts
from nanochat.serve import tools as server_tools
from nanochat.serve.app import create_app
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
        assert choice["message"]["content"] == ("So." if family == "qwen" else None)
