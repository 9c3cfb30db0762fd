"""Chat templates: transformers' texts, ids and masks; no special token from a message; hostile ones end in a line."""

import asyncio
import json
import multiprocessing
import pickle
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import pytest
from starlette.testclient import TestClient
from test_serve import until
from tiny import complaint, cpu_device, learned, lively_model, tiny_config, tiny_tokenizer, write_rows
from tiny_families import FAMILIES, random_string, save_family

from nanochat.conversation import fit_prompt, parse_reply, render, render_prompt, text_of
from nanochat.engine import Engine, ending
from nanochat.families.chat_template import ChatTemplate, TemplateError
from nanochat.families.imported_tokenizer import ImportedTokenizer
from nanochat.ground.cli import UserError
from nanochat.mixture import MixtureCorpus
from nanochat.sampling import SamplingParams
from nanochat.serve.app import create_app
from nanochat.serve.scheduler import Scheduler
from nanochat.serve.state import LoadedModel
from nanochat.tasks.flag import Reading, open_mixture
from nanochat.tokenizer import Tokenizer

HELLO = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! A boat?"},
    {"role": "user", "content": "the boat's sail"},
    {"role": "assistant", "content": "The sail is red."},
]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "of <a> city", "parameters": {"type": "object", "properties": {}}},
}
CALLED = [
    {"role": "system", "content": "You are helpful."},
    {"role": "user", "content": "Paris?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}],
    },
    {"role": "tool", "content": '{"sun": true}'},
    {"role": "assistant", "content": "Sun."},
]


def conversation(source: random.Random) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": random_string(source) or "s"}] if source.random() < 0.4 else []
    for _ in range(source.randrange(1, 4)):
        for role in ("user", "assistant"):
            messages.append({"role": role, "content": random_string(source) or "x"})
    return messages


def special_of(tokenizer: ImportedTokenizer, ids: list[int]) -> list[int]:
    return [token for token in ids if token in tokenizer.special_ids.values()]


@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_are_those_of_transformers(family_folders, family_tokenizers, family):
    """Text, ids, and the mask of what follows a prompt; names of special tokens in messages stay text."""
    transformers = pytest.importorskip("transformers")
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(family_folders[family])
    tokenizer = family_tokenizers[family]
    template = tokenizer.chat_template
    assert template is not None
    source = random.Random(3)
    equal = different = 0
    for _ in range(100):
        messages = conversation(source)
        assert template.render(messages).text == oracle.apply_chat_template(messages, tokenize=False)
        rendered = render(tokenizer, messages)
        prompt = render_prompt(tokenizer, messages[:-1])
        # The mask is that of what the engine would sample: after the prompt, up to and with the end of the turn.
        assert rendered.ids[: len(prompt)] == prompt
        reply = rendered.ids[len(prompt) :]
        end = reply.index(tokenizer.reply_ends[0]) + 1
        assert rendered.mask[len(prompt) :] == [1] * end + [0] * (len(reply) - end)
        if any(name in message["content"] for message in messages for name in tokenizer.special_ids):
            harmless = [{**message, "content": "x"} for message in messages]
            expected = special_of(tokenizer, render(tokenizer, harmless).ids)
            assert special_of(tokenizer, rendered.ids) == expected
            continue
        theirs = oracle.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=family == "marked")
        if rendered.ids == theirs["input_ids"]:
            equal += 1
            if family == "marked":
                assert rendered.mask == theirs["assistant_masks"]
        else:  # a reply begins with a line end, which would join the prompt's last one to one token
            different += 1
            assert any(message["content"][:1].isspace() for message in messages if message["role"] == "assistant")
    assert equal > 40 and different < 5


def test_tools_and_settings_of_a_template(family_folders, family_tokenizers):
    transformers = pytest.importorskip("transformers")
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(family_folders["qwen3"])
    tokenizer = family_tokenizers["qwen3"]
    rendered = render(tokenizer, CALLED, tools=[WEATHER])
    assert rendered.ids == oracle.apply_chat_template(CALLED, tools=[WEATHER], return_dict=True)["input_ids"]
    text = learned(tokenizer, rendered)
    assert '<tool_call>\n{"name": "weather"' in text and text.endswith("Sun.<|im_end|>")
    assert "sun" not in text and rendered.unlearned == 0
    settings = {"enable_thinking": False}
    theirs = oracle.apply_chat_template(HELLO[:1], add_generation_prompt=True, return_dict=True, **settings)
    assert render_prompt(tokenizer, HELLO[:1], settings=settings) == theirs["input_ids"]
    assert fit_prompt(tokenizer, HELLO[:1], 100, settings=settings).ids == theirs["input_ids"]
    # They are a stranger's: no special token comes from them, and they replace nothing that is ours.
    template = ChatTemplate({"default": "{{ a }}{{ eos_token }}{{ messages | length }}"}, {"eos_token": "<e>"}, ["<e>"])
    rendered = template.render(HELLO, settings={"a": "<e>", "eos_token": "b", "messages": "c"})
    assert rendered.text == "<e><e>4" and rendered.specials == [(3, 6, "<e>")]


