"""What a request may cost: large bodies, long samples, metadata, and a thread that hangs.

What owners may cost each other is in tests/promises/test_s16_training_service_keeps.py.
"""

import asyncio
import contextlib
import json
import shutil
import socket
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import test_serve
from fake_server import until
from service_clients import (
    NAME,
    OWNER,
    PROTO,
    Client,
    Server,
    base_model,
    batch,
    client_of,
    lora_client,
    mistake_of,
    new_model,
    pb2,
    rest_of,
    serving,
    tinker,
    train,
)

from nanochat.ground import storage
from nanochat.ground.cli import UserError
from nanochat.sampling import SamplingParams
from nanochat.serve import middleware
from nanochat.serve.schema import ApiError, read_body
from nanochat.train_service import app as service_app
from nanochat.train_service import bodies, sampling, wire
from nanochat.train_service.jobs import Job, Queue
from nanochat.train_service.sampling import SampleJob
from nanochat.train_service.service import Limits, Service
from nanochat.train_service.store import Store


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(base_model(), tmp_path / "service", NAME, Limits())
    yield service
    service.close()


@pytest.fixture
def http(service: Service) -> Iterator[httpx.Client]:
    with serving(service) as address, httpx.Client(base_url=f"{address}/api/v1/", timeout=30) as http:
        yield http


# ---------------------------------------------------------------------- bodies


def header(model_id: str, number: int) -> bytes:
    return pb2.ForwardBackwardRequest(model_id=model_id, seq_id=number).SerializeToString()


def tensor_of(dims: int) -> bytes:
    """A request with one target token, whose shape has many dimensions of 1."""
    values = pb2.Tensor(dense=(5).to_bytes(8, "little"), dtype=2, shape=[1] * dims)
    text = {"encoded_text": {"tokens": (5).to_bytes(4, "little")}}
    datum = pb2.Datum(model_input=[text], loss_fn_inputs={"target_tokens": values})
    return pb2.ForwardBackwardRequest(data=[datum]).SerializeToString()


def test_a_tensor_has_four_dimensions_at_most():
    assert wire.read_forward_backward(tensor_of(4)).data[0].inputs["target_tokens"].shape == (1, 1, 1, 1)
    with pytest.raises(UserError, match="350000 dimensions: at most 4"):
        wire.read_forward_backward(tensor_of(350_000))


@pytest.mark.parametrize(
    "content, named",
    [
        (b"\x1a\x00" * 1_000_000, "more than 4,096 data"),
        (b"\x1a\x80\x80\x80\x01" + b"\x0a\x00" * (1 << 20), "datum 0 has more than 64 parts"),
        (b"\x22\x00" * 1_000_000, "more than 64 settings"),
        (b"\x1a\xff\xff\xff\x0f", "not a forward_backward request"),
        (b"\x1b" * 100, "not a forward_backward request"),
        (b"\x10" + b"\xff" * 100, "not a forward_backward request"),
    ],
    ids=["data", "parts", "settings", "cut off", "groups", "a number without end"],
)
def test_a_request_of_many_parts_is_refused_before_it_is_parsed(http, monkeypatch, content, named):
    model_id = new_model(http)

    def parse(content: bytes) -> Any:
        raise AssertionError("parsed")

    monkeypatch.setattr(wire, "read_forward_backward", parse)
    answer = http.post("forward_backward", content=header(model_id, 1) + content, headers=PROTO)
    assert named in mistake_of(answer, 400)
    # What has a model and a number has used it up: later requests do not wait for it.
    step = {"model_id": model_id, "seq_id": 2 if "more than" in named else 1, "adam_params": {}}
    queued = http.post("optim_step", json=step)
    assert queued.status_code == 200, queued.text
    request_id = queued.json()["request_id"]
    assert "no gradients" in http.post("retrieve_future", json={"request_id": request_id}).json()["error"]


def test_the_outline_is_what_the_parser_reads():
    content = batch("the model", 77)
    assert wire.outline(content) == wire.Outline("the model", 77)
    message = pb2.ForwardBackwardRequest.FromString(content)
    assert (message.model_id, message.seq_id) == ("the model", 77)


def test_the_model_is_looked_up_before_a_body_is_parsed(http, monkeypatch):
    monkeypatch.setattr(wire, "read_forward_backward", lambda content: 1 / 0)
    answer = http.post("forward_backward", content=batch("elsewhere", 1), headers=PROTO)
    assert "elsewhere" in mistake_of(answer, 404)


