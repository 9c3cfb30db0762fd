"""Every call of every stage by CANN's rules for a 910B and 910C, release by release: none on the AI CPU, none refused;
and what a stage computes in: the residual stream, sums over a vocabulary, groups of the optimizer."""

from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import tiny

from nanochat.engine import SamplingParams
from simnpu import adapters
from simnpu.adapters import Record, Tensor
from simnpu.cann_rules import RELEASES, TABLE, where
from simnpu.conftest import computing
from simnpu.stage_cases import ROWS, SETTINGS, TOKENS, VOCAB, WIDTH

Log = dict[str, list[Record]]
# What the adapters of this torch_npu, which belongs to CANN 9.1, call only where CANN has it.
NEWER = {"8.5.0": {"aclnnChunkCat", "aclnnForeachCopy"}, "9.0.0": {"aclnnForeachCopy"}, "9.1.0": set()}


@pytest.fixture(scope="module", params=[pytest.param("", marks=pytest.mark.slow)])
def log(built: None, tmp_path_factory: pytest.TempPathFactory) -> Log:
    """What every stage asks of the device, by section."""
    found: Log = {}
    for functions in (("stages", "decoding", "evaluations"), ("layouts",)):
        path: Path = tmp_path_factory.mktemp("stages") / "calls.jsonl"
        with computing("stage_cases", adapters=str(path)) as compute:
            for function in functions:
                compute(function)
        for name, records in adapters.sections(path).items():
            found.setdefault(name, []).extend(records)
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_every_call_runs_on_the_cores(log: Log, release: str):
    elsewhere = Counter[str]()
    for name, records in log.items():
        for record in records:
            place = where(record, release) if record.kind == "operator" else "cores"
            if place != "cores" and not (record.what in NEWER[release] and place != "AI CPU"):
                elsewhere[f"{name}: {record.what} {place}"] += 1
    assert not elsewhere, sorted({key.split(": ")[-1] for key in elsewhere})


def test_every_stage_and_setting_is_logged(log: Log):
    losses = [f"preferences, {name}" for name in tiny.all_losses("pair losses")]
    losses += [f"RL, {name}" for name in tiny.all_losses("policy losses")]
    parallel = [f"{kind} parallel" for kind in ("context", "expert")]
    assert {"base", "packed SFT", "LoRA", "NF4", "experts", "ddp", "fsdp", *losses, *parallel} <= log.keys()
    assert all(len(log[name]) > 100 for name in losses)
    assert {field.name for field in fields(SamplingParams)} <= {"seed"}.union(*SETTINGS.values())
    assert len({record.what for records in log.values() for record in records if record.kind == "operator"}) >= 114


def argument(value: Any) -> Any:
    """An argument of an example's call."""
    if isinstance(value, list):
        return tuple(map(argument, value))
    if isinstance(value, int):
        return value
    dtype, *sizes = value.split()
    return {dtype: "2"} if dtype == "scalar" else Tensor(tuple(map(int, sizes)), (), (), 0, dtype, 0)


@pytest.mark.parametrize("example", TABLE["example"], ids=lambda example: " ".join(map(str, example["call"])))
def test_a_call_runs_where_the_sources_say(example: dict[str, Any]):
    name, *arguments = example["call"]
    record = Record("operator", f"aclnn{name}", argument(arguments))
    places = example["where"]
    expected = [places] * len(RELEASES) if isinstance(places, str) else places
    assert [where(record, release) for release in RELEASES] == expected


def test_the_table_names_its_sources():
    assert all(kernel["file"].partition(":")[0] in TABLE["sources"] for kernel in TABLE["kernel"])


# ---------------------------------------------------------------------- what a stage computes in


STAGES = ("base", "packed SFT", "packed SFT of Qwen3", "preferences, dpo", "RL, grpo", "experts", "fsdp")


def test_the_residual_stream_is_bf16(log: Log):
    """Forward and backward, but for the rows of the tables, which are fp32, and their casts."""
    for name in STAGES:
        dtypes = set()
        for record in log[name]:
            if not record.what.startswith(("aclnnEmbedding", "aclnnInplaceCopy")):
                wide = [tensor for tensor in record.tensors if tensor.shape[::2] == (ROWS, WIDTH)]
                dtypes |= {tensor.dtype for tensor in wide if tensor.shape[1] <= TOKENS}  # no stack of matrices
        assert dtypes == {"bfloat16"}, name


SUMS = {f"aclnn{name}" for name in ("ReduceSum", "Mean", "Softmax", "LogSoftmax", "Cumsum")}


def test_sums_over_a_vocabulary_are_fp32(log: Log):
    counted = Counter[str]()
    for name, records in log.items():
        for record in records:
            wide = [tensor for tensor in record.tensors if tensor.shape and tensor.shape[-1] in (VOCAB, 280)]
            if wide and record.what in SUMS:
                counted[record.what] += 1
                is_count = wide[0].dtype == "bool"
                assert record.tensors[-1].dtype == ("int64" if is_count else "float32"), (name, record)
            if record.what == "aclnnInplaceAdd" and record.tensors[0].shape == (VOCAB, WIDTH):  # the head's gradients
                assert record.tensors[0].dtype == "float32", name
    assert counted["aclnnReduceSum"] > 100 and counted["aclnnCumsum"] > 20 and counted["aclnnSoftmax"] > 20


def test_groups_that_differ_in_nothing_are_updated_together(log: Log):
    """AdamW updates all parameters of equal betas and decay at once, Muon all matrices of a shape."""
    expected = {"base": (1, 3), "packed SFT of Qwen3": (1, 3), "LoRA": (1, 0), "NF4": (1, 0), "experts": (2, 2)}
    for name, counts in (expected | {"ddp": (1, 3), "fsdp": (1, 3)}).items():
        called = Counter(record.what for record in log[name])
        assert (called["aclnnForeachAddScalarList"], called["aclnnInplaceLerps"]) == counts, name


def test_products_of_experts_and_gated_mlps_are_one_operator_each(log: Log):
    """Each product of a block's experts: once forward and twice backward. A gated MLP: once each way."""
    called = Counter(record.what for name in ("experts", "packed SFT of Qwen3") for record in log[name])
    assert called["aclnnGroupedMatmulV5"] == 2 * 2 * 6 and called["aclnnSwiGlu"] == called["aclnnSwiGluGrad"] == 2 * 2
    assert not any("Silu" in what for what in called)


def test_the_host_waits_for_what_it_prints(log: Log):
    """For a line of a training's log, for decoded tokens, for sums; PPO computes its returns on the host."""
    waits = Counter(name for name, records in log.items() for record in records if record.kind == "wait")
    once = [name for name in log if name.startswith("log line") or ": a token" in name]
    for name in ("", "first", "batch of first"):
        del waits[name]
    assert waits == dict.fromkeys(once, 1) | {"batch of RL, ppo": 1, "bits per byte": 2}


def test_a_loss_over_a_real_vocabulary_in_bf16_is_fp32s(built: None):
    """Over 32,768 logits of 64 tokens, with gradients. How a kernel adds up is not simulated: see the dtypes above."""
    with computing("cases") as compute:
        for cap in (0.0, 15.0):
            exact = compute("vocabulary_loss", device="npu:0", dtype="float32", cap=cap)
            rounded = compute("vocabulary_loss", device="npu:0", dtype="bfloat16", cap=cap)
            assert rounded["losses"] == pytest.approx(exact["losses"], rel=2e-3)
            assert rounded["losses"][0] == pytest.approx(exact["losses"][0], rel=2e-4)  # the sum
            assert rounded["hidden"] == pytest.approx(exact["hidden"], rel=1e-2)
            assert rounded["weight"] == pytest.approx(exact["weight"], rel=1e-2)