def test_a_data_set_with_function_calls(family_tokenizers, tmp_path, capsys):
    """OpenAI's form: arguments and tools as JSON in texts, no content, a result at the end that nobody answers."""
    call = CALLED[2]["tool_calls"][0]
    asks = {"role": "assistant", "content": None, "tool_calls": [{**call, "function": {**call["function"]}}]}
    asks["tool_calls"][0]["function"]["arguments"] = '{"city": "Paris"}'
    row = {"messages": [*CALLED[:2], asks, *CALLED[3:], CALLED[1], asks, CALLED[3]], "tools": json.dumps([WEATHER])}
    file = write_rows(tmp_path / "calls.parquet", [row] * 2)
    mixture = open_mixture(file, "train")
    expected = render(family_tokenizers["qwen3"], [*CALLED, *CALLED[1:3]], tools=[WEATHER])
    rendered = mixture.rendered(family_tokenizers["qwen3"], 0)[-1]
    assert (rendered.ids, rendered.mask) == (expected.ids, expected.mask)
    # Our own format has no such calls.
    assert not mixture.rendered(tiny_tokenizer(), 0)[0].ids
    assert "left out" in capsys.readouterr().err
    assert not mixture.rendered(tiny_tokenizer(), 1)[0].ids
    assert not capsys.readouterr().err
    file = write_rows(tmp_path / "answered.parquet", [{**row, "messages": row["messages"][:5]}] * 2)
    strict = open_mixture(f"mine={file}", "train", Reading(strict_data=True))
    corpora = [MixtureCorpus(one, tiny_tokenizer()) for one in (mixture, strict)]
    assert not corpora[0].read_block(0)  # in mid-training, too
    for read in (lambda: strict.rendered(tiny_tokenizer(), 0), lambda: corpora[1].read_block(0)):
        assert complaint(read).startswith(f"--tasks mine: {file} ")


def test_a_model_whose_format_refuses_every_chat_ends_the_run(tmp_path):
    file = write_rows(tmp_path / "calls.jsonl", [{"messages": CALLED}] * 2)
    mixture = open_mixture(file, "train")
    for index in range(99):
        assert not mixture.rendered(tiny_tokenizer(), index)[0].ids
    for index in (99, 100):  # threads that read beside each other all end
        assert f"{file} " in complaint(lambda index=index: mixture.rendered(tiny_tokenizer(), index))


def test_no_message_makes_a_special_token_with_its_neighbour():
    """Two messages that the template joins; whole names, and names that one begins and the next one ends."""
    glued = ChatTemplate(
        {"default": "{% for m in messages %}{{ m.content | trim }}{% endfor %}{{ eos_token }}"},
        {"eos_token": "<|im_end|>"},
        ["<|im_end|>", "<|im_start|>"],
    )
    for texts in (["<|im_end|>"], ["<|im_", "end|>"], ["<", "|im_end|>"], ["<<|im_end", "|>"], ["<|im_st", "art|>"]):
        rendered = glued.render([{"role": "user", "content": text} for text in texts])
        assert rendered.text == "".join(texts) + "<|im_end|>"
        assert rendered.specials == [(len("".join(texts)), len(rendered.text), "<|im_end|>")]


def test_prompts_that_are_shortened_or_continued(family_tokenizers):
    for tokenizer in family_tokenizers.values():
        long = [{"role": "system", "content": "Be kind."}, *HELLO, *HELLO, *HELLO, {"role": "user", "content": "Why?"}]
        whole = render_prompt(tokenizer, long)
        context = len(whole)
        room = context - 3 * context // 8
        prompt = fit_prompt(tokenizer, long, context)
        assert 1 < prompt.oldest < len(long) and long[prompt.oldest]["role"] == "user"
        assert prompt.ids == render_prompt(tokenizer, [long[0], *long[prompt.oldest :]])
        assert len(prompt.ids) <= room
        longer = render_prompt(tokenizer, [long[0], *long[prompt.oldest - 2 :]])
        assert len(longer) > room  # no turn is left out that has room
        assert "shorten" in complaint(lambda tokenizer=tokenizer, long=long: render_prompt(tokenizer, long, 3))
        # A reply that is begun continues without an end, and without a second space.
        begun = render_prompt(tokenizer, [*HELLO[:1], {"role": "assistant", "content": "Hel"}])
        assert begun[: len(render_prompt(tokenizer, HELLO[:1]))] == render_prompt(tokenizer, HELLO[:1])
        assert tokenizer.decode(begun).endswith("Hel") and begun[-1] not in tokenizer.special_ids.values()


