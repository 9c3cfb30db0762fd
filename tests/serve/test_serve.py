"""The app and the command `chat_web`: what a request becomes, what is listed and measured, which model is served."""

import gc
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import tiny
import torch
from bodies import BODIES, CHAT, COMPLETIONS, CONTEXT, HELLO, PROMPT
from connections import events_of, is_ready
from fake_server import FakeScheduler, asking, checkpoint, client_of, error_of, loaded, make_app, serving, until
from prometheus_client.parser import text_string_to_metric_families
from runs import mistake

from nanochat.checkpoint_manager import load_model
from nanochat.device import Device
from nanochat.engine import Engine, SamplingParams, Slots
from nanochat.gpt import GPTConfig
from nanochat.ground import cli
from nanochat.model_folder import weights_sha256
from nanochat.serve.app import create_app
from nanochat.serve.scheduler import fitting_context
from nanochat.serve.state import LoadedModel
from nanochat.serve.weights import ServedWeights
from nanochat.tokenizer import SPECIAL_TOKENS
from scripts import chat_web

ask = pytest.fixture(asking, scope="module")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(make_app(FakeScheduler(tick=0.02))) as port:
        yield port


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of a base model and two later stages, with weights and sampling settings of their own."""
    folder = tmp_path_factory.mktemp("stages")
    names = ("base", "sft", "rl")
    return {
        name: checkpoint(folder / name, seed, stage=name, sampling={"top_k": seed + 1})
        for seed, name in enumerate(names)
    }


@pytest.fixture(scope="module")
def several(stages: dict[str, Path]) -> Iterator[Callable[..., httpx.Response]]:
    """A client of a server with all of them."""
    source = ",".join(map(str, stages.values()))
    config = chat_web.Config(source=source, name="base,sft,rl", device="cpu", dtype="float32", slots=2)
    with client_of(chat_web.make_app(config, lambda error: None)) as ask:
        yield ask


def test_truncation_drops_the_oldest_turns():
    roles = ("user", "assistant")
    turns = [{"role": role, "content": f"{number} " + "x" * 80} for number in range(6) for role in roles]
    body = {"messages": [*turns, {"role": "user", "content": "the last"}], "max_tokens": 50}
    auto = {**body, "truncation": "auto"}
    scheduler = FakeScheduler()
    with client_of(make_app(scheduler)) as ask:
        assert ask("POST", CHAT, json=body).status_code == 400
        assert ask("POST", CHAT, json=auto).status_code == 200
        text = tiny.tiny_tokenizer().decode(scheduler.requests[0].prompt)
        assert "the last" in text and "5 xx" in text and "0 xx" not in text
        assert len(scheduler.requests[0].prompt) + 50 <= CONTEXT
        assert ask("POST", CHAT, json={**auto, "max_tokens": 9999}).status_code == 200
        longest = scheduler.requests[-1]
        assert len(longest.prompt) <= 5 * CONTEXT // 8 and len(longest.prompt) + longest.max_tokens == CONTEXT
        # No turn goes while a reply of open length has 3/8 of the context; the question may take more. The reply names
        # the first message of the request that the model still reads.
        for lengths, first in (((50, 50, 212), 0), ((50, 50, 213), 2), ((9, 9, 480), 2)):
            sides = zip((*roles, "user"), lengths, "abc", strict=True)
            turns = [{"role": role, "content": letter * length} for role, length, letter in sides]
            answer = ask("POST", CHAT, json={"messages": turns, "truncation": "auto"})
            text = tiny.tiny_tokenizer().decode(scheduler.requests[-1].prompt)
            assert ("a" * lengths[0] in text, "c" * lengths[2] in text) == (first == 0, True), lengths
            message = answer.json()["choices"][0]["message"]
            assert message["nanochat"] == {"first_message_read": first, "limit": "context"}
        question = [{"role": "user", "content": "x" * 5000}]
        assert ask("POST", CHAT, json={**auto, "messages": question}).status_code == 400


def test_what_ended_a_reply_and_what_it_no_longer_read_are_told_apart(ask: Any):
    """A client that sets no limit must not read that its limit was reached."""
    # Turns begin at messages 1, 3, 5 and 6 of the request: 200 tokens do not fit beside the last two of 100.
    words = [("system", "s"), ("user", "a" * 100), ("user", "b" * 100), ("assistant", "c"), ("system", "t")]
    words += [("user", "d" * 100), ("assistant", "e"), ("user", "f" * 100)]
    long = {"messages": [{"role": role, "content": text} for role, text in words], "truncation": "auto"}
    for path, body, facts in (
        (CHAT, {**HELLO, "max_tokens": 2}, {"limit": "max_tokens"}),
        (CHAT, {**HELLO, "truncation": "auto", "max_tokens": 9999}, {"first_message_read": 0, "limit": "context"}),
        (CHAT, {**long, "max_tokens": 1}, {"first_message_read": 0, "limit": "max_tokens"}),
        (CHAT, long, {"first_message_read": 5, "limit": "context"}),
        (COMPLETIONS, PROMPT, {"limit": "max_tokens"}),  # without a number 16, as OpenAI's
    ):
        (choice,) = ask("POST", path, json=body).json()["choices"]
        assert choice.get("message", choice)["nanochat"] == facts, body
        choices = [event["choices"][0] for event in events_of(ask("POST", path, json={**body, "stream": True}).text)]
        said = [choice.get("delta", choice).get("nanochat") for choice in choices]
        assert said[-1] == facts and not any(said[:-1]), body


def test_user_text_never_becomes_a_control_token():
    scheduler = FakeScheduler(slots=64)
    tokenizer = tiny.tiny_tokenizer()
    special = set(tokenizer.special_ids.values())
    with client_of(make_app(scheduler)) as ask:

        def marks(*contents: Any) -> list[int]:
            """The special tokens in the prompt of these turns."""
            roles = ("user", "assistant") * 2
            turns = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
            assert ask("POST", CHAT, json={"messages": turns, "max_tokens": 1}).status_code == 200
            return [token for token in scheduler.requests[-1].prompt if token in special]

        one, several = marks("a"), marks("a", "a", "a")
        for name in SPECIAL_TOKENS:
            for text in (name, f"{name}{name} x", f" {name}\n", f"a{name}b"):
                assert marks(text) == one and text in tokenizer.decode(scheduler.requests[-1].prompt)
                assert ask("POST", COMPLETIONS, json={"prompt": text, "max_tokens": 1}).status_code == 200
                made = [token for token in scheduler.requests[-1].prompt if token in special]
                assert made == [tokenizer.get_bos_token_id()]
            left, right = name[: len(name) // 2], name[len(name) // 2 :]  # split over messages and over parts
            assert marks(left, [{"type": "text", "text": part} for part in (left, right)], right) == several
        for token in special:
            answer = ask("POST", COMPLETIONS, json={"prompt": [65, token], "max_tokens": 1})
            assert answer.status_code == 400 and error_of(answer)["param"] == "prompt"


def test_settings_reach_the_scheduler_and_the_checkpoints_apply_field_by_field():
    scheduler = FakeScheduler()
    own = SamplingParams(temperature=0.6, top_k=9, min_p=0.1)
    settings = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.5}
    with client_of(make_app(scheduler, replace(loaded(scheduler), sampling=own))) as ask:
        body = {**HELLO, **settings, "seed": 11, "n": 3, "stop": ["a", "b"], "max_tokens": 20}
        body |= {"max_completion_tokens": 9}  # which goes before max_tokens
        assert ask("POST", CHAT, json=body).status_code == 200
        assert [request.sampling.seed for request in scheduler.requests] == [11, 12, 13]
        for request in scheduler.requests:
            assert request.sampling == SamplingParams(**settings, seed=request.sampling.seed)
            assert (request.stop, request.max_tokens, request.logprobs, request.calls) == (("a", "b"), 9, -1, "own")
        scheduler.requests.clear()
        for _ in range(2):
            ask("POST", COMPLETIONS, json={"prompt": ["x", "y"], "logprobs": 2})
        assert len({request.sampling.seed for request in scheduler.requests}) == 2  # one for each HTTP request
        assert [request.max_tokens for request in scheduler.requests] == [16] * 4
        assert all(request.calls == "none" for request in scheduler.requests)
        assert scheduler.requests[0].logprobs == 2
        shown = ask("GET", "/v1/models").json()["data"][0]["nanochat"]
        assert SamplingParams(**shown["sampling"]) == own and "seed" not in shown["sampling"]
        for path, body in BODIES.items():
            for settings in ({}, {"temperature": 1.0}, {"top_k": 0, "min_p": 0.0, "top_p": 0.5}, {"temperature": None}):
                answer = ask("POST", path, json={**body, **settings, "seed": 5, "max_tokens": 1})
                sent = {name: value for name, value in settings.items() if value is not None}
                assert answer.status_code == 200 and scheduler.requests[-1].sampling == replace(own, **sent, seed=5)


def test_messages_in_any_order_become_turns():
    """As vLLM takes them: two users in a row, late system messages, parts of a text, the beginning of the reply. An
    earlier reply with a call can be sent back."""
    scheduler = FakeScheduler(calls=True)
    user, more = ({"role": "user", "content": text} for text in ("one", "two"))
    reply = {"role": "assistant", "content": "It is"}
    late = {"role": "system", "content": "late"}
    parts = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    call = {"type": "python", "text": "2+3"}
    called = {**reply, "nanochat": {"parts": [{"type": "text", "text": "It is "}, call]}}
    asked = "<|user_start|>one\ntwo<|user_end|><|assistant_start|>"
    with client_of(make_app(scheduler)) as ask:

        def prompt_of(**body: Any) -> str:
            assert ask("POST", CHAT, json={**body, "max_tokens": 1}).status_code == 200, body
            return tiny.tiny_tokenizer().decode(scheduler.requests[-1].prompt)

        for messages, text in (
            ([user, more], asked),
            ([parts], asked),
            ([{**late, "role": "developer"}, user, late, more], f"<|system_start|>late\nlate<|system_end|>{asked}"),
            ([user, more, reply], f"{asked}It is"),
            ([user, more, reply, reply], f"{asked}It is\nIt is"),
            ([user, more, {"role": "assistant", "content": None}], asked),
        ):
            is_open = messages[-1]["role"] == "assistant"
            for body in ({}, {"continue_final_message": is_open, "add_generation_prompt": not is_open}):
                for truncation in ({}, {"truncation": "auto"}):
                    assert prompt_of(**body, **truncation, messages=messages) == f"<|bos|>{text}"
        for messages in ([reply, user], [late], [user, called], [{"role": "user", "content": None}]):
            answer = ask("POST", CHAT, json={"messages": messages})
            assert answer.status_code == 400 and error_of(answer)["param"] == "messages"
        answer = ask("POST", CHAT, json={**HELLO, "max_tokens": 2, "truncation": "auto"}).json()
        message = answer["choices"][0]["message"]
        assert set(message["nanochat"]) == {"parts", "first_message_read", "limit"}
        sent = "<|python_start|>2+3<|python_end|><|output_start|>5<|output_end|>word 1 <|assistant_end|>"
        assert sent in prompt_of(messages=[*HELLO["messages"], message, more])


def test_it_is_alive_before_it_is_ready():
    may_load = threading.Event()
    errors: list[BaseException] = []

    def load() -> LoadedModel:
        may_load.wait()
        scheduler = FakeScheduler()
        scheduler.start()
        return loaded(scheduler)

    with serving(create_app(load), ready=False) as port:
        base = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{base}/health").status_code == 200
        for path in ("/ready", "/v1/models"):
            answer = httpx.get(f"{base}{path}")
            assert answer.status_code == 503 and error_of(answer)["code"] == "not_ready"
        assert not is_ready(port)
        may_load.set()
        until(lambda: httpx.get(f"{base}/ready").status_code == 200)
        assert is_ready(port)
    with client_of(create_app(lambda: 1 // 0, on_failure=errors.append)) as ask:
        assert ask("GET", "/ready").status_code == 503 and isinstance(errors[0], ZeroDivisionError)


def test_the_model_list_has_the_facts_of_the_checkpoint(tmp_path: Path):
    folder = checkpoint(tmp_path, pretraining={"data": "/home/me/books"}, tasks=["stories"], sampling={"min_p": 0.2})
    config = chat_web.Config(source=str(folder), device="cpu", slots=1, name="my model")
    before = gc.get_freeze_count()
    with client_of(chat_web.make_app(config, lambda error: None)) as ask:
        # The collector of garbage skips what was loaded, or a body with many lists would hold the event loop (S4).
        assert gc.get_freeze_count() > before + 1000
        reply = ask("POST", COMPLETIONS, json={"model": "nanochat", "prompt": "a", "max_tokens": 0}).json()
        assert reply["model"] == "my model" and reply["system_fingerprint"] == f"fp_{weights_sha256(folder)[:12]}"
        (shown,) = ask("GET", "/v1/models").json()["data"]
        assert ask("GET", f"/v1/models/{shown['id']}").json() == shown
    facts = shown["nanochat"]
    model, _, meta = load_model(folder, "cpu")
    assert facts.pop("sampling") == meta["sampling"] and meta["sampling"]["min_p"] == 0.2
    assert facts.pop("parameters") == sum(weight.numel() for weight in model.parameters())
    assert abs(facts.pop("trained_at") - time.time()) < 100
    same = {"context": model.config.sequence_len, "step": meta["step"], "stage": "sft", "slots": 1}
    assert facts == {**same, "chats": True, "tasks": ["stories"], "data": "books"}


def test_metrics_are_in_prometheus_form(several: Any):
    scheduler = FakeScheduler()
    for seconds in (0.001, 0.2, 0.2, 40):
        scheduler.metrics.first_token.observe(seconds)
    with client_of(make_app(scheduler)) as ask:
        ask("GET", "/nowhere")
        ask("POST", COMPLETIONS, json=PROMPT)
        families = list(text_string_to_metric_families(ask("GET", "/metrics").text))
    values = {}
    for sample in (sample for family in families for sample in family.samples):
        values[(sample.name.removeprefix("nanochat_"), *sample.labels.values())] = sample.value
    assert {family.type for family in families} == {"counter", "gauge", "histogram"}
    assert values["http_responses_total", "404"] == values["http_responses_total", "200"] == 1
    assert values["requests_finished_total", "tiny", "length"] == 1 and values["slots", "tiny"] == 4
    first = "time_to_first_token_seconds"
    assert [values[f"{first}_bucket", bound, "tiny"] for bound in ("0.1", "1.0", "+Inf")] == [1, 3, 4]
    assert values[f"{first}_count", "tiny"] == 4 and values[f"{first}_sum", "tiny"] == pytest.approx(40.401)
    assert not [name for name, *_ in values if name.endswith("_created")]
    # Of several models each sample has the name of its model.
    families = list(text_string_to_metric_families(several("GET", "/metrics").text))
    assert len({family.name for family in families}) == len(families)
    slots = next(family for family in families if family.name == "nanochat_slots")
    assert {sample.labels["model"]: sample.value for sample in slots.samples} == {"rl": 2, "sft": 2, "base": 2}


MISTAKES = (
    # flags, where {one} and {two} are folders and {port} is taken -> what the line names
    ("--source sft", "sft"),
    ("--slots 0", "--slots 0"),
    ("--host 0.0.0.0 --api_key short", "--api_key"),
    ("--api_key_file /nowhere/key", "/nowhere/key"),
    ("--source {one} --device gpu", "--device 'gpu'"),
    ("--source {one} --allowed_origins *", "--allowed_origins *"),
    ("--source {one} --name " + "x" * 101, "--name"),
    ("--source {one},nowhere", "--source nowhere"),
    ("--source {one},{one}", "{one}"),
    ("--source {one},{two}", "nanochat-tiny-sft"),
    ("--source {one},{two} --name a", "--name a"),
    ("--source {one},{two} --name a,nanochat", "nanochat"),
    ("--source {one},{two} --for_rl", "--for_rl"),
    ("--source ,", "--source"),
    ("--source {one} --device cpu --graphs on", "--graphs on"),
    ("--source {one} --port {port}", "--port {port}"),
    ("--source {one} --host 192.0.2.1 --api_key none", "--host 192.0.2.1"),
    ("--source {one} --host no.such.host.example --api_key none", "--host no.such.host.example"),
)


def test_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = {"one": checkpoint(tmp_path), "two": checkpoint(tmp_path / "other"), "port": port}
        for flags, named in MISTAKES:
            code, line = mistake(capsys, "chat_web", "--device", "cpu", *flags.format(**words).split())
            assert code in (1, 2) and named.format(**words) in line, flags
    for flags in ("--port 9000", "--host 0.0.0.0", "--api_key_file /nowhere/key", "--slots 0"):  # gunicorn's business
        monkeypatch.setenv("NANOCHAT_CHAT_WEB", flags)
        with pytest.raises(SystemExit) as left:
            chat_web.__getattr__("app")
        out, err = capsys.readouterr()
        assert left.value.code == 3 and flags.split()[0] in err and len(err.splitlines()) == 1 and not out


def test_the_default_cache_fits_the_device(capsys: pytest.CaptureFixture[str]):
    """Qwen3 0.6B with its own context of 40,960 tokens and 16 slots, where 58 GiB of a card of 64 are free."""
    shape = GPTConfig(n_layer=28, width=1024, n_head=16, n_kv_head=8, head_dim=128, sequence_len=40960)
    free = 58 * 2**30
    device = SimpleNamespace(dtype=torch.bfloat16, free_memory=lambda: free)
    engine: Any = SimpleNamespace(model=SimpleNamespace(config=shape), device=device)
    token = Slots.bytes_per_slot(shape, torch.bfloat16) // 40960
    assert 70 * 2**30 <= 16 * 40960 * token < 71 * 2**30
    tokens = fitting_context(engine, 16)
    assert 20_000 < tokens < 40960 and 16 * tokens * token <= 0.7 * free
    assert f"a chat has at most {tokens:,} tokens" in capsys.readouterr().out
    assert fitting_context(engine, 8) == 40960 and not capsys.readouterr().out
    device.free_memory = lambda: None  # the system does not say
    assert fitting_context(engine, 16) == 40960


def test_what_does_not_fit_in_memory_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = checkpoint(tmp_path)
    model, _, _ = load_model(folder, tiny.cpu_device())
    needed = 4 * sum(weight.numel() for weight in model.parameters())
    errors: list[BaseException] = []
    config = chat_web.Config(source=str(folder), device="cpu", dtype="float32", max_seq_len=32)
    for free, changes, named in (
        (needed, {}, ""),
        (needed - 1, {}, rf"{folder.name}.* GiB in float32.*--to hf"),
        (None, {"slots": 10**10}, r"--slots 10000000000.* [\d,.]+ GiB "),
    ):
        with monkeypatch.context() as patch:
            if free is not None:
                patch.setattr(Device, "free_memory", lambda self, free=free: free)
            with client_of(chat_web.make_app(replace(config, **changes), errors.append)) as ask:
                assert ask("GET", "/ready").status_code == (503 if named else 200)
        if named:
            error = errors.pop()
            assert isinstance(error, cli.UserError) and re.search(named, str(error)) and "\n" not in str(error)
    assert not errors


def test_a_served_model_is_in_memory_once_and_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On an accelerator, in bf16: no copy in fp32 is made, and the weights are the same as in a copy of it."""
    folder = checkpoint(tmp_path)
    device = tiny.cpu_device(dtype=torch.bfloat16)
    monkeypatch.setattr(type(device.kernels), "packs", lambda self, dtype: False)  # as on an accelerator
    before, tokenizer, _ = load_model(folder, device)
    copied = Engine(before, tokenizer, device).model
    assert before.embedding.weight.dtype == torch.float32 and copied is not before
    model, _, _ = load_model(folder, device, prepare=[ServedWeights(folder)])
    assert Engine(model, tokenizer, device).model is model
    expected = copied.state_dict() | dict(copied.named_buffers())
    assert {weight.dtype for weight in model.state_dict().values()} == {torch.bfloat16}
    for name, weight in (model.state_dict() | dict(model.named_buffers())).items():
        assert torch.equal(weight, expected[name]), name


