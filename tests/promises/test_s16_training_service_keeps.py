"""What the training service keeps through full disks, damaged files and kills; no client, no socket."""

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nanochat.ground import storage
from nanochat.optim import Optimizer
from nanochat.serve.schema import ApiError
from nanochat.train_service import service as service_module
from nanochat.train_service import wire
from nanochat.train_service.log import Entry, RequestLog
from nanochat.train_service.service import Limits, Service
from nanochat.train_service.tenants import Base, Trained, TrainedModel

IDS = [[5, 6, 7, 8, 9, 10, 11, 12], [20, 21, 22, 23, 24]]
ADAM = {"learning_rate": 0.01}
OWNER = "alice"


# ---------------------------------------------------------------------- a client without HTTP


def batch(model_id: str, number: int, shift: int = 0) -> bytes:
    """The body of a forward_backward."""
    data = []
    for ids in IDS:
        tokens = np.array(ids[:-1], "<i4") + shift
        targets = {"dense": (np.array(ids[1:], "<i8") + shift).tobytes(), "dtype": 2}
        inputs = [{"key": "target_tokens", "value": targets}]
        data.append({"model_input": [{"encoded_text": {"tokens": tokens.tobytes()}}], "loss_fn_inputs": inputs})
    message = wire._messages()["ForwardBackwardRequest"]
    return message(model_id=model_id, seq_id=number, data=data, loss_fn="cross_entropy").SerializeToString()


class Client:
    """One owner's session and one model; requests are numbered as the tinker client numbers them."""

    def __init__(self, service: Service, model_number: int = 0, load: dict[str, Any] | None = None, owner: str = OWNER):
        self.service = service
        self.owner = owner
        self.session = service.create_session(owner, None)
        created = service.create_model(owner, self.session, model_number, Trained(2, seed=7), None, load)
        self.model_id = created.removesuffix(":0")
        self.number = 0
        assert "error" not in self.result(0)

    def result(self, number: int) -> dict[str, Any]:
        """A result, {} for one in the form of the wire."""
        content = self.service.promise(self.owner, f"{self.model_id}:{number}").result.result(30)
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


def live_model(service: Service, model_id: str) -> Any:
    live = service.models[model_id].live
    assert live is not None
    return live.model


def trained_weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters() if one.requires_grad}


