"""What torch_npu's own adapters ask of CANN, counted in their log: launches, hidden copies, AI CPU, memory.

Every number was counted on a simulated Ascend910B3 under torch_npu 2.13.0; a change may lower a bound, and should then
write the new number here. The same bounds hold under 2.7.1, but for what `IS_OLD` says."""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from simnpu import adapters
from simnpu.adapters import Record, copied_inputs, sections, transposed_gradients
from simnpu.conftest import computing

GIB = 1 << 30
ROOT = Path(__file__).resolve().parents[2]
IS_OLD = torch.__version__.startswith(("2.7.", "2.8."))
Measured = tuple[list[Any], dict[str, list[Record]]]


@pytest.fixture(scope="module", params=[pytest.param("", marks=pytest.mark.slow)])
def measure(built, tmp_path_factory) -> Iterator[Callable[..., Measured]]:
    """The results of functions of adapter_cases.py, and what they added to the log of their process, which those of one
    number of ranks share."""
    processes: dict[int, tuple[Path, Callable[..., Any]]] = {}
    with contextlib.ExitStack() as stack:

        def run(*asked: dict[str, Any]) -> Measured:
            (ranks,) = {one["arguments"].get("ranks", 1) for one in asked}
            if ranks not in processes:
                log = tmp_path_factory.mktemp("adapters") / "calls.jsonl"
                log.touch()
                process = computing("adapter_cases", adapters=str(log), memory="80GiB")
                processes[ranks] = log, stack.enter_context(process)
            log, compute = processes[ranks]
            begin = log.stat().st_size
            results = []
            for one in asked:
                compute("forget")
                results.append(compute(one["function"], **one["arguments"]))
            return results, sections(log, begin)

        yield run


def call(function: str, **arguments: Any) -> dict[str, Any]:
    return {"function": function, "arguments": arguments}


@pytest.fixture(scope="module")
def depth_12(measure) -> Measured:
    return measure(
        call("step", depth=12, rows=1, tokens=128),
        call("token", depth=12, tokens=128),
        call("kept", depth=12, tokens=2048),
        call("adamw", sizes=[3, 5]),
        call("step", depth=12, rows=1, tokens=128, document=32),
    )


def launches(records: list[Record]) -> int:
    return sum(record.launches for record in records)


def waits(records: list[Record]) -> int:
    return sum(record.kind == "wait" for record in records)


def test_launches_and_waits(depth_12: Measured):
    results, log = depth_12
    assert launches(log["step"]) <= 846 and waits(log["step"]) == 0
    assert waits(log["log line of step"]) == 1
    assert launches(log["token"]) <= 240 and waits(log["token"]) == 1
    assert results[2] <= 377 * 1024, "bytes kept for the backward pass of a token"
    assert all(record.what.startswith("aclnn") for record in log["step"])  # one process: no copy, no collective


def test_launches_of_a_step_of_adapters(measure):
    """Of all matrices of Qwen3 0.6B: the model's own operators, and 28 for the adapters of each layer."""
    step = call("adapters_step", rows=8, tokens=2048, rank=8)
    _, log = measure(step, {**step, "arguments": {**step["arguments"], "micro_batches": 2}})
    assert launches(log["step of adapters, 1"]) <= 2264 and waits(log["step of adapters, 1"]) == 0
    # A second micro-batch casts no adapters again; it adds its gradients to those of the first, one by one.
    assert launches(log["step of adapters, 2"]) - launches(log["step of adapters, 1"]) <= 2538


# The sizes of Qwen3.5 0.8B but for its vocabulary, whose tables would be most of a step.
QWEN3_5 = tiny.SHAPES["qwen3_5"] | {
    "width": 1024, "n_head": 8, "n_kv_head": 2, "head_dim": 256, "rotary_dims": 64, "mlp_width": 3584,
    "window_pattern": "DDDL", "state_key_heads": 16, "state_value_heads": 16, "state_key_dim": 128,
    "state_value_dim": 128, "lookback_heads": 0,
}  # fmt: skip


def test_launches_of_layers_with_a_state(measure):
    """Four layers, three of them with a state. A row of 2,048 tokens is 32 chunks, each of which takes the state on."""
    calls = [call("step", depth=4, rows=1, tokens=tokens, **QWEN3_5) for tokens in (1024, 2048)]
    short, long = (measure(one)[1]["step"] for one in calls)
    _, log = measure(call("token", depth=4, tokens=128, **QWEN3_5))
    assert launches(long) <= 2556 and waits(long) == 0
    assert launches(long) - launches(short) <= 13 * 16 * 3, "launches of a chunk, forward and backward"
    assert launches(log["token"]) <= 189 and waits(log["token"]) == 1