def test_bodies_are_parsed_one_at_a_time(http, monkeypatch):
    model_id = new_model(http)
    running: list[int] = []
    most: list[int] = []

    def parse(content: bytes) -> Any:
        running.append(1)
        most.append(len(running))
        time.sleep(0.05)
        running.pop()
        raise UserError("refused")

    monkeypatch.setattr(wire, "read_forward_backward", parse)
    with ThreadPoolExecutor(4) as threads:
        for number in range(1, 5):
            threads.submit(http.post, "forward_backward", content=batch(model_id, number), headers=PROTO)
    assert most == [1] * 4


def test_unfinished_bodies_are_bounded_and_each_key_has_its_share(service, monkeypatch):
    app = service_app.create_app(service, keys=("tml-alice", "tml-bob", "tml-carol"))
    held = app.state.bodies
    monkeypatch.setattr(service_app, "OWNER_BODIES", 60_000)
    monkeypatch.setattr(service_app, "ALL_BODIES", 90_000)
    monkeypatch.setattr(service_app, "MAX_JSON", 2000)
    body = json.dumps({"tags": [], "sdk_version": "0" * 900}).encode()

    with test_serve.serving(app, ready=False) as port, contextlib.ExitStack() as opened:

        def post(key: str, content: Any = body, path: str = "create_session") -> httpx.Response:
            url = f"http://127.0.0.1:{port}/api/v1/{path}"
            return httpx.post(url, content=content, headers={"x-api-key": key, **PROTO}, timeout=30)

        def begin(key: str, length: int) -> socket.socket:
            """A request whose body lacks its last byte."""
            head = f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {key}\r\n"
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + bytes(length - 1))
            return connection

        for _ in range(60):
            begin("tml-alice", 1000)
        until(lambda: held.total() == 60_000)
        for content in (body, iter([body])):  # its length is announced or not
            refused = post("tml-alice", content)
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1" and "room" in refused.text
        assert post("tml-alice", bytes(8 << 20), "forward_backward").status_code == 503  # it reads the answer
        assert post("tml-bob").status_code == 200
        begin("tml-bob", 30_000)
        until(lambda: held.total() == 90_000)
        assert post("tml-carol").status_code == 503
        # Every way to end gives the room back: the client leaves, and the answers 200, 400, 404, 413, 408 and 500.
        opened.close()
        until(lambda: held.total() == 0)
        assert post("tml-carol").status_code == 200 and post("tml-carol", b"{").status_code == 400
        assert post("tml-carol", batch("elsewhere", 1), "forward_backward").status_code == 404
        assert post("tml-carol", iter([bytes(1500)] * 2)).status_code == 413
        monkeypatch.setattr(middleware, "BODY_SECONDS", 0.2)
        late = begin("tml-carol", 1000)
        assert b" 408 " in late.recv(1000)
        in_work: list[int] = []
        monkeypatch.setattr(service, "create_session", lambda *_: in_work.append(held.total()) or 1 / 0)
        assert post("tml-carol").status_code == 500 and in_work == [len(body)]
        until(lambda: held.total() == 0)


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"sampling_params": {"stop": [0.5] * 200_000}}, "sampling_params.stop"),
        ({"sampling_params": {"stop": [5] * 200_000}}, "sampling_params.stop"),
        ({"prompt": {"chunks": [{"tokens": []}] * 2000}}, "chunks"),
    ],
    ids=["wrong items", "stops", "chunks"],
)
def test_a_list_that_is_wrong_or_long_ends_at_its_first_items(part, named):
    good = {"prompt": {"chunks": [{"tokens": [5]}]}, "sampling_session_id": "x", "seq_id": 0, "sampling_params": {}}
    with pytest.raises(ApiError, match=named):
        read_body(bodies.SampleBody, json.dumps({**good, **part}).encode())


def test_nothing_waits_for_the_disk_on_the_event_loop(service, monkeypatch):
    on_loop: list[str] = []

    def watched(module: Any, name: str) -> None:
        function = getattr(module, name)

        def call(*arguments: Any, **settings: Any) -> Any:
            if asyncio._get_running_loop() is not None:
                on_loop.append(name)
            return function(*arguments, **settings)

        monkeypatch.setattr(module, name, call)

    disk = ((storage, "write_file"), (storage, "flush"), (shutil, "rmtree"), (Store, "rows"), (Store, "transaction"))
    for module, name in (*disk, (json, "loads")):
        watched(module, name)
    with serving(service) as address:
        client = client_of(address)
        training = lora_client(client, rank=2)
        train(training, 1)
        path = training.save_state("x").result().path
        client.create_training_client_from_state(path).result()
        weights = training.save_weights_for_sampler("y").result().path
        client.create_sampling_client(model_path=weights).result().compute_logprobs(
            tinker.ModelInput.from_ints([5, 6])
        ).result()
        rest_of(address).delete_checkpoint_from_tinker_path(path).result()
    # The client's own loop is in this process too: it reads JSON, and touches no file.
    assert not set(on_loop) - {"loads"}