def weights_of(service: Service, model_id: str) -> dict[str, torch.Tensor]:
    return trained_weights(live_model(service, model_id))


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@pytest.fixture
def start(base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a service in a folder, by default the same one; all are closed at the end."""
    monkeypatch.setattr(service_module, "READ_PAUSE", 0.0)
    started: list[Service] = []

    def start(folder: Path = tmp_path / "service", **limits: Any) -> Service:
        service = Service(base, folder, "tiny", Limits(**limits))
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


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a file is made and gets none of its bytes, as on a full disk."""

    def write_file(path: Path, parts: Any) -> Any:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(storage, "write_file", write_file)


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
    folder = killed()
    assert "error" not in client.run("optim_step", **ADAM)
    again = start(folder)
    assert again.models[client.model_id].next == client.number
    for number in (4, client.number - 1):  # one that the snapshot covers, one of the log
        assert b'"error"' not in again.promise(OWNER, f"{client.model_id}:{number}").result.result(30)
    last = again.submit(OWNER, client.model_id, client.number, "optim_step", json.dumps(ADAM).encode())
    assert b'"error"' not in again.promise(OWNER, last).result.result(30)
    assert_same(weights_of(again, client.model_id), client.weights())


def test_a_disk_that_was_full_costs_no_later_start(start, killed, monkeypatch):
    service = start()
    client = Client(service)
    client.train()
    with monkeypatch.context() as full:
        fill_disk(full)
        for request in (
            lambda: service.create_session(OWNER, None),
            lambda: service.create_model(OWNER, client.session, 1, Trained(2), None),
            lambda: service.create_sampler(OWNER, client.session, 1, None),
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
    client, other, nameless = (Client(service) for _ in range(3))
    sampler = service.create_sampler(OWNER, client.session, 1, None)
    client.train()
    other.train()
    for _ in range(3):
        nameless.train()
    folder = killed()
    (folder / "models" / other.model_id / "model.json").write_bytes(b"")
    (folder / "models" / nameless.model_id / "model.json").unlink()
    flip(folder / "tokenizer" / "tokenizer.json", 7)
    flip(folder / "samplers" / f"{sampler}.json", 30)
    (folder / "models" / "lost+found").mkdir()
    (folder / "sessions" / f"{'0' * 16}.json").write_bytes(b"[]")
    for name in (".DS_Store", "000000001.optim_step.swp~", "notes", "000000003.tmp"):
        (folder / "models" / client.model_id / "log" / name).write_bytes(b"?")
    (folder / "models" / client.model_id / "state" / "notes").mkdir()
    again = start(folder)
    named = "".join(capsys.readouterr())
    for name in (f"{other.model_id}/model.json", "0000.json", f"{nameless.model_id} has no model.json"):
        assert name in named
    assert again.models.keys() == {client.model_id}
    assert again.promise(OWNER, f"{client.model_id}:2").result.result(30)
    assert_same(weights_of(again, client.model_id), client.weights())
    assert again.models[client.model_id].next == 3 and not list(folder.glob("models/*/log/*.tmp"))
    for lost in (other, nameless):  # it becomes no new model
        with pytest.raises(ApiError, match="cannot be read"):
            again.create_model(OWNER, lost.session, 0, Trained(2, seed=7), None)
    expected = (service.folder / "tokenizer" / "tokenizer.json").read_bytes()
    assert (folder / "tokenizer" / "tokenizer.json").read_bytes() == expected
    with pytest.raises(ApiError, match="create another one") as error:
        again.find_sampler(OWNER, sampler)
    assert error.value.status_code == 400 and f"{sampler}.json" in capsys.readouterr().err


def test_the_log_is_read_while_a_request_is_written_to_it(tmp_path, monkeypatch):
    """A model that comes back into memory reads its log, and its client goes on sending."""
    log = RequestLog(tmp_path)
    log.append(Entry(1, "optim_step", b"1"))
    write_file = storage.write_file

    def write_and_read(path: Path, parts: list[bytes]) -> None:
        write_file(path, parts)
        assert [entry.number for entry in log.entries()[0]] == [1]
        log.end_snapshot()

    monkeypatch.setattr(storage, "write_file", write_and_read)
    log.append(Entry(2, "optim_step", b"2"))
    assert [entry.number for entry in log.entries()[0]] == [1, 2]


def put_aside(start: Any) -> tuple[Service, Client]:
    """A client whose model has left the memory with gradients that no snapshot has: its log is run again."""
    service = start(models=1)
    client, other = Client(service), Client(service, 1)
    client.train()
    client.submit("forward_backward", shift=0)
    client.result(client.number)
    other.train()
    assert service.models[client.model_id].live is None
    return service, client


def test_a_log_is_run_again_while_an_early_request_takes_its_turn(start, monkeypatch):
    """The entry of an early request is renamed while the worker, which has listed it, reads the others."""
    service, client = put_aside(start)
    last, logged = client.number, RequestLog._logged

    def list_and_submit(log: RequestLog) -> list:
        found = logged(log)
        if log is service.models[client.model_id].log and last + 2 not in sent:
            sent.append(last + 2)
            service.submit(OWNER, client.model_id, last + 2, "optim_step", json.dumps(ADAM).encode())
        return found

    sent: list[int] = []
    early = batch(client.model_id, last + 3)
    service.submit(OWNER, client.model_id, last + 3, "forward_backward", early)
    monkeypatch.setattr(RequestLog, "_logged", list_and_submit)
    service.submit(OWNER, client.model_id, last + 1, "optim_step", json.dumps(ADAM).encode())
    for number in (1, 2, 3):
        client.result(last + number)
    live = service.models[client.model_id].live
    assert sent == [last + 2] and live is not None and live.steps == 2


def test_a_log_that_cannot_be_read_loses_no_step(start, killed, monkeypatch):
    service, client = put_aside(start)
    twin = Client(start(service.folder.with_name("twin"), models=1))
    entries, fails = RequestLog.entries, [True]

    def read(log: RequestLog, **settings):
        if fails:
            fails.pop()
            raise FileNotFoundError("it is gone for a moment")
        return entries(log, **settings)

    # An error that passes costs nothing.
    monkeypatch.setattr(RequestLog, "entries", read)
    for one in (client, twin):
        if one is twin:
            one.train()
            one.submit("forward_backward", shift=0)
        one.submit("forward_backward", shift=1)
        assert "error" not in one.run("optim_step", **ADAM)
    assert not fails
    assert_same(client.weights(), twin.weights())

    # One that stays stops the model. Its request is in the log, and runs after the next start.
    client.submit("forward_backward", shift=2)
    client.result(client.number)
    Client(service, 2).train()
    assert service.models[client.model_id].live is None
    fails += [True] * 100
    assert "cannot be read" in client.run("optim_step", **ADAM)["error"]
    assert service.models[client.model_id].live is None
    fails.clear()
    again = start(killed())
    assert b"error" not in again.promise(OWNER, f"{client.model_id}:{client.number}").result.result(30)
    twin.submit("forward_backward", shift=2)
    twin.run("optim_step", **ADAM)
    assert_same(weights_of(again, client.model_id), twin.weights())


@pytest.mark.parametrize("kind", ["load", "memory", "step"])
@pytest.mark.parametrize("restarted", [True, False])
def test_what_was_answered_as_failed_is_never_run(start, killed, monkeypatch, kind, restarted):
    """Also where it would succeed now: the checkpoint has been saved meanwhile, or there is memory again."""
    service = start(models=1)
    client, other = Client(service), Client(service, 1)
    client.train()
    client.result(client.submit("forward_backward", shift=1))
    with monkeypatch.context() as full:
        forward, step = TrainedModel._forward, Optimizer.step

        def forward_and_fail(*given: Any) -> Any:
            forward(*given)
            raise torch.OutOfMemoryError("a moment of little memory")

        def step_and_fail(*given: Any, **settings: Any) -> Any:
            step(*given, **settings)
            raise torch.OutOfMemoryError("a moment of little memory")

        if kind == "load":
            path = f"tinker://{other.model_id}/weights/late"
            assert "does not exist" in client.run("load_weights", path=path, optimizer=True)["error"]
        elif kind == "memory":
            full.setattr(TrainedModel, "_forward", forward_and_fail)
            assert "failed" in client.run("forward_backward", shift=3)["error"]
        else:
            full.setattr(Optimizer, "step", step_and_fail)
            assert "failed" in client.run("optim_step", **ADAM)["error"]
    # After a load the gradients are still there. Otherwise they are dropped, and so was the step before.
    assert ("error" in client.run("optim_step", **ADAM)) == (kind != "load")
    client.train(shift=2)
    expected = client.weights()
    client.result(client.submit("forward_backward", shift=4))  # gradients are in no snapshot: the log is run again
    other.train()
    assert "error" not in other.save("late")
    if restarted:
        again = start(killed())
        failed = again.promise(OWNER, f"{client.model_id}:4").result.result(30)
        assert b"send it once more" in failed
        again.promise(OWNER, f"{client.model_id}:{client.number}").result.result(30)
    else:
        again = service
        assert service.models[client.model_id].live is None
        client.result(client.submit("forward_backward", shift=5))
    assert_same(weights_of(again, client.model_id), expected)
    assert again.models[client.model_id].live.steps == (3 if kind == "load" else 2)


def test_a_failure_that_cannot_be_written_is_no_answer(start, killed, monkeypatch):
    """The client is told that the model has stopped; the next start runs the request."""
    service = start()
    client = Client(service)
    client.train()
    with monkeypatch.context() as broken:
        broken.setattr(TrainedModel, "_forward", lambda *_: 1 / 0)
        broken.setattr(RequestLog, "fail", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken disk")))
        assert "cannot be written (broken disk)" in client.run("forward_backward")["error"]
    again = start(killed())
    assert b"error" not in again.promise(OWNER, f"{client.model_id}:{client.number}").result.result(30)


# ---------------------------------------------------------------------- checkpoints that change


@pytest.mark.parametrize("change", ["overwritten", "deleted"])
@pytest.mark.parametrize("with_new_model", [True, False], ids=["at the creation", "later"])
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
    again.promise(OWNER, f"{client.model_id}:{client.number}").result.result(30)
    assert_same(weights_of(again, client.model_id), client.weights())


def test_a_snapshot_lets_the_loaded_files_go(start):
    service = start(snapshot_steps=1)
    source = Client(service)
    path = source.save("x")["path"]
    client = Client(service, load={"path": path, "optimizer": True})
    pinned = service.folder / "models" / client.model_id / "loaded"
    assert len(list(pinned.glob("0/step_*/adapter.safetensors"))) == 1
    client.train()
    client.train()  # once it runs, the snapshot after the step before is done
    assert not list(pinned.iterdir())


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
        write_file = storage.write_file

        def write_weights(path: Path, parts: Any) -> Any:
            if path.name.endswith(".safetensors"):
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            return write_file(path, parts)

        full.setattr(storage, "write_file", write_weights)
        assert "the disk is full" in client.run(kind, **save)["error"]
    step, _ = service.path_of(OWNER, path)
    assert_same(load_file(step / "adapter.safetensors"), before)
    assert [folder.name for folder in step.parents[1].iterdir() if folder.is_dir()] == ["x"]
    # Where there is room the new one takes its place, and is listed once.
    assert client.run(kind, **save)["path"] == path
    step, model = service.path_of(OWNER, path)
    assert_same(load_file(step / "adapter.safetensors"), client.weights())
    assert len(service.list_checkpoints(model)) == 1


def test_a_kill_between_two_renames_loses_no_checkpoint(start, killed):
    service = start()
    client = Client(service)
    path = client.save("x")["path"]
    folder = killed()
    weights = folder / "models" / client.model_id / "weights"
    (weights / "x").rename(weights / ".x.old")
    shutil.copytree(weights / ".x.old", weights / ".y.new")
    (entry,) = (folder / "models" / client.model_id / "log").iterdir()
    entry.unlink()  # or it would be saved again
    again = start(folder)
    assert again.path_of(OWNER, path)[0].parent.name == "x"
    assert [one.name for one in weights.iterdir() if one.is_dir()] == ["x"]


def test_a_restart_leaves_finished_checkpoints_alone(start, killed, monkeypatch):
    """Saved again, a replaced one would be the older one where the disk fills up, and a deleted one would be back."""
    service = start()
    client = Client(service)
    path = client.save("x")["path"]
    deleted = client.save("y")["path"]
    client.train()
    assert "error" not in client.save("x", overwrite=True)
    expected = client.weights()
    service.delete_checkpoint(OWNER, deleted)
    with monkeypatch.context() as full:
        full.setattr(TrainedModel, "save", lambda *_, **__: 1 / 0)
        assert "error" in client.save("z")
        again = start(killed())
        again.promise(OWNER, f"{client.model_id}:{client.number}").result.result(30)
    assert_same(load_file(again.path_of(OWNER, path)[0] / "adapter.safetensors"), expected)
    with pytest.raises(ApiError, match="does not exist"):
        again.path_of(OWNER, deleted)
    # A save that has failed does not succeed later, when it might replace a newer one.
    third = start(killed())
    message = third.promise(OWNER, f"{client.model_id}:{client.number}").result.result(30)
    assert b"send it once more" in message
    # A snapshot lets the marks go.
    marks = again.folder / "models" / client.model_id / "weights"
    assert list(marks.glob(".*"))
    again.close()
    assert not list(marks.glob(".*")) and (marks / "x").is_dir()


# ---------------------------------------------------------------------- damage


def require_stopped(service: Service, client: Client, after: int, named: str) -> None:
    """Requests after `after` are answered by one line, which also names the file."""
    for number in range(after + 1, client.number + 1):
        content = service.promise(OWNER, f"{client.model_id}:{number}").result.result(30)
        message = json.loads(content)["error"]
        assert "has stopped" in message and "backup" in message and named in message and "\n" not in message
    with pytest.raises(ApiError, match="has stopped") as error:
        service.submit(OWNER, client.model_id, client.number + 1, "optim_step", b"{}")
    assert error.value.status_code == 400  # any of 409 and 5xx is tried again by the client for hours


def entry_of(log: Path, number: int) -> Path:
    (entry,) = log.glob(f"{number:09d}.*")
    return entry


def flip_entry(number: int, place: int) -> Callable[[Path], None]:
    return lambda log: flip(entry_of(log, number), place)


def exchange_entries(log: Path) -> None:
    first, third = entry_of(log, 1), entry_of(log, 3)
    first.rename(log / "x")
    third.rename(log / third.name.replace("000000003", "000000001"))
    (log / "x").rename(log / first.name.replace("000000001", "000000003"))


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
        assert model.stopped and model.live is None
        return None
    assert not result.startswith(b'{"error"'), result
    return weights_of(service, model_id)


def files_of(folder: Path, ids: list[str]) -> Iterator[Path]:
    """Files of models, but for checkpoints, which are checked when they are loaded; relative to the folder."""
    for path in sorted(file for one in ids for file in (folder / "models" / one).rglob("*") if file.is_file()):
        file = path.relative_to(folder)
        if "weights" not in str(file) and path.stat().st_size:
            yield file


def require_flips_noticed(start: Any, folder: Path, ids: list[str], flips: list[tuple[Path, int]], capsys: Any) -> int:
    """Flip one byte at a time in a copy of a killed server's folder: every model has its weights, or has stopped.

    Returns how many models stopped.
    """
    copy = folder.with_name("copy")
    expected: dict[str, Any] = {}
    stopped = 0
    for place, (file, byte) in enumerate([(None, 0), *flips]):  # nothing is flipped at first
        shutil.copytree(folder, copy)
        if file is not None:
            flip(copy / file, byte)
        capsys.readouterr()
        service = start(copy)
        found = {one: continued(service, one) for one in ids}
        service.close()
        said = "".join(capsys.readouterr())
        for one, weights in found.items():
            if place == 0:
                assert weights
                expected[one] = weights
            elif weights is None:
                assert file is not None and one in file.parts and one in said, (one, file, said)
                stopped += 1
            else:
                assert_same(weights, expected[one])
        shutil.rmtree(copy)
    return stopped


def test_a_flipped_byte_anywhere_is_named_and_stops_its_model_alone(start, killed, capsys):
    service = start(snapshot_steps=3)
    source = Client(service)
    source.train()
    load = {"path": source.save("x")["path"], "optimizer": True}
    loaded, saved = Client(service, load=load), Client(service, load=load)
    loaded.train()
    for shift in range(4):
        saved.train(shift)  # a snapshot and a step in the log
    ids = [loaded.model_id, saved.model_id]
    folder = killed()
    files = [file for file in files_of(folder, ids) if file.parts[2] != "log"]  # the next test is of logs
    assert {file.parts[2] for file in files} == {"model.json", "loaded", "state"}
    flips = [(file, (folder / file).stat().st_size - 1 - place) for place, file in enumerate(files)]
    assert require_flips_noticed(start, folder, ids, flips, capsys) > len(flips) / 2


def test_a_damaged_log_stops_that_model_and_no_other(start, killed):
    """What is done to the log of five requests, the last request that is good, and what the answers name."""
    service = start()
    client, other = Client(service), Client(service)
    for one in (client, other):
        one.train()
        one.train(shift=2)
    checkpoint = client.save("x")["path"]
    for damage, good, named in (
        *((flip_entry(number, 5 * number), number - 1, f"{number:09d}.") for number in range(1, 5)),
        (lambda log: entry_of(log, 2).unlink(), 1, "lacks request 2"),
        (exchange_entries, 0, "000000001"),
    ):
        folder = killed()
        damage(folder / "models" / client.model_id / "log")
        again = start(folder)
        require_stopped(again, client, good, named)
        assert again.path_of(OWNER, checkpoint)
        again.promise(OWNER, f"{other.model_id}:4").result.result(30)
        assert_same(weights_of(again, other.model_id), other.weights())


def test_a_request_that_has_not_come_yet_stops_no_model(start, killed):
    service = start()
    client = Client(service)
    client.train()
    client.train()
    content = batch(client.model_id, 6)
    service.submit(OWNER, client.model_id, 6, "forward_backward", content)  # before request 5
    again = start(killed())
    again.submit(OWNER, client.model_id, 5, "forward_backward", batch(client.model_id, 5))
    for number in (5, 6):
        assert not again.promise(OWNER, f"{client.model_id}:{number}").result.result(30).startswith(b"{")
    # The one that came later is in the log as in its turn: without it there is a gap now.
    entry_of(again.folder / "models" / client.model_id / "log", 4).unlink()
    copy = again.folder.with_name("once more")
    shutil.copytree(again.folder, copy)
    assert start(copy).models[client.model_id].stopped


def test_a_request_that_was_early_is_missed_once_those_before_it_have_come(start, killed, monkeypatch):
    service = start()
    client = Client(service)
    for number in (1, 3, 2):
        service.submit(OWNER, client.model_id, number, "forward_backward", batch(client.model_id, number))
    client.result(3)
    folder = killed()
    entry_of(folder / "models" / client.model_id / "log", 2).unlink()
    client.number = 3
    require_stopped(start(folder), client, 1, "lacks request 2")
    # A lost newest request looks as if it had not come yet, until it is late.
    folder = killed()
    entry_of(folder / "models" / client.model_id / "log", 3).unlink()
    again = start(folder)
    request_id = again.submit(OWNER, client.model_id, 4, "forward_backward", batch(client.model_id, 4))
    assert not again.promise(OWNER, request_id).result.done()
    monkeypatch.setattr(service_module, "PARKED_SECONDS", 0.0)
    client.number = 4
    require_stopped(again, client, 3, "request 3 has not come")


def test_a_snapshot_that_fails_gives_its_room_back_and_comes_later(start, monkeypatch):
    service = start(snapshot_steps=1)
    client = Client(service)
    state = service.folder / "models" / client.model_id / "state"
    with monkeypatch.context() as full:
        full.setattr(TrainedModel, "save", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        client.train()
        client.train()
        client.result(client.submit("forward_backward"))
        assert not list(state.iterdir())
    assert "error" not in client.run("optim_step", **ADAM)
    client.result(client.submit("forward_backward"))
    assert not list(state.iterdir())  # not tried again at once
    service.models[client.model_id].snapshot_after = 0.0
    assert "error" not in client.run("optim_step", **ADAM)
    client.result(client.submit("forward_backward"))
    assert list(state.iterdir())


def test_a_model_whose_start_is_lost_does_not_become_a_new_one(start, killed):
    service = start()
    source = Client(service)
    client = Client(service, load={"path": source.save("x")["path"], "optimizer": True})
    folder = killed()
    shutil.rmtree(folder / "models" / client.model_id / "loaded")
    shutil.rmtree(folder / "models" / source.model_id)
    again = start(folder)
    for number in (1, 2):
        again.submit(OWNER, client.model_id, number, "forward_backward", batch(client.model_id, number))
        content = again.promise(OWNER, f"{client.model_id}:{number}").result.result(30)
        assert "does not exist" in json.loads(content)["error"]
