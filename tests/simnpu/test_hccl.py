"""hccl.c: against numpy through ctypes, in processes of their own; and under the real torch_npu's process group."""

import ctypes
import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import forkserver

HERE = Path(__file__).resolve().parent
Simulated = Callable[..., subprocess.CompletedProcess[str]]
SUCCESS, PARAMETER, NOT_SUPPORTED, UNAVAILABLE, TIMEOUT, REMOTE = 0, 1, 5, 7, 9, 21
SUM, PROD, MAX, MIN = range(4)
FLOATS = ("float16", "bfloat16", "float32")
TYPES = {  # HCCL's number, and numpy's type of the same size; bfloat16 has none and travels as its bits
    "int8": (0, np.int8), "int16": (1, np.int16), "int32": (2, np.int32), "float16": (3, np.float16),
    "float32": (4, np.float32), "int64": (5, np.int64), "uint8": (7, np.uint8), "float64": (10, np.float64),
    "bfloat16": (11, np.uint16),
}  # fmt: skip
REDUCIBLE = ("int8", "int16", "int32", "int64", "float16", "float32", "bfloat16")
MOVABLE = tuple(TYPES)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("gcc"), reason="the simulated HCCL is for Linux, and needs gcc"
)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("hccl") / "libhccl.so"
    command = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*command, "-o", os.fspath(path), os.fspath(HERE / "hccl.c")], check=True)
    return os.fspath(path)


# ---------------------------------------------------------------------- the library from Python


class Item(ctypes.Structure):
    _fields_ = [
        *(("kind", ctypes.c_int), ("buffer", ctypes.c_void_p), ("count", ctypes.c_uint64), ("type", ctypes.c_int)),
        ("remote_rank", ctypes.c_uint32),
    ]


class Config(ctypes.Structure):
    """HcclCommConfig of version 10, as far as its execution timeout; the rest is zeros."""

    _fields_ = [
        *(("size", ctypes.c_size_t), ("magic", ctypes.c_uint32), ("version", ctypes.c_uint32)),
        *(("reserved", ctypes.c_uint64), ("buffer_size", ctypes.c_uint32), ("deterministic", ctypes.c_uint32)),
        *(("name", ctypes.c_char * 128), ("user_information", ctypes.c_char * 128), ("modes", ctypes.c_uint32 * 4)),
        *(("job", ctypes.c_uint64), ("zero_copy", ctypes.c_uint8), ("exec_timeout", ctypes.c_int32)),
        ("rest", ctypes.c_char * 1928),
    ]


def configuration(name: str = "", exec_timeout: int = -1) -> Config:
    return Config(ctypes.sizeof(Config), 0xF0F0F0F0, 10, name=name.encode(), exec_timeout=exec_timeout)


ROOT_INFO_BYTES = 4108


class Group:
    """A communicator and the calls on it; every call returns HCCL's code."""

    def __init__(self, library: Any, handle: ctypes.c_void_p, rank: int, ranks: int) -> None:
        self.library, self.handle, self.rank, self.ranks = library, handle, rank, ranks

    def __getattr__(self, name: str) -> Callable[..., int]:
        """all_reduce(...) is HcclAllReduce(..., communicator, stream): arrays as their addresses, sizes as 64 bits."""
        function = getattr(self.library, "Hccl" + "".join(map(str.title, name.split("_"))).replace("ToA", "toA"))

        def call(*arguments: Any) -> int:
            converted = [ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray) else a for a in arguments]
            return function(*converted, self.handle, None)

        return call

    def batch(self, *items: tuple[str, np.ndarray, int, int]) -> int:
        """Items: "send" or "recv", array, HCCL type, remote rank."""
        made = [Item(way == "recv", data.ctypes.data, data.size, number, peer) for way, data, number, peer in items]
        array = (Item * len(items))(*made)
        return self.library.HcclBatchSendRecv(array, ctypes.c_uint32(len(items)), self.handle, None)


