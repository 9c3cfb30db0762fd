"""S16. The training service keeps what it acknowledged, also what it answered as failed.

Most tests call the service without HTTP: a copy of its folder is what a kill at that moment leaves, and another service
starts there. Disks are full, bytes flip, and checkpoints are overwritten and deleted underneath. Two unmodified tinker
clients then train through kills of a real server; `NANOCHAT_TRIALS=200 pytest -m soak -s` on this file is the same
with 200 kills and a small disk that fills up (it is mounted, which needs the right to do so). What a tenant may cost
the others is here, too; their bodies are in tests/train_service/test_limits.py.
"""

import contextlib
import errno
import json
import os
import shutil
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from service_clients import (
    ADAM,
    IDS,
    NAME,
    OWNER,
    Client,
    Server,
    assert_same,
    base_model,
    batch,
    client_of,
    datum,
    lora_client,
    mistake_of,
    rest_of,
    result_of,
    serving,
    tinker,
    train,
    weights_of,
)

from nanochat.engine import Slots
from nanochat.ground import paths, storage
from nanochat.ground.cli import UserError
from nanochat.optim import Optimizer
from nanochat.sampling import SamplingParams
from nanochat.serve.schema import ApiError
from nanochat.train_service import app as service_app
from nanochat.train_service import sampling
from nanochat.train_service import service as service_module
from nanochat.train_service.jobs import Job, Queue
from nanochat.train_service.sampling import SampleJob
from nanochat.train_service.service import Limits, Service
from nanochat.train_service.store import RESERVE_BYTES, Damaged, Store
from nanochat.train_service.tenants import Trained, TrainedModel


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a service in a folder, by default the same one; all are closed at the end."""
    monkeypatch.setattr(service_module, "WRITE_PAUSE", 0.01)
    started: list[Service] = []

    def start(folder: Path = tmp_path / "service", **limits: Any) -> Service:
        service = Service(base_model(), folder, NAME, Limits(**limits))
        started.append(service)
        return service

    yield start
    for service in started:
        service.close()


@pytest.fixture
def killed(tmp_path: Path) -> Callable[[], Path]:
    """A copy of the service's folder as a kill at this moment would leave it."""

    def killed() -> Path:
        copy = tmp_path / f"killed-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(tmp_path / "service", copy)
        return copy

    return killed


def full_disk(path: Any, *_: Any, **__: Any) -> Any:
    """A file is made and gets none of its bytes."""
    if isinstance(path, Path):
        path.touch()
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


def full_database(store: Store) -> None:
    raise sqlite3.OperationalError("database or disk is full")


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "write_file", full_disk)
    monkeypatch.setattr(Store, "_commit", full_database)


def change(folder: Path, statement: str, *values: Any) -> None:
    """Change rows in the database of a killed service, without their sums."""
    with contextlib.closing(sqlite3.connect(folder / "service.db", isolation_level=None)) as db:
        assert db.execute(statement, values).rowcount == 1, statement


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << place % 8
    path.write_bytes(content)


# ---------------------------------------------------------------------- kills and a full disk


def test_a_killed_service_resumes_to_the_same_bits(start, killed):
    service = start(snapshot_steps=3)
    client = Client(service)
    for shift in range(5):
        client.train(shift)  # a snapshot after step 3, two more steps in the log
    client.result(client.submit("forward_backward", shift=1))
    early = client.number + 2  # before its turn
    service.submit(OWNER, client.model_id, early, "forward_backward", batch(client.model_id, early))
    folder = killed()
    assert "error" not in client.run("optim_step", **ADAM)
    again = start(folder)
    assert again.models[client.model_id].next == client.number
    for number in (4, client.number - 1):  # one that the snapshot covers, one of the log
        assert b'"error"' not in result_of(again, client.model_id, number)
    last = again.submit(OWNER, client.model_id, client.number, "optim_step", json.dumps(ADAM).encode())
    assert b'"error"' not in again.promise(OWNER, last).result.result(30)
    assert not result_of(again, client.model_id, early).startswith(b"{")
    assert_same(weights_of(again, client.model_id), client.weights())


def test_a_disk_that_was_full_costs_no_later_start(start, killed, monkeypatch):
    service = start()
    client = Client(service)
    client.train()
    with monkeypatch.context() as full:
        fill_disk(full)
        for request in (
            lambda: service.create_model(OWNER, client.session, 1, Trained(2), None),
            lambda: service.submit(OWNER, client.model_id, client.number + 1, "optim_step", b"{}"),
        ):
            with pytest.raises(ApiError, match="make room") as error:
                request()
            assert error.value.status_code == 503
    # Nothing was acknowledged, so a client that tries again gets a model that is on the disk.
    again = start(killed())
    created = again.create_model(OWNER, client.session, 1, Trained(2), None)
    assert again.promise(OWNER, created).result.result(30)
    assert again.models.keys() == {client.model_id, f"{client.session}:train:1"}
    assert again.models[client.model_id].next == client.number + 1


