"""T12. What is trained is what is served: before each learned reply are the ids that serving renders as its prompt.

Random conversations with thoughts, functions and their results are rendered for training, with our own tokenizer, with
every kind of template that is read here, and with all that TRL ships for the families that are read. Every reply is
learned once, behind the ids of the prompt for its history, and with its whole text; where one rendering does not allow
that, in several. Facts that a model has learned are known through the server, at every turn.
"""

import itertools
import json
import random
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.testclient import TestClient
from test_reply_spans import TEMPLATES, TOOLS, folder_of
from test_serve import until
from tiny import cpu_device, lively_model, runs_of, tiny_config, tiny_tokenizer
from tiny_families import FAMILIES, published, random_string, save_family

from nanochat.conversation import render_prompt, renderings
from nanochat.engine import Engine
from nanochat.families.imported_tokenizer import ImportedTokenizer
from nanochat.losses import masked_loss
from nanochat.packing import pack_sequences
from nanochat.serve.app import create_app
from nanochat.serve.prompts import encode_chat
from nanochat.serve.scheduler import Scheduler
from nanochat.serve.schema import ChatBody
from nanochat.serve.state import LoadedModel
from nanochat.tokenizer import Tokenizer
from nanochat.train import make_adamw, train_step

CLOSED = {"enable_thinking": False}  # only the template of qwen3 reads it
OPENED = {"enable_thinking": True}
PUBLISHED = [
    f"{name}{training}"
    for name in (
        *("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8"),
        *("llama3", "deepseek_r1_distill", "phi3", "phi3_5"),
    )
    for training in ("", "_training")
] + ["llama3_1", "llama3_2", "off"]
# An owner's line before Qwen3.5's template: thoughts are off unless a client turns them on.
OFF = "{%- set enable_thinking = enable_thinking | default(false) %}\n"
# What these learn of plain replies, of thoughts and of calls, at least: the rest their template does not write.
PARTLY = {name: (1, 1, 0.3) for name in ("llama3", "llama3_1", "llama3_2", "deepseek_r1_distill", "phi3", "phi3_5")}
PARTLY |= {f"{name}_training": (1, 1, 0.3) for name in ("phi3", "phi3_5")}


def tokenizer_of(name: str, folder: Path) -> Tokenizer:
    if name == "ours":
        return tiny_tokenizer()
    if name in TEMPLATES:
        return Tokenizer.load(folder_of(folder, name, ("", "")))
    return Tokenizer.load(save_family(folder, name))


def conversation(source: random.Random, thinks: bool, calls: int = 0) -> list[dict[str, Any]]:
    """With up to `calls` calls at once, and without the characters that mark places. No reply begins with white space,
    which would join a prompt's last token."""

    def text(first: str) -> str:
        return first + random_string(source).replace("think>", "").replace("\U0010ffff", "").strip()

    def thought() -> str:
        return f"<think>\n{text('hm')}\n</think>\n\n" if thinks and source.random() < 0.6 else ""

    messages: list[dict[str, Any]] = [{"role": "system", "content": text("Be")}] if source.random() < 0.4 else []
    for _ in range(source.randrange(1, 4)):
        messages.append({"role": "user", "content": text("why")})
        if calls and source.random() < 0.6:
            function = {"name": "weather", "arguments": {"city": text("P"), "days": [source.randrange(9)]}}
            calls_made = [
                {"id": f"00000000{n}", "type": "function", "function": function}
                for n in range(source.randint(1, calls))
            ]
            messages.append({"role": "assistant", "content": thought(), "tool_calls": calls_made})
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": text("sun")} for call in calls_made]
        messages.append({"role": "assistant", "content": thought() + text("so")})
    return messages


def as_encoded(text: str) -> str:
    """As the tokenizers here normalize it."""
    return unicodedata.normalize("NFC", text).replace("\u2581", " ")


def prompt_of(tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: Any, settings: Any = None) -> list[int]:
    """What the server renders of these messages as clients send them, with parts, thoughts in a field, and JSON."""
    if not isinstance(tokenizer, ImportedTokenizer) or (tools and tokenizer.chat_format.call_form is None):
        return render_prompt(tokenizer, messages, tools=tools)
    template = tokenizer.chat_format.template
    sent = []
    for message in messages:
        thought, mark, text = message["content"].rpartition("</think>")
        is_apart = mark and template.has_thoughts  # otherwise the server sends the thought as a part of the text
        fields = {**message, "content": [{"type": "text", "text": text.lstrip() if is_apart else message["content"]}]}
        if is_apart:
            fields["reasoning_content"] = thought.removeprefix("<think>").strip()
        for call in message.get("tool_calls", []):
            function = {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}
            fields["tool_calls"] = [*fields["tool_calls"][1:], {**call, "function": function}]
        sent.append(fields)
    model = LoadedModel(cast(Any, SimpleNamespace(size=4)), tokenizer, "model", 9999, chats=True)
    body = ChatBody.model_validate({"messages": sent, "tools": tools, "chat_template_kwargs": settings})
    return encode_chat(model, body).ids


