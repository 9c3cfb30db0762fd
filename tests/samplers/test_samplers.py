"""Samplers outside of the trainer sample what its own engine samples, and one that fails or is wrong costs one line."""

import gzip
import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import pytest
from runs import call, lasting, metrics, process, sha256
from test_scripts import base  # noqa: F401 (base is a fixture)
from test_serve import error_of, serving, until
from test_stages import RL, graded, pretrained, start, taught, tutored  # noqa: F401 (fixtures)
from tiny import adapt, complaint, cpu_device, lively_model, run_command, tiny_config, tiny_tokenizer

from nanochat import rollout
from nanochat.adapters.lora import Lora
from nanochat.checkpoint_manager import load_model
from nanochat.engine import Engine
from nanochat.families import hf
from nanochat.gpt import GPT, ScalarHead
from nanochat.ground import cli
from nanochat.samplers import http as http_sampler
from nanochat.samplers.ahead import Ahead
from nanochat.samplers.http import HttpSampler
from nanochat.sampling import SamplingParams, seed_of
from nanochat.serve.app import create_app
from nanochat.serve.scheduler import Scheduler
from nanochat.serve.state import LoadedModel
from nanochat.serve.weights import reader_of_updates
from nanochat.tokenizer import Tokenizer

CONTEXT = 64
KEY = "a-key-of-tests"


def policy(seed: int = 0) -> GPT:
    return lively_model(tiny_config(vocab_size=tiny_tokenizer().vocab_size, sequence_len=CONTEXT), seed)


def family_policy() -> GPT:
    """A model of the shape of Qwen3."""
    qwen = tiny_config(
        vocab_size=tiny_tokenizer().vocab_size, sequence_len=CONTEXT, window_pattern="L", mlp="swiglu", mlp_width=48,
        qk_norm="before_rotary", qk_scale=1.0, norm_weight=True, embedding_norm=False, value_embeddings=False,
        residual_scales=False, logit_cap=0.0,
    )  # fmt: skip
    return lively_model(qwen)


def serve_model(model: GPT, tokenizer: Tokenizer | None = None, for_rl: bool = True, **settings: Any) -> Any:
    engine = Engine(model, tokenizer or tiny_tokenizer(), cpu_device())
    reader = reader_of_updates(engine) if for_rl else None

    def load() -> LoadedModel:
        scheduler = Scheduler(engine, slots=4, queue=16)
        scheduler.start()
        context = model.config.sequence_len
        return LoadedModel(scheduler, engine.tokenizer, "tiny", context, True, fingerprint="fp_0", read_update=reader)

    return create_app(load, **settings)


@pytest.fixture
def folder(base) -> Path:  # noqa: F811
    """A base folder that trainer and server share."""
    return base


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A server of ours, which begins with other weights than the trainer's."""
    with serving(serve_model(policy(seed=9), api_key=KEY)) as port:
        yield f"http://127.0.0.1:{port}"


def start_of(model: GPT, tag: str = "tag") -> Any:
    return SimpleNamespace(model=model, tokenizer=tiny_tokenizer(), device=cpu_device(), tag=tag)


def open_http(*addresses: str, model: GPT, tag: str = "tag", patience: float = 2.0) -> HttpSampler:
    flags = SimpleNamespace(sampler=",".join(addresses), sampler_patience=patience, temperature=1.0, top_k=0)
    few = mock.patch.object(http_sampler, "ROWS_AT_ONCE", 8)  # http.server refuses connections that come all at once
    with few, mock.patch.dict(os.environ, NANOCHAT_API_KEY=KEY):
        return HttpSampler(flags, start_of(model, tag), lambda: False)


def open_ray(workers: int) -> Any:
    from nanochat.samplers.ray import RaySampler  # an extra

    flags = SimpleNamespace(sampler=f"ray:{workers}", sampler_patience=60.0, graphs="auto")
    return RaySampler(flags, start_of(policy()), lambda: False)


