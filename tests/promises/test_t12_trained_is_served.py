"""T12. What is trained is what is served: before each learned reply are the ids that serving renders as its prompt.

Random conversations are rendered for training, with our own tokenizer and with every kind of template that is read
here. Before a learned reply the ids are those of the prompt for that history. Where a template does not allow that (it
opens a thought that replies lose, or moves the system message), the reply is counted as misplaced, and a run warns.
The templates that Qwen and Llama publish are read as texts. Facts that a model has learned are known through the
server.

Not covered yet: the ids of published templates with their own vocabularies, function calls and tools in the history,
families whose folders are not read, and facts that one of the training commands has taught.
"""

import importlib.util
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from test_reply_spans import TEMPLATES, folder_of
from test_serve import until
from tiny import cpu_device, lively_model, tiny_config, tiny_tokenizer
from tiny_families import FAMILIES, random_string, save_family

from nanochat.conversation import render, render_prompt
from nanochat.cross_entropy import IGNORE
from nanochat.engine import Engine
from nanochat.families.chat_template import ChatTemplate
from nanochat.families.reply_spans import Conversation
from nanochat.serve.app import create_app
from nanochat.serve.scheduler import Scheduler
from nanochat.serve.state import LoadedModel
from nanochat.tasks.learned_share import report_learned
from nanochat.tokenizer import Tokenizer
from nanochat.train import make_adamw, next_token_loss, train_step

CLOSED = {"enable_thinking": False}  # only the template of qwen3 reads it
PUBLISHED = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3", "llama3_1", "llama3_2")


def tokenizer_of(name: str, folder: Path) -> Tokenizer:
    if name == "ours":
        return tiny_tokenizer()
    if name in TEMPLATES:
        return Tokenizer.load(folder_of(folder, name, ("", "")))
    return Tokenizer.load(save_family(folder, name))


def conversation(source: random.Random) -> list[dict[str, str]]:
    """Without thoughts, which some templates drop, and without the characters that mark places. No reply begins with
    white space, which would join a prompt's last token."""

    def text(first: str) -> str:
        return first + random_string(source).replace("think>", "").replace("\U0010ffff", "")

    messages = [{"role": "system", "content": text("Be")}] if source.random() < 0.4 else []
    for _ in range(source.randrange(1, 4)):
        messages += [{"role": "user", "content": text("why")}, {"role": "assistant", "content": text("so")}]
    return messages


@pytest.mark.parametrize("name", ["ours", *FAMILIES, *TEMPLATES])
def test_the_ids_before_each_learned_reply_are_the_prompt_that_serving_renders(tmp_path, name):
    tokenizer = tokenizer_of(name, tmp_path / "model")
    source = random.Random(11)
    served = misplaced = 0
    for _ in range(60):
        messages = conversation(source)
        rendered = render(tokenizer, messages)
        is_target = [0, *rendered.mask]
        starts = [place for place in range(len(rendered.ids)) if is_target[place : place + 2] == [0, 1]]
        numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        assert len(starts) == len(numbers) == rendered.replies and not rendered.unlearned
        elsewhere = 0
        for start, number in zip(starts, numbers, strict=True):
            prompt = render_prompt(tokenizer, messages[:number])
            prompts = [prompt]
            if name == "qwen3":  # a reply without a thought is also for the prompt that closes it
                prompts.append(render_prompt(tokenizer, messages[:number], settings=CLOSED))
            is_served = all(rendered.ids[: len(one)] == one for one in prompts)
            assert start == len(prompt) or not is_served
            elsewhere += not is_served
            served += is_served
        assert rendered.misplaced == elsewhere
        misplaced += elsewhere
    assert (misplaced > 0) == (name in ("qwen3", "late system", "opened thought"))
    assert served > 0 or name == "opened thought"


TURNS = [
    {"role": "user", "content": "why"},
    {"role": "assistant", "content": "so"},
    {"role": "user", "content": "and"},
    {"role": "assistant", "content": "then"},
]
THOUGHTFUL = [TURNS[0], {**TURNS[1], "content": "<think>\nhm\n</think>\n\nso"}]


