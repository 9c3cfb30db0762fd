"""The training service of tests: its base model, a client without HTTP, the unmodified tinker client, and a server."""

import contextlib
import functools
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import test_serve
import tiny
import torch

from nanochat.train_service.app import create_app
from nanochat.train_service.service import Service
from nanochat.train_service.tenants import Base, Trained

os.environ["TINKER_TELEMETRY"] = "0"  # or clients of a server that has ended go on calling it
tinker = pytest.importorskip("tinker", reason="the extra `dev` brings tinker")
pb2 = importlib.import_module("tinker.proto.tinker_public_pb2")
logging.getLogger("tinker").setLevel(logging.ERROR)  # clients of servers that have ended complain for minutes

NAME = "tiny"
CONTEXT = 64
OWNER = "alice"
ADAM = {"learning_rate": 0.01}
IDS = [[5, 6, 7, 8, 9, 10, 11, 12], [20, 21, 22, 23, 24], [40, 3, 41, 3, 42, 3, 43], [60, 61, 62]]
FOLDER = tempfile.TemporaryDirectory()
PROTO = {"content-type": "application/x-protobuf"}


@functools.cache
def base_model() -> Base:
    tokenizer = tiny.tiny_tokenizer()
    model = tiny.lively_model(tiny.tiny_config(vocab_size=tokenizer.vocab_size, sequence_len=CONTEXT, n_layer=2))
    folder = Path(FOLDER.name) / "checkpoints" / "sft" / NAME
    return Base(tiny.save_checkpoint(folder, 0, model, tokenizer, {"stage": "sft", "tasks": []}), tiny.cpu_device())


# ---------------------------------------------------------------------- a client without HTTP


def batch(model_id: str, number: int, shift: int = 0, times: int = 1, **fields: Any) -> bytes:
    """The body of a forward_backward."""
    data = []
    for ids in IDS[:2] * times:
        tokens = np.array(ids[:-1], "<i4") + shift
        targets = pb2.Tensor(dense=(np.array(ids[1:], "<i8") + shift).tobytes(), dtype=2)
        text = {"encoded_text": {"tokens": tokens.tobytes()}}
        data.append(pb2.Datum(model_input=[text], loss_fn_inputs={"target_tokens": targets}))
    fields |= {"model_id": model_id, "seq_id": number, "data": data, "loss_fn": "cross_entropy"}
    return pb2.ForwardBackwardRequest(**fields).SerializeToString()


class Client:
    """One owner's session and one model; requests are numbered as the tinker client numbers them."""

    def __init__(self, service: Service, number: int = 0, load: Any = None, owner: str = OWNER, seed: int = 7):
        self.service = service
        self.owner = owner
        self.session = service.create_session(owner)
        created = service.create_model(owner, self.session, number, Trained(2, seed=seed), None, load)
        self.model_id = created.removesuffix(":0")
        self.number = 0
        assert "error" not in self.result(0)

    def result(self, number: int) -> dict[str, Any]:
        """A result, {} for one in the form of the wire."""
        content = result_of(self.service, self.model_id, number, self.owner)
        return json.loads(content) if content.startswith(b"{") else {}

    def submit(self, kind: str, **body: Any) -> int:
        self.number += 1
        content = json.dumps(body).encode()
        if kind == "forward_backward":
            content = batch(self.model_id, self.number, **body)
        self.service.submit(self.owner, self.model_id, self.number, kind, content)
        return self.number

    def run(self, kind: str, **body: Any) -> dict[str, Any]:
        return self.result(self.submit(kind, **body))

    def train(self, shift: int = 0) -> None:
        self.submit("forward_backward", shift=shift)
        assert "error" not in self.run("optim_step", **ADAM)

    def save(self, name: str, overwrite: bool = False) -> dict[str, Any]:
        return self.run("save_weights", name=name, overwrite=overwrite, sampler=None)

    def weights(self) -> dict[str, torch.Tensor]:
        return weights_of(self.service, self.model_id)

    @property
    def folder(self) -> Path:
        return self.service.folder / "models" / self.model_id


def result_of(service: Service, model_id: str, number: int, owner: str = OWNER) -> bytes:
    return service.promise(owner, f"{model_id}:{number}").result.result(60)


def live_model(service: Service, model_id: str) -> Any:
    model = service.models[model_id]
    list(service._live(model))
    assert model.live is not None
    return model.live.model


def trained_weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters() if one.requires_grad}


def weights_of(service: Service, model_id: str) -> dict[str, torch.Tensor]:
    return trained_weights(live_model(service, model_id))


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


# ---------------------------------------------------------------------- the tinker client, and servers


@contextlib.contextmanager
def serving(service: Service, **settings: Any) -> Iterator[str]:
    """The service on a real socket, in a thread."""
    with test_serve.serving(create_app(service, **settings), ready=False) as port:
        yield f"http://127.0.0.1:{port}"


class Server:
    """The command, in a process that can be killed and started again. Its snapshots come often."""

    def __init__(self, folder: Path, log: Path, *flags: str, before: str = ""):
        port = tiny.free_port()
        self.address = f"http://127.0.0.1:{port}"
        self.folder = folder
        self.log = log
        program = "from scripts import train_server as server; from nanochat.ground.cli import run"
        program += f"\nserver.SNAPSHOT_STEPS = 3\n{before}\nrun(server.main, server.Config)"
        self.command = [sys.executable, "-c", program, f"--source={base_model().source}", f"--name={NAME}", *flags]
        self.command += [f"--port={port}", f"--folder={folder}", "--device=cpu", "--dtype=float32", "--batch_tokens=16"]
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=environment)
        end = time.monotonic() + 120
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"{self.address}/api/v1/healthz")
                return
            time.sleep(0.05)
        raise AssertionError(self.log.read_text()[-3000:])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def client_of(address: str, key: str = "tml-any") -> Any:
    return tinker.ServiceClient(base_url=address, api_key=key)


def rest_of(address: str, key: str = "tml-any") -> Any:
    return tinker.RestClient(base_url=address, api_key=key)


def lora_client(client: Any, **settings: Any) -> Any:
    return client.create_lora_training_client(base_model=NAME, **{"rank": 4, "seed": 7, **settings}).result()


def datum(ids: list[int], **inputs: Any) -> Any:
    """A sequence that predicts its next token everywhere, with a number for each token of what the loss needs."""
    tensors = {name: np.array(values, np.float32) for name, values in inputs.items()}
    tensors["target_tokens"] = np.array(ids[1:], np.int64)
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=tensors)


def numbers(ids: list[int], seed: int) -> list[float]:
    return np.random.default_rng(seed).normal(size=len(ids) - 1).tolist()


def train(training: Any, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        data = [datum(ids, weights=numbers(ids, step)) for ids in IDS]
        gradients = training.forward_backward(data, "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=0.01)).result()
        gradients.result()


def new_model(http: httpx.Client) -> str:
    """The id of a model that is made by plain requests."""
    session = http.post("create_session", json={"tags": [], "sdk_version": "0"}).json()["session_id"]
    lora = {"rank": 2, "seed": 7}
    body = {"session_id": session, "model_seq_id": 0, "base_model": NAME, "lora_config": lora}
    return http.post("create_model", json=body).json()["request_id"].removesuffix(":0")


def mistake_of(answer: httpx.Response, status: int | None = None) -> str:
    """The one line of a refused request."""
    assert answer.status_code == status if status else 400 <= answer.status_code < 500, answer.text
    message = answer.json()["error"]["message"]
    assert message and "\n" not in message and len(message) < 500, message
    return message