def test_what_cannot_be_read_is_named_and_the_others_are_served(start, killed, capsys):
    service = start(snapshot_steps=2)
    client, other = Client(service), Client(service)
    client.train()
    other.train()
    saved = client.save("x")["path"]
    folder = killed()
    change(folder, "UPDATE models SET facts = '{}' WHERE id = ?", other.model_id)
    change(folder, "UPDATE checkpoints SET folder = 'y' WHERE model = ?", client.model_id)
    flip(folder / "tokenizer" / "tokenizer.json", 7)
    left = folder / "models" / client.model_id / "weights" / "x.9"  # a kill during a save
    for path in (left, folder / "models" / "lost+found"):
        path.mkdir(parents=True)
    again = start(folder)
    assert f"service.db is damaged (models: {other.model_id})" in capsys.readouterr().err
    assert again.models.keys() == {client.model_id}
    assert result_of(again, client.model_id, 2)
    assert left.exists()  # with damaged rows nothing is deleted
    again.submit(OWNER, client.model_id, 4, "forward_backward", batch(client.model_id, 4))
    result_of(again, client.model_id, 4)
    assert_same(weights_of(again, client.model_id), client.weights())
    with pytest.raises(ApiError, match="cannot be read"):  # it becomes no new model
        again.create_model(OWNER, other.session, 0, Trained(2, seed=7), None)
    expected = (service.folder / "tokenizer" / "tokenizer.json").read_bytes()
    assert (folder / "tokenizer" / "tokenizer.json").read_bytes() == expected
    with pytest.raises(ApiError, match="create another one") as error:
        again.path_of(OWNER, saved)
    assert error.value.status_code == 400 and f"{client.model_id} weights x" in capsys.readouterr().err


def rewrite(folder: Path, old: bytes, new: bytes) -> None:
    # The file has all pages then, and none is in the log before it.
    change(folder, "UPDATE base SET sum = sum WHERE name = 'base'")
    path = folder / "service.db"
    path.write_bytes(path.read_bytes().replace(old, new))


def test_a_damaged_database_names_itself_and_the_last_snapshot(start, killed, monkeypatch):
    service = start(snapshot_steps=1)
    client = Client(service)
    client.train()
    client.result(client.submit("forward_backward"))
    model = service.models[client.model_id]
    for damage, named in (
        (lambda folder: rewrite(folder, b"SQLite", b"SQLitf"), "not a database"),
        (lambda folder: rewrite(folder, b":train:0:1", b":train:0:9"), "KEY order"),
        (lambda folder: flip(folder / "service.db-wal", 5000), "lacks the last"),
        (lambda folder: (folder / "service.db-wal").unlink(), "lacks the last"),
        (lambda folder: (folder / "service.db").unlink(), "is missing"),
    ):
        folder = killed()
        damage(folder)
        with pytest.raises(UserError, match=named) as error:
            Service(base_model(), folder, NAME)
        assert f"{folder}/service.db" in str(error.value) and "\n" not in str(error.value)
        assert f"snapshot is {folder / model.snapshot}/step_" in str(error.value)
        paths.unlock(folder)
    folder = killed()
    with monkeypatch.context() as other, pytest.raises(UserError, match="over another base"):
        other.setitem(base_model().about, "base_sha256", "other weights")
        start(folder)
    paths.unlock(folder)
    # What a kill leaves without a name is removed.
    folder = killed()
    left = folder / "models" / client.model_id / "weights" / "x.9" / "step_000001"
    left.mkdir(parents=True)
    start(folder)
    assert not left.parent.exists() and (folder / model.snapshot).is_dir()


def test_a_log_that_cannot_be_read_loses_no_step(start, killed, monkeypatch):
    """It stops the model. Its request is on the disk, and runs after the next start."""
    service = start(models=1)
    client, other = Client(service), Client(service, 1)
    twin = Client(start(service.folder.with_name("twin")))
    for one in (client, twin):
        one.train()
        one.result(one.submit("forward_backward", shift=2))
    other.train()
    assert service.models[client.model_id].live is None  # its gradients are in no snapshot: its requests run again

    def read(*_: Any) -> Any:
        raise Damaged("its files cannot be read")

    with monkeypatch.context() as broken:
        broken.setattr(Store, "request", read)
        assert "cannot be read: restart the server" in client.run("optim_step", **ADAM)["error"]
    assert service.models[client.model_id].live is None
    again = start(killed())
    assert b"error" not in result_of(again, client.model_id, client.number)
    twin.run("optim_step", **ADAM)
    assert_same(weights_of(again, client.model_id), twin.weights())


