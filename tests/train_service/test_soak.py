"""A bad week of the training service: kills, full disks, overwritten checkpoints, flipped bytes.

`NANOCHAT_TRIALS=200 pytest -m soak tests/train_service/test_soak.py -s` is the long form: so many kills. It mounts a
small disk, so it needs the right to do so.
"""

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_durability import batch, files_of, require_flips_noticed
from test_limits import PROTO as PROTO_HEADERS
from test_limits import new_model
from test_train_service import IDS, NAME, Server, datum, lora_client, serving, tinker, train

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


def ran(address: str, key: str, seed: int) -> Loop:
    loop = Loop(address, key, seed)
    loop.run()
    return loop


def run_into(ended: list[Loop | Exception], address: str, key: str, seed: int) -> None:
    try:
        ended.append(ran(address, key, seed))
    except Exception as error:
        ended.append(error)


# ---------------------------------------------------------------------- what happens to the server


def soaked_server(base: Base, disk: Path, log: Path) -> Server:
    return Server(base, disk / "service", log, f"--models={LIMITS.models}", f"--api_key={','.join(KEYS)}")


def fill(ballast: Path) -> None:
    """Write a file until the disk is full."""
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
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


# ---------------------------------------------------------------------- the soak


@pytest.mark.soak
def test_a_bad_week(base, disk, tmp_path, capsys):
    draw = np.random.default_rng(int(os.environ.get("NANOCHAT_SEED", "0")))
    server = soaked_server(base, disk, tmp_path / "server.log")
    ballast = disk / "ballast"
    kills = fills = flips = stops = operations = refused = rounds = 0
    try:
        while kills < TRIALS:
            ended: list[Loop | Exception] = []
            for place, key in enumerate(KEYS):
                run = (ended, server.address, key, 100 * rounds + place)
                threading.Thread(target=run_into, args=run, daemon=True).start()
            while len(ended) < len(KEYS):
                time.sleep(0.1 + draw.exponential(1))
                if draw.random() < 0.4:
                    fill(ballast)
                    fills += 1
                    time.sleep(draw.exponential(2))
                server.kill()
                kills += 1
                if draw.random() < 0.5:
                    ballast.unlink(missing_ok=True)
                server.start()  # also on a disk that is full
                if ballast.exists():
                    time.sleep(draw.exponential(2))
                    ballast.unlink()
            loops = [one for one in ended if isinstance(one, Loop)]
            assert len(loops) == len(KEYS), (ended, server.log.read_text()[-3000:])
            weights = {loop.seed: loop.weights(server.folder) for loop in loops}
            server.kill()

            # The same without an accident.
            service = Service(base, tmp_path / f"straight-{rounds}", NAME, LIMITS)
            with serving(service) as address:
                for loop in loops:
                    straight = ran(address, "tml-any", loop.seed)
                    assert straight.record == loop.record
                    expected = straight.weights(service.folder)
                    assert len(expected) == len(weights[loop.seed])
                    for left, right in zip(expected, weights[loop.seed], strict=True):
                        assert left.keys() == right.keys()
                        assert all(torch.equal(left[name], right[name]) for name in left)

            ids = [model.model_id for loop in loops for model in loop.models]
            files = [*files_of(server.folder, ids)]
            chosen = [files[draw.integers(len(files))] for _ in range(10)]
            places = [(file, int(draw.integers((server.folder / file).stat().st_size))) for file in chosen]
            start = lambda folder: Service(base, folder, NAME, LIMITS)  # noqa: E731
            stops += require_flips_noticed(start, server.folder, ids, places, capsys)
            flips += len(places)
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


def sent_until(ended: threading.Event, url: str, content: bytes, headers: dict[str, str]) -> list[int]:
    """Send a body again and again; returns the statuses of the answers."""
    statuses = []
    while not ended.is_set():
        statuses.append(httpx.post(url, content=content, headers=headers, timeout=60).status_code)
    return statuses


@pytest.mark.soak
def test_health_is_answered_under_the_worst_bodies(base, tmp_path):
    """p99 under 100 ms, as for the chat server, while clients send each of the worst bodies as fast as they can."""
    server = soaked_server(base, tmp_path, tmp_path / "server.log")
    slowest: dict[str, float] = {}
    try:
        headers = {"x-api-key": KEYS[0]}
        with (
            httpx.Client(base_url=f"{server.address}/api/v1/", headers=headers, timeout=60) as http,
            ThreadPoolExecutor(4) as threads,
        ):
            model_id = new_model(http)
            for number, (route, content, kind) in enumerate(worst_bodies(model_id)):
                ended = threading.Event()
                kind_of = {**headers, "content-type": kind}
                senders = [
                    threads.submit(sent_until, ended, f"{server.address}/api/v1/{route}", content, kind_of)
                    for _ in range(4)
                ]
                seconds = []
                while len(seconds) < 500:
                    start = time.perf_counter()
                    assert http.get("healthz").status_code == 200
                    seconds.append(time.perf_counter() - start)
                    time.sleep(0.01)
                ended.set()
                statuses = [status for sender in senders for status in sender.result()]
                assert statuses
                p99 = sorted(seconds)[int(0.99 * len(seconds))]
                slowest[f"{number} {route} {len(content):,} bytes {sorted(set(statuses))}"] = p99
        print(*(f"{1000 * p99:6.1f} ms  {name}" for name, p99 in slowest.items()), sep="\n")
        assert max(slowest.values()) < 0.1
    finally:
        server.kill()
