"""P5. A user's mistake costs one line.

Each row is a command that cannot work, and what its one line has to name: the flag, the file, or what to run next. The
exit code is 1 or 2, nothing is written, and no traceback is shown.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from runs import ROOT, TINY, call, mistake, refused, write_lines
from tiny import lively_model, save_checkpoint, tiny_config, tiny_tokenizer

from nanochat import device as devices
from nanochat import train

LONG = "many_words_" * 60

PRETRAINING = [
    ("--data=nosuch", "--data nosuch: no such file"),
    ("--data=pydok", "did you mean pydoc"),
    ("--total_batch_size=300", "use 256, or another --device_batch_size"),
    ("--gradient_accumulation_steps=3", "is not 3 x 128 tokens .* use 384"),
    ("--learning_rate=1e-5", "--learning_rate=1e-5"),
    ("--shards=2", "--shards 2: --data demo"),
    ("--model_tag=", "--model_tag ''"),
    ("--depth=0", "--depth 0: at least 1"),
    ("--head_dim=31", "--head_dim 31 is odd"),
    ("--window_pattern=SXL", "--window_pattern .SXL."),
    ("--target_param_data_ratio=nan", "--target_param_data_ratio"),
    ("--seed=99999999999999999999", "--seed"),
    ("--track=nonsense", "--track 'nonsense' is unknown"),
    ("--data=", "--data is empty"),
    ("--data=demo:0.7,pydok:0.3", "--data pydok: .* pydoc"),
    ("--data=demo:much,pydoc", "--data demo:much: .*the weight 'much'"),
    ("--data=demo:1,demo:2", "names demo twice"),
    ("--data=demo,,pydoc:-1", "the weight '-1'"),
    ("--device=gpu", "--device 'gpu': one of auto, npu, cuda, cpu"),
    ("--model_tag=../x", "--model_tag '../x'"),
    ("--val_data=nosuch.txt", "--val_data nosuch.txt"),
    ("--expert_width=3", "add --experts"),
    ("--dpeth=4", "--dpeth.*--help`"),
]
LATER = [
    ("mid_train --source=nowhere", "neither a stage"),
    ("mid_train --source_tag=nowhere", "that is whole"),
    ("mid_train --tasks=nothing", "no such task"),
    ("mid_train --total_batch_size=100 --device_batch_size=2", "--total_batch_size"),
    ("mid_train --lr_scale=-1", "--lr_scale"),
    ("mid_train --num_epochs=2", "--num_epochs is for text: add --data"),
    ("mid_train --data=demo --num_epochs=1 --source_tag=d1", "never ends.*--num_iterations"),
    ("mid_train --data=demo:0.5,pydoc:0.5 --num_epochs=1 --source_tag=d1", "drawn by weight.*--num_iterations"),
    ("mid_train --num_epochs=1 --num_iterations=3", "leave one of them out"),
    ("mid_train --data=demo --source_tag=d1 --model_tag=d1", "--model_tag d1 is the source's"),
    ("mid_train --data=demo", "--source_tag"),
    ("mid_train --data=demo --source_tag=d1 --tasks=addition", "--data and --tasks"),
    ("mid_train --data=demo --source_tag=d1 --lora_rank=4 --lr_scale=0.1", "of --lora_rank is absolute"),
    ("mid_train --data=demo --source_tag=d1 --lora_alpha=4", "--lora_alpha needs --lora_rank"),
    ("chat_sft", "no mid checkpoint"),
    ("chat_sft --source=base --tasks=gsm8k=/nowhere", "/nowhere"),
    ("chat_sft --source=base --context_parallel=2", "--context_parallel 2"),
    ("chat_sft --source=base --learning_rate=1e-4 --lr_scale=0.5", "--learning_rate is absolute: leave --lr_scale out"),
    ("chat_sft --source=base --num_epochs=1 --tasks=addition:2,identity", "leave the weights out"),
    ("chat_sft --source=base --gradient_accumulation_steps=2 --target_examples_per_step=8", "leave one of them out"),
    ("chat_sft --source=base --lora_base=nf4", "--lora_base needs --lora_rank"),
    ("chat_sft --source=base --rope_scaling=yarn", "--rope_scaling yarn .* --max_seq_len"),
    ("chat_sft --source=base --tasks=addition --max_seq_len=3", "leave nothing to learn"),
    (f"chat_sft --source=base --num_iterations={10**400}", "at most 1,000,000,000,000"),
    ("chat_dpo", "no sft checkpoint"),
    ("chat_dpo --source=base --tasks=smoltalk", "two to compare"),
    ("chat_dpo --source=base --tasks=humaneval", "no train split"),
    ("chat_dpo --source=base --device_batch_size=1", "--device_batch_size 1: at least 2"),
    ("chat_dpo --source=base --beta=0", "--beta"),
    ("chat_dpo --source=base --label_smoothing=0.6", "--label_smoothing 0.6: at most 0.5"),
    ("chat_dpo --source=base --loss=orpo --label_smoothing=0.1", "--label_smoothing 0.1"),
    ("chat_dpo --source=base --loss=reward --sft_weight=1", "--sft_weight 1.0.*dpo, simpo, "),
    ("chat_dpo --source=base --weight_decay=0.1", "--weight_decay 0.1 needs --learning_rate"),
    ("chat_rl", "no sft checkpoint"),
    # The flags of RL are compared before a model is looked for, which is not there.
    ("chat_rl --num_samples=1", "--num_samples"),
    ("chat_rl --temperature=0", "--temperature"),
    ("chat_rl --gradient_accumulation_steps=2 --examples_per_step=8", "--examples_per_step.*leave one of them out"),
    ("chat_rl --source=base --device_batch_size=2 --gradient_accumulation_steps=3", "6 replies.*--examples_per_step"),
    ("chat_rl --loss=nosuch", "grpo, "),
    ("chat_rl --loss=distill", "--teacher"),
    ("chat_rl --loss=distill --teacher=base --kl=0.1", "leave --kl out"),
    ("chat_rl --kl_in=reward", "--kl_in reward"),
    ("chat_rl --loss=dapo --staleness=1", "--refills 0"),
    ("chat_rl --loss=dapo --num_epochs=1", "--refills 0"),
    ("chat_rl --num_epochs=1 --num_iterations=3", "leave one of them out"),
    ("chat_rl --minibatches=4 --examples_per_step=3", "--minibatches 4"),
    ("chat_rl --reward=mine.py:short", "no file mine.py"),
    ("chat_rl --reward=length", "--reward length: it is none of task"),
    ("chat_rl --tasks=smoltalk", "no right answer to grade"),
    ("chat_rl --sampler=llama", "--sampler llama: engine, "),
    ("chat_rl --sampler=http://127.0.0.1:9,127.0.0.1:8", "--sampler http://127.0.0.1:9,127.0.0.1:8"),
    ("chat_rl --sampler=ray:0", "--sampler ray:0"),
    (f"chat_cli -p {LONG}", r"the prompt has \d+ tokens, .* 128"),
    ("chat_cli -p x --temperature=nan", "--temperature"),
    ("chat_cli -p x --top_p=1.5", "--top_p"),
    ("chat_cli -p x --source=base/d1/step_7", r"no step 7 .*\[20\]"),
    ("chat_cli -p x --model_tag=../base/d1", "not a plain folder name"),
    (f"base_eval --eval_tokens=128 --samples=1 --prompt={LONG}", "shorten the prompt"),
    ("base_eval --eval_tokens=0", "--eval_tokens 0: at least 1"),
    ("tok_train --max_chars=20000 --vocab_size=280", "delete this one"),
    ("tok_train --vocab_size=99999999999999", "--vocab_size 99999999999999: at most 10,000,000"),
    ("bench train --head_dim=31", "--head_dim 31 .*32"),
    ("fetch --hub=modelscope --tasks=smoltalk", "no copy of smoltalk"),
]


@pytest.fixture
def trained(pretrained: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a base model, in which nothing may be written."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(pretrained))
    before = sorted(pretrained.glob("*/*/*/*"))
    yield pretrained
    assert sorted(pretrained.glob("*/*/*/*")) == before


def complain(capsys: pytest.CaptureFixture, script: str, *flags: str) -> str:
    code, line = mistake(capsys, script, *flags)
    assert code in (1, 2) and line.count("\n") == 1
    return line


@pytest.mark.parametrize(("flag", "says"), PRETRAINING, ids=lambda text: text[:40])
def test_mistakes_of_pretraining(trained, capsys, flag, says):
    assert re.search(says, complain(capsys, "base_train", *TINY, "--num_iterations=1", flag))


@pytest.mark.parametrize(("command", "says"), LATER, ids=lambda text: text[:60])
def test_mistakes_of_other_commands(trained, capsys, command, says):
    script, *flags = command.split()
    device = [] if script in ("tok_train", "fetch") else ["--device=cpu"]
    assert re.search(says, complain(capsys, script, *flags, *device))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("base_train", ("no tokenizer", "`python -m scripts.tok_train`")),
        ("tok_eval", ("no tokenizer", "`python -m scripts.tok_train`")),
        # Nothing is trained: the one command that trains all stages.
        ("chat_cli Hello", ("no base checkpoint", "`bash speedrun.sh`", "`python -m scripts.base_train`")),
        ("chat_cli Hello --source=sft", ("no sft checkpoint", "`bash speedrun.sh`", "chat_sft")),
        ("base_eval --model_tag=d4", ("`python -m scripts.base_train`",)),
        ("base_eval --source=base/d4/step_3", ("`python -m scripts.base_train`",)),
        ("chat_cli --source=nowhere", ("neither a stage",)),
    ],
)
def test_what_is_missing_is_named_with_its_command(base, capsys, command, words):
    refused(capsys, command.split(), *words)


@pytest.mark.parametrize("kind", ["npu", "cuda"])
def test_a_device_that_is_not_here(trained, capsys, kind):
    if devices._available(kind):
        pytest.skip(f"this machine has {kind}")
    words = (f"--device {kind}", "check_npu.py", "--device cpu")
    refused(capsys, ("base_train", *TINY, f"--device={kind}"), *words)


def test_too_little_memory(base, tokenizer, capsys, monkeypatch):
    def no_room(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(train, "train_step", no_room)
    refused(capsys, ("base_train", *TINY, "--num_iterations=1"), "out of memory", "--device_batch_size")


def test_files_that_cannot_be_used(base, tokenizer, tmp_path, capsys):
    path = write_lines(tmp_path / "no_text.jsonl", [{"content": "x"}] * 50)
    for script in ("tok_train", "base_train"):
        refused(capsys, (script, f"--data={path}"), 'line 1 has no "text"')
    path = base / "tokenizer/tokenizer.json"
    path.write_text(path.read_text()[:-9])
    refused(capsys, ("base_train", *TINY), "cannot be used", "`python -m scripts.tok_train`")


def test_tokens_of_another_tokenizer(trained, capsys, tmp_path, base, tokenizer):
    model = lively_model(tiny_config(vocab_size=tiny_tokenizer().vocab_size))
    teacher = save_checkpoint(tmp_path / "other", 1, model, tiny_tokenizer(), {"stage": "base"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(trained))
        distill = ("--source=base", "--loss=distill", "--device=cpu", f"--teacher={teacher}")
        refused(capsys, ("chat_rl", *distill), "tokenizer", "chat_batch")
    call("base_train", *TINY, "--num_iterations=1")
    shutil.rmtree(base / "tokenizer")
    call("tok_train", "--max_chars=20000", "--vocab_size=320")
    refused(capsys, ("base_train", *TINY, "--num_iterations=4", "--resume"), "--resume", "tokenizer")


def test_outside_of_the_environment_one_line_says_how_to_enter_it(tmp_path):
    for made in (False, True):
        project = tmp_path / f"my project {made}"
        shutil.copytree(ROOT / "scripts", project / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        if made:
            (project / ".venv/bin").mkdir(parents=True)
            (project / ".venv/bin/activate").touch()
        command = [sys.executable, "-S", "-m", "scripts.chat_web", "--help"]  # -S: without installed packages
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        result = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=60)
        assert result.returncode == 1 and result.stderr.count("\n") == 1 and not result.stdout
        assert f"`source '{project}/.venv/bin/activate'`" in result.stderr
        assert ("`bash setup_ascend.sh`" in result.stderr) == (not made)