def failure(action: Callable[[], Any]) -> str:
    """The one line of the Failed that this raises."""
    with pytest.raises(cli.Failed) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def prompts_and_settings(temperature: float, count: int = 9) -> tuple[list[list[int]], list[SamplingParams]]:
    """Conversations with their special tokens, each sampled several times."""
    tokenizer = tiny_tokenizer()
    prompts = [rollout.render_prompt(tokenizer, [{"role": "user", "content": text}]) for text in ("the", "an x", "2+2")]
    settings = [SamplingParams(temperature=temperature, top_k=200, seed=seed_of(1, n)) for n in range(count)]
    return [prompts[n % 3] for n in range(count)], settings


# ---------------------------------------------------------------------- our server


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_server_samples_what_the_engine_samples(address, folder, temperature):
    """Greedy and drawn, through more requests than the server has slots, with the weights of the trainer."""
    model = policy()
    prompts, settings = prompts_and_settings(temperature, 24)
    expected = rollout.EngineSampler(Engine(policy(), tiny_tokenizer(), cpu_device()), 8)(prompts, settings, 40)
    sampler = open_http(address, model=model)
    sampler.hand_over(model)
    replies = sampler(prompts, settings, 40)
    for reply, wanted in zip(replies, expected, strict=True):
        assert (reply.tokens, reply.mask, reply.ending) == (wanted.tokens, wanted.mask, wanted.ending)
        assert reply.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
    if temperature:
        assert {reply.ending for reply in replies} == {"complete", "cut off", "broken"}
        assert any(0 in reply.mask for reply in replies), "none has called the calculator"


@pytest.mark.parametrize("kind", ["plain", "nf4"])
def test_a_server_samples_with_adapters_as_the_engine_does(address, folder, kind):
    """The engine has them apart, the server merged: over weights as they are, or rounded to 4 bits. PPO's scalar head
    stays here."""
    model = adapt(policy(), Lora(4, 8.0, base_format=kind))
    model.scalar_head = ScalarHead(model.config)
    model.config = replace(model.config, scalar_head=True)
    prompts, settings = prompts_and_settings(1.3)
    expected = rollout.EngineSampler(Engine(model, tiny_tokenizer(), cpu_device()), 8)(prompts, settings, 20)
    sampler = open_http(address, model=model, patience=60.0)
    sampler.hand_over(model)
    replies = sampler(prompts, settings, 20)
    assert [reply.tokens for reply in replies] == [reply.tokens for reply in expected]
    for reply, wanted in zip(replies, expected, strict=True):
        assert reply.logprobs == pytest.approx(wanted.logprobs, abs=2e-5)
    plain = rollout.EngineSampler(Engine(policy(), tiny_tokenizer(), cpu_device()), 8)(prompts, settings, 20)
    assert [reply.tokens for reply in plain] != [reply.tokens for reply in expected]


def test_each_reply_names_its_weights_and_old_folders_go(address, folder):
    first, second = policy(seed=1), policy(seed=2)
    sampler = open_http(address, model=first)
    prompts, settings = prompts_and_settings(0.0)
    by_weights = []
    weights = folder / "runs" / "rl" / "tag" / "weights"
    (weights / "fp_of_a_killed_trainer").mkdir(parents=True)
    for model in (first, second, first):
        sampler.hand_over(model)
        assert [path.name for path in weights.iterdir()] == [sampler.weights.name]
        by_weights.append([reply.tokens for reply in sampler(prompts, settings, 10)])
    assert by_weights[0] == by_weights[2] != by_weights[1]
    # Another trainer takes the server in between: its weights are noticed, and ours are handed over again.
    other = open_http(address, model=second, tag="other")
    other.hand_over(second)
    assert [reply.tokens for reply in sampler(prompts, settings, 10)] == by_weights[0]
    assert sampler.weights.is_dir()
    del sampler
    assert not weights.exists()


