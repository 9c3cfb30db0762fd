"""What one client's requests can cost the others: large bodies, long samples, results that nobody fetches."""

import asyncio
import json
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_durability import ADAM, OWNER, Client, assert_same, batch
from test_train_service import NAME, Server, serving, tinker, train

from nanochat.engine import Slots
from nanochat.ground import storage
from nanochat.ground.cli import UserError
from nanochat.sampling import SamplingParams
from nanochat.serve.schema import ApiError, read_body
from nanochat.train_service import bodies, sampling, wire
from nanochat.train_service import service as service_module
from nanochat.train_service.jobs import Job, Queue
from nanochat.train_service.sampling import SampleJob
from nanochat.train_service.service import Limits, Service
from nanochat.train_service.tenants import Base, Trained

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
    queued = http.post("optim_step", json=step)
    assert queued.status_code == 200, queued.text
    request_id = queued.json()["request_id"]
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


# ---------------------------------------------------------------------- several owners


def test_owners_take_turns():
    queue = Queue()
    weights = [Path("x"), Path("y")]
    some = SampleJob([5], 1, 4, SamplingParams(), frozenset())
    jobs = [Job(f"a{number}", "alice", lambda: b"") for number in range(3)]
    jobs += [Job(f"s{number}", "alice", sampler=weights[number % 2], sample=some) for number in range(4)]
    jobs += [
        Job("b0", "bob", lambda: b""),
        Job("b1", "bob", lambda: b""),
        Job("c0", "carol", sampler=None, sample=some),
    ]
    for job in jobs:
        queue.append(job)
    assert len(queue) == 10 and queue.count("alice") == 7
    order = []
    while taken := queue.take(lambda owner: owner == "alice"):
        order.append(" ".join(job.id for job in taken))
    assert order == ["a0", "b0", "a1", "b1", "a2", "s0 s2", "s1 s3"]
    assert [job.id for job in queue.take(lambda owner: True)] == ["c0"] and len(queue) == 0


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token takes a hundredth of a second, and slices are short."""
    decode = Slots.decode

    def slow_decode(self: Slots, topk: int = 0) -> Any:
        time.sleep(0.01)
        return decode(self, topk)

    monkeypatch.setattr(Slots, "decode", slow_decode)
    monkeypatch.setattr(sampling, "SLICE_SECONDS", 0.02)


def test_a_long_sample_holds_up_no_one_else_and_can_be_cancelled(service, slow):
    alice, bob = Client(service), Client(service, owner="bob")
    sampler = service.create_sampler(OWNER, alice.session, 1, None)
    jobs = [SampleJob([5, 6], 1024, 50, SamplingParams(seed=number), frozenset()) for number in range(3)]
    running = [service.sample(OWNER, sampler, number, job) for number, job in enumerate(jobs)]
    while not service.sampling:
        time.sleep(0.001)
    bob.train()
    results = [service.promises[one].result for one in running]
    assert not any(result.done() for result in results)
    mine = service.create_sampler("bob", bob.session, 1, None)
    short = service.sample("bob", mine, 0, SampleJob([5, 6], 2, 3, SamplingParams(), frozenset()))
    assert not service.promise("bob", short).result.result(30).startswith(b"{")
    assert not any(result.done() for result in results)
    # One key cannot cancel the samples of another. The owner's are over at once.
    service.cancel("bob", running[0])
    assert not results[0].done()
    for one in running:
        service.cancel(OWNER, one)
        assert b"cancelled" in service.promise(OWNER, one).result.result(0)
    alice.train()
    while service.sampling:
        time.sleep(0.001)
    assert sum(job.num_samples for job in jobs) == 3072


def test_a_sample_in_slices_is_the_sample(service, monkeypatch):
    client = Client(service)
    sampler = service.create_sampler(OWNER, client.session, 1, None)
    results = []
    for number, seconds in enumerate((1000.0, 0.0)):
        monkeypatch.setattr(sampling, "SLICE_SECONDS", seconds)
        job = SampleJob([5, 6], 20, 9, SamplingParams(seed=3), frozenset({7}), prompt_logprobs=True, topk=2)
        results.append(service.promise(OWNER, service.sample(OWNER, sampler, number, job)).result.result(30))
    assert results[0] == results[1] and not results[0].startswith(b"{")


def test_a_sample_has_a_bounded_result(base):
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
    assert [len(queue.take(lambda owner: True)) for _ in range(3)] == [4, 4, 1]


def test_what_waits_and_what_is_kept_is_bounded_in_bytes(service, monkeypatch):
    client, other = Client(service), Client(service, owner="bob")
    size = len(batch(client.model_id, 3))
    monkeypatch.setattr(service_module, "MAX_WAITING", 3 * size)
    for number in range(3, 7):  # before their turn
        service.submit(OWNER, client.model_id, number, "forward_backward", batch(client.model_id, number))
    with pytest.raises(ApiError) as refused:
        service.submit(OWNER, client.model_id, 7, "forward_backward", batch(client.model_id, 7))
    assert refused.value.status_code == 429
    for number in (1, 2):  # those that they wait for have room
        service.submit(OWNER, client.model_id, number, "forward_backward", batch(client.model_id, number))
    client.result(6)
    service.submit(OWNER, client.model_id, 7, "forward_backward", batch(client.model_id, 7))
    client.result(7)
    other.train()
    monkeypatch.setattr(service_module, "MAX_OWNER_RESULTS", service.owner_bytes[OWNER])
    client.number = 7
    client.train()
    assert (
        service.owner_bytes[OWNER]
        == sum(sum(group.values()) for name, group in service.kept.items() if name == client.model_id)
        <= service_module.MAX_OWNER_RESULTS
    )
    assert "no longer kept" in client.result(1)["error"] and "error" not in other.result(1)
    service.delete_model(OWNER, client.model_id).result.result(30)
    assert service.owner_bytes[OWNER] == 0 and service.owner_bytes["bob"] > 0


def test_results_go_by_model_and_one_that_is_gone_is_answered(service, monkeypatch):
    monkeypatch.setattr(service_module, "KEPT_RESULTS", 3)
    alice, bob = Client(service), Client(service, owner="bob")
    bob.train()
    service.submit(OWNER, alice.model_id, 100, "forward_backward", batch(alice.model_id, 100))  # waits for its turn
    for _ in range(4):
        alice.train()
    assert "error" not in bob.result(0) and "error" not in bob.result(2)
    assert "error" not in alice.result(8) and "error" not in alice.result(0)
    gone = alice.result(2)
    assert gone["category"] == "user" and "request 2 was carried out" in gone["error"]
    assert not service.promise(OWNER, f"{alice.model_id}:100").result.done()
    with pytest.raises(ApiError) as unknown:
        service.promise(OWNER, f"{alice.model_id}:50")
    assert unknown.value.status_code == 410
    with pytest.raises(ApiError):
        service.promise("bob", f"{alice.model_id}:2")
    assert len(service.kept[alice.model_id]) == 3


def test_models_in_memory_are_bounded_also_between_gradients_and_a_step(base, tmp_path, service):
    limited = Service(base, tmp_path / "limited", NAME, Limits(models=1))
    few, many = ([Client(one) for _ in range(3)] for one in (limited, service))
    for clients in (few, many):
        for place, client in enumerate(clients):
            client.train(shift=place)
            client.submit("forward_backward", shift=place + 4)
            assert "checkpoint" not in client.save("x").get("error", "")
        for client in clients:
            client.result(client.submit("forward_backward", shift=9))
            assert sum(model.live is not None for model in limited.models.values()) <= 1
        for client in clients:
            assert "error" not in client.run("optim_step", **ADAM)
            client.final = client.weights()
    for left, right in zip(few, many, strict=True):
        assert_same(left.final, right.final)
    limited.close()


# ---------------------------------------------------------------------- disk


def test_metadata_is_small(http):
    for size, status in ((4000, 200), (5000, 400)):
        body = {"tags": [], "sdk_version": "0", "user_metadata": {"note": "x" * size}}
        answer = http.post("create_session", json=body)
        assert answer.status_code == status, answer.text
    assert "user_metadata: at most 4,096" in message_of(answer, 400)
    session = http.post("create_session", json={"tags": [], "sdk_version": "0"}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": NAME, "user_metadata": {"note": "x" * 5000}}
    assert "user_metadata" in message_of(http.post("create_model", json=body), 400)


def test_sessions_without_models_expire(service, monkeypatch):
    client = Client(service)
    silent, alive = (service.create_session(OWNER, None) for _ in range(2))
    sampler = service.create_sampler(OWNER, silent, 1, None)
    other = service.create_sampler(OWNER, alive, 1, None)
    old = time.time() - service_module.SESSION_SECONDS - 60
    for session in (client.session, silent, alive):
        os.utime(service.folder / "sessions" / f"{session}.json", (old, old))
    service.touch_session(OWNER, alive)
    service.expired = 0.0
    new = service.create_session(OWNER, None)
    assert service.sessions.keys() == {client.session, alive, new}
    with pytest.raises(ApiError):
        service.find_sampler(OWNER, sampler)
    assert service.find_sampler(OWNER, other)["path"] is None
    # At the limit the longest silent one makes room, and none with models.
    monkeypatch.setattr(service_module, "MAX_SESSIONS", 3)
    os.utime(service.folder / "sessions" / f"{new}.json", (old, old))
    newest = service.create_session(OWNER, None)
    assert service.sessions.keys() == {client.session, alive, newest}
    for session in (alive, newest):
        service.create_model(OWNER, session, 0, Trained(2), None)
    with pytest.raises(ApiError, match="delete models") as refused:
        service.create_session(OWNER, None)
    assert refused.value.status_code == 400
    assert service.create_session("bob", None)


def test_a_quota_of_disk_is_of_one_owner_and_deleting_makes_room(base, tmp_path):
    service = Service(base, tmp_path / "service", NAME, Limits(owner_bytes=1))
    service.limits = Limits(owner_bytes=10**9)
    alice, bob = Client(service), Client(service, owner="bob")
    path = alice.save("x")["path"]
    used = service.used_bytes(OWNER)
    size = sum(file.stat().st_size for file in service.path_of(OWNER, path)[0].iterdir())
    assert size < used < 2 * size
    loaded = Client(service, load={"path": path, "optimizer": True})
    assert service.used_bytes(OWNER) < used + size / 2  # a link takes no room
    service.limits = Limits(owner_bytes=used)
    assert "delete checkpoints or models" in alice.save("y")["error"]
    with pytest.raises(ApiError, match="delete checkpoints or models"):
        service.create_model(OWNER, alice.session, 1, Trained(2), None)
    assert "error" not in bob.save("y")
    alice.train()  # is not refused
    service.delete_checkpoint(OWNER, path)
    service.delete_model(OWNER, loaded.model_id).result.result(30)
    assert service.used_bytes(OWNER) < used - size / 2
    assert "error" not in alice.save("z")
    service.close()


def test_models_are_listed_and_deleted(service):
    with serving(service) as address:
        client = tinker.ServiceClient(base_url=address, api_key="tml-any")
        training, other = (client.create_lora_training_client(base_model=NAME, rank=2).result() for _ in range(2))
        path = training.save_state("x").result().path
        child = client.create_training_client_from_state_with_optimizer(path).result()
        rest = tinker.RestClient(base_url=address, api_key="tml-any")
        runs = rest.list_training_runs().result()
        ids = [one.training_run_id for one in runs.training_runs]
        assert set(ids) == {training.model_id, other.model_id, child.model_id} and runs.cursor.total_count == 3
        assert rest.list_training_runs(limit=1, offset=1).result().training_runs[0].training_run_id == ids[1]
        run = rest.get_training_run(training.model_id).result()
        assert run.lora_rank == 2 and not run.corrupted
        assert [one.tinker_path for one in rest.list_user_checkpoints().result().checkpoints] == [path]
        with httpx.Client(base_url=f"{address}/api/v1/", timeout=30) as http:
            assert http.delete(f"training_runs/{training.model_id}").status_code == 204
            assert http.delete(f"training_runs/{training.model_id}").status_code == 404
            assert "limit" in message_of(http.get("training_runs?limit=x"), 400)
        assert {one.training_run_id for one in rest.list_training_runs().result().training_runs} == {
            other.model_id, child.model_id
        }  # fmt: skip
        assert training.model_id not in {path.name for path in (service.folder / "models").iterdir()}
        # What began from it goes on.
        train(child, 1)


def test_another_user_of_the_machine_reads_nothing(service):
    Client(service).train()
    for part in ("sessions", "models", "samplers"):
        assert (service.folder / part).stat().st_mode & 0o777 == 0o700


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
def test_a_thread_that_hangs_does_not_keep_the_server_from_ending(base, tmp_path):
    server = Server(base, tmp_path / "service", tmp_path / "log", before=HANG)
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
    (entry,) = (server.folder / "models" / model_id / "log").iterdir()
    assert entry.read_bytes() == batch(model_id, 1)
    assert entry.stat().st_mode & 0o777 == 0o600
