"""Files of tensors: exact, hashed as written; sharded state at any world size and on any mesh; nothing odd passes."""

import copy
import errno
import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from test_checkpoint_manager import same_tensors
from tiny import cpu_device, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from nanochat.device import Device
from nanochat.ground import storage
from nanochat.ground.paths import naming
from nanochat.ground.sharding import held_box
from nanochat.optim import Optimizer, ParameterGroup

TENSORS = {
    "a": torch.arange(15, dtype=torch.float32).view(5, 3),
    "bf16": torch.randn(3, 2).bfloat16(),
    "half": torch.randn(1).half(),
    "double": torch.randn(2, 2, 2).double(),
    "scalar": torch.tensor(7.5),
    "long": torch.tensor([2**62, -1]),
    "int": torch.arange(3).int(),
    "bytes": torch.arange(5).byte(),
    "flag": torch.tensor([True, False, True]),
    "empty": torch.empty(0, 4),
    "é/name": torch.randn(4, 6).T[1:],  # not contiguous
    "short": torch.tensor([3]).short(),
    "small": torch.tensor([-3]).to(torch.int8),
}


ONE = cpu_device()


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("most", [None, 7], ids=["whole writes", "partial writes"])
def test_tensors_come_back_and_the_hash_is_the_files(tmp_path, monkeypatch, most):
    write, synced = os.write, []
    if most:
        monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:most]))
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
    path = tmp_path / "x.safetensors"
    facts = storage.write_tensors(path, TENSORS, {"step": "3"})
    assert same_tensors(load_file(path), TENSORS)
    data = path.read_bytes()
    assert facts == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert int.from_bytes(data[:8], "little") % 8 == 0
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"step": "3"}
    assert synced == [path.stat().st_ino]


def test_a_large_tensor_is_written_in_pieces_and_a_file_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "PIECE_BYTES", 1000)
    tensors = {"x": torch.randn(1234)}
    for _ in range(2):
        storage.write_tensors(tmp_path / "x", tensors)
        assert same_tensors(load_file(tmp_path / "x"), tensors)
    storage.write_json(tmp_path / "x.json", list(range(100)))
    facts = storage.write_json(tmp_path / "x.json", {"é": 1})
    assert json.loads((tmp_path / "x.json").read_text()) == {"é": 1}
    assert facts["bytes"] == (tmp_path / "x.json").stat().st_size


# ---------------------------------------------------------------------- sharded state

WHOLE = {
    "optimizer/even": torch.randn(6, 3, 2, generator=torch.Generator().manual_seed(1)),
    "optimizer/uneven": torch.randn(5, 3, generator=torch.Generator().manual_seed(2)),
    "optimizer/short": torch.randn(1, 4, generator=torch.Generator().manual_seed(3)),  # fewer rows than ranks
    "optimizer/alike": torch.tensor([3.0]),
    "optimizer/scalar": torch.tensor(4.0),
}