def test_weights_are_taken_from_the_base_folder_by_a_server_for_rl_only(address, folder, tmp_path):
    update = {"model_path": str(folder / "weights" / "x")}
    headers = {"authorization": f"Bearer {KEY}"}

    def status(body: Any, at: str = address, route: str = "/update_weights_from_disk", **more: Any) -> int:
        return httpx.post(at + route, json=body, **more).status_code

    assert status(update) == 401
    outside = (str(tmp_path), f"{folder}/../etc", "a\0b", "", "x" * 5000, str(folder / "none"))
    for path in outside:
        assert status({"model_path": path}, headers=headers) == 400, path
    exact = {"prompt": [3, 4], "return_token_ids": True}
    for more in ({"stream": True}, {"echo": True}, {"stop": "x"}, {"prompt": "text"}, {"prompt": [10**6]}):
        assert status({**exact, **more}, route="/v1/completions", headers=headers) == 400, more
    with serving(serve_model(policy(), for_rl=False)) as port:
        for route, body in (("/update_weights_from_disk", update), ("/v1/completions", exact)):
            response = httpx.post(f"http://127.0.0.1:{port}{route}", json=body)
            assert "--for_rl" in error_of(response)["message"]


@pytest.mark.parametrize("change", ["shape", "tokenizer"])
def test_weights_of_another_model_are_refused(address, folder, change):
    model = policy() if change == "tokenizer" else lively_model(tiny_config(vocab_size=300, sequence_len=CONTEXT))
    sampler = open_http(address, model=model)
    if change == "tokenizer":
        tokens = tiny_tokenizer().tokens
        sampler.tokenizer = type(sampler.tokenizer)([*tokens[:-1], b"zzz"])
    assert f"another {change}" in complaint(lambda: sampler.hand_over(model))


# ---------------------------------------------------------------------- servers that fail