def test_a_sample_in_slices_is_the_sample(service, monkeypatch):
    client = Client(service)
    sampler = service.create_sampler(OWNER, client.session, 1, None)
    results = []
    for number, seconds in enumerate((1000.0, 0.0)):
        monkeypatch.setattr(sampling, "SLICE_SECONDS", seconds)
        job = SampleJob([5, 6], 20, 9, SamplingParams(seed=3), frozenset({7}), prompt_logprobs=True, topk=2)
        results.append(service.promise(OWNER, service.sample(OWNER, sampler, number, job)).result.result(30))
    assert results[0] == results[1] and not results[0].startswith(b"{")


def test_a_sample_has_a_bounded_result():
    base = base_model()
    config = base.model.config
    body = {"prompt": {"chunks": [{"tokens": [5]}]}, "sampling_session_id": "x", "seq_id": 0, "num_samples": 1024}
    for topk, fits in ((0, True), (100, False)):
        text = json.dumps({**body, "topk_sample_logprobs": topk, "sampling_params": {}}).encode()
        asked = read_body(bodies.SampleBody, text)
        if fits:
            assert asked.job(base.tokenizer, config.vocab_size, config.sequence_len).numbers == 1024 * 63
        else:
            with pytest.raises(ApiError, match="several requests"):
                asked.job(base.tokenizer, config.vocab_size, config.sequence_len)
    # Several are decoded together as long as their results are as small.
    queue = Queue()
    large = SampleJob([5], 1024, 1024, SamplingParams(), frozenset())
    for number in range(9):
        queue.append(Job(f"s{number}", "alice", sampler=None, sample=large))
    assert [len(queue.take(lambda job: True)) for _ in range(3)] == [4, 4, 1]


def test_metadata_is_small(http):
    session = http.post("create_session", json={"tags": [], "sdk_version": "0"}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": NAME, "user_metadata": {"note": "x" * 5000}}
    assert "user_metadata: at most 4,096" in mistake_of(http.post("create_model", json=body), 400)
    assert http.post("create_model", json={**body, "user_metadata": {"note": "x" * 4000}}).status_code == 200


def test_models_are_listed(service):
    with serving(service) as address:
        client = client_of(address)
        training, other = (lora_client(client, rank=2) for _ in range(2))
        path = training.save_state("x").result().path
        child = client.create_training_client_from_state_with_optimizer(path).result()
        rest = rest_of(address)
        runs = rest.list_training_runs().result()
        ids = [one.training_run_id for one in runs.training_runs]
        assert set(ids) == {training.model_id, other.model_id, child.model_id} and runs.cursor.total_count == 3
        assert rest.list_training_runs(limit=1, offset=1).result().training_runs[0].training_run_id == ids[1]
        run = rest.get_training_run(training.model_id).result()
        assert run.lora_rank == 2 and not run.corrupted
        assert [one.tinker_path for one in rest.list_user_checkpoints().result().checkpoints] == [path]
        with httpx.Client(base_url=f"{address}/api/v1/", timeout=30) as http:
            assert "limit" in mistake_of(http.get("training_runs?limit=x"), 400)


# ---------------------------------------------------------------------- the end of a server


HANG = """
import time
from nanochat.train_service.tenants import TrainedModel
def hang(*arguments):
    print("hangs", flush=True)
    time.sleep(1000)
TrainedModel.forward = hang
"""


@pytest.mark.slow
def test_a_thread_that_hangs_does_not_keep_the_server_from_ending(tmp_path):
    server = Server(tmp_path / "service", tmp_path / "log", before=HANG)
    try:
        with httpx.Client(base_url=f"{server.address}/api/v1/", timeout=30) as http:
            model_id = new_model(http)
            http.post("forward_backward", content=batch(model_id, 1), headers=PROTO).raise_for_status()
            while "hangs\n" not in server.log.read_text():
                time.sleep(0.01)
            server.process.terminate()
            server.process.wait(30)
        assert "in hang" in server.log.read_text()
    finally:
        server.kill()
    # What was acknowledged is on the disk, which only its owner reads.
    with contextlib.closing(sqlite3.connect(server.folder / "service.db")) as db:
        assert db.execute("SELECT content FROM requests WHERE number = 1").fetchone() == (batch(model_id, 1),)
    assert (server.folder / "service.db").stat().st_mode & 0o777 == 0o600
