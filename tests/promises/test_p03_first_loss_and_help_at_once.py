"""P3. The first loss of the demo comes within 15 seconds, and `--help` answers at once and touches no device.

The times are measured by hand and by the benchmark (docs/measurements.md). Here is what they come from: `--help`
imports no torch and makes no file; a first run on a CPU imports no package that it does not need, and prints the loss
of its first step before the second one begins.
"""

import dataclasses
import importlib
import json
import os
import re

from runs import ROOT, STAGE_SCRIPTS, call, process
from test_house import imported

from nanochat import train
from nanochat.tokenizer import Tokenizer

SCRIPTS = sorted(path.stem for path in (ROOT / "scripts").glob("*.py") if path.stem != "__init__")

# What other people's documents already use (the public contract).
CONTRACT_FLAGS = {
    "tok_train": "data val_data",
    "tok_eval": "data val_data",
    "base_train": "depth device_batch_size total_batch_size gradient_accumulation_steps dataloader_num_workers "
    "num_iterations max_seq_len target_param_data_ratio window_pattern run model_tag resume data val_data hub",
    "base_eval": "data val_data",
    "chat_cli": "source",
    "mid_train": "device_batch_size total_batch_size gradient_accumulation_steps dataloader_num_workers",
    "chat_sft": "device_batch_size target_examples_per_step",
    "chat_dpo": "device_batch_size target_examples_per_step beta",
    "chat_rl": "device_batch_size examples_per_step",
    "chat_web": "host port source",
}

HELP = """
import contextlib, importlib, io, json, sys
from nanochat.ground import cli
pages = {}
for script in sys.argv[1:]:
    out = io.StringIO()
    module = importlib.import_module(f"scripts.{script}")
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.parse(module.Config, ["--help"])
    pages[script] = out.getvalue()
print(json.dumps(pages))
"""


def test_help_answers_without_torch_and_touches_nothing(tmp_path):
    stub = tmp_path / "stub"
    stub.mkdir()
    for name in ("torch", "torch_npu"):
        (stub / f"{name}.py").write_text("raise RuntimeError('--help imports torch')")
    (stub / "all_help.py").write_text(HELP)
    places = {"PYTHONPATH": f"{stub}{os.pathsep}{ROOT}", "NANOCHAT_BASE_DIR": str(tmp_path / "base")}
    result = process("all_help", *SCRIPTS, COLUMNS="100", **places)
    assert (result.returncode, result.stderr) == (0, "")
    for script, page in json.loads(result.stdout).items():
        assert f"python -m scripts.{script}" in page
        for flag in CONTRACT_FLAGS.get(script, "").split():
            assert re.search(rf"--{flag}\b", page)
        assert not re.search(r"^\W*--\w+( \S+)? +\(default", page, re.MULTILINE), "a flag without a description"
        if script in STAGE_SCRIPTS:
            flags = re.findall(r"(?m)^\W --(\w+)", page.partition("--help ")[2])
            config = importlib.import_module(f"scripts.{script}").Config
            assert sorted(flags) == sorted(field.name for field in dataclasses.fields(config))
    assert not (tmp_path / "base").exists()
    result = process("scripts.base_train", PYTHONPATH=str(stub))
    assert "--help imports torch" in result.stderr  # the stub stops what does import it


def test_the_first_run_imports_little():
    """What takes a second to import and is for other things. A default run on the CPU, from its start to its end."""
    packages = {module.partition(".")[0] for module in imported()}
    slow = {"transformers", "datasets", "peft", "trl", "uvicorn", "starlette", "pandas", "matplotlib", "sklearn", "ray"}
    assert {"torch", "numpy"} <= packages and not packages & {*slow, "torch_npu", "tokenizers", "pyarrow"}


def test_the_first_loss_is_printed_before_the_second_step(base_folder, monkeypatch, capsys):
    printed = []
    step = train.train_step

    def watched(*arguments, **options):
        printed.append(capsys.readouterr().out)
        return step(*arguments, **options)

    monkeypatch.setattr("nanochat.train.train_step", watched)
    Tokenizer([bytes([value]) for value in range(256)]).save(base_folder / "tokenizer")
    sizes = "--depth=1 --head_dim=32 --max_seq_len=32 --device_batch_size=1 --total_batch_size=32 --eval_tokens=32"
    call("base_train", *sizes.split(), "--device=cpu", "--num_iterations=2", "--compile=off")
    assert len(printed) == 2 and "base 0/2 | loss " not in printed[0] and "base 0/2 | loss " in printed[1]