class FakeServer:
    """A server that makes up its replies from their seeds. `fault` may change one, or return another status, or another
    status, content and headers."""

    def __init__(self, kind: str = "nanochat"):
        self.kind = kind
        self.fault: Callable[[int, dict[str, Any]], Any] = lambda number, reply: None
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.weights = "fp_at_start"
        self.models: dict[str, Any] = {}  # further entries of the model in /v1/models
        self.headers: dict[str, str] = {}

    def reply(self, route: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.requests.append((route, body))
        if route == "/v1/models":
            return 200, {"data": [{"id": "fake", "owned_by": self.kind, **self.models}]}
        if route != "/v1/completions":
            path = body.get("model_path") or body.get("kwargs", {}).get("weights_path")
            self.weights = Path(path).name if path else self.weights
            return 200, {}
        rng = random.Random(body["seed"])
        tokens = [rng.randrange(256) for _ in range(body["max_tokens"])]
        choice = {"token_ids": tokens, "logprobs": {"token_logprobs": [-rng.random() for _ in tokens]}}
        content = {"choices": [choice], "usage": {"prompt_tokens": len(body["prompt"])}}
        content |= {"system_fingerprint": self.weights}
        number = sum(route == "/v1/completions" for route, _ in self.requests)
        fault = self.fault(number, content)
        self.headers = {}
        if isinstance(fault, tuple):
            status, content, self.headers = fault
            return status, content
        return 200 if fault is None else fault, content


@contextmanager
def served(fake: Any, port: int = 0) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, reply = fake.reply(self.path, json.loads(content or b"{}"))
            if status == 0:  # it dies
                self.connection.close()
                return
            text = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            for name, value in fake.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:  # a client that has given up
            pass

    server = Server(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def fake() -> FakeServer:
    return FakeServer()


@pytest.fixture(scope="module")
def fake_address(fake) -> Iterator[str]:
    with served(fake) as address:
        yield address


@pytest.fixture
def sampler(fake, fake_address, folder, monkeypatch) -> Iterator[HttpSampler]:
    """With weights handed over, and a fault-free server until the test changes that."""
    monkeypatch.setattr(http_sampler, "LONGEST_PAUSE", 0.02)
    monkeypatch.setattr(http_sampler, "RETURN_SECONDS", 0.02)
    fake.fault = lambda number, reply: None
    fake.requests.clear()
    monkeypatch.setattr(http_sampler, "check_agreement", lambda *_: None)
    model = policy()
    sampler = open_http(fake_address, model=model, tag="fake", patience=20.0)
    sampler.hand_over(model)
    fake.requests.clear()
    yield sampler
    fake.fault = lambda number, reply: None


def changed(*path: Any, to: Any) -> Callable[[int, dict[str, Any]], None]:
    """A fault of the third reply: what is at this path of it."""

    def fault(number: int, reply: dict[str, Any]) -> None:
        if number == 3:
            for name in path[:-1]:
                reply = reply[name]
            reply[path[-1]] = to(reply[path[-1]])

    return fault


def answers(status: int, content: bytes, **headers: str) -> Callable[[int, dict[str, Any]], tuple[int, bytes, Any]]:
    """A fault of all replies: this one instead."""
    return lambda number, reply: (status, content, headers)


TOKENS = ("choices", 0, "token_ids")
LOGPROBS = ("choices", 0, "logprobs", "token_logprobs")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (changed("choices", to=lambda choices: choices * 2), "2 replies instead of 1"),
        (changed("choices", 0, to=lambda choice: {"text": "only"}), "return_token_ids"),
        (changed(*TOKENS, to=lambda tokens: tokens[:-1]), "logprobs, of at most"),
        (changed(*TOKENS, to=lambda tokens: []), "0 tokens"),
        (changed(*TOKENS, to=lambda tokens: None), "return_token_ids"),
        (changed(*LOGPROBS, to=lambda logprobs: 1.0), "return_token_ids"),
        (changed(*TOKENS, to=lambda tokens: [True] * len(tokens)), "another model"),
        (changed(*LOGPROBS, to=lambda logprobs: [0.5] * len(logprobs)), "not logarithms"),
        (changed(*LOGPROBS, to=lambda logprobs: ["x"] * len(logprobs)), "not logarithms"),
        (changed(*LOGPROBS, to=lambda logprobs: [-(10**400)] * len(logprobs)), "--sampler http://127.0.0.1"),
        (changed(*LOGPROBS, to=lambda logprobs: [float("-inf")] * len(logprobs)), "--sampler http://127.0.0.1"),
        (changed(*TOKENS, to=lambda tokens: [5000] * len(tokens)), "another model"),
        (changed("usage", "prompt_tokens", to=lambda count: count + 1), "another tokenization"),
        (lambda number, reply: 400, "refuses a request (status 400)"),
        (answers(200, b"[" * 200_000), "return_token_ids"),
        (answers(200, b"\xff\xfe\xfd"), "return_token_ids"),
        (answers(200, gzip.compress(b" " * 10**6), **{"content-encoding": "gzip"}), "return_token_ids"),
        (answers(200, b" " * (1 << 20) + b"{}"), "more than"),
        (answers(302, b"", location="http://localhost:1/"), "status 302"),
        (answers(400, b'{"error": {"message": 5}}'), "status 400): 5"),
        (answers(503, b""), "no reply for 1 s"),
    ],
)
def test_a_wrong_or_hostile_reply_is_one_line(sampler, fake, fault, message, monkeypatch):
    monkeypatch.setattr(http_sampler, "MAX_REPLY", 1 << 20)
    fake.fault = fault
    sampler.patience = 1.0
    prompts, settings = prompts_and_settings(1.0)
    line = failure(lambda: sampler(prompts, settings, 8))
    assert message in line and len(line) < 500