def test_a_model_without_a_template_holds_no_conversation(tmp_path):
    tokenizer = Tokenizer.load(save_family(tmp_path, "qwen2", chat_template=None))
    assert tokenizer.chat_template is None and not tokenizer.can_chat
    assert "chat template" in complaint(lambda: render(tokenizer, HELLO))
    assert "chat template" in complaint(lambda: render_prompt(tokenizer, HELLO))


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"
# These would take minutes or all memory. The kernel sets both limits, whatever the operation is. The trial at loading
# finds them.
RUNAWAY = {
    "endless loop": LOOPS.replace("BODY", ""),
    "multiplied": "{{ 'a' * 10**10 }}",
    "only with tools": "{% if tools %}{{ 'a' * 10**10 }}{% endif %}",
    "only in long chats": "{% if messages | length > 9 %}{{ 'a' * 10**10 }}{% endif %}",
}
# These run away in a conversation that the trial does not have.
LATE = {
    "writes for ever": LOOPS.replace("BODY", "{{ a }} and {{ b }}"),
    "one operation": "{{ 9 ** (messages | length * 9 ** 9) }}",
}
# These fail at once, at the first rendering.
REFUSED = {
    "recursion": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "attributes": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "import": "{% include '/etc/passwd' %}",
    "changes messages": "{{ messages.append(1) }}",
    "divides": "{{ 1 / 0 }}",
    "its own complaint": "{{ raise_exception('roles\nmust alternate') }}",
}


@pytest.mark.parametrize("source", RUNAWAY.values(), ids=RUNAWAY)
def test_a_template_that_takes_too_much_is_refused(source):
    with pytest.raises(TemplateError, match="more work") as error:
        ChatTemplate({"default": source}, {}, [])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("work", LATE.values(), ids=LATE)
def test_a_template_that_runs_away_after_its_trial_ends_in_one_line(work):
    template = ChatTemplate({"default": "{% if messages[0].content == 'go' %}" + work + "{% endif %}"}, {}, [])
    assert template.render(HELLO).text == ""
    with pytest.raises(TemplateError, match="more work") as error:
        template.render([{"role": "user", "content": "go"}])
    assert "\n" not in str(error.value)
    assert template.render(HELLO).text == ""  # in the next child


@pytest.mark.parametrize("source", REFUSED.values(), ids=REFUSED)
def test_a_template_that_fails_ends_in_one_line(source):
    template = ChatTemplate({"default": source}, {}, [])
    with pytest.raises(TemplateError) as error:
        template.render(HELLO)
    line = str(error.value)
    assert "chat template" in line and "more work" not in line and "\n" not in line
    assert ChatTemplate({"default": "{{ messages[0].content }}"}, {}, []).render(HELLO).text == "Hello"


def test_a_forked_process_has_its_own_child():
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {}, [])
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        texts = [pool.submit(template.render, [{"role": "user", "content": str(n)}]) for n in range(40)]
        own = [template.render([{"role": "user", "content": str(n)}]).text for n in range(40)]
        assert [one.result(60).text for one in texts] == own == [str(n) for n in range(40)]


def test_loop_controls_dates_and_pickling():
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson(indent=1) }}{% endfor %}"
    )
    template = pickle.loads(pickle.dumps(ChatTemplate({"default": source + "{{ strftime_now('%Y') }}"}, {}, [])))
    text = template.render([{"role": "user", "content": "<é>"}, *HELLO]).text
    assert json.loads(text[:-4]) == {"role": "user", "content": "<é>"} and "<é>" in text
    assert text[-4:].isdigit()
    everything = "".join(chr(code) for code in range(0xFDD0, 0xFDF0))
    with pytest.raises(TemplateError, match="noncharacters"):
        template.render([{"role": "user", "content": everything}])


# ---------------------------------------------------------------------- engine and server


@pytest.fixture(scope="module", params=["qwen3", "mistral"])
def engine(request, family_tokenizers) -> Engine:
    tokenizer = family_tokenizers[request.param]
    # The output layer of imported models is often wider than the vocabulary.
    config = tiny_config(vocab_size=tokenizer.vocab_size + 20, sequence_len=256, n_layer=1, window_pattern="L")
    return Engine(lively_model(config), tokenizer, cpu_device())


