"""A bad week of the training service: kills, full disks, overwritten checkpoints, flipped bytes.

`NANOCHAT_TRIALS=200 pytest -m soak tests/train_service/test_soak.py -s` is the long form: so many kills. It mounts a
small disk, so it needs the right to do so.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_durability import ADAM, batch, flip
from test_limits import PROTO as PROTO_HEADERS
from test_limits import new_model
from test_train_service import IDS, NAME, SERVER, datum, lora_client, serving, tinker, train

from nanochat.serve.schema import ApiError
from nanochat.train_service import wire
from nanochat.train_service.service import Limits, Service
from nanochat.train_service.tenants import Base

TRIALS = int(os.environ.get("NANOCHAT_TRIALS", "10"))
OPERATIONS = 400  # of each client in a round
KEYS = ("tml-alice-soak", "tml-bob-soak")
LIMITS = Limits(snapshot_steps=3, batch_tokens=16, models=2)
DISK_MB = 64
PROTO, JSON = PROTO_HEADERS["content-type"], "application/json"


# ---------------------------------------------------------------------- what a client does


class Loop:
    """Drawn operations of one client. Its record says what it was told: equal records and weights are equal runs."""

    def __init__(self, address: str, key: str, seed: int):
        self.client = tinker.ServiceClient(base_url=address, api_key=key)
        self.rest = tinker.RestClient(base_url=address, api_key=key)
        self.draw = np.random.default_rng(seed)
        self.seed = seed
        self.models = [lora_client(self.client, seed=seed)]
        self.saved: dict[str, str] = {}
        self.record: list[Any] = []
        self.names = 0
        self.refused = 0  # saves that found a full disk

    def run(self, operations: int = OPERATIONS) -> None:
        for _ in range(operations):
            model = self.models[self.draw.integers(len(self.models))]
            chosen = self.draw.choice(
                ["train", "save", "load", "grow", "delete", "sample", "forward"],
                p=[0.5, 0.15, 0.1, 0.07, 0.03, 0.08, 0.07],
            )
            path = self.saved[str(self.draw.choice(sorted(self.saved)))] if self.saved else ""
            if chosen == "train":
                train(model, 1, first=int(self.draw.integers(9)))
            elif chosen == "save":
                name = str(self.draw.choice(["x", "y", "z"]))
                self.saved[name] = self.persist(model.save_state, name, overwrite=True).path
            elif chosen == "load" and path:
                model.load_state_with_optimizer(path).result()
            elif chosen == "grow" and path:
                self.models[1:] = [self.client.create_training_client_from_state_with_optimizer(path).result()]
            elif chosen == "delete" and path:
                self.delete(path)
            elif chosen == "sample":
                sampler = self.persist(model.save_weights_for_sampler, self.name()).path
                prompt = tinker.ModelInput.from_ints([5, 6, 7])
                params = tinker.SamplingParams(max_tokens=4, seed=int(self.draw.integers(99)))
                samples = self.client.create_sampling_client(model_path=sampler).sample(prompt, 2, params).result()
                self.record.append([one.tokens for one in samples.sequences])
            elif chosen == "forward":
                self.record.append(model.forward([datum(IDS[0])], "cross_entropy").result().metrics["loss:sum"])

    def name(self) -> str:
        self.names += 1
        return f"sampler-{self.names}"

    def persist(self, save: Any, *arguments: Any, **settings: Any) -> Any:
        """Until there is room: a save on a full disk is refused with a line that says so."""
        while True:
            try:
                return save(*arguments, **settings).result()
            except tinker.RequestFailedError as error:
                assert "disk" in str(error), error
                self.refused += 1
                time.sleep(0.5)

    def delete(self, path: str) -> None:
        with contextlib.suppress(tinker.NotFoundError):  # the answer to the first try was lost with the server
            self.rest.delete_checkpoint_from_tinker_path(path).result()
        self.saved = {name: one for name, one in self.saved.items() if one != path}

    def weights(self, folder: Path) -> list[dict[str, torch.Tensor]]:
        """Those of all models; `folder` is the service's."""
        found = []
        for model in self.models:
            self.persist(model.save_weights_for_sampler, self.name())
            (file,) = (folder / "models" / model.model_id / "sampler_weights").glob(f"sampler-{self.names}/*/*.safe*")
            found.append(load_file(file))
        return found


# ---------------------------------------------------------------------- what happens to the server