@pytest.mark.parametrize("slots", [0, -1, "many", [], 10**400, float("nan"), float("inf")])
def test_slots_that_are_no_number_are_one_line(fake, fake_address, folder, monkeypatch, slots):
    monkeypatch.setattr(fake, "models", {"nanochat": {"slots": slots}})
    assert "/v1/models" in complaint(lambda: open_http(fake_address, model=policy()))


@pytest.mark.slow
@pytest.mark.parametrize("status", [0, 429, 503])
def test_what_a_server_loses_is_asked_again_by_the_same_seed(sampler, fake, status, capsys):
    prompts, settings = prompts_and_settings(1.0)
    expected = [reply.tokens for reply in sampler(prompts, settings, 8)]
    fake.requests.clear()
    fake.fault = lambda number, reply: status if number % 3 == 1 else None
    assert [reply.tokens for reply in sampler(prompts, settings, 8)] == expected
    seeds = [body["seed"] for route, body in fake.requests if route == "/v1/completions"]
    assert len(seeds) > len(settings) and set(seeds) == {one.seed for one in settings}
    # One that broke off may have restarted, with the weights that it was started with.
    assert ("/update_weights_from_disk" in [route for route, _ in fake.requests]) == (status == 0)
    printed = capsys.readouterr()
    assert ("is lost (" in printed.err) == ("is back" in printed.out) == (status == 0)
    assert printed.err.count("asked again for up to 20 s") == printed.out.count("is back")


def test_a_server_with_other_weights_gets_them_again_and_not_for_ever(sampler, fake):
    prompts, settings = prompts_and_settings(1.0)
    expected = [reply.tokens for reply in sampler(prompts, settings, 8)]
    fake.weights = "fp_of_another"
    assert [reply.tokens for reply in sampler(prompts, settings, 8)] == expected

    def stale(number: int, reply: dict[str, Any]) -> None:
        reply["system_fingerprint"] = "fp_of_another"

    fake.fault = stale
    sampler.patience = 3.0
    assert "fp_of_another" in failure(lambda: sampler(prompts, settings, 8))


def test_without_a_reply_for_long_the_sampler_gives_up(sampler, fake):
    hanging = threading.Event()

    def fault(number: int, reply: dict[str, Any]) -> int | None:
        if number < 4:
            return None
        hanging.wait(10)
        return 0

    fake.fault = fault
    sampler.patience = 1.0
    prompts, settings = prompts_and_settings(1.0)
    assert "no reply for 1 s (--sampler_patience)" in failure(lambda: sampler(prompts, settings, 8))
    hanging.set()


@pytest.mark.slow
def test_a_dead_server_costs_nothing_where_another_lives(sampler, fake, fake_address, folder, capsys):
    """It gets neither requests nor weights, and both again when it is back."""
    model = policy()
    prompts, settings = prompts_and_settings(1.0)

    def sample() -> tuple[list[list[int]], str, str]:
        capsys.readouterr()
        replies = sampler(prompts, settings, 8)
        return [reply.tokens for reply in replies], *capsys.readouterr()

    other = FakeServer()
    with served(other) as second:
        sampler = open_http(fake_address, second, model=model, tag="two", patience=30.0)
        sampler.hand_over(model)
        expected = sample()[0]
        assert 3 <= sum(route == "/v1/completions" for route, _ in other.requests) <= 6
    tokens, out, error = sample()
    assert tokens == expected and "is back" not in out
    assert error.startswith(f"warning: sampler: {second} is lost (") and error.count("\n") == 1
    sampler.hand_over(policy(seed=1))
    assert sample() == (expected, "", "")
    other.requests.clear()
    with served(other, int(second.rpartition(":")[2])):
        sampler(prompts * 4, settings * 4, 8)
        assert capsys.readouterr() == (f"sampler: {second} is back\n", "")
        sampler.hand_over(model)
        assert sample() == (expected, "", "")
    routes = [route for route, _ in other.requests]
    assert routes[:2] == ["/v1/models", "/update_weights_from_disk"] and "/v1/completions" in routes[2:]
    assert other.weights == sampler.weights.name