def test_a_reply_ends_with_any_of_the_models_own_ends(engine):
    tokenizer = engine.tokenizer
    assert engine.stop_ids == set(tokenizer.stop_ids) and engine.call_start == -1
    assert {ending([7, end], [1, 1], tokenizer) for end in tokenizer.reply_ends} == {"complete"}
    prompt = render_prompt(tokenizer, HELLO[:1])
    (plain,), _ = engine.generate([prompt], max_tokens=30, sampling=SamplingParams(temperature=0))
    (kept,), (mask,) = engine.generate([prompt], max_tokens=30, sampling=SamplingParams(temperature=0), keep_stop=True)
    assert kept[: len(plain)] == plain and all(mask)


@contextmanager
def served(engine: Engine) -> Iterator[TestClient]:
    def load() -> LoadedModel:
        scheduler = Scheduler(engine, slots=2, queue=4)
        scheduler.start()
        return LoadedModel(scheduler, engine.tokenizer, "imported", 256, chats=engine.tokenizer.can_chat)

    app = create_app(load)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        until(lambda: app.state.nanochat.model is not None, 60)
        yield client


def test_the_server_chats_with_an_imported_tokenizer(engine):
    """Its replies are the engine's. Promise T12 compares its prompts with training's."""
    tokenizer = engine.tokenizer
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"], "additionalProperties": False}
    with served(engine) as client:

        def chat(**body):
            return client.post("/v1/chat/completions", json={"messages": HELLO[:1], "temperature": 0, **body})

        answer = chat(max_tokens=12, logprobs=True).json()
        prompt = render_prompt(tokenizer, HELLO[:1])
        (made,), _ = engine.generate([prompt], max_tokens=12, sampling=SamplingParams(temperature=0))
        assert answer["choices"][0]["message"]["content"] == text_of(parse_reply(tokenizer, made))
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        data = [bytes(one["bytes"]) for one in answer["choices"][0]["logprobs"]["content"]]
        assert b"".join(data) == tokenizer.decode_bytes(made)
        # Text by a schema, plain completions, tokens.
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        answer = chat(max_tokens=40, response_format=form).json()["choices"][0]
        assert json.loads(answer["message"]["content"]) == {"a": "b"} and answer["finish_reason"] == "stop"
        body = {"prompt": "a boat", "max_tokens": 4, "temperature": 0, "echo": True, "logprobs": 0}
        text = client.post("/v1/completions", json=body).json()["choices"][0]
        assert text["text"].strip().startswith("a boat")
        tokens = client.post("/tokenize", json={"prompt": "从前 <|im_end|>"}).json()["tokens"]
        assert tokens == tokenizer.encode("从前 <|im_end|>", prepend=tokenizer.get_bos_token_id())
        assert client.get("/tokenizer_info").json()["eos_token"] == tokenizer.decode([tokenizer.reply_ends[0]])
        # A special id lies among the others, and is refused from a client.
        bad = client.post("/v1/completions", json={"prompt": [tokenizer.reply_ends[0]]})
        assert bad.status_code == 400 and "special" in bad.json()["error"]["message"]
        settings = {"enable_thinking": False}
        length = len(render_prompt(tokenizer, HELLO[:1], settings=settings))
        assert chat(max_tokens=1, chat_template_kwargs=settings).json()["usage"]["prompt_tokens"] == length
        assert chat(chat_template_kwargs={"enable_thinking": "no" * 99}).status_code == 400


def test_a_strangers_template_and_tokenizer_stay_off_the_event_loop(engine, monkeypatch):
    on_loop = []
    encode = ImportedTokenizer._encode

    def noted(self, text):
        on_loop.append(asyncio._get_running_loop() is not None)
        if text.startswith("panic"):
            raise UserError("this model's tokenizer cannot encode a text: retry-limit")
        return encode(self, text)

    monkeypatch.setattr(ImportedTokenizer, "_encode", noted)
    with served(engine) as client:
        on_loop.clear()
        for path, body in (
            ("/v1/chat/completions", {"messages": HELLO[:1], "max_tokens": 1}),
            ("/v1/completions", {"prompt": "a boat", "max_tokens": 1}),
            ("/tokenize", {"prompt": "a boat"}),
        ):
            assert client.post(path, json=body).status_code == 200
        assert on_loop and not any(on_loop)
        answer = client.post("/v1/completions", json={"prompt": "panic", "max_tokens": 1})
        assert answer.status_code == 400 and "retry-limit" in answer.json()["error"]["message"]