def test_packed_rows_are_divided_into_their_documents(depth_12: Measured, measure):
    """No mask of T x T values and no more launches than the same rows have as one document each."""
    _, log = depth_12
    attention = [record for record in log["packed step"] if "FlashAttention" in record.what]
    assert len(attention) == 24 and all("VarLen" in record.what or "Unpadding" in record.what for record in attention)
    assert launches(log["packed step"]) <= launches(log["step"]) and waits(log["packed step"]) == 0
    results, _ = measure(
        call("step", depth=2, rows=8, tokens=2048), call("step", depth=2, rows=8, tokens=2048, document=128)
    )
    whole, packed = (result["allocated"] for result in results)
    assert packed <= whole + (5 << 20)  # where documents begin: a mask as large as a head of the keys


def test_a_recorded_token_under_the_second_level_of_the_queue(measure):
    """torch_npu refuses to record under it, and the vendor excludes the fused attention from recordings."""
    _, log = measure(call("token", depth=12, tokens=128, graphs="on"))
    kinds = Counter(record.kind for record in log["token"] if record.launches)
    assert (
        kinds["replay"] == 1 and kinds["operator"] <= 7 + 2 * IS_OLD and kinds["copy"] == 1 and waits(log["token"]) == 1
    )
    assert launches(log["token"]) <= 9 + 2 * IS_OLD

    # Each layer multiplies with its keys and its values, of 6 heads, 64 places and 128 numbers, once when the token
    # runs and once when it is recorded; before that the prompt attends to them. All read them in the cache.
    def of_cache(tensor: adapters.Tensor) -> bool:
        return tensor.numel == 6 * 64 * 128 and set(tensor.shape[-2:]) == {64, 128}

    large = [record for record in log["first token"] if any(map(of_cache, record.tensors))]
    assert Counter(record.what for record in large) == {"aclnnMatmul": 2 * 2 * 12, "aclnnFlashAttentionScore": 12}
    assert not [tensor for record in large for tensor in copied_inputs(record) if of_cache(tensor)]
    read = {(tensor.at, tensor.offset) for record in large for tensor in record.tensors if of_cache(tensor)}
    assert len(read) == 2 * 12
    assert "aclnnSoftmax" in {record.what for record in log["first token"]}  # the fused attention is not recorded


def test_a_batch_reaches_the_device_without_a_wait(measure):
    """From pinned memory and not blocking: else the host waits for all that was launched before the copy."""

    expected = {"right": (6, 0, 0), "plain": (6, 6, 6), "not pinned": (6, 0, 6), "blocking": (6, 6, 0)}
    for kind, numbers in expected.items():
        _, log = measure(call("to_device", kind=kind))
        moved = [record for record in log["copies"] if record.kind == "copy"]
        assert (len(moved), sum(one.blocking for one in moved), sum(not one.pinned for one in moved)) == numbers
        assert kind != "right" or waits(log["copies"]) == 0


def test_hidden_copies(depth_12: Measured):
    """Inputs that an operator copies first: the channels that value gates read, the long side of Muon's stacks, and the
    diagonals of their Gram matrices (10, of a few kilobytes); no queries, keys and values."""
    _, log = depth_12
    copied = Counter[str]()
    for record in log["step"]:
        copied[record.what] += len(copied_inputs(record))
    assert not [what for what in copied if re.search("FlashAttention|Rotary", what) and copied[what]]
    assert copied.total() <= 29, copied
    casts, copies = transposed_gradients(log["step"])
    assert casts <= 1 and copies == 0


def test_the_fused_adamw_reads_neither_scale_nor_skip(depth_12: Measured):
    """So a caller must divide the gradients and mask a bad step by itself."""
    results, log = depth_12
    addresses = results[3]
    called = [record.what for record in log["adamw"]]
    assert called == ["aclnnSubs", "aclnnApplyAdamWV2"] * 2, "a loop over the parameters: step - 1, then the update"
    read = {tensor.at for record in log["adamw"] for tensor in record.tensors}
    assert read.isdisjoint(addresses["unread"]) and read.issuperset(addresses["gradients"])


def test_a_gated_mlp_keeps_its_input(measure):
    """And nothing between: for backward 2 x 4 x 256 channels more, of two layers of 128 channels whose MLPs are of 512.
    That it is one operator is test_cann_rules.py's."""
    (plain, gated), _ = measure(*(call("kept", depth=2, tokens=2048, mlp=mlp) for mlp in ("relu2", "swiglu")))
    assert gated - plain <= 2 * 512 * 2