@pytest.mark.parametrize(
    ("kind", "restarted"), [("load", True), ("memory", False), ("step", True), ("load", False)], ids=str
)
def test_what_was_answered_as_failed_is_never_run(start, killed, monkeypatch, kind, restarted):
    """Also where it would succeed now: the checkpoint has been saved meanwhile, or there is memory again."""
    service = start(models=1)
    client, other = Client(service), Client(service, 1)
    client.train()
    client.result(client.submit("forward_backward", shift=1))

    def fail_after(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def call_and_fail(*given: Any, **settings: Any) -> Any:
            list(method(*given, **settings) or ())
            raise torch.OutOfMemoryError("a moment of little memory")

        little.setattr(owner, name, call_and_fail)

    with monkeypatch.context() as little:
        if kind == "load":
            path = f"tinker://{other.model_id}/weights/late"
            assert "does not exist" in client.run("load_weights", path=path, optimizer=True)["error"]
        elif kind == "memory":
            fail_after(TrainedModel, "_forward")
            assert "failed" in client.run("forward_backward", shift=3)["error"]
        else:
            fail_after(Optimizer, "step")
            assert "failed" in client.run("optim_step", **ADAM)["error"]
    # After a load the gradients are still there. Otherwise they are dropped, and so was the step before.
    assert ("error" in client.run("optim_step", **ADAM)) == (kind != "load")
    client.train(shift=2)
    expected = client.weights()
    client.result(client.submit("forward_backward", shift=4))  # gradients are in no snapshot: the log is run again
    other.train()
    assert "error" not in other.save("late")
    again = start(killed()) if restarted else service
    assert again.models[client.model_id].live is None and (b"error" in result_of(again, client.model_id, 4))
    client.service = again
    client.result(client.submit("forward_backward", shift=5))
    assert_same(weights_of(again, client.model_id), expected)
    assert again.models[client.model_id].live.steps == (3 if kind == "load" else 2)


@pytest.mark.parametrize(
    ("end", "fails"), [("room", False), ("room", True), ("kill", True), ("kill", False), ("close", False)], ids=str
)
def test_an_outcome_that_cannot_be_written_is_no_answer(start, killed, monkeypatch, capsys, end, fails):
    """The client waits until there is room. A server that is killed or ended before that runs the request again."""
    service = start(snapshot_steps=1)
    client, twin = Client(service), Client(service)
    for one in (client, twin):
        one.train()
        one.submit("forward_backward")
    assert "error" not in twin.run("optim_step", **ADAM)
    expected = twin.weights()
    with monkeypatch.context() as full:
        step = TrainedModel.step

        def step_and_fill(trained: TrainedModel, adam: Any) -> Any:
            fill_disk(full)
            metrics = step(trained, adam)
            return 1 / 0 if fails else metrics

        full.setattr(TrainedModel, "step", step_and_fill)
        client.submit("optim_step", **ADAM)
        while "all requests wait" not in capsys.readouterr().err:
            time.sleep(0.001)
        assert not service.promise(OWNER, f"{client.model_id}:{client.number}").result.done()
        folder = killed()
        service.closing = end == "close"
        while service.closing and service.thread.is_alive():
            time.sleep(0.001)
    if end == "close":
        service.close()  # there is room again: the snapshot must not be further than the outcomes
    again = {"room": lambda: service, "kill": lambda: start(folder), "close": start}[end]()
    assert (b"error" in result_of(again, client.model_id, client.number)) == (end == "room" and fails)
    if end != "room" or not fails:
        assert_same(weights_of(again, client.model_id), expected)


def test_a_full_disk_has_room_for_a_deletion(start, monkeypatch):
    service = start()
    client = Client(service)
    step, _ = service.path_of(OWNER, client.save("x")["path"])
    commit = Store._commit
    monkeypatch.setattr(Store, "_commit", lambda store: (full_database if store.reserve.exists() else commit)(store))
    service.delete_checkpoint(OWNER, f"tinker://{client.model_id}/weights/x")
    assert not step.parent.exists() and service.store.reserve.stat().st_size == RESERVE_BYTES


# ---------------------------------------------------------------------- checkpoints that change


@pytest.mark.parametrize(("change", "with_new_model"), [("overwritten", True), ("deleted", False)])
def test_a_load_is_of_the_same_files_when_the_log_is_run_again(start, killed, change, with_new_model):
    service = start()
    source = Client(service)
    source.train()
    path = source.save("x")["path"]
    load = {"path": path, "optimizer": True}
    client = Client(service, load=load if with_new_model else None)
    if not with_new_model:
        client.train(shift=3)
        assert "error" not in client.run("load_weights", **load)
    client.train(shift=5)
    if change == "overwritten":
        source.train(shift=9)
        assert "error" not in source.save("x", overwrite=True)
    else:
        service.delete_checkpoint(OWNER, path)
    again = start(killed())
    result_of(again, client.model_id, client.number)
    assert_same(weights_of(again, client.model_id), client.weights())


def test_a_load_waits_for_room_and_nobody_deletes_what_it_reads(start, monkeypatch, capsys):
    service = start(snapshot_steps=1)
    source, client = Client(service), Client(service)
    source.train()
    path = source.save("x")["path"]
    folder = service.path_of(OWNER, path)[0].parent
    load = TrainedModel.load

    def load_and_fill(trained: TrainedModel, step: Path, with_optimizer: bool) -> None:
        service.delete_checkpoint(OWNER, path)
        load(trained, step, with_optimizer)

    monkeypatch.setattr(TrainedModel, "load", load_and_fill)
    put = Store.put

    def put_with_no_room(store: Store, table: str, **row: Any) -> None:
        if table == "runs":
            full_database(store)
        put(store, table, **row)

    with monkeypatch.context() as full:
        full.setattr(Store, "put", put_with_no_room)
        number = client.submit("load_weights", path=path, optimizer=True)
        while "all requests wait" not in capsys.readouterr().err:
            time.sleep(0.001)
        assert folder.is_dir()
    assert client.result(number)["path"] == path
    assert_same(client.weights(), source.weights())
    assert folder.is_dir()  # the request that is run again after a kill reads it
    client.train()
    client.train()  # after a snapshot none is
    assert not folder.exists()


def test_a_snapshot_lets_the_loaded_files_go(start):
    service = start(snapshot_steps=1)
    source = Client(service)
    path = source.save("x")["path"]
    client = Client(service, load={"path": path, "optimizer": True})
    step, _ = service.path_of(OWNER, path)
    service.delete_checkpoint(OWNER, path)
    assert step.is_dir()
    client.train()
    client.train()  # once it runs, the snapshot after the step before is done
    assert not step.parent.exists()


@pytest.mark.parametrize("kind", ["save_weights", "save_weights_for_sampler"])
def test_an_overwrite_on_a_full_disk_leaves_the_old_checkpoint(start, monkeypatch, kind):
    service = start()
    client = Client(service)
    client.train()
    save = {"name": "x", "overwrite": True, "sampler": None}
    path = client.run(kind, **save)["path"]
    before = client.weights()
    client.train()
    number = client.submit("forward_backward")
    client.result(number)
    with monkeypatch.context() as full:
        full.setattr(storage, "write_tensors", full_disk)
        assert "the disk is full" in client.run(kind, **save)["error"]
    step, _ = service.path_of(OWNER, path)
    assert_same(load_file(step / "adapter.safetensors"), before)
    assert [folder for folder in step.parents[1].iterdir()] == [step.parent]
    # Where there is room the new one takes its place, and is listed once.
    assert client.run(kind, **save)["path"] == path
    client.result(client.submit("forward_backward"))  # the old one is removed before this runs
    step, model = service.path_of(OWNER, path)
    assert_same(load_file(step / "adapter.safetensors"), client.weights())
    assert len(service.list_checkpoints(model)) == 1 and list(step.parents[1].iterdir()) == [step.parent]


def test_a_restart_leaves_checkpoints_alone(start, killed, monkeypatch):
    """Saved again, a replaced one might be the older one, and a deleted one or one that failed would be back."""
    service = start()
    client = Client(service)
    paths = [client.save(name)["path"] for name in ("x", "y")]
    client.train()
    assert "error" not in client.save("x", overwrite=True)
    service.delete_checkpoint(OWNER, paths[1])
    with monkeypatch.context() as broken:
        broken.setattr(TrainedModel, "save", lambda *_, **__: 1 / 0)
        assert "error" in client.save("z")
    again = start(killed())
    assert b"error" in result_of(again, client.model_id, client.number)
    assert_same(load_file(again.path_of(OWNER, paths[0])[0] / "adapter.safetensors"), client.weights())
    assert [one["checkpoint_id"] for one in again.list_checkpoints(again.models[client.model_id])] == ["weights/x"]
    again.close()
    assert [one.name for one in (again.folder / "models" / client.model_id / "weights").iterdir()] == ["x.5"]


# ---------------------------------------------------------------------- damage


def require_stopped(service: Service, client: Client, named: str) -> None:
    """The next request is answered by one line, which also names the damage, and none after it is accepted."""
    number = client.number + 1
    with contextlib.suppress(ApiError):  # the start may have seen it
        service.submit(OWNER, client.model_id, number, "optim_step", b"{}")
    message = json.loads(result_of(service, client.model_id, number))["error"]
    assert "has stopped" in message and "backup" in message and named in message and "\n" not in message
    with pytest.raises(ApiError, match="has stopped") as error:
        service.submit(OWNER, client.model_id, number + 1, "optim_step", b"{}")
    assert error.value.status_code == 400  # any of 409 and 5xx is tried again by the client for hours


def continued(service: Service, model_id: str) -> dict[str, torch.Tensor] | None:
    """The weights after one more step; None: the model has stopped, and said so."""
    model = service.models.get(model_id)
    if model is None:
        return None
    number = model.next
    with contextlib.suppress(ApiError):  # if it has stopped already
        service.submit(model.owner, model_id, number, "forward_backward", batch(model_id, number))
        service.submit(model.owner, model_id, number + 1, "optim_step", json.dumps(ADAM).encode())
    result = result_of(service, model_id, number + 1, model.owner)
    if b"has stopped" in result:
        assert model.stopped and model.live is None
        return None
    assert not result.startswith(b'{"error"'), result
    return weights_of(service, model_id)


def files_of(folder: Path) -> Iterator[Path]:
    """The database and the weights, relative to the folder."""
    for path in sorted(file for file in folder.rglob("*") if file.is_file()):
        file = path.relative_to(folder)
        if file.parts[0] in ("models", "service.db", "service.db-wal", "service.count") and path.stat().st_size:
            yield file


def require_flips_noticed(start: Any, folder: Path, ids: list[str], flips: list[tuple[Path, int]], capsys: Any) -> int:
    """Flip a byte in copies of a killed server's folder: models have their weights, or stop; returns how many stop."""
    copy = folder.with_name("copy")
    expected: dict[str, Any] = {}
    stopped = 0
    for place, (file, byte) in enumerate([(Path("no file"), 0), *flips]):  # nothing is flipped at first
        shutil.copytree(folder, copy)
        if place:
            flip(copy / file, byte)
        capsys.readouterr()
        found: dict[str, Any] = dict.fromkeys(ids)
        try:
            service = start(copy)
            found = {one: continued(service, one) for one in ids}
            service.close()
        except UserError as error:
            paths.unlock(copy)
            print(error)
        said = "".join(capsys.readouterr())
        for one, weights in found.items():
            if place == 0:
                assert weights
                expected[one] = weights
            elif weights is None:
                named = copy / file.parent if file.parts[0] == "models" else "service.db"
                assert str(named) in said, (file, byte, said)
                stopped += 1
            else:
                assert_same(weights, expected[one])
        shutil.rmtree(copy)
    return stopped


def test_a_flipped_byte_anywhere_is_named_and_stops_what_needs_it(start, killed, capsys):
    service = start(snapshot_steps=3)
    source = Client(service)
    source.train()
    load = {"path": source.save("x")["path"], "optimizer": True}
    loaded, saved = Client(service, load=load), Client(service, load=load)
    loaded.train()
    for shift in range(4):
        saved.train(shift)  # a snapshot, and a step after it
    ids = [loaded.model_id, saved.model_id]
    folder = killed()
    draw = np.random.default_rng(0)
    flips = []
    for file in files_of(folder):
        size = (folder / file).stat().st_size
        places = [size - 1] if file.parts[0] == "models" else draw.integers(size, size=8)
        flips += [(file, int(place)) for place in places]
    assert {file.parts[0] for file, _ in flips} == {"models", "service.db", "service.db-wal", "service.count"}
    assert require_flips_noticed(start, folder, ids, flips, capsys) > len(flips) / 2


def test_a_damaged_request_stops_that_model_and_no_other(start, killed):
    """What is done to the rows of five requests, and what the answers name."""
    service = start()
    client, other = Client(service), Client(service)
    for one in (client, other):
        one.train()
        one.train(shift=2)
    checkpoint = client.save("x")["path"]
    for statement, named in (
        *((f"UPDATE requests SET content = '' WHERE number = {number}", f":0 {number})") for number in range(5)),
        ("UPDATE runs SET state = 'none' WHERE number = 2", ":0 2)"),
        ("UPDATE runs SET pinned = 'x' WHERE number = 0", ":0 0)"),
        ("DELETE FROM runs WHERE number = 2", "lacks request 2"),
        ("DELETE FROM requests WHERE number = 2", "lacks request 2"),
        ("UPDATE requests SET number = 7 WHERE number = 2", "lacks request 2"),
    ):
        folder = killed()
        change(folder, f"{statement} AND model = ?", client.model_id)
        again = start(folder)
        require_stopped(again, client, named)
        assert again.path_of(OWNER, checkpoint)
        again.submit(OWNER, other.model_id, 5, "forward_backward", batch(other.model_id, 5))
        result_of(again, other.model_id, 5)
        assert_same(weights_of(again, other.model_id), other.weights())


def test_a_snapshot_that_fails_gives_its_room_back_and_comes_later(start, monkeypatch):
    service = start(snapshot_steps=1)
    client = Client(service)
    state = service.folder / "models" / client.model_id / "state"
    save = TrainedModel.save

    def save_damaged(trained: TrainedModel, folder: Path, **settings: bool) -> None:
        save(trained, folder, **settings)
        flip(next(folder.glob("*/adapter.safetensors")), -1)

    for broken_save in (full_disk, save_damaged):
        with monkeypatch.context() as broken:
            broken.setattr(TrainedModel, "save", broken_save)
            client.train()
            client.result(client.submit("forward_backward"))
            assert not state.exists()
    assert "error" not in client.run("optim_step", **ADAM)
    client.result(client.submit("forward_backward"))
    assert [one.name for one in state.iterdir()] == ["7"]


def test_a_model_whose_start_is_lost_does_not_become_a_new_one(start, killed, monkeypatch):
    service = start()
    source = Client(service)
    load = {"path": source.save("x")["path"], "optimizer": True}
    client = Client(service, load=load)
    folder = killed()
    shutil.rmtree(folder / "models" / source.model_id)
    require_stopped(start(folder), client, "weights/x.1 is damaged")
    # One that could not be created does not become one, also after the next start.
    with monkeypatch.context() as little:
        little.setattr(TrainedModel, "load", lambda *_, **__: 1 / 0)
        request_id = service.create_model(OWNER, client.session, 7, Trained(2), None, load)
        assert b"failed" in service.promise(OWNER, request_id).result.result(30)
    client.model_id = request_id.removesuffix(":0")
    require_stopped(start(killed()), client, "could not be created")


# ---------------------------------------------------------------------- what a tenant may cost the others


def test_owners_take_turns():
    queue = Queue()
    weights = [Path("x"), Path("y")]
    some = SampleJob([5], 1, 4, SamplingParams(), frozenset())
    jobs = [Job(f"a{number}", "alice") for number in range(3)]
    jobs += [Job(f"s{number}", "alice", sampler=weights[number % 2], sample=some) for number in range(4)]
    jobs += [Job(f"b{number}", "bob") for number in range(2)]
    jobs.append(Job("c0", "carol", sampler=None, sample=some))
    for job in jobs:
        queue.append(job)
    assert len(queue) == 10
    order = []
    while taken := queue.take(lambda job: job.id != "c0"):
        order.append(" ".join(job.id for job in taken))
    assert order == ["a0", "b0", "a1", "b1", "a2", "s0 s2", "s1 s3"]
    assert [job.id for job in queue.take(lambda job: True)] == ["c0"] and len(queue) == 0


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the device's thread computes, in its order: the letter of a model's seed, small for a micro-batch and
    capital for a step. `computed.after[n]` is called after n of them."""

    class Computed(list[str]):
        after: dict[int, Callable[[], Any]] = {}

    computed = Computed()
    for method, case in ((TrainedModel._add, str.lower), (TrainedModel.step, str.upper)):

        def call(trained: TrainedModel, *given: Any, method: Any = method, case: Any = case) -> Any:
            result = method(trained, *given)
            computed.append(case(chr(trained.trained.seed)))
            computed.after.pop(len(computed), list)()
            return result

        monkeypatch.setattr(TrainedModel, method.__name__, call)
    return computed


@pytest.mark.parametrize(
    ("owner", "models", "order"),
    [("bob", 2, "ababaBaaaA"), (OWNER, 8, "ababBaaaaA"), ("bob", 1, "aaaaaabbaaaaaaAbbB")],
    ids=["keys", "one key", "one in memory"],
)
def test_a_long_batch_holds_up_no_one_else_and_has_its_bits(start, killed, computed, owner, models, order):
    """Micro-batches take turns. A model's own step waits, and a kill between two of them changes nothing."""
    service = start(batch_tokens=1, models=models)
    twin = start(service.folder.with_name("twin"), batch_tokens=1)
    clients, alone = ([Client(one, seed=ord("a")), Client(one, owner=owner, seed=ord("b"))] for one in (service, twin))
    for client in (*alone, *reversed(clients)):
        client.train()
    Client(service)  # idle: with few models in memory, bob's is not there now
    for client, times in zip(alone, (3, 1), strict=True):
        client.submit("forward_backward", times=times)
        assert "error" not in client.run("optim_step", **ADAM)
    folders: list[Path] = []
    computed.clear()
    computed.after[3] = lambda: folders.append(killed())

    def submit(client: Client, times: int) -> None:
        client.submit("forward_backward", times=times)
        client.submit("optim_step", **ADAM)

    computed.after[1] = lambda: submit(clients[1], 1)
    with service.lock:  # the device's thread waits until both are there
        submit(clients[0], 3)
    for client in clients:
        assert b"error" not in result_of(service, client.model_id, 4, client.owner)
    assert "".join(computed) == order
    for one in (service, start(folders[0], batch_tokens=1)):
        for client, expected in zip(clients, alone, strict=True):
            for number in (3, 4):
                found = result_of(one, client.model_id, number, client.owner)
                assert found == result_of(twin, expected.model_id, number, client.owner)
            assert_same(weights_of(one, client.model_id), expected.weights())


def test_a_server_that_ends_while_it_repeats_requests_keeps_them(start, killed, computed):
    client = Client(start(batch_tokens=1))
    client.train()
    client.submit("forward_backward", forward_only=True)
    client.train(shift=2)
    again = start(killed(), batch_tokens=1)
    computed.clear()
    computed.after[4] = lambda: setattr(again, "closing", True)
    content = batch(client.model_id, 6)
    again.submit(OWNER, client.model_id, 6, "forward_backward", content)
    again.thread.join()
    again.close()
    assert len(computed) == 4
    last = start(again.folder, batch_tokens=1)
    assert b"error" not in result_of(last, client.model_id, 6)
    assert_same(weights_of(last, client.model_id), client.weights())


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token takes a hundredth of a second, and slices are short."""
    decode = Slots.decode

    def slow_decode(self: Slots, topk: int = 0) -> Any:
        time.sleep(0.01)
        return decode(self, topk)

    monkeypatch.setattr(Slots, "decode", slow_decode)
    monkeypatch.setattr(sampling, "SLICE_SECONDS", 0.02)


def test_a_long_sample_holds_up_no_one_else(start, slow):
    service = start()
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


def test_what_waits_and_what_is_kept_is_bounded_in_bytes(start, killed, monkeypatch):
    service = start()
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
    kept = service.store.kept
    most = sum(kept[client.model_id].values())
    monkeypatch.setattr("nanochat.train_service.store.KEPT_BYTES", most)
    client.number = 7
    client.train()
    assert sum(kept[client.model_id].values()) <= most
    assert "no longer kept" in client.result(0)["error"] and "error" not in other.result(1)
    assert start(killed()).store.kept == kept


def test_results_go_by_model_and_one_that_is_gone_is_answered(start, monkeypatch):
    service = start()
    monkeypatch.setattr("nanochat.train_service.store.KEPT_RESULTS", 3)
    alice, bob = Client(service), Client(service, owner="bob")
    bob.train()
    service.submit(OWNER, alice.model_id, 100, "forward_backward", batch(alice.model_id, 100))  # waits for its turn
    for _ in range(4):
        alice.train()
    assert "error" not in bob.result(0) and "error" not in bob.result(2)
    assert "error" not in alice.result(8)
    gone = alice.result(2)
    assert gone["category"] == "user" and "request 2 was carried out" in gone["error"]
    assert not service.promise(OWNER, f"{alice.model_id}:100").result.done()
    with pytest.raises(ApiError) as unknown:
        service.promise(OWNER, f"{alice.model_id}:50")
    assert unknown.value.status_code == 410
    with pytest.raises(ApiError):
        service.promise("bob", f"{alice.model_id}:2")
    assert len(service.store.kept[alice.model_id]) == 3


def test_a_session_and_a_sampler_are_names_which_only_their_key_can_use(start, killed):
    service = start()
    client = Client(service)
    path = client.save("x")["path"]
    samplers = [service.create_sampler(OWNER, client.session, number, uri) for number, uri in ((1, None), (2, path))]
    again = start(killed())
    assert [again.sampled_path(OWNER, one) for one in samplers] == [None, path]
    wrong = (client.session[:-1], client.session[:15] + "!" + client.session[16:], "", "\ud800")
    for owner, session in (("bob", client.session), *((OWNER, one) for one in wrong)):
        for request in (
            lambda owner=owner, session=session: again.require_session(owner, session),
            lambda owner=owner, session=session: again.create_model(owner, session, 1, Trained(2), None),
            lambda owner=owner, session=session: again.create_sampler(owner, session, 1, None),
            lambda owner=owner, session=session: again.sampled_weights(owner, f"{session}:sample:1"),
        ):
            with pytest.raises(ApiError) as refused:
                request()
            assert refused.value.status_code == 404
    assert Client(again, owner="bob").session != client.session
    with pytest.raises(ApiError):  # a session of bob's opens none of alice's weights
        again.sampled_weights("bob", samplers[1].replace(client.session, again.create_session("bob"), 1))


def test_a_quota_of_disk_is_of_one_owner_and_deleting_makes_room(start):
    service = start(owner_bytes=10**9)
    alice, bob = Client(service), Client(service, owner="bob")
    path = alice.save("x")["path"]
    used = service.store.used_bytes(OWNER)
    assert used == sum(file.stat().st_size for file in service.path_of(OWNER, path)[0].iterdir()) > 0
    service.limits = Limits(owner_bytes=used)
    assert "delete checkpoints" in alice.save("y")["error"]
    with pytest.raises(ApiError, match="delete checkpoints"):
        service.create_model(OWNER, alice.session, 1, Trained(2), None)
    assert "error" not in bob.save("y")
    alice.train()  # is not refused
    service.delete_checkpoint(OWNER, path)
    assert service.store.used_bytes(OWNER) == 0 and "error" not in alice.save("z")


def test_a_client_sees_what_its_own_key_has_made(start, monkeypatch):
    service = start(queue=2)
    assert service.folder.stat().st_mode & 0o777 == 0o700  # nor does another user of the machine
    with serving(service, keys=("tml-alice", "tml-bob")) as address:
        alice, bob = (client_of(address, f"tml-{name}") for name in ("alice", "bob"))
        training = lora_client(alice)
        path = training.save_state("mine").result().path
        assert lora_client(bob).model_id != training.model_id
        ask = {"base_url": f"{address}/api/v1", "timeout": 30}
        with httpx.Client(headers={"x-api-key": "tml-bob"}, **ask) as http:
            for route, body in {
                "get_info": {"model_id": training.model_id},
                "optim_step": {"model_id": training.model_id, "seq_id": 5, "adam_params": {}},
                "retrieve_future": {"request_id": f"{training.model_id}:1"},
                "weights_info": {"tinker_path": path},
                "session_heartbeat": {"session_id": alice.holder.get_session_id()},
            }.items():
                answer = http.post(f"/{route}", json=body)
                assert answer.status_code in (404, 410), route
                mistake_of(answer)
            for wrong in ("tml-carol", "", "tml-bo"):
                answer = http.get("/get_server_capabilities", headers={"x-api-key": wrong})
                assert answer.status_code == 401 and "TINKER_API_KEY" in mistake_of(answer)
            assert http.get("/healthz", headers={"x-api-key": ""}).status_code == 200
        # Two requests that come before their turn fill the queue of two; the next one is to come again later.
        with httpx.Client(headers={"x-api-key": "tml-alice"}, **ask) as http:
            step = {"model_id": training.model_id, "adam_params": {}}
            codes = [http.post("/optim_step", json={**step, "seq_id": number}).status_code for number in (5, 6, 7)]
            assert codes == [200, 200, 429]
            monkeypatch.setattr(service_app, "MAX_JSON", 1000)
            answer = http.post("/create_session", content=b"x" * 1001)
            assert answer.status_code == 413 and "1,000" in mistake_of(answer)
            assert http.post("/create_session", content=iter([b"x" * 600] * 2)).status_code == 413


# ---------------------------------------------------------------------- two clients and a server that is killed

TRIALS = int(os.environ.get("NANOCHAT_TRIALS", "10"))
KEYS = ("tml-alice-soak", "tml-bob-soak")
LIMITS = Limits(snapshot_steps=3, batch_tokens=16, models=2)
DISK_MB = 64


CHOICES = {
    "train": 0.45, "save": 0.15, "load": 0.1, "grow": 0.07, "delete": 0.03, "sample": 0.08, "forward": 0.07,
    "fail": 0.05,
}  # fmt: skip
LARGE = 777.0  # a weight of a batch that does not fit into the memory
LITTLE_MEMORY = f"""
import torch
from nanochat.train_service.tenants import TrainedModel

def add(trained, rows, *settings, add=TrainedModel._add):
    result = add(trained, rows, *settings)
    if rows.weights.max() == {LARGE}:
        raise torch.OutOfMemoryError("out of memory")
    return result

TrainedModel._add = add
"""


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainedModel, "_add", TrainedModel._add)  # it is restored at the end
    exec(LITTLE_MEMORY)


class Loop:
    """Drawn operations of one client. Its record says what it was told: equal records and weights are equal runs."""

    def __init__(self, address: str, key: str, seed: int):
        self.client = client_of(address, key)
        self.rest = rest_of(address, key)
        self.draw = np.random.default_rng(seed)
        self.seed = seed
        self.models = [lora_client(self.client, seed=seed)]
        self.saved: dict[str, str] = {}
        self.record: list[Any] = []
        self.samplers = 0
        self.refused = 0  # saves that found a full disk

    def run(self, operations: int) -> None:
        for _ in range(operations):
            model = self.models[self.draw.integers(len(self.models))]
            chosen = self.draw.choice(list(CHOICES), p=list(CHOICES.values()))
            name = str(self.draw.choice(["x", "y", "z"]))
            path = self.saved.get(name)
            if chosen == "train":
                train(model, 1, first=int(self.draw.integers(9)))
            elif chosen == "save":
                self.saved[name] = self.persist(model.save_state, name, overwrite=True)
            elif chosen == "sample":
                sampler = self.client.create_sampling_client(model_path=self.sampler_of(model)).result()
                params = tinker.SamplingParams(max_tokens=4, seed=int(self.draw.integers(99)))
                samples = sampler.sample(tinker.ModelInput.from_ints([5, 6, 7]), 2, params).result()
                self.record.append([one.tokens for one in samples.sequences])
            elif chosen == "forward":
                self.record.append(model.forward([datum(IDS[0])], "cross_entropy").result().metrics["loss:sum"])
            elif chosen == "load" and path:
                model.load_state_with_optimizer(path).result()
            elif chosen == "grow" and path:
                self.models[1:] = [self.client.create_training_client_from_state_with_optimizer(path).result()]
            elif chosen == "fail":
                self.fail(model)
            elif chosen == "delete" and path:
                del self.saved[name]
                with contextlib.suppress(tinker.NotFoundError):  # the first answer was lost with the server
                    self.rest.delete_checkpoint_from_tinker_path(path).result()

    def fail(self, model: Any) -> None:
        """A load, the second micro-batch of a batch, and the step after it."""
        data = [datum(IDS[0]), datum(IDS[3], weights=[LARGE, 1.0])]
        for words, request in (
            ("does not exist", lambda: model._load_state_impl("tinker://elsewhere/weights/x", False, None)),
            ("too little memory", lambda: model.forward_backward(data, "cross_entropy")),
            ("since the last one failed", lambda: model.optim_step(tinker.AdamParams())),
        ):
            with pytest.raises(tinker.RequestFailedError, match=words):
                request().result()
            self.record.append(words)

    def persist(self, save: Any, *arguments: Any, **settings: Any) -> str:
        """The path, once there is room: a save on a full disk is refused with a line that says so."""
        while True:
            try:
                return save(*arguments, **settings).result().path
            except tinker.RequestFailedError as error:
                assert "disk" in str(error), error
                self.refused += 1
                time.sleep(0.5)

    def sampler_of(self, model: Any) -> str:
        self.samplers += 1
        return self.persist(model.save_weights_for_sampler, f"sampler-{self.samplers}")

    def weights(self, service: Path) -> list[dict[str, torch.Tensor]]:
        """Those of all models, in the service's folder."""
        found = []
        for model in self.models:
            path = Path(self.sampler_of(model))
            folder = service / "models" / model.model_id / "sampler_weights"
            (file,) = folder.glob(f"{path.name}.*/*/adapter.safetensors")
            found.append(load_file(file))
        return found


def run_into(ended: list[Loop | Exception], address: str, key: str, seed: int, operations: int) -> None:
    try:
        loop = Loop(address, key, seed)
        loop.run(operations)
        ended.append(loop)
    except Exception as error:
        ended.append(error)


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


def require_a_round_through_kills(
    server: Server, straight: Path, seed: int, operations: int, kills: int | None = None, ballast: Path | None = None
) -> tuple[int, list[Loop]]:
    """Both clients train through `kills` (None: until they have ended), and end as without an accident. With a
    `ballast` the disk also fills up. Returns how many kills, and the clients."""
    draw = np.random.default_rng(seed)
    ended: list[Loop | Exception] = []
    for place, key in enumerate(KEYS):
        run = (ended, server.address, key, seed + place, operations)
        threading.Thread(target=run_into, args=run, daemon=True).start()
    killed = 0
    while len(ended) < len(KEYS):
        if killed == kills:
            time.sleep(0.01)
            continue
        time.sleep(0.1 + draw.exponential(1))
        if ballast is not None and draw.random() < 0.4:
            fill(ballast)
            time.sleep(draw.exponential(2))
        server.kill()
        killed += 1
        if ballast is not None and draw.random() < 0.5:
            ballast.unlink(missing_ok=True)
        server.start()  # also on a disk that is full
        if ballast is not None and ballast.exists():
            time.sleep(draw.exponential(2))
            ballast.unlink()
    loops = [one for one in ended if isinstance(one, Loop)]
    assert len(loops) == len(KEYS), (ended, server.log.read_text()[-3000:])
    weights = {loop.seed: loop.weights(server.folder) for loop in loops}
    server.kill()
    service = Service(base_model(), straight, NAME, LIMITS)
    with serving(service) as address:
        for loop in loops:
            again = Loop(address, "tml-any", loop.seed)
            again.run(operations)
            assert again.record == loop.record
            for left, right in zip(again.weights(service.folder), weights[loop.seed], strict=True):
                assert_same(left, right)
    service.close()
    return killed, loops


def soaked_server(folder: Path, log: Path) -> Server:
    flags = (f"--models={LIMITS.models}", f"--api_key={','.join(KEYS)}")
    return Server(folder / "service", log, *flags, before=LITTLE_MEMORY)


@pytest.mark.slow
def test_two_clients_train_on_through_kills_of_their_server(tmp_path, little_memory):
    """They know nothing of it: they wait while the server is away, and end with the same weights and samples."""
    server = soaked_server(tmp_path, tmp_path / "server.log")
    try:
        killed, _ = require_a_round_through_kills(server, tmp_path / "straight", 0, operations=15, kills=2)
    finally:
        server.kill()
    assert killed > 0 and "Traceback" not in server.log.read_text()


@pytest.mark.soak
def test_a_bad_week(start, disk, tmp_path, capsys, little_memory):
    first = int(os.environ.get("NANOCHAT_SEED", "0"))
    draw = np.random.default_rng(first)
    server = soaked_server(disk, tmp_path / "server.log")
    kills = stops = refused = rounds = 0
    try:
        while kills < TRIALS:
            straight, seed = tmp_path / f"straight-{rounds}", first + 100 * rounds
            killed, loops = require_a_round_through_kills(server, straight, seed, 60, ballast=disk / "ballast")
            ids = [model.model_id for loop in loops for model in loop.models]
            files = [*files_of(server.folder)]  # checkpoints are checked when they are loaded
            parts = [[file for file in files if file.name == name] for name in ("service.db", "service.db-wal")]
            parts.append([file for file in files if "state" in file.parts and file.parts[1] in ids])
            chosen = [part[draw.integers(len(part))] for part in parts for _ in range(4)]
            places = [(file, int(draw.integers((server.folder / file).stat().st_size))) for file in chosen]
            stops += require_flips_noticed(start, server.folder, ids, places, capsys)
            kills += killed
            refused += sum(loop.refused for loop in loops)
            rounds += 1
            shutil.rmtree(server.folder)
            server.start()
            with capsys.disabled():
                print(
                    f"{rounds} rounds: {kills} kills, {refused} saves refused by a full disk, "
                    f"{stops} models stopped by {12 * rounds} flipped bytes, no weight differs"
                )
    finally:
        server.kill()
    assert "Traceback" not in server.log.read_text()