def test_several_models_are_chosen_by_name(stages: dict[str, Path], several: Any):
    """Each replies as in a server without others, with its settings; the last one of --source is the default."""
    listed = several("GET", "/v1/models").json()["data"]
    assert [one["id"] for one in listed] == ["rl", "sft", "base"]
    assert [one["nanochat"]["sampling"]["top_k"] for one in listed] == [3, 2, 1]
    assert [one["nanochat"]["chats"] for one in listed] == [True, True, False]
    greedy = {"prompt": "abc", "max_tokens": 12, "temperature": 0}
    texts = {}
    for name, folder in stages.items():
        answer = several("POST", COMPLETIONS, json={**greedy, "model": name}).json()
        model, tokenizer, _ = load_model(folder, "cpu")
        prompt = tokenizer.encode("abc", prepend=tokenizer.get_bos_token_id())
        reply = Engine(model, tokenizer).generate([prompt], max_tokens=12, sampling=SamplingParams(temperature=0))[0][0]
        texts[name] = answer["choices"][0]["text"]
        assert (answer["model"], texts[name]) == (name, tokenizer.decode(reply))
        assert answer["system_fingerprint"] == f"fp_{weights_sha256(folder)[:12]}"
        assert several("GET", f"/v1/models/{name}").json()["id"] == name
    assert len(set(texts.values())) == 3
    for default in ({}, {"model": "nanochat"}):
        answer = several("POST", COMPLETIONS, json={**greedy, **default})
        assert answer.json()["choices"][0]["text"] == texts["rl"]
    assert several("POST", CHAT, json={**HELLO, "max_tokens": 1, "model": "sft"}).status_code == 200
    base = several("POST", CHAT, json={**HELLO, "model": "base"})
    assert base.status_code == 400 and COMPLETIONS in error_of(base)["message"]
    unknown = several("POST", CHAT, json={**HELLO, "model": "gpt-4"})
    wrong = error_of(unknown)
    assert unknown.status_code == 404 and (wrong["code"], wrong["param"]) == ("model_not_found", "model")
    assert "rl, sft, base" in wrong["message"]
    assert several("POST", "/update_weights_from_disk", json={"model_path": "/"}).status_code == 403


