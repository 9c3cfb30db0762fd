"""What one client's requests can cost the others: large bodies, long samples, results that nobody fetches."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_durability import batch
from test_train_service import NAME, serving, tinker, train

from nanochat import storage
from nanochat.cli import UserError
from nanochat.serve.schema import ApiError, read_body
from nanochat.train_service import bodies, wire
from nanochat.train_service.service import Limits, Service
from nanochat.train_service.tenants import Base

PROTO = {"content-type": "application/x-protobuf"}


@pytest.fixture
def service(base: Base, tmp_path: Path) -> Iterator[Service]:
    service = Service(base, tmp_path / "service", NAME, Limits())
    yield service
    service.close()


@pytest.fixture
def http(service: Service) -> Iterator[httpx.Client]:
    with serving(service) as address, httpx.Client(base_url=f"{address}/api/v1/", timeout=30) as http:
        yield http


def new_model(http: httpx.Client) -> str:
    session = http.post("create_session", json={"tags": [], "sdk_version": "0"}).json()["session_id"]
    lora = {"rank": 2, "seed": 7}
    body = {"session_id": session, "model_seq_id": 0, "base_model": NAME, "lora_config": lora}
    return http.post("create_model", json=body).json()["request_id"].removesuffix(":0")


def message_of(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


# ---------------------------------------------------------------------- bodies


def header(model_id: str, number: int) -> bytes:
    message = wire._messages()["ForwardBackwardRequest"]
    return message(model_id=model_id, seq_id=number).SerializeToString()


def tensor_of(dims: int) -> bytes:
    """A request with one target token, whose shape has many dimensions of 1."""
    values = {"dense": (5).to_bytes(8, "little"), "dtype": 2, "shape": [1] * dims}
    text = {"tokens": (5).to_bytes(4, "little")}
    datum = {"model_input": [{"encoded_text": text}], "loss_fn_inputs": [{"key": "target_tokens", "value": values}]}
    return wire._messages()["ForwardBackwardRequest"](data=[datum]).SerializeToString()


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
    assert named in message_of(answer, 400)
    # What has a model and a number has used it up: later requests do not wait for it.
    step = {"model_id": model_id, "seq_id": 2 if "more than" in named else 1, "adam_params": {}}
    request_id = http.post("optim_step", json=step).json()["request_id"]
    assert "no gradients" in http.post("retrieve_future", json={"request_id": request_id}).json()["error"]


def test_the_outline_is_what_the_parser_reads():
    content = batch("the model", 77)
    assert wire.outline(content) == wire.Outline("the model", 77)
    message = wire.read_forward_backward(content)
    assert (message.model_id, message.number) == ("the model", 77)


def test_the_model_is_looked_up_before_a_body_is_parsed(http, monkeypatch):
    monkeypatch.setattr(wire, "read_forward_backward", lambda content: 1 / 0)
    answer = http.post("forward_backward", content=batch("elsewhere", 1), headers=PROTO)
    assert "elsewhere" in message_of(answer, 404)


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
        list(
            threads.map(
                lambda n: http.post("forward_backward", content=batch(model_id, n), headers=PROTO), (1, 2, 3, 4)
            )
        )
    assert most == [1] * 4


def test_a_list_of_wrong_items_ends_at_the_first():
    body = {
        "prompt": {"chunks": [{"tokens": [5]}]}, "sampling_session_id": "x", "seq_id": 0,
        "sampling_params": {"stop": [0.5] * 200_000},
    }  # fmt: skip
    with pytest.raises(ApiError, match="sampling_params.stop"):
        read_body(bodies.SampleBody, json.dumps(body).encode())
    body["sampling_params"] = {"stop": [5] * 200_000}
    with pytest.raises(ApiError, match="sampling_params.stop"):
        read_body(bodies.SampleBody, json.dumps(body).encode())
    body["sampling_params"] = {}
    body["prompt"] = {"chunks": [{"tokens": []}] * 2000}
    with pytest.raises(ApiError, match="chunks"):
        read_body(bodies.SampleBody, json.dumps(body).encode())


def test_nothing_waits_for_the_disk_on_the_event_loop(service, monkeypatch):
    on_loop: list[str] = []

    def watched(module: Any, name: str) -> None:
        function = getattr(module, name)

        def call(*arguments: Any, **settings: Any) -> Any:
            if asyncio._get_running_loop() is not None:
                on_loop.append(name)
            return function(*arguments, **settings)

        monkeypatch.setattr(module, name, call)

    for module, name in ((storage, "write_file"), (storage, "flush"), (shutil, "rmtree"), (json, "loads")):
        watched(module, name)
    with serving(service) as address:
        client = tinker.ServiceClient(base_url=address, api_key="tml-any")
        training = client.create_lora_training_client(base_model=NAME, rank=2).result()
        train(training, 1)
        path = training.save_state("x").result().path
        client.create_training_client_from_state(path).result()
        weights = training.save_weights_for_sampler("y").result().path
        client.create_sampling_client(model_path=weights).result().compute_logprobs(
            tinker.ModelInput.from_ints([5, 6])
        ).result()
        tinker.RestClient(base_url=address, api_key="tml-any").delete_checkpoint_from_tinker_path(path).result()
    # The client's own loop is in this process too: it reads JSON, and touches no file.
    assert not set(on_loop) - {"loads"}


WEDGED = """
import sys, time
from nanochat.train_service.tenants import TrainedModel
def hang(*arguments):
    print("hangs", flush=True)
    time.sleep(1000)
TrainedModel.forward = hang
from nanochat.cli import run
from scripts.train_server import Config, main
run(main, Config)
"""


@pytest.mark.slow
def test_a_thread_that_hangs_does_not_keep_the_server_from_ending(base, tmp_path):
    command = [sys.executable, "-c", WEDGED, f"--source={base.source}", "--port=0", f"--name={NAME}", "--device=cpu"]
    command += [f"--folder={tmp_path / 'service'}", "--dtype=float32"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stdout is not None and server.stderr is not None
        address = server.stdout.readline().split()[0].partition("=")[2]
        server.stdout.readline()
        with httpx.Client(base_url=f"{address}api/v1/", timeout=30) as http:
            model_id = new_model(http)
            http.post("forward_backward", content=batch(model_id, 1), headers=PROTO).raise_for_status()
            assert server.stdout.readline() == "hangs\n"
            server.send_signal(signal.SIGTERM)
            server.wait(30)
        assert "hang" in server.stderr.read()
    # What was acknowledged is on the disk, which only its owner reads.
    (entry,) = (tmp_path / "service" / "models" / model_id / "log").iterdir()
    assert entry.read_bytes() == batch(model_id, 1)