def check_replies(tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: Any = None) -> tuple[int, int]:
    """Each reply is learned once and behind its prompt; returns how many replies there are, and how many are learned.

    A template's marks may begin before the prompt ends, or leave out a part of a reply.
    """
    prompts = {}
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            ids = prompt_of(tokenizer, messages[:number], tools)
            if "</think>" in message["content"] and tokenizer.decode(ids).endswith("</think>\n\n"):
                ids = prompt_of(tokenizer, messages[:number], tools, OPENED)
            prompts[number] = ids
    found = renderings(tokenizer, messages, tools=tools)
    is_marked = isinstance(tokenizer, ImportedTokenizer) and tokenizer.chat_format.template.has_marks(tools)
    learned = []
    for rendered in found:
        for begin, end in runs_of(rendered.mask):
            (number,) = [
                number
                for number, ids in prompts.items()
                if rendered.ids[: len(ids)] == ids and (begin <= len(ids) < end if is_marked else begin == len(ids))
            ]
            learned.append(number)
            text = as_encoded(tokenizer.decode(rendered.ids[begin:end]))
            thought, _, said = as_encoded(messages[number]["content"]).rpartition("</think>")
            assert is_marked or (said.strip() in text and thought.removeprefix("<think>").strip() in text)
    assert len(learned) == len(set(learned)) and sum(one.replies for one in found) == len(prompts)
    assert len(learned) + sum(one.unlearned for one in found) == len(prompts)
    assert not learned or learned[-1] == max(learned)  # pairs of replies are the last ones
    return len(prompts), len(learned)


@pytest.mark.parametrize("name", ["ours", *FAMILIES, *TEMPLATES])
def test_before_each_learned_reply_are_the_ids_that_serving_renders(tmp_path, name):
    tokenizer = tokenizer_of(name, tmp_path / "model")
    source = random.Random(11)
    for thinks in (False, True) if name != "ours" else (False,):
        counts = [check_replies(tokenizer, conversation(source, thinks)) for _ in range(40)]
        replies, learned = map(sum, zip(*counts, strict=True))
        drops = name == "empty thought"  # this template leaves thoughts out of every turn
        assert replies > 60 and (0 < learned < replies if thinks and drops else learned == replies)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_templates_too(tmp_path, name):
    """The package `trl` brings copies; the vocabulary is a tiny one."""
    source = OFF + published("qwen3_5_think") if name == "off" else published(name)
    family = "llama3" if name.startswith("llama") else "qwen3_5"
    tokenizer = Tokenizer.load(save_family(tmp_path / "model", family, chat_template=source))
    draw = random.Random(5)
    most_calls = 1 if name.startswith("llama") else 2
    for thinks, calls in ((False, 0), (True, 0), (True, most_calls))[: 3 if "tool_calls" in source else 2]:
        tools = TOOLS if calls else None
        counts = [check_replies(tokenizer, conversation(draw, thinks, calls), tools) for _ in range(10)]
        replies, learned = map(sum, zip(*counts, strict=True))
        share = PARTLY.get(name, (1, 1, 1))[thinks + bool(calls)]
        assert replies > 10 and (learned == replies if share == 1 else share * replies < learned < replies)


@pytest.mark.parametrize("name", ["qwen3", "opened thought"])
def test_a_client_may_keep_the_thought_of_an_earlier_reply_or_not(tmp_path, name):
    """The ids are the same, in data too, and where it sends back what the server has sent."""
    tokenizer = tokenizer_of(name, tmp_path / "model")
    kept = ["so", "<think>\nhm\n</think>\n\nso", *(["\nhm\n</think>\n\nso"] if name == "opened thought" else [])]
    question = [{"role": "user", "content": "why"}]
    prompts = [
        render_prompt(tokenizer, [*question, {"role": "assistant", "content": text}, *question]) for text in kept
    ]
    assert all(prompt == prompts[0] for prompt in prompts)
    chat = [*question, {"role": "assistant", "content": kept[1]}, *question, {"role": "assistant", "content": "then"}]
    assert renderings(tokenizer, chat)[-1].ids[: len(prompts[0])] == prompts[0]


# ---------------------------------------------------------------------- through the server

FACTS = {"Who hums?": "A bee.", "Who is red?": "The sail.", "How many?": "13 boats", "Which day?": "May 4"}
TURNS = [
    [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    for question, answer in FACTS.items()
]
CHATS = [[*TURNS[0], *TURNS[1]], [*TURNS[2], *TURNS[3]]]


@contextmanager
def served(model: Any, tokenizer: Tokenizer) -> Iterator[TestClient]:
    engine = Engine(model, tokenizer, cpu_device())

    def load() -> LoadedModel:
        scheduler = Scheduler(engine, slots=2, queue=4)
        scheduler.start()
        return LoadedModel(scheduler, tokenizer, "model", model.config.sequence_len, chats=True)

    app = create_app(load)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        until(lambda: app.state.nanochat.model is not None, 60)
        yield client


@pytest.mark.parametrize("name", ["ours", "qwen2", "qwen3", "llama3", "mistral", *TEMPLATES])
def test_facts_that_are_learned_are_known_through_the_server(tmp_path, name):
    """Facts of a chat's first turn, too, and after a prompt that closes the thought."""
    tokenizer = tokenizer_of(name, tmp_path / "model")
    rows = [row for messages in CHATS for row in renderings(tokenizer, messages)]
    packed = pack_sequences([row.ids for row in rows], [row.mask for row in rows], 128)
    model = lively_model(tiny_config(vocab_size=tokenizer.vocab_size, n_layer=2, sequence_len=128))
    device = cpu_device()
    optimizer = make_adamw(model, 1e-2, device)
    for _ in range(150):
        step = train_step(model, optimizer, [packed], masked_loss, device=device)
        if float(step.loss) < 0.01:
            break
    assert float(step.loss) < 0.01
    every = [{}, {"chat_template_kwargs": CLOSED}] if name == "qwen3" else [{}]
    with served(model.eval(), tokenizer) as client:
        for messages, end, settings in itertools.product(CHATS, (1, 3), every):
            body = {"messages": messages[:end], "temperature": 0, "max_tokens": 30, **settings}
            (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]
            *_, reply = choice["message"]["content"].rpartition("</think>")
            assert reply.strip() == messages[end]["content"], json.dumps(choice)
            assert choice["finish_reason"] == "stop"