def size(count: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(count)


class Rank:
    """What a process of run() has to do with the others."""

    def __init__(self, path: str, rank: int, ranks: int, folder: Path) -> None:
        self.library, self.rank, self.ranks, self.folder = ctypes.CDLL(path), rank, ranks, folder
        self.joined = 0

    def join(self, config: Config | None = None, ranks: int | None = None) -> tuple[int, Group]:
        """The code and a communicator of everybody."""
        self.joined += 1
        file = self.folder / f"root{self.joined}"
        info = ctypes.create_string_buffer(ROOT_INFO_BYTES)
        if self.rank == 0:
            assert self.library.HcclGetRootInfo(info) == SUCCESS
            file.with_suffix(".tmp").write_bytes(info.raw)
            file.with_suffix(".tmp").rename(file)
        while not file.exists():
            time.sleep(0.001)
        info = ctypes.create_string_buffer(file.read_bytes(), ROOT_INFO_BYTES)
        handle = ctypes.c_void_p()
        ranks = ranks or self.ranks
        place = ctypes.c_uint32(ranks), info, ctypes.c_uint32(self.rank)
        options = config and ctypes.byref(config)
        code = self.library.HcclCommInitRootInfoConfig(*place, options, ctypes.byref(handle))
        return code, Group(self.library, handle, self.rank, ranks)

    def group(self, config: Config | None = None) -> Group:
        code, group = self.join(config)
        assert code == SUCCESS, code
        return group


def rank_main(
    path: str, function: Callable[..., Any], rank: int, ranks: int, folder: Path, environment: dict[str, str]
) -> None:
    os.dup2(os.open(folder / "stderr", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    os.environ.update(environment, RANK=str(rank))
    result = function(Rank(path, rank, ranks, folder))
    (folder / f"result{rank}").write_bytes(pickle.dumps(result))


class Results(list[Any]):
    """What the ranks returned, and what they and the library wrote to stderr."""

    stderr = ""


def run(
    library: str, function: Callable[[Rank], Any], ranks: int, *, lost: int | None = None, **environment: str
) -> Results:
    """The results of the function in as many processes; None for the one that dies or never answers (`lost`)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [
            forkserver().Process(target=rank_main, args=(library, function, rank, ranks, folder, environment))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + 60
        for rank, process in enumerate(processes):
            if rank != lost:
                process.join(max(0, deadline - time.monotonic()))
        for process in processes:
            process.kill()
            process.join()
        stderr = (folder / "stderr").read_text()
        sys.stderr.write(stderr)  # pytest shows it with a failure
        outcome = Results()
        outcome.stderr = stderr
        for rank in range(ranks):
            file = folder / f"result{rank}"
            assert file.exists() == (rank != lost), f"rank {rank} did not answer"
            outcome.append(None if rank == lost else pickle.loads(file.read_bytes()))
        return outcome


# ---------------------------------------------------------------------- expectations


def data(name: str, count: int, seed: int) -> np.ndarray:
    """Values of that type; bfloat16 as its bits."""
    random = np.random.default_rng(seed)
    if name in ("float16", "float32", "float64", "bfloat16"):
        values = random.standard_normal(count).astype(np.float32)
        return to_bits(values) if name == "bfloat16" else values.astype(TYPES[name][1])
    limits = np.iinfo(TYPES[name][1])
    return random.integers(limits.min, limits.max, count, TYPES[name][1], endpoint=True)


def to_bits(values: np.ndarray) -> np.ndarray:
    """fp32 to the bits of bfloat16: to the nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bits(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def reduced(name: str, arrays: list[np.ndarray], operation: int) -> np.ndarray:
    """One after the other in the order of the ranks; 16-bit floats in fp32, rounded once; integers wrap around."""
    function = (np.add, np.multiply, np.maximum, np.minimum)[operation]
    if name == "bfloat16":
        arrays = [from_bits(array) for array in arrays]
    elif name == "float16":
        arrays = [array.astype(np.float32) for array in arrays]
    total = arrays[0].copy()
    for array in arrays[1:]:
        function(total, array, out=total)
    return to_bits(total) if name == "bfloat16" else total.astype(TYPES[name][1])


def blank(name: str, count: int) -> np.ndarray:
    return np.full(count, 77, TYPES[name][1])


def check(what: str, code: int, got: np.ndarray, expected: np.ndarray) -> None:
    assert code == SUCCESS, f"{what}: code {code}"
    assert got.tobytes() == expected.tobytes(), f"{what}: {got[:8]} instead of {expected[:8]}"


# ---------------------------------------------------------------------- every collective


def every_reduction(me: Rank) -> int:
    group, checks = me.group(), 0
    for name, operation, count in itertools.product(REDUCIBLE, range(4), (1, 37, 5000)):
        if operation == PROD and name in ("int16", "bfloat16"):
            continue
        number = TYPES[name][0]
        what = f"{name} {operation} {count}"
        inputs = [data(name, count * me.ranks, seed=rank) for rank in range(me.ranks)]
        mine = inputs[me.rank]
        whole = reduced(name, inputs, operation)

        out = blank(name, whole.size)
        check(f"all_reduce {what}", group.all_reduce(mine, out, size(out.size), number, operation), out, whole)
        same = mine.copy()
        code = group.all_reduce(same, same, size(same.size), number, operation)
        check(f"all_reduce in place {what}", code, same, whole)

        root = me.ranks - 1
        out = blank(name, whole.size)
        code = group.reduce(mine, out, size(out.size), number, operation, root)
        check(f"reduce {what}", code, out, whole if me.rank == root else blank(name, whole.size))

        out = blank(name, count)
        code = group.reduce_scatter(mine, out, size(count), number, operation)
        check(f"reduce_scatter {what}", code, out, np.split(whole, me.ranks)[me.rank])
        checks += 4
    return checks


def every_movement(me: Rank) -> int:
    group, checks = me.group(), 0
    for name, count in itertools.product(MOVABLE, (1, 37, 5000)):
        number = TYPES[name][0]
        what = f"{name} {count}"
        inputs = [data(name, count * me.ranks, seed=rank) for rank in range(me.ranks)]
        mine = inputs[me.rank]

        out = mine.copy()
        check(f"broadcast {what}", group.broadcast(out, size(out.size), number, me.ranks - 1), out, inputs[-1])

        out = blank(name, count)
        code = group.scatter(mine, out, size(count), number, 1)
        check(f"scatter {what}", code, out, np.split(inputs[1], me.ranks)[me.rank])

        out = blank(name, count * me.ranks * me.ranks)
        code = group.all_gather(mine, out, size(mine.size), number)
        check(f"all_gather {what}", code, out, np.concatenate(inputs))

        out = blank(name, mine.size)
        code = group.all_to_all(mine, size(count), number, out, size(count), number)
        expected = np.concatenate([np.split(array, me.ranks)[me.rank] for array in inputs])
        check(f"all_to_all {what}", code, out, expected)

        # rank a sends (a + b) % ranks * count / 4 elements to rank b
        matrix = np.add.outer(range(me.ranks), range(me.ranks)) % me.ranks * count // 4
        send_counts, receive_counts = matrix[me.rank].astype(np.uint64), matrix[:, me.rank].astype(np.uint64)
        starts = np.cumsum(matrix, axis=1) - matrix
        expected = np.concatenate(
            [inputs[a][starts[a, me.rank] : starts[a, me.rank] + matrix[a, me.rank]] for a in range(me.ranks)]
        )
        out = blank(name, expected.size)
        send_offsets, receive_offsets = (np.cumsum(counts) - counts for counts in (send_counts, receive_counts))
        code = group.all_to_all_v(mine, send_counts, send_offsets, number, out, receive_counts, receive_offsets, number)
        check(f"all_to_all_v {what}", code, out, expected)
        checks += 5
    assert group.barrier() == SUCCESS
    return checks


def every_collective(me: Rank) -> tuple[int, int]:
    return every_reduction(me), every_movement(me)


@pytest.mark.parametrize(("ranks", "piece"), [(4, "4096"), (2, "4194304")])  # many pieces a message, one piece
def test_every_collective(library: str, ranks: int, piece: str) -> None:
    reductions = (len(REDUCIBLE) * 4 - 2) * 3 * 4
    movements = len(MOVABLE) * 3 * 5
    results = run(library, every_collective, ranks, SIMNPU_HCCL_PIECE=piece)
    assert results == [(reductions, movements)] * ranks


# ---------------------------------------------------------------------- send and receive


def messages(me: Rank) -> str:
    group = me.group()
    number = TYPES["int32"][0]
    after, before = (me.rank + 1) % me.ranks, (me.rank - 1) % me.ranks
    for count in (1, 100_000):  # the second is more than a ring holds
        mine, got = np.full(count, me.rank, np.int32), blank("int32", count)
        # one after the other down the line and back to the first
        if me.rank > 0:
            assert group.recv(got, size(count), number, before) == SUCCESS
            assert (got == before).all()
        assert group.send(mine, size(count), number, after) == SUCCESS
        if me.rank == 0:
            assert group.recv(got, size(count), number, before) == SUCCESS
            assert (got == before).all()

        # all at once, two messages to each neighbour and one to itself
        mine = [np.full(count, 10 * me.rank + i, np.int32) for i in range(3)]
        got = [blank("int32", count) for _ in range(3)]
        places = ((after, before), (after, before), (me.rank, me.rank))
        sends = [("send", array, number, to) for array, (to, _) in zip(mine, places, strict=True)]
        receives = [("recv", array, number, whence) for array, (_, whence) in zip(got, places, strict=True)]
        assert group.batch(*sends, *receives) == SUCCESS
        assert [array[0] for array in got] == [10 * before, 10 * before + 1, 10 * me.rank + 2]
        assert all((array == array[0]).all() for array in got)

        # sends first everywhere: only together can they be done
        assert me.library.HcclGroupStart() == SUCCESS
        assert group.send(mine[0], size(count), number, after) == SUCCESS
        assert group.recv(got[0], size(count), number, before) == SUCCESS
        assert me.library.HcclGroupEnd() == SUCCESS
        assert (got[0] == 10 * before).all()
    return "done"


def test_send_and_receive(library: str) -> None:
    assert run(library, messages, 3) == ["done"] * 3


# ---------------------------------------------------------------------- communicators


def several(me: Rank) -> tuple[str, str, int]:
    """Two of all ranks, and one of ranks 1 and 3 cut out of the first, used in turn."""
    first, second = me.group(configuration("first")), me.group()
    names = []
    for group in (first, second):
        name, rank, ranks = ctypes.create_string_buffer(128), ctypes.c_uint32(), ctypes.c_uint32()
        assert me.library.HcclGetCommName(group.handle, name) == SUCCESS
        assert me.library.HcclGetRankId(group.handle, ctypes.byref(rank)) == SUCCESS
        assert me.library.HcclGetRankSize(group.handle, ctypes.byref(ranks)) == SUCCESS
        assert (rank.value, ranks.value) == (me.rank, me.ranks)
        names.append(name.value.decode())
    members = (1, 3)
    handle = ctypes.c_void_p()
    inside = me.rank in members
    code = me.library.HcclCreateSubCommConfig(
        ctypes.byref(first.handle),
        ctypes.c_uint32(2),
        (ctypes.c_uint32 * 2)(*members) if inside else None,
        ctypes.c_uint64(5 if inside else 0xFFFFFFFF),
        ctypes.c_uint32(members.index(me.rank) if inside else 0),
        ctypes.byref(configuration("some")),
        ctypes.byref(handle),
    )
    assert code == SUCCESS
    assert bool(handle.value) == inside
    total = 0
    for round in range(50):
        number = np.array([me.rank + round], np.int64)
        group = (first, second)[round % 2]
        if inside:
            part = Group(me.library, handle, members.index(me.rank), 2)
            assert part.all_reduce(number, number, size(1), TYPES["int64"][0], SUM) == SUCCESS
            assert number == 4 + 2 * round
        assert group.all_reduce(number, number, size(1), TYPES["int64"][0], MAX) == SUCCESS
        total += int(number[0])
    assert me.library.HcclCommDestroy(second.handle) == SUCCESS
    assert first.barrier() == SUCCESS
    return names[0], names[1], total


def test_several_communicators(library: str) -> None:
    results = run(library, several, 4)
    assert results == [results[0]] * 4
    assert results[0][0] == "first"
    assert results[0][1] != "first"
    assert results[0][2] == sum(4 + 2 * round for round in range(50))


def outside_the_documentation(me: Rank) -> list[int]:
    group, codes = me.group(), []
    for name, operation in (("uint8", SUM), ("int16", PROD), ("bfloat16", PROD), ("float64", SUM), ("int64", SUM)):
        array = data(name, 8, seed=0)
        codes.append(group.all_reduce(array, array, size(8), TYPES[name][0], operation))
    return codes


@pytest.mark.parametrize(("limits", "code"), [("1", NOT_SUPPORTED), ("0", SUCCESS)])
def test_documented_limits(library: str, limits: str, code: int) -> None:
    codes = [code, code, code, NOT_SUPPORTED, SUCCESS]  # fp64 cannot be reduced in any case, int64 can
    assert run(library, outside_the_documentation, 2, SIMNPU_HCCL_LIMITS=limits) == [codes] * 2


# ---------------------------------------------------------------------- faults


def mistakes(me: Rank) -> list[int]:
    """The codes of one mistake after another on two ranks, each on a communicator of its own."""
    float32 = TYPES["float32"][0]
    numbers = np.zeros(8, np.float32)
    codes = []

    group = me.group()  # HCCL's send waits until it is received, so two that send to each other wait for ever
    codes.append(group.send(numbers, size(8), float32, 1 - me.rank))
    group = me.group()
    if me.rank == 0:
        codes.append(group.send(numbers, size(4), float32, 1))
    else:
        codes.append(group.recv(numbers, size(3), float32, 0))
    group = me.group()
    if me.rank == 0:
        codes.append(group.all_reduce(numbers, numbers, size(8), float32, SUM))
    else:
        codes.append(group.broadcast(numbers, size(8), float32, 0))
    codes.append(me.group().all_reduce(numbers, numbers, size(8 - me.rank), float32, SUM))
    codes.append(me.join(ranks=3)[0])
    return codes


def test_mistakes_are_found_and_named(library: str) -> None:
    results = run(library, mistakes, 2, HCCL_EXEC_TIMEOUT="0.3", HCCL_CONNECT_TIMEOUT="0.3")
    others = [PARAMETER, PARAMETER, TIMEOUT]
    assert results == [[TIMEOUT, TIMEOUT, *others], [TIMEOUT, PARAMETER, *others]]
    for text in (
        "EI0002: send of communicator",
        "rank 0 sends 16 bytes to rank 1, which expects 12",
        "rank 0 all_reduce of float32 (operation 0, root 0), rank 1 broadcast of float32",
        "rank 1 sends 28 bytes to rank 0, which expects 32",
        "EI0015: rank 0 of 3",
        'List of unconnected ranks: "[2]"',
    ):
        assert text in results.stderr


def one_is_missing(me: Rank) -> tuple[int, float]:
    """Rank 1 leaves out the second sum: the code, and processor seconds of the others' wait."""
    group = me.group(configuration(exec_timeout=1))
    numbers = np.zeros(8, np.float32)
    assert group.all_reduce(numbers, numbers, size(8), 4, SUM) == SUCCESS
    if me.rank == 1:
        return 0, 0
    before = time.process_time()
    code = group.all_reduce(numbers, numbers, size(8), 4, SUM)
    processor = time.process_time() - before
    assert group.barrier() == code  # it stays broken, and says so at once
    return code, processor


def test_a_rank_that_does_not_come(library: str) -> None:
    """The communicator's own timeout goes before the environment's."""
    first, second, third = run(library, one_is_missing, 3, HCCL_EXEC_TIMEOUT="60")
    assert second[0] == SUCCESS
    for code, processor in (first, third):
        assert code == TIMEOUT
        assert processor < 0.1  # it sleeps


def one_dies(me: Rank) -> int:
    group = me.group()
    assert group.barrier() == SUCCESS
    if me.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return group.barrier()


def test_a_rank_that_dies_and_nothing_left_behind(library: str) -> None:
    assert run(library, one_dies, 3, lost=0, HCCL_EXEC_TIMEOUT="0.3") == [None, TIMEOUT, TIMEOUT]
    # Other programs use the folder, too. Every communicator's name begins with "simulated".
    assert not [file for file in Path("/dev/shm").iterdir() if "simulated" in file.name]


def four_sums(me: Rank) -> list[int]:
    group, codes = me.group(), []
    numbers = np.zeros(8, np.float32)
    for _ in range(4):
        assert group.barrier() in (SUCCESS, TIMEOUT, REMOTE)
        codes.append(group.all_reduce(numbers, numbers, size(8), 4, SUM))
    return codes


def test_an_ordered_failure(library: str) -> None:
    results = run(library, four_sums, 2, HCCL_EXEC_TIMEOUT="0.3", SIMNPU_HCCL_FAIL="broadcast:1@0,all_reduce:3@1")
    assert results == [[SUCCESS, SUCCESS, TIMEOUT, TIMEOUT], [SUCCESS, SUCCESS, REMOTE, REMOTE]]


def test_an_ordered_failure_everywhere(library: str) -> None:
    assert run(library, four_sums, 2, SIMNPU_HCCL_FAIL="all_reduce:1") == [[REMOTE] * 4] * 2


def test_an_ordered_hang(library: str) -> None:
    results = run(library, four_sums, 2, lost=1, HCCL_EXEC_TIMEOUT="0.3", SIMNPU_HCCL_HANG="all_reduce:2@1")
    assert results == [[SUCCESS, TIMEOUT, TIMEOUT, TIMEOUT], None]
    assert "SIMNPU_HCCL_HANG: all_reduce number 2 never returns" in results.stderr


# ---------------------------------------------------------------------- under torch_npu

SUMS = """
import os, torch, torch.distributed as dist
torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("hccl")
ones = torch.ones(8, device="npu")
for number in range(1, 4):
    dist.all_reduce(ones)
    print(f"rank {dist.get_rank()} sum {number}: {ones[0].item()}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torch_distributed(simulated: Simulated, tmp_path: Path) -> None:
    """Everything in hccl_worker.py, in one launch."""
    ranks = 4
    worker = os.fspath(HERE / "hccl_worker.py")
    done = simulated([worker, os.fspath(tmp_path)], ranks=ranks, env={"HCCL_EXEC_TIMEOUT": "30"})
    outcomes = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    errors = [f"rank {rank}, {name}:\n{text}" for rank in range(ranks) for name, text in outcomes[rank].items() if text]
    assert not errors, "\n".join(errors)
    assert done.returncode == 0, done.stderr
    assert all(list(outcome) == list(outcomes[0]) for outcome in outcomes)
    assert len(outcomes[0]) == 12


@pytest.mark.slow
def test_a_failure_as_torch_shows_it(simulated: Simulated, tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(SUMS)
    done = simulated([os.fspath(tmp_path / "sums.py")], ranks=2, hccl_fail="all_reduce:2@1")
    assert done.returncode == 1
    assert "rank 1 sum 1: 2.0" in done.stdout
    assert "rank 1 sum 2" not in done.stdout
    assert "OPS function error: HcclAllreduce, error code is 21" in done.stderr
    assert "[rank1]: SIMNPU_HCCL_FAIL: all_reduce number 2 fails." in done.stderr  # as part of the exception


@pytest.mark.slow
def test_a_timeout_as_torch_shows_it(simulated: Simulated, tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(SUMS)
    script, limit = os.fspath(tmp_path / "sums.py"), {"HCCL_EXEC_TIMEOUT": "2"}
    done = simulated([script], ranks=2, hccl_hang="all_reduce:2@1", env=limit)
    assert done.returncode == 1
    assert "rank 0 sum 1: 2.0" in done.stdout
    assert "OPS function error: HcclAllreduce, error code is 9" in done.stderr
    assert "[rank0]: EI0002: all_reduce of communicator" in done.stderr