def test_a_server_that_refuses_the_weights_ends_the_run_though_another_takes_them(sampler, fake_address, folder):
    model = policy()
    other = FakeServer()
    with served(other) as second:
        sampler = open_http(fake_address, second, model=model, tag="two")
        sampler.hand_over(model)
        answer = other.reply
        other.reply = lambda route, body: (403, {}) if route.startswith("/update") else answer(route, body)
        assert f"{second} does not take the weights" in failure(lambda: sampler.hand_over(model))


def test_without_a_server_that_takes_the_weights_the_sampler_gives_up(sampler, fake, fake_address, folder):
    sampler.servers[0].address = "http://127.0.0.1:9"
    sampler.patience = 1.0
    assert "no reply for 1 s (--sampler_patience)" in failure(lambda: sampler.hand_over(policy()))


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [("nanochat", 404, ("status 404", "/v1/models", "chat_web --for_rl")), ("vllm", 200, ("chat_web --for_rl",))],
)
def test_a_server_that_cannot_serve_this_model_is_one_line(folder, kind, status, words):
    """One without OpenAI's API; and vLLM, which needs a model of a family."""
    other = FakeServer(kind)
    reply = other.reply
    other.reply = lambda route, body: reply(route, body) if status == 200 else (status, {})
    with served(other) as address:
        line = complaint(lambda: open_http(address, model=policy()))
    assert all(word in line for word in words)


def test_other_log_probabilities_are_noticed_before_anything_is_saved(start, fake_address, capsys):  # noqa: F811
    """Those of the fake server are made up."""
    with pytest.raises(SystemExit):
        call("chat_rl", *RL, "--source=base", "--source_tag=d1", "--model_tag=wrong", f"--sampler={fake_address}")
    error = capsys.readouterr().err
    assert "nats a token" in error and error.count("\n") == 1
    assert not list(start.glob("checkpoints/rl/wrong/step_*"))


def test_weights_in_several_files_are_named_by_all_of_them(fake_address, folder, monkeypatch):
    """A step of large weights may change only the last file."""
    monkeypatch.setattr(hf, "write_weights", partial(hf.write_weights, shard_bytes=1 << 12))
    model = family_policy()
    sampler = open_http(fake_address, model=model)
    sampler.family = "qwen3"
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    first = sampler._write(model, weights)
    second = sampler._write(model, {**weights, "head.weight": 2 * weights["head.weight"]})
    files = [{path.name: path.read_bytes() for path in written.glob("*.safetensors")} for written in (first, second)]
    changed = [name for name in files[0] if files[0][name] != files[1][name]]
    assert len(files[0]) > len(changed) > 0 and min(files[0]) not in changed
    assert first.name != second.name


# ---------------------------------------------------------------------- runs


@contextmanager
def serving_source(source: str) -> Iterator[str]:
    """A server of the trainer's source, as chat_web --for_rl makes it."""
    model, tokenizer, _ = load_model(source, cpu_device())
    with serving(serve_model(model, tokenizer)) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_with_a_server_has_the_bits_of_one_without(taught, staleness):  # noqa: F811
    """Also where the server samples while the trainer trains. With a staleness the policy becomes another one."""
    flags = (*graded(taught), "--num_iterations=3", "--eval_every=2", "--importance_cap=0", f"--staleness={staleness}")
    call("chat_rl", *flags, "--model_tag=alone")
    with serving_source("sft") as address:
        call("chat_rl", *flags, "--model_tag=served", f"--sampler={address}")
    assert sha256(taught, "rl", 3, "served") == sha256(taught, "rl", 3, "alone")
    assert not (taught / "runs/rl/served/weights").exists()
    logged = lasting(taught, "rl", "served"), lasting(taught, "rl", "alone")
    for line in [*logged[0], *logged[1]]:
        is_fresh = staleness == 0 or line["step"] == 0
        assert (line.pop("sampler_gap") < 1e-5) == is_fresh  # not 0: other batches round otherwise
    assert logged[0] == logged[1]
    assert sum(line["no_signal"] < 1 for line in metrics(taught, "rl", "alone")) == 3