@pytest.mark.parametrize(
    ("names", "max_seq_len", "tokens"),
    [
        (["sft"], 0, 320),  # 0.7 of 512, in steps of 64
        (["sft"], CONTEXT, CONTEXT),
        (["base", "sft", "rl"], 0, 64),  # a third of it
    ],
)
def test_a_server_with_little_memory_has_a_shorter_context(
    stages: dict[str, Path], monkeypatch: pytest.MonkeyPatch, names: list[str], max_seq_len: int, tokens: int
):
    """Several models share one thread, or their threads of OpenMP would outnumber the cores, and the memory, or each
    would take the cache's whole share."""
    slot = Slots.bytes_per_slot(tiny.tiny_config(sequence_len=CONTEXT), torch.float32)
    monkeypatch.setattr(Device, "free_memory", lambda self: 2 * slot)
    source = ",".join(str(stages[name]) for name in names)
    config = chat_web.Config(source=source, name=",".join(names), device="cpu", dtype="float32", slots=2)
    app = chat_web.make_app(replace(config, max_seq_len=max_seq_len), print)
    with client_of(app) as ask:
        models = app.state.nanochat.model.all
        assert len({model.scheduler.thread for model in models}) == 1
        assert len({model.scheduler for model in models}) == len(names)
        assert [model.context for model in models] == [tokens] * len(names)
        assert ask("POST", "/tokenize", json={"prompt": "one", "model": "sft"}).json()["max_model_len"] == tokens