def by_formula(depth: int, rows: int, ranks: int) -> float:
    """GiB on each device, as docs/ascend.md has it, for rows of 2,048 tokens and a vocabulary of 32,768."""
    width = 64 * depth
    tokens = rows * 2048
    matrices = 12 * depth * width**2
    tables = (2 + depth // 2) * 32768 * width  # embedding, head, and value embeddings in every other layer
    size = 42 * depth * width * tokens + (6 + 4 / ranks) * matrices + (4 + 8 / ranks) * tables
    return (size + 4 * 32768 * width + 0.9e9) / GIB


@pytest.mark.parametrize("page", ["docs/ascend.md", "docs/ascend.zh.md"])
def test_the_table_of_memory_is_by_the_formula(page: str):
    lines = re.findall(r"^\| (\d+) \| ((?:\d+ \| ){8})", (ROOT / page).read_text(), re.MULTILINE)
    assert [int(depth) for depth, _ in lines] == [12, 16, 20, 24, 26, 32]
    for depth, cells in lines:
        places = [(rows, ranks) for ranks in (1, 8) for rows in (4, 8, 16, 32)]
        wanted = [f"{by_formula(int(depth), rows, ranks):.0f}" for rows, ranks in places]
        assert cells.replace("|", "").split() == wanted


@pytest.mark.parametrize(("ranks", "allocated", "reserved"), [(1, 44, 46), (8, 39, 40)])
def test_peak_memory_at_depth_20(measure, ranks: int, allocated: int, reserved: int):
    """16 rows of 2,048 tokens. Less what CANN takes for itself: a card of 64 GB has some 61 GiB for both."""
    ((peak,), log) = measure(call("step", depth=20, rows=16, tokens=2048, ranks=ranks))
    assert peak["allocated"] <= allocated * GIB and peak["reserved"] <= reserved * GIB
    assert by_formula(20, 16, ranks) == pytest.approx(peak["allocated"] / GIB, rel=0.02)
    assert sum(record.kind == "collective" for record in log["step"]) <= (204 if ranks > 1 else 0)
    assert waits(log["step"]) == 0


def test_fsdp_holds_a_share(measure):
    """Each of four ranks a quarter, although it gathers a block. Of few tokens: activations count for little."""
    ((peak,), _) = measure(call("step", depth=12, rows=1, tokens=64, ranks=4, parallel="fsdp"))
    ((whole,), _) = measure(call("step", depth=12, rows=1, tokens=64))
    assert peak["allocated"] <= 0.25 * whole["allocated"]


@pytest.mark.slow
def test_one_order_of_sums_reaches_cann(simulated, tmp_path):
    """`--deterministic` sets torch's switch, and torch_npu passes it on with the next operator."""
    program = """
import ctypes, os
from nanochat import device
here = device.init("npu", deterministic=True)
import torch
x = torch.ones(4, device=here.torch_device)
(x + x).sum()
here.synchronize()
value = ctypes.c_int64(-1)
ctypes.CDLL(os.environ["SIMNPU_LIBRARY"]).aclrtGetSysParamOpt(0, ctypes.byref(value))  # 0: ACL_OPT_DETERMINISTIC
print(value.value, os.environ.get("HCCL_DETERMINISTIC"))
"""
    done = simulated(["-c", program], adapters=str(tmp_path / "calls.jsonl"))
    assert done.stdout.splitlines()[-1] == "1 true", done.stderr[-2000:]


@pytest.mark.parametrize(
    "cases",
    [
        [
            {"depth": 4, "rows": 1, "tokens": 256},  # the most is in the update, in the others in the loss
            {"depth": 2, "rows": 8, "tokens": 1024, "vocab": 2048, "dtype": "float32"},
            {"depth": 4, "rows": 8, "tokens": 1024, "activation_checkpointing": True, "micro_batches": 2},
            {"depth": 2, "rows": 8, "tokens": 1024, "vocab": 2048, "lora_rank": 8},
        ],
        [{"depth": 4, "rows": 4, "tokens": 1024, "ranks": 2, "parallel": parallel} for parallel in ("fsdp", "ddp")],
    ],
    ids=["one rank", "two ranks"],
)
@pytest.mark.skipif(IS_OLD, reason="torch 2.7 counts a third too much in fp32, and has no collectives without data")
def test_a_dry_run_counts_what_the_allocator_holds(measure, cases: list[dict[str, Any]]):
    results, _ = measure(*(call("counted", **case) for case in cases))
    for case, result in zip(cases, results, strict=True):
        what, most = list(result.items())[-1]
        assert most == pytest.approx(result["allocated"], rel=0.02), (case, what)


def test_offloaded_state_is_not_on_the_device(measure):
    """The peak falls by its size, and it travels to the device and back in a step."""
    shape = {"depth": 2, "rows": 8, "tokens": 1024, "vocab": 2048}
    (here, away), log = measure(call("counted", **shape), call("counted", **shape, offload=True))
    size = away["optimizer state in main memory"]
    assert size == pytest.approx(here["optimizer state"], rel=0.01) and not here["optimizer state in main memory"]
    assert here["allocated"] - away["allocated"] == pytest.approx(size, rel=0.02)
    moved = sum(record.bytes for record in log["offloaded step"] if record.kind == "copy")
    assert moved == pytest.approx(2 * size, rel=0.02)


def test_launches_of_experts(measure):
    """Of depth 4 with 8 experts."""
    sizes = {"depth": 4, "rows": 1, "tokens": 128}
    _, log = measure(call("step", **sizes, experts=8, mlp_width=256))
    _, dense = measure(call("step", **sizes))
    assert launches(log["step"]) - launches(dense["step"]) <= 184  # 46 a block, forward, backward and update
