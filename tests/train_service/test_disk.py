"""The training service's folder on an ordinary day: full disks, flipped bytes, files that are overwritten or foreign.

A copy of the folder is the disk at that moment; a second service over the copy is the server after `kill -9`.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
from test_train_service import (
    IDS,
    NAME,
    assert_same,
    datum,
    live_weights,
    lora_client,
    serving,
    tinker,
    train,
)

from nanochat import storage
from nanochat.serve.schema import ApiError
from nanochat.train_service.log import Entry, RequestLog
from nanochat.train_service.service import Limits, Service
from nanochat.train_service.tenants import Base, Trained, TrainedModel

FULL = OSError(28, "No space left on device")


@pytest.fixture
def service(base: Base, tmp_path: Path) -> Service:
    return Service(base, tmp_path / "service", NAME, Limits(snapshot_steps=100))


def client_of(address: str) -> Any:
    return tinker.ServiceClient(base_url=address, api_key="tml-any")


def resumed(address: str, service: Service, model_id: str) -> Any:
    """The client of before, after the restart."""
    training = tinker.TrainingClient(client_of(address).holder, 0, model_id, info=None)
    training._request_id_counter = training._turn_counter = service.models[model_id].next - 1
    return training


def settled(service: Service, model_id: str) -> None:
    """Wait until the worker has run what the log holds."""
    service.promises[f"{model_id}:{service.models[model_id].next - 1}"].result.result(60)


# ---------------------------------------------------------------------- a full disk


def test_a_model_that_the_disk_did_not_take_does_not_exist(base, service, tmp_path, monkeypatch, capsys):
    session = service.create_session("me", {})
    write = storage.write_json

    def full(path: Path, content: Any) -> Any:
        if path.name.startswith("model."):
            path.write_text("")  # what a full disk leaves
            raise FULL
        return write(path, content)

    monkeypatch.setattr(storage, "write_json", full)
    with pytest.raises(ApiError) as refused:
        service.create_model("me", session, 0, Trained(4), {})
    assert refused.value.status_code == 503 and "make room" in refused.value.body["error"]["message"]
    assert not service.models
    monkeypatch.undo()
    assert service.create_model("me", session, 0, Trained(4), {}) == f"{session}:train:0:0"
    settled(service, f"{session}:train:0")
    # And one that an earlier version, or a hand, has left like that: the others go on.
    damaged = tmp_path / "service/models" / f"{session}:train:1"
    damaged.mkdir()
    (damaged / "model.json").write_text("")
    (tmp_path / "service/sessions/0123.json").write_text("{")
    (tmp_path / "service/models" / f"{session}:train:0/log/notes.txt").write_text("mine")
    shutil.copytree(tmp_path / "service", tmp_path / "killed")
    again = Service(base, tmp_path / "killed", NAME)
    assert list(again.models) == [f"{session}:train:0"]
    said = capsys.readouterr().err
    assert all(name in said for name in ("train:1/model.json", "0123.json", "notes.txt"))
    assert (tmp_path / "killed" / "models" / f"{session}:train:0/log/notes.txt").exists()


def test_a_checkpoint_that_cannot_be_overwritten_stays(service, monkeypatch):
    with serving(service) as address:
        training = lora_client(client_of(address))
        train(training, 1)
        path = training.save_state("mine").result().path
        step, model = service.path_of(service.models[training.model_id].owner, path)
        before = {file.name: file.read_bytes() for file in step.iterdir()}
        train(training, 1, first=1)
        save = TrainedModel.save

        def full(self: TrainedModel, folder: Path, with_optimizer: bool) -> None:
            save(self, folder, with_optimizer)
            raise FULL

        monkeypatch.setattr(TrainedModel, "save", full)
        with pytest.raises(tinker.RequestFailedError):
            training.save_state("mine", overwrite=True).result()
        assert {file.name: file.read_bytes() for file in step.iterdir()} == before
        monkeypatch.undo()
        assert len(service.list_checkpoints(model)) == 1
        training.save_state("mine", overwrite=True).result()
        (listed,) = service.list_checkpoints(model)
        assert listed["tinker_path"] == path and service.path_of(model.owner, path)[0].name == "step_000002"


# ---------------------------------------------------------------------- a checkpoint that is overwritten later


@pytest.mark.parametrize("what", ["overwritten", "deleted"])
def test_a_model_begins_again_from_what_it_began_from(base, service, tmp_path, what):
    with serving(service) as address:
        client = client_of(address)
        source = lora_client(client)
        train(source, 1)
        path = source.save_state("start").result().path
        grown = client.create_training_client_from_state_with_optimizer(path).result()
        train(grown, 1, first=1)
        train(source, 1, first=5)
        loading = lora_client(client, seed=3)
        loading.load_state_with_optimizer(path).result()
        if what == "overwritten":
            source.save_state("start", overwrite=True).result()
        else:
            service.delete_checkpoint(service.models[source.model_id].owner, path)
        expected = [live_weights(service, one) for one in (grown, loading)]
        shutil.copytree(tmp_path / "service", tmp_path / "killed")
    again = Service(base, tmp_path / "killed", NAME)
    for one, weights in zip((grown, loading), expected, strict=True):
        settled(again, one.model_id)
        assert_same(live_weights(again, one), weights)


def test_a_model_whose_start_is_lost_does_not_become_a_new_one(base, service, tmp_path):
    with serving(service) as address:
        source = lora_client(client_of(address))
        path = source.save_state("start").result().path
        owner, session = service.models[source.model_id].owner, source.model_id.partition(":")[0]
        load = {"path": path, "optimizer": False}
        service.create_model(owner, session, 99, Trained(4), {}, load)
        grown = f"{session}:train:99"
        settled(service, grown)
        shutil.copytree(tmp_path / "service", tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed/models" / grown / "loaded")
    shutil.rmtree(tmp_path / "killed/models" / source.model_id)
    again = Service(base, tmp_path / "killed", NAME)
    with serving(again) as address:
        training = resumed(address, again, grown)
        for _ in range(2):
            with pytest.raises(tinker.RequestFailedError, match="does not exist"):
                training.forward([datum(IDS[0])], "cross_entropy").result()


# ---------------------------------------------------------------------- damage in the log


@pytest.mark.parametrize("damage", ["flipped", "missing", "cut off"])
def test_damage_in_a_log_stops_one_model(base, service, tmp_path, damage, capsys):
    with serving(service) as address:
        client = client_of(address)
        hurt, well = lora_client(client), lora_client(client, seed=2)
        train(hurt, 1)
        after_one = live_weights(service, hurt)
        for one in (hurt, well):
            train(one, 2, first=1)
        expected = live_weights(service, well)
        shutil.copytree(tmp_path / "service", tmp_path / "killed")
    third = sorted((tmp_path / "killed/models" / hurt.model_id / "log").iterdir())[2]
    content = third.read_bytes()
    if damage == "missing":
        third.unlink()
    else:
        middle = len(content) // 2
        third.write_bytes(
            content[:middle] + (bytes([content[middle] ^ 1]) + content[middle + 1 :]) * (damage != "cut off")
        )
    again = Service(base, tmp_path / "killed", NAME)
    assert f"model {hurt.model_id} has stopped" in capsys.readouterr().err
    for one, weights in ((well, expected), (hurt, after_one)):
        settled(again, one.model_id)
        assert_same(live_weights(again, one), weights)
    owner = again.models[hurt.model_id].owner
    with pytest.raises(ApiError) as refused:
        again.submit(owner, hurt.model_id, 3, "forward_backward", content)
    assert refused.value.status_code == 400 and "saved state" in refused.value.body["error"]["message"]
    with serving(again) as address:
        train(resumed(address, again, well.model_id), 1, first=3)


def test_a_log_of_an_earlier_version_and_requests_before_their_turn_are_read(tmp_path):
    log = RequestLog(tmp_path)
    (tmp_path / "log/000000001.optim_step").write_bytes(b"one")
    log.append(Entry(3, "optim_step", b"three", is_early=True))
    assert ([entry.number for entry in log.entries()[0]], log.entries()[1]) == ([1, 3], "")
    log.append(Entry(2, "optim_step", b"two"))
    entries = [Entry(n, "optim_step", text, n == 3) for n, text in enumerate((b"one", b"two", b"three"), 1)]
    assert log.entries() == (entries, "")