class Server:
    """The command, in a process that is killed and started again, on a disk that fills up."""

    def __init__(self, base: Base, disk: Path, log: Path):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self.folder = disk / "service"
        self.ballast = disk / "ballast"
        self.log = log
        self.command = [*SERVER, f"--source={base.source}", f"--port={port}"]
        self.command += [f"--name={NAME}", f"--folder={self.folder}", "--device=cpu", "--dtype=float32"]
        self.command += [f"--batch_tokens={LIMITS.batch_tokens}", f"--models={LIMITS.models}"]
        self.command.append(f"--api_key={','.join(KEYS)}")
        self.start()

    def start(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
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

    def fill_disk(self) -> None:
        with self.ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 4096)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "none", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted: {mounted.stderr.decode()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


# ---------------------------------------------------------------------- damage


def continued(service: Service, model_id: str) -> dict[str, torch.Tensor] | None:
    """The weights after one more step; None: the model has stopped, and said so."""
    model = service.models.get(model_id)
    if model is None:
        return None
    number = model.next
    try:
        service.submit(model.owner, model_id, number, "forward_backward", batch(model_id, number))
        service.submit(model.owner, model_id, number + 1, "optim_step", json.dumps(ADAM).encode())
    except ApiError as error:
        assert "has stopped" in str(error.body)
        return None
    result = service.promise(model.owner, f"{model_id}:{number + 1}").result.result(60)
    if b"has stopped" in result:
        return None
    assert not result.startswith(b'{"error"'), result
    assert model.live is not None
    return {name: one.detach().clone() for name, one in model.live.model.named_parameters() if one.requires_grad}


def damage_each(base: Base, folder: Path, copy: Path, ids: list[str], count: int, draw: Any, capsys: Any) -> int:
    """Flip one byte at a time in a copy of a killed server's folder: every model has its weights, or has stopped.

    Returns how many models stopped.
    """
    shutil.copytree(folder, copy)
    service = Service(base, copy, NAME, LIMITS)
    expected = {one: continued(service, one) for one in ids}
    service.close()
    assert all(expected.values())
    shutil.rmtree(copy)
    stopped = 0
    for _ in range(count):
        shutil.copytree(folder, copy)
        files = sorted(
            path for one in ids for path in (copy / "models" / one).rglob("*") if path.is_file() and path.stat().st_size
        )
        files = [path for path in files if "weights" not in str(path.relative_to(copy))]  # checked when they are loaded
        file = files[draw.integers(len(files))]
        flip(file, int(draw.integers(file.stat().st_size)))
        capsys.readouterr()
        service = Service(base, copy, NAME, LIMITS)
        for one in ids:
            weights = continued(service, one)
            if weights is None:
                assert one in file.parts, (one, file)
                stopped += 1
            else:
                assert all(torch.equal(weights[name], tensor) for name, tensor in (expected[one] or {}).items()), file
        service.close()
        said = "".join(capsys.readouterr())
        hurt = next(one for one in ids if one in file.parts)
        if any(service.models.get(one) is None or service.models[one].stopped for one in ids):
            assert str(file) in said or str(file.parent) in said or hurt in said, (file, said)
        shutil.rmtree(copy)
    return stopped


# ---------------------------------------------------------------------- the soak


@pytest.mark.soak
def test_a_bad_week(base, disk, tmp_path, capsys):
    draw = np.random.default_rng(int(os.environ.get("NANOCHAT_SEED", "0")))
    server = Server(base, disk, tmp_path / "server.log")
    kills = fills = flips = stops = operations = refused = rounds = 0
    try:
        while kills < TRIALS:
            loops: list[Loop] = []
            failures: list[BaseException] = []
            done = threading.Event()

            def run(key: str, seed: int, loops: list[Loop] = loops, failures: list[BaseException] = failures) -> None:
                try:
                    loops.append(Loop(server.address, key, seed))
                    loops[-1].run()
                except BaseException as error:
                    failures.append(error)

            threads = [
                threading.Thread(target=run, args=(key, 100 * rounds + place), daemon=True)
                for place, key in enumerate(KEYS)
            ]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                done.wait(0.1 + draw.exponential(1))
                if draw.random() < 0.4:
                    server.fill_disk()
                    fills += 1
                    done.wait(draw.exponential(2))
                server.kill()
                kills += 1
                if draw.random() < 0.5:
                    server.ballast.unlink(missing_ok=True)
                server.start()  # also on a disk that is full
                if server.ballast.exists():
                    done.wait(draw.exponential(2))
                    server.ballast.unlink()
            assert not failures, (failures, server.log.read_text()[-3000:])
            ended = {loop.seed: loop.weights(server.folder) for loop in loops}
            server.kill()

            # The same without an accident.
            service = Service(base, tmp_path / f"straight-{rounds}", NAME, LIMITS)
            with serving(service) as address:
                for loop in loops:
                    straight = Loop(address, "tml-any", loop.seed)
                    straight.run()
                    assert straight.record == loop.record
                    expected = straight.weights(service.folder)
                    assert len(expected) == len(ended[loop.seed])
                    for left, right in zip(expected, ended[loop.seed], strict=True):
                        assert left.keys() == right.keys()
                        assert all(torch.equal(left[name], right[name]) for name in left)

            ids = [model.model_id for loop in loops for model in loop.models]
            count = 10
            stops += damage_each(base, server.folder, tmp_path / "copy", ids, count, draw, capsys)
            flips += count
            operations += sum(OPERATIONS for _ in loops)
            refused += sum(loop.refused for loop in loops)
            rounds += 1
            shutil.rmtree(server.folder)
            server.start()
            with capsys.disabled():
                print(
                    f"{rounds} rounds, {operations} operations: {kills} kills, {fills} full disks ({refused} saves "
                    f"refused), {flips} flipped bytes ({stops} models stopped), no weight differs"
                )
    finally:
        server.kill()
    assert "Traceback" not in server.log.read_text()


def worst_bodies(model_id: str) -> list[tuple[str, bytes, str]]:
    """Route, content and type of what costs most to read: each nearly as large as is allowed."""
    first = batch(model_id, 1)  # never in its turn
    tensor = wire._messages()["ForwardBackwardRequest"]
    token = {"encoded_text": {"tokens": (5).to_bytes(4, "little")}}
    values = {"dense": bytes(8), "dtype": 2, "shape": [1] * 4}
    small = {"model_input": [token], "loss_fn_inputs": [{"key": "target_tokens", "value": values}]}
    shape = {"dense": bytes(8), "dtype": 2, "shape": [1] * 4_000_000}
    deep = {"model_input": [token], "loss_fn_inputs": [{"key": "target_tokens", "value": shape}]}
    head = {"model_id": model_id, "seq_id": 10**6}
    large = {"dense": bytes(15 << 20), "dtype": 2}
    wide = {"model_input": [token], "loss_fn_inputs": [{"key": "target_tokens", "value": large}]}
    prompt = {"sampling_session_id": "x", "num_samples": 1, "sampling_params": {}}
    stops = json.dumps({**prompt, "prompt": {}, "sampling_params": {"stop": "@"}})
    floats = "[" + ",".join(["0.123456789"] * 150_000) + "]"
    return [
        ("forward_backward", tensor(**head, data=[small] * 4096).SerializeToString(), PROTO),
        ("forward_backward", tensor(**head, data=[deep]).SerializeToString(), PROTO),
        ("forward_backward", tensor(**head, data=[wide]).SerializeToString(), PROTO),
        ("forward_backward", first[: len(first) // 2] + b"\x1a\x00" * 8_000_000, PROTO),
        ("forward_backward", b"\x1b" * (16 << 20), PROTO),
        ("asample", json.dumps({**prompt, "prompt": {"chunks": [{"tokens": [5] * 250_000}]}}).encode(), JSON),
        ("asample", json.dumps({**prompt, "prompt": {"chunks": [{"tokens": []}] * 100_000}}).encode(), JSON),
        ("asample", stops.replace('"@"', floats).encode(), JSON),
        ("asample", b"[" * (2 << 20), JSON),
        ("create_session", json.dumps({"tags": ["x"] * 300_000, "sdk_version": "0"}).encode(), JSON),
    ]  # fmt: skip


@pytest.mark.soak
def test_health_is_answered_under_the_worst_bodies(base, tmp_path):
    """p99 under 100 ms, as for the chat server, while clients send each of the worst bodies as fast as they can."""
    server = Server(base, tmp_path, tmp_path / "server.log")
    slowest: dict[str, float] = {}
    try:
        headers = {"x-api-key": KEYS[0]}
        with httpx.Client(base_url=f"{server.address}/api/v1/", headers=headers, timeout=60) as http:
            model_id = new_model(http)
            for number, (route, content, kind) in enumerate(worst_bodies(model_id)):
                ended = threading.Event()
                statuses: list[int] = []

                def send(
                    route: str = route,
                    content: bytes = content,
                    kind: str = kind,
                    ended: threading.Event = ended,
                    statuses: list[int] = statuses,
                ) -> None:
                    while not ended.is_set():
                        answer = httpx.post(
                            f"{server.address}/api/v1/{route}",
                            content=content,
                            headers={**headers, "content-type": kind},
                            timeout=60,
                        )
                        statuses.append(answer.status_code)

                senders = [threading.Thread(target=send) for _ in range(4)]
                for sender in senders:
                    sender.start()
                seconds = []
                while len(seconds) < 500:
                    start = time.perf_counter()
                    assert http.get("healthz").status_code == 200
                    seconds.append(time.perf_counter() - start)
                    time.sleep(0.01)
                ended.set()
                for sender in senders:
                    sender.join()
                assert statuses
                p99 = sorted(seconds)[int(0.99 * len(seconds))]
                slowest[f"{number} {route} {len(content):,} bytes {sorted(set(statuses))}"] = p99
        print(*(f"{1000 * p99:6.1f} ms  {name}" for name, p99 in slowest.items()), sep="\n")
        assert max(slowest.values()) < 0.1
    finally:
        server.kill()