@pytest.mark.slow
def test_two_ranks_share_a_server_and_end_together_when_it_dies(taught):  # noqa: F811
    """Its samples are those of one rank."""
    flags = (*graded(taught), "--num_iterations=3", "--eval_every=3", "--staleness=1")
    call("chat_rl", *flags, "--model_tag=alone")
    with serving_source("sft") as address:
        run_command("chat_rl", *flags, "--model_tag=two", f"--sampler={address}")
        first, second = metrics(taught, "rl", "alone"), metrics(taught, "rl", "two")
        assert [line["reward"] for line in first] == [line["reward"] for line in second]
        assert [line["loss"] for line in first] == pytest.approx([line["loss"] for line in second], rel=1e-3)
        more = ("--model_tag=dead", f"--sampler={address}", "--sampler_patience=2", "--num_iterations=1000")
        ended = threading.Event()
        printed: list[str] = []

        def train() -> None:
            try:
                run_command("chat_rl", *flags[:-1], *more)
            except AssertionError as error:  # what the ranks have raised
                printed.append(str(error))
            ended.set()

        threading.Thread(target=train, daemon=True).start()
        until(lambda: (taught / "runs/rl/dead/metrics.jsonl").exists() and metrics(taught, "rl", "dead"), 60)
    assert ended.wait(60) and all(word in printed[0] for word in ("SystemExit: 1", "--resume", "--sampler_patience"))
    assert list((taught / "checkpoints/rl/dead").glob("step_*"))


# ---------------------------------------------------------------------- samples drawn ahead


class Recording:
    """A sampler that is told of weights, and counts who samples meanwhile."""

    def __init__(self) -> None:
        self.weights = -1
        self.sampling = 0

    def hand_over(self, model: Any) -> None:
        assert self.sampling == 0, "weights change while somebody samples"
        self.weights = model.step

    __call__: Any = None


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_every_sample_has_exactly_the_weights_of_its_step(staleness):
    sampler = Recording()
    model: Any = SimpleNamespace(step=0)
    trained = threading.Event()
    overlapped = []

    def draw(step: int) -> rollout.RankSamples:
        sampler.sampling += 1
        if threading.current_thread() is not threading.main_thread():
            overlapped.append(trained.wait(5))  # the trainer trains meanwhile
        sampler.sampling -= 1
        return rollout.RankSamples(step, sampler.weights)

    ahead = Ahead(sampler, model, draw, staleness, last=6)
    for step in range(6):
        if step in (0, 4):  # an evaluation
            ahead.hand_over(step)
            assert sampler.weights == step
        share = ahead.take(step)
        assert (share.questions, share.group_size) == (step, max(0, step - staleness))
        trained.clear()
        ahead.begin(step)
        model.step = step + 1
        trained.set()
    assert overlapped == [True] * (5 if staleness else 0)


def test_an_error_of_the_thread_that_samples_is_raised():
    def draw(step: int) -> rollout.RankSamples:
        if step == 1:
            raise cli.UserError("no such question")
        return rollout.RankSamples(1, 1)

    ahead = Ahead(Recording(), SimpleNamespace(step=0), draw, 1, last=3)  # pyright: ignore
    ahead.take(0)
    ahead.begin(0)
    assert complaint(lambda: ahead.take(1)) == "no such question"


# ---------------------------------------------------------------------- Ray


@pytest.mark.slow
def test_ray_workers_in_a_process_of_their_own():
    """ray_cases.py: a node of Ray that dies ends the process that has started it, and this one runs other tests."""
    pytest.importorskip("ray", reason="the extra `ray` brings it")
    done = process("pytest", "-p", "no:cacheprovider", "-n", "0", str(Path(__file__).with_name("ray_cases.py")))
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr
