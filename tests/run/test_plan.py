"""--dry_run --plan: which layout of a run fits, from config.json alone, for cards that are not here."""

import dataclasses
import importlib
import json
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from test_scripts import base, call, mistake, tokenizer, trained_tokenizer  # noqa: F401 (fixtures)
from torch import Tensor
from torch.utils._pytree import tree_leaves

from nanochat import cli
from nanochat.run import plan

slow = pytest.mark.slow
QWEN3 = {
    "model_type": "qwen3", "vocab_size": 640, "hidden_size": 128, "intermediate_size": 384,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}  # fmt: skip
ROWS = ("--max_seq_len=64", "--device_batch_size=1")
SFT = (*ROWS, "--target_examples_per_step=16")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a config.json and nothing else."""
    return folder_of(tmp_path, 3)


def folder_of(tmp_path: Path, layers: int) -> Path:
    folder = tmp_path / f"model{layers}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**QWEN3, "num_hidden_layers": layers}))
    return folder


@pytest.fixture
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those that some tests are about, for their time."""
    monkeypatch.setattr(plan, "CANDIDATES", (("ddp",), ("fsdp",), ("fsdp in each host",), ("fsdp", "recomputation")))


def run_of(script: str, *argv: str) -> tuple[Any, Any]:
    """A script's `main`, and its config with these flags."""
    module = importlib.import_module(f"scripts.{script}")
    return module.main, cli.parse(module.Config, ["--device=cpu", "--dry_run", *argv])


def table_of(out: str) -> dict[str, list[str]]:
    """The words after each candidate's name: GB a card, GB counted, phase, GB moved, "fits"."""
    rows = re.findall(r"(?m)^  ((?:ddp|fsdp|one card)[a-z0-9+ ]*?) {2,}(\d.*)$", out)
    return {name: words.split() for name, words in rows}


# ---------------------------------------------------------------------- memory

FSDP = ("fsdp", "recomputation")


@pytest.mark.usefixtures("tokenizer")
@pytest.mark.parametrize(
    ("script", "flags", "parts"),
    [
        ("base_train", ("--depth=12",), ("ddp",)),
        pytest.param("base_train", ("--depth=12",), FSDP, marks=slow),
        pytest.param("base_train", ("--depth=12", "--experts=4"), FSDP, marks=slow),
        pytest.param("base_train", ("--depth=12",), (*FSDP, "offloaded optimizer"), marks=slow),
        ("chat_sft", (), FSDP),  # Muon
        ("chat_sft", ("--learning_rate=1e-5",), (*FSDP, "offloaded optimizer")),
        pytest.param("chat_sft", ("--learning_rate=1e-5",), ("ddp",), marks=slow),
        pytest.param("chat_sft", ("--learning_rate=1e-5",), (*FSDP, "context 2"), marks=slow),
        pytest.param("chat_sft", ("--lora_rank=8",), FSDP, marks=slow),
        pytest.param("chat_sft", ("--lora_rank=8", "--lora_base=nf4"), ("ddp", "recomputation"), marks=slow),
    ],
)
def test_a_plan_agrees_with_a_count_of_all_twelve_layers(base, tmp_path, script, flags, parts):  # noqa: F811
    folder = folder_of(tmp_path, 12)
    flags = (
        (*flags, *ROWS, "--total_batch_size=512") if script == "base_train" else (*flags, *SFT, f"--source={folder}")
    )
    main, config = run_of(script, "--plan=4x64", *flags)
    (candidate,) = [one for one in plan.candidates(config, 4) if one.name == " + ".join(parts)]
    planned = plan.Plan(main, config, 4).of(candidate)
    whole_config = dataclasses.replace(config, dry_run_devices=4, **candidate.flags)
    whole = plan.count_with(main, whole_config, has_whole_step=True)
    assert planned.phase == max(whole.peaks, key=lambda phase: whole.peaks[phase])
    assert planned.counted == pytest.approx(whole.base + max(whole.peaks.values()), rel=0.03)


def test_the_state_of_the_optimizer_is_not_continued_by_a_line(base, tmp_path):  # noqa: F811
    """12 matrices of a shape on 4 ranks: rank 0 owns one of 2, two of 6, and three of 12."""
    folder = folder_of(tmp_path, 12)
    main, config = run_of("chat_sft", "--plan=4x64", f"--source={folder}", *SFT, "--dry_run_devices=4")
    few, more, whole = (
        plan.count_with(main, config, blocks=blocks) for blocks in (plan.FEW, plan.FEW + plan.FURTHER, None)
    )
    line = few.base + (more.base - few.base) * (12 - plan.FEW) / plan.FURTHER
    assert whole.base > 1.001 * line or whole.base < 0.999 * line


QWEN3_8B = {
    **QWEN3, "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "num_hidden_layers": 36,
}  # fmt: skip
QWEN3_32B = QWEN3_8B | {
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
}
QWEN3_30B_A3B = QWEN3_8B | {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "num_key_value_heads": 4,
    "num_hidden_layers": 48,
}  # fmt: skip


@slow
@pytest.mark.parametrize(
    ("shape", "tokens", "flags", "gigabytes"),
    [
        (QWEN3_8B, 8192, "--learning_rate=1e-5", 25.6),
        (QWEN3_8B, 32768, "--learning_rate=1e-5", 35.6),
        (QWEN3_8B, 131072, "--learning_rate=1e-5", 83.3),
        (QWEN3_32B, 8192, "--lora_rank=16", 20.0),
        (QWEN3_32B, 32768, "--lora_rank=16", 48.6),
        (QWEN3_32B, 8192, "--learning_rate=1e-5", 79.9),
        (QWEN3_30B_A3B, 8192, "--lora_rank=16", 14.3),
        (QWEN3_30B_A3B, 8192, "--learning_rate=1e-5", 69.4),
        (QWEN3_30B_A3B, 32768, "--lora_rank=16", 25.2),
    ],
)
def test_a_server_of_eight_cards(base, folder, shape, tokens, flags, gigabytes):  # noqa: F811
    (folder / "config.json").write_text(json.dumps(shape))
    rows = (f"--max_seq_len={tokens}", "--device_batch_size=1", "--target_examples_per_step=16")
    main, config = run_of("chat_sft", "--plan=8x64", f"--source={folder}", flags, *rows)
    planned = plan.Plan(main, config, 8).of(plan.Candidate("", {"parallel": "fsdp", "activation_checkpointing": True}))
    assert planned.counted / plan.GB == pytest.approx(gigabytes, rel=0.02)
    # 4% for gaps, 3 GB for the runtime, 0.4 for one group of ranks: about 58 GB of 64 are left for a step.
    assert planned.needed / plan.GB == pytest.approx(1.04 * gigabytes + 3.4, rel=0.02)


# ---------------------------------------------------------------------- bytes

KINDS = {
    "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
}  # fmt: skip


class Seen(plan.PartLedger):
    """Also adds up the bytes of collectives, by kind: of what they take or what they return, whichever is larger."""

    bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func.overloadpacket.__name__ in KINDS:
            sizes = [leaf.nbytes for leaf in tree_leaves(args[:2]) if isinstance(leaf, Tensor)]
            self.bytes[KINDS[func.overloadpacket.__name__]] += max(sizes)
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.usefixtures("tokenizer")
@pytest.mark.parametrize(
    ("script", "cards", "flags"),
    [
        ("base_train", 4, ("--parallel=ddp",)),
        ("base_train", 3, ("--parallel=fsdp",)),  # rows that 3 ranks do not divide
        ("base_train", 4, ("--parallel=fsdp", "--experts=4", "--experts_per_token=2")),
        ("base_train", 4, ("--parallel=fsdp", "--experts=4", "--experts_per_token=2", "--expert_parallel")),
        (
            "base_train",
            4,
            ("--parallel=fsdp", "--replicate=2", "--experts=4", "--expert_parallel", "--activation_checkpointing"),
        ),
        ("chat_sft", 16, ("--parallel=fsdp", "--replicate=2")),
        ("chat_sft", 4, ("--parallel=fsdp", "--activation_checkpointing", "--dtype=float32")),
        ("chat_sft", 4, ("--parallel=fsdp", "--context_parallel=4")),  # more than key heads
        ("chat_sft", 4, ("--parallel=ddp", "--context_parallel=2", "--activation_checkpointing")),
        ("chat_sft", 4, ("--parallel=fsdp", "--lora_rank=4")),
    ],
)
def test_the_bytes_are_those_of_the_collectives(base, folder, monkeypatch, script, cards, flags):  # noqa: F811
    if script == "chat_sft":
        flags = (*flags, *ROWS, f"--target_examples_per_step={2 * cards}", f"--source={folder}")
    else:
        flags = (*flags, *ROWS, "--depth=3", f"--total_batch_size={128 * cards}")
    monkeypatch.setattr(plan, "PartLedger", Seen)
    monkeypatch.setattr(Seen, "bytes", Counter())
    main, config = run_of(script, f"--dry_run_devices={cards}", "--plan=1x1", *flags)
    if config.context_parallel > 1:  # fewer rows at a time
        config = dataclasses.replace(config, target_examples_per_step=2 * cards // config.context_parallel)
    count = plan.count_with(main, config, has_whole_step=True)
    moved = count.moved
    assert count.micro_batches == 2
    assert Seen.bytes["all_gather"] == moved["weights"] + 2 * count.losses > 0
    sums = moved["gradients"] + moved["between groups"] + moved["sums"]
    assert Seen.bytes["reduce_scatter"] + Seen.bytes["all_reduce"] == sums
    assert Seen.bytes["all_to_all"] == moved["muon"] + moved["context"] + moved["experts"]
    assert bool(moved["between groups"]) == (config.replicate > 1)
    assert bool(moved["context"]) == (config.context_parallel > 1)
    assert bool(moved["experts"]) == config.expert_parallel


# ---------------------------------------------------------------------- the table and the command


@pytest.mark.usefixtures("few_candidates")
def test_the_first_that_fits_is_a_command(base, folder, capsys):  # noqa: F811
    flags = (f"--source={folder}", *SFT, "--learning_rate=1e-5", "--parallel=fsdp")
    call("chat_sft", "--device=cpu", "--dry_run", "--plan=4x64", *flags)
    out = capsys.readouterr().out
    table = table_of(out)
    assert list(table) == ["fsdp", "fsdp + recomputation"]
    assert [words[-1] for words in table.values()] == ["fits", "fits"]
    # 3 GB for the runtime and 0.4 for the buffers of one group; the model itself is too small to be seen
    assert table["fsdp"][:2] == ["3.4", "0.0"]
    command = shlex.split(out.splitlines()[-1])
    assert command[:5] == ["python", "-m", "nanochat.run.launch", "--nproc_per_node=4", "-m"]
    _, again = run_of("chat_sft", *command[command.index("--") + 1 :])
    _, asked = run_of("chat_sft", *flags)
    assert again == dataclasses.replace(asked, device="auto") or again == asked


@pytest.mark.usefixtures("few_candidates")
def test_a_candidate_fits_when_its_needs_do(base, folder, capsys):  # noqa: F811
    flags = (f"--source={folder}", "--max_seq_len=256", "--device_batch_size=256", "--lora_rank=4", "--parallel=fsdp")
    call("chat_sft", "--device=cpu", "--dry_run", "--plan=8x64", *flags)
    needs = {name: float(words[0]) for name, words in table_of(capsys.readouterr().out).items()}
    plain, recomputed = needs["fsdp"], needs["fsdp + recomputation"]
    assert recomputed < plain - 0.1
    call("chat_sft", "--device=cpu", "--dry_run", f"--plan=8x{(plain + recomputed) / 2:.2f}", *flags)
    out = capsys.readouterr().out
    assert "fits" not in table_of(out)["fsdp"] and "fits" in table_of(out)["fsdp + recomputation"]
    assert "--activation_checkpointing" in out.splitlines()[-1]


@pytest.mark.usefixtures("few_candidates")
@pytest.mark.parametrize("cards", [64, pytest.param(1024, marks=slow)])
def test_many_hosts(base, folder, capsys, cards):  # noqa: F811
    call("chat_sft", "--device=cpu", "--dry_run", f"--plan={cards}x64", f"--source={folder}", *SFT, "--parallel=fsdp")
    out = capsys.readouterr().out
    assert f"on {cards // 8} hosts" in out
    table = table_of(out)
    assert list(table) == ["fsdp", "fsdp in each host", "fsdp + recomputation"]
    # Three groups of ranks instead of one: all, those of a host, and those with the same rows.
    assert float(table["fsdp in each host"][0]) == pytest.approx(float(table["fsdp"][0]) + 2 * 0.4, abs=0.11)
    assert f"torchrun --nnodes={cards // 8} --nproc_per_node=8" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("continue_train", ("--num_iterations=1", "--data=not_written_yet.txt")),
        ("chat_dpo", ("--tasks=not_written_yet.jsonl", "--lora_rank=4")),
        ("chat_rl", ("--kl=0.1", "--lora_rank=4", "--lora_base=nf4")),
        ("mid_train", ("--num_iterations=1",)),
    ],
)
def test_every_stage_has_a_plan(base, folder, capsys, monkeypatch, script, flags):  # noqa: F811
    monkeypatch.setattr(plan, "CANDIDATES", (("ddp", "recomputation", "offloaded optimizer"),))
    flags = (*flags, f"--source={folder}", "--max_seq_len=64", "--device_batch_size=2")
    call(script, "--device=cpu", "--dry_run", "--plan=8x64", *flags)
    out = capsys.readouterr().out
    assert list(table_of(out)) == ["ddp + recomputation + offloaded optimizer"]
    assert ("sampling comes on top" in out) == (script == "chat_rl")
    last = out.splitlines()[-1]
    assert f"-m scripts.{script} -- " in last and "--activation_checkpointing --offload_optimizer" in last
    assert not list(base.rglob("*.safetensors"))


@pytest.mark.usefixtures("few_candidates")
def test_one_card_has_nothing_to_share(base, folder, capsys):  # noqa: F811
    call("chat_sft", "--device=cpu", "--dry_run", "--plan=1x64", f"--source={folder}", *SFT)
    out = capsys.readouterr().out
    assert list(table_of(out)) == ["one card"] and table_of(out)["one card"][3] == "0.00"
    assert out.splitlines()[-1].startswith("  python -m scripts.chat_sft --source")


@pytest.mark.usefixtures("few_candidates")
def test_what_the_heads_do_not_allow_is_a_row_with_its_reason(base, folder, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr(plan, "CANDIDATES", (("ddp",), ("fsdp", "context 8")))
    call("chat_sft", "--device=cpu", "--dry_run", "--plan=8x64", f"--source={folder}", *SFT)
    assert "  fsdp + context 8  --context_parallel 8 does not divide the 4 heads" in capsys.readouterr().out


@pytest.mark.usefixtures("tokenizer")
@pytest.mark.parametrize("experts", [0, 4])
def test_experts_stay_where_they_are_only_if_there_are_some(base, capsys, monkeypatch, experts):  # noqa: F811
    parts = ("fsdp", "recomputation")
    monkeypatch.setattr(plan, "CANDIDATES", (parts, (*parts, "expert parallelism")))
    flags = (*ROWS, "--depth=2", "--total_batch_size=256", f"--experts={experts}")
    call("base_train", "--device=cpu", "--dry_run", "--plan=4x64", *flags)
    table = table_of(capsys.readouterr().out)
    names = ["fsdp + recomputation", "fsdp + recomputation + expert parallelism"]
    assert list(table) == names[: 2 if experts else 1]
    if experts:  # these have few tokens, which travel less than the weights of experts
        assert float(table[names[1]][3]) <= float(table[names[0]][3])


def test_flags_of_the_user_stay(base, folder, capsys):  # noqa: F811
    asked = ("--dry_run", f"--source={folder}", *SFT, "--context_parallel=2", "--parallel=fsdp", "--offload_optimizer")
    _, config = run_of("chat_sft", *asked, "--plan=8x64")
    names = [one.name for one in plan.candidates(config, 8)]
    assert names[0] == "fsdp + --context_parallel 2 + --offload_optimizer" and len(set(names)) == len(names)
    assert all(
        one.flags["context_parallel"] == 2 and one.flags["offload_optimizer"] for one in plan.candidates(config, 8)
    )
    _, config = run_of("chat_sft", f"--source={folder}", *SFT, "--parallel=fsdp", "--replicate=4", "--plan=64x64")
    assert {one.flags["replicate"] for one in plan.candidates(config, 64)} == {4}
    _, config = run_of("chat_sft", f"--source={folder}", *SFT, "--plan=2x64")
    assert {one.flags.get("context_parallel", 1) for one in plan.candidates(config, 2)} == {1, 2}
    # Only candidates that nobody can have: the reason of the first.
    wrong = ("--device=cpu", "--dry_run", f"--source={folder}", *SFT, "--context_parallel=3", "--plan=9x64")
    assert "--plan 9x64" in mistake(capsys, "chat_sft", *wrong)[1]
    assert "--context_parallel 3" in mistake(capsys, "chat_sft", *wrong[:-1], "--plan=8x64")[1]


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--plan=8", "--dry_run"), "--plan 8: the number of cards and the GB of each, such as 8x64"),
        (("--plan=0x64", "--dry_run"), "--plan 0x64: the number of cards"),
        (("--plan=8x", "--dry_run"), "--plan 8x: the number of cards"),
        (("--plan=8x0", "--dry_run"), "--plan 8x0: the number of cards"),
        (("--plan=8x64",), "add --dry_run"),
        (("--plan=12x64", "--dry_run"), "whole hosts of 8, such as 8x64"),
        (("--plan=8x64", "--dry_run", "--dry_run_devices=8"), "leave --dry_run_devices out"),
        (("--plan=4x64", "--dry_run", "--replicate=3"), "--replicate 3"),
        (("--plan=8x64", "--dry_run", "--source=nowhere"), "nowhere"),
        (("--plan=8x3.4", "--dry_run", "--parallel=fsdp"), "nothing fits; fsdp"),
        (("--plan=8x0.0001", "--dry_run", "--parallel=fsdp"), "2 layers of this model take"),
    ],
)
@pytest.mark.usefixtures("few_candidates")
def test_mistakes_are_one_line(base, folder, capsys, flags, says):  # noqa: F811
    code, line = mistake(capsys, "chat_sft", "--device=cpu", f"--source={folder}", *SFT, *flags)
    assert code == 1 and says in line