def sharded(device: Device, replicas: int, zero: bool = False) -> dict[str, Tensor]:
    """WHOLE as this rank of a run holds it."""
    world_size = device.world_size
    if world_size == 1:
        return {name: torch.zeros_like(t) if zero else t for name, t in WHOLE.items()}
    shape = (replicas, world_size // replicas) if replicas > 1 else (world_size,)
    names = ("replicate", "shard") if replicas > 1 else ("shard",)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    placements = (Replicate(), Shard(0)) if replicas > 1 else (Shard(0),)
    state = {}
    for name, tensor in WHOLE.items():
        tensor = torch.zeros_like(tensor) if zero else tensor.clone()
        state[name] = distribute_tensor(tensor, mesh, placements) if tensor.ndim > 1 else tensor
    return state


def write(folder: Path, device: Device, state: dict[str, Tensor]) -> dict[str, Any]:
    """This rank's part of a save; returns its entries of the index."""
    own = {f"rank{device.rank}/loader/row": torch.tensor([device.rank, device.world_size])}
    tensors, entries = storage.share_of({**state, **own}, device.rank)
    storage.write_tensors(folder / storage.share_name(device.rank), tensors)
    return entries


def reshard(device: Device, base: str) -> list[str]:
    """Folder 0 is read in shards and written as 1, that in hybrid shards and written as 2; returns rank's entries."""
    written = []
    for number, replicas in ((0, 1), (1, 2)):
        source, target = Path(base) / str(number), Path(base) / str(number + 1)
        state = sharded(device, replicas, zero=True)
        storage.read(source, json.loads((source / "training.json").read_text()), state)
        expected = sharded(device, replicas)
        for name, tensor in state.items():
            mine, right = (t.to_local() if isinstance(t, DTensor) else t for t in (tensor, expected[name]))
            assert torch.equal(mine, right), name
        entries: list[Any] = [None] * device.world_size
        dist.all_gather_object(entries, write(target, device, state))
        if device.is_main:
            storage.write_json(target / "training.json", storage.merge(entries))
        dist.barrier()
        written.append(json.dumps(entries[device.rank]))
    return written


@pytest.mark.slow
def test_any_world_reads_what_any_other_wrote(tmp_path):
    """One process -> shards, of some tensors fewer than ranks -> hybrid shards -> one process."""
    world_size = 4
    for number in range(3):
        (tmp_path / str(number)).mkdir()
    index = storage.merge([write(tmp_path / "0", ONE, sharded(ONE, 1))])
    storage.write_json(tmp_path / "0" / "training.json", index)
    ranks = run_ranks(reshard, str(tmp_path), world_size=world_size)
    flat, hybrid = ([json.loads(written[i]) for written in ranks] for i in (0, 1))
    assert ["optimizer/short" in entries for entries in flat] == [True] + [False] * (world_size - 1)
    assert ["optimizer/alike" in entries for entries in flat] == [True] + [False] * (world_size - 1)
    assert sum("optimizer/even" in entries for entries in flat) == 3  # 6 rows by 2s
    assert sum("optimizer/even" in entries for entries in hybrid) == world_size // 2  # the replicas write nothing
    for number, worlds in enumerate((1, world_size, world_size)):
        index = json.loads((tmp_path / str(number) / "training.json").read_text())
        state = {name: torch.zeros_like(tensor) for name, tensor in WHOLE.items()}
        rows = {f"rank{rank}/loader/row": torch.zeros(2, dtype=torch.long) for rank in range(worlds)}
        storage.read(tmp_path / str(number), index, {**state, **rows})
        assert same_tensors(state, WHOLE)
        assert [row.tolist() for row in rows.values()] == [[rank, worlds] for rank in range(worlds)]


def test_a_layout_that_is_not_known_is_refused():
    """Their rows are elsewhere than a Shard's: a box of them would make a wrong checkpoint."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2))

        def laid_out(*placements: Any) -> DTensor:
            return DTensor.from_local(torch.zeros(2, 3), mesh, placements, run_check=False)

        assert held_box(laid_out(Replicate(), Shard(0))) == ([2, 0], [2, 3])
        for placement in (_StridedShard(0, split_factor=2), Partial()):
            with pytest.raises(NotImplementedError, match="only Shard and Replicate are known"):
                held_box(laid_out(placement, Shard(0)))
    finally:
        dist.destroy_process_group()


def test_a_state_of_another_model_is_refused(tmp_path):
    index = storage.merge([write(tmp_path, ONE, dict(WHOLE))])
    for wrong, message in (
        ({"optimizer/new": torch.zeros(1)}, "optimizer/new"),
        ({"optimizer/even": torch.zeros(6, 3)}, "optimizer/even"),
        ({"optimizer/even": torch.zeros(6, 3, 2).double()}, "optimizer/even"),
    ):
        with pytest.raises(ValueError, match=message):
            storage.read(tmp_path, index, wrong)


def test_shares_that_are_not_of_one_state_are_refused(tmp_path):
    whole = write(tmp_path, ONE, dict(WHOLE))
    other = copy.deepcopy(whole)
    other["optimizer/even"]["shape"][0] = 12
    with pytest.raises(ValueError, match="different shapes"):
        storage.merge([whole, other])
    chunk = {"rank": 0, "offset": [0, 0, 0], "size": [6, 3, 2]}
    for changes in (
        {"size": [5, 3, 2]}, {"offset": [1, 0, 0]}, {"offset": [-1, 0, 0], "size": [7, 3, 2]}, {"size": [6, 3]},
        {"rank": -1}, {"rank": "0"}, {"size": [6.0, 3, 2]},
    ):  # fmt: skip
        bad = copy.deepcopy(whole)
        bad["optimizer/even"]["chunks"] = [{**chunk, **changes}]
        with pytest.raises(ValueError, match="optimizer/even"):
            storage.check(bad)
    for chunks in ([], [chunk, chunk]):
        bad["optimizer/even"]["chunks"] = chunks
        with pytest.raises(ValueError, match="parts of optimizer/even are missing"):
            storage.check(bad)
    whole["optimizer/even"]["dtype"] = "load"
    with pytest.raises(ValueError, match="optimizer/even"):
        storage.check(whole)


def test_a_share_that_is_not_what_the_index_says_is_an_error(tmp_path):
    """Every byte of the header, and lengths; whatever is read then is of the right shape, or a ValueError."""
    index = storage.merge([write(tmp_path, ONE, dict(WHOLE))])
    file = tmp_path / storage.share_name(0)
    whole, source, refused = file.read_bytes(), random.Random(0), 0
    header = 8 + int.from_bytes(whole[:8], "little")
    for trial in range(300):
        data = bytearray(whole)
        data[source.randrange(header)] = source.randrange(256)
        file.write_bytes(data[: source.randrange(len(data))] if trial % 5 == 0 else data)
        try:
            storage.read(tmp_path, index, {name: torch.zeros_like(t) for name, t in WHOLE.items()})
        except ValueError:
            refused += 1
    assert refused > 150
    # A copy would broadcast or convert these.
    for other in (torch.zeros(1, 1, 1), torch.zeros(6, 3, 2).long(), torch.zeros(7, 3, 2)[:, :2]):
        storage.write_tensors(file, {"optimizer/even": other})
        with pytest.raises(ValueError):
            storage.read(tmp_path, index, {"optimizer/even": torch.zeros(6, 3, 2)})


def test_a_state_of_something_else_is_refused(tmp_path: Path) -> None:
    def state(kind: Any, *shapes: tuple[int, ...], name: str = "p") -> dict[str, Tensor]:
        parameters = [(f"{name}{i}", nn.Parameter(torch.zeros(shape))) for i, shape in enumerate(shapes)]
        return Optimizer([ParameterGroup(kind, parameters, 0.1)]).state_dict()

    for kind, another in (("muon", "adamw"), ("adamw", "muon")):
        tensors, entries = storage.share_of(state(kind, (4, 4), (4, 4)), 0)
        storage.write_tensors(tmp_path / storage.share_name(0), tensors)
        index = storage.merge([entries])
        storage.read(tmp_path, index, state(kind, (4, 4), (4, 4)))
        for other in (
            state(kind, (4, 6), (4, 6)), state(kind, (4, 4), (4, 4), (4, 4)),
            state(kind, (4, 4), (4, 4), name="other"), state(another, (4, 4), (4, 4)),
        ):  # fmt: skip
            with pytest.raises(ValueError, match="belongs to another"):
                storage.read(tmp_path, index, other)


def test_an_error_while_writing_names_the_file(tmp_path, monkeypatch):
    """As a network file system's stale handle: the system's error has no name."""

    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    for call, act in (
        ("write", lambda: storage.write_json(tmp_path / "a.json", {})),
        ("fsync", lambda: storage.write_json(tmp_path / "a.json", {})),
        ("fsync", lambda: storage.flush(tmp_path)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, stale)
            with pytest.raises(OSError) as caught:
                act()
            assert str(tmp_path) in str(caught.value.filename)
    with pytest.raises(FileNotFoundError) as caught, naming(tmp_path):
        (tmp_path / "none").read_bytes()
    assert caught.value.filename == str(tmp_path / "none")  # it has a name