@pytest.mark.parametrize(
    ("name", "messages", "misplaced"),
    [
        # The prompt opens a thought, and no reply has one.
        ("opened thought", TURNS, 2),
        # Only the last reply has the empty thought that ends the prompt of enable_thinking=False.
        ("qwen3", TURNS, 1),
        ("qwen3", TURNS[:2], 0),
        ("qwen3", THOUGHTFUL, 0),
        # The system message is in the last question of a prompt.
        ("late system", [{"role": "system", "content": "Be."}, *TURNS], 2),
        ("late system", TURNS, 0),
    ],
)
def test_a_run_warns_of_replies_after_another_prompt(tmp_path, capsys, name, messages, misplaced):
    tokenizer = tokenizer_of(name, tmp_path / "model")
    rendered = render(tokenizer, messages)
    replies = rendered.replies
    assert rendered.misplaced == misplaced and not rendered.unlearned
    report_learned([rendered] * 2, tokenizer)
    shown = capsys.readouterr()
    share = f"learned: {1 - misplaced / replies:.1%} of the replies and "
    if misplaced:
        assert shown.err.startswith(f"warning: {share}") and shown.err.count("\n") == 1
        assert f"{2 * misplaced} of {2 * replies} replies" in shown.err
    else:
        assert share in shown.out and not shown.err


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_templates_write_a_reply_after_its_prompt(name):
    """As texts: the package `trl` brings copies, whose vocabularies are not here."""
    package = importlib.util.find_spec("trl")
    if package is None:
        pytest.skip("pip install --no-deps trl==1.16.0")
    source = Path((package.submodule_search_locations or [""])[0], "chat_templates", f"{name}.jinja").read_text()
    ends = ["<|im_end|>", "<|eot_id|>"]
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    template = ChatTemplate({"default": source}, names, [*ends, "<|begin_of_text|>"])
    draw = random.Random(5)
    found = 0
    for _ in range(12):
        messages = conversation(draw)
        whole = template.render(messages)
        replies = Conversation(template, whole, messages, None, ends).replies()
        numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        for number, reply in zip(numbers, replies, strict=True):
            prompt = template.render(messages[:number], add_generation_prompt=True).text
            ((start, end),) = reply.spans
            assert any(whole.text[start:end].endswith(mark) for mark in ends)
            assert whole.text[:start] == prompt or not reply.is_served
            found += reply.is_served
    assert found > 5


# ---------------------------------------------------------------------- through the server

FACTS = {"Who hums?": "A bee.", "Who is red?": "The sail.", "How many?": "13 boats"}


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


@pytest.mark.parametrize("name", ["ours", "qwen2", "qwen3", "llama3", "mistral"])
def test_facts_that_are_learned_are_known_through_the_server(tmp_path, name):
    tokenizer = tokenizer_of(name, tmp_path / "model")
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in FACTS.items()]
    rows = [render(tokenizer, messages) for messages in chats]
    length = max(len(row.ids) for row in rows)
    inputs = torch.zeros(len(rows), length, dtype=torch.long)
    targets = torch.full((len(rows), length), IGNORE)
    for place, row in enumerate(rows):
        inputs[place, : len(row.ids)] = torch.tensor(row.ids)
        learned = torch.tensor(row.ids).where(torch.tensor(row.mask) > 0, IGNORE)
        targets[place, : len(row.ids) - 1] = learned[1:]
    model = lively_model(tiny_config(vocab_size=tokenizer.vocab_size, n_layer=2, sequence_len=128))
    device = cpu_device()
    optimizer = make_adamw(model, 1e-2, device)
    for _ in range(150):
        step = train_step(model, optimizer, [[inputs, targets]], next_token_loss, device=device)
        if float(step.loss) < 0.01:
            break
    assert float(step.loss) < 0.01
    with served(model.eval(), tokenizer) as client:
        for messages, row in zip(chats, rows, strict=True):
            prompt = client.post("/tokenize", json={"messages": messages[:1]}).json()["tokens"]
            assert row.ids[: len(prompt)] == prompt and row.mask[: len(prompt)] == [0] * len(prompt)
            body = {"messages": messages[:1], "temperature": 0, "max_tokens": 30}
            (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]
            reply = choice["message"]["content"]
            assert reply.removeprefix("<think>\n\n</think>\n\n") == messages[1]["content"], json.dumps(choice)
            assert choice["finish_reason"] == "stop"
