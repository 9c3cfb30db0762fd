"""docs/extending.md: its blocks are applied to a copy of the code, and the eight examples run there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(
    r"^```python\n# (\S+) \((new|before|after|instead of)(?:: ([^\n]*))?\)\n(.*?)^```$", re.M | re.DOTALL
)

# What the examples on the page are tried with, in one process: all commands share its imports.
TRIAL = """
import importlib, json, shutil, sys
from pathlib import Path
import torch
from nanochat import device as devices
from nanochat.tasks.flag import task_class
from nanochat.ground import cli
from nanochat.operators import TorchKernels
from nanochat.sampling import RowSettings, SamplingParams, sample
from nanochat.tokenizer import Tokenizer
from nanochat.checkpoint_manager import load_model
from nanochat.ground.paths import base_dir, tokenizer_dir
sys.path[:0] = [TESTS, TESTS + "/core"]
from test_gpt import greedy, greedy_cached

def call(script, *flags):
    print("TRIAL", script)
    module = importlib.import_module(f"scripts.{script}")
    flags = ["--num_iterations=2", *flags, "--device=cpu", "--dtype=float32", "--log_every=1"]
    module.main(cli.parse(module.Config, flags))

torch.set_num_threads(1)
task = task_class("reverse")("test")
assert task.grade(task.example(0), [{"type": "text", "text": task.example(0).answer}])
Tokenizer.train([f"Write word {n} backwards." for n in range(300)], 300).save(tokenizer_dir())
SIZES = ("--depth=1", "--head_dim=32", "--max_seq_len=64", "--device_batch_size=2", "--total_batch_size=256",
         "--eval_tokens=128", "--compile=off")

def trained(tag, *flags):
    # Bits per byte and the model after four steps.
    call("base_train", *SIZES, "--num_iterations=4", "--save_every=2", f"--model_tag={tag}", *flags)
    lines = (base_dir() / "runs/base" / tag / "metrics.jsonl").read_text().splitlines()
    return json.loads(lines[-1])["val_bpb"], load_model(f"base/{tag}", devices.init("cpu", "float32"))[0]

bits, straight = trained("lion", "--optimizer=lion")
shutil.rmtree(base_dir() / "checkpoints/base/lion/step_000004")
bits_resumed, resumed = trained("lion", "--optimizer=lion", "--resume")
assert bits == bits_resumed and all(map(torch.equal, straight.parameters(), resumed.parameters()))
gated, model = trained("gated", "--head_gate")
others = {bits, trained("plain")[0], trained("steps", "--lr_schedule=steps")[0]}
assert len({*others, gated}) == 4, "a change without an effect"

# The gate is AdamW's and has learned; open, it does the same in decoding as in training.
(gate,) = [gate for name, gate in model.parameter_groups()["vector"] if "output_gate" in name]
assert gate.abs().max() > 0
with torch.no_grad():
    gate.normal_()
ids = torch.randint(300, (2, 9))
assert torch.allclose(greedy(model, ids, 20)[1], greedy_cached(model, ids, 20, [9])[1], atol=1e-4)

call("base_train", *SIZES, "--head_gate", "--mlp=swiglu")
Path("long.py").write_text("def reward(episodes): return [len(one.reply) % 7 for one in episodes]")
for loss in ("sapo", "grpo"):
    call("chat_rl", "--source=base", "--source_tag=d1", "--tasks=reverse", "--examples_per_step=2", "--num_samples=2",
         "--max_tokens=8", "--eval_examples=2", "--updates_per_step=2", "--reward=long.py:reward",
         f"--loss={loss}", f"--model_tag={loss}")
sapo, grpo = (load_model("rl", "cpu", model_tag=loss)[0].state_dict() for loss in ("sapo", "grpo"))
assert any(not torch.equal(sapo[name], grpo[name]) for name in sapo), "a loss without an effect"

call("chat_anchor", "--source=base", "--tasks=reverse", "--target_examples_per_step=4", "--eval_examples=4")
call("chat_anchor", "--source=base", "--tasks=reverse", "--target_examples_per_step=4", "--eval_examples=4", "--resume")

model, _, meta = load_model("anchor", "cpu")
assert model.config.head_gate and model.config.mlp == "swiglu" and meta["stage"] == "anchor"

import transformers
from test_losses import test_gradients_are_finite_differences
test_gradients_are_finite_differences("sapo")
from tiny_families import save_family
folder = save_family(Path("hunyuan"), "llama3")
sizes = dict(hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
theirs = transformers.HunYuanDenseV1ForCausalLM(transformers.HunYuanDenseV1Config(
    vocab_size=600, max_position_embeddings=64, pad_token_id=None, bos_token_id=None, eos_token_id=None, head_dim=16,
    rope_parameters={"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0, "rope_theta": 10_000.0},
    attn_implementation="eager", **sizes))
with torch.no_grad():
    for name, weight in theirs.named_parameters():
        weight.uniform_(0.5, 1.5) if "norm" in name else weight.normal_(0, 0.15)
theirs.save_pretrained(folder)
ours, _, _ = load_model(str(folder), devices.init("cpu", "float32"))
assert ours.config.qk_norm == "after_rotary" and ours.config.rope_theta > 500_000
ids = torch.randint(300, (2, 40))
with torch.no_grad():
    assert torch.allclose(ours.logits(ours.hidden(ids))[..., :600], theirs(ids).logits, atol=1e-5)

logits = torch.tensor([[3.0, 2.9, 0.0, -1.0, -2.0]])
def drawn(n):
    params = [SamplingParams(top_n_sigma=n)]
    table = torch.tensor([RowSettings.numbers(p) for p in params])
    noise = torch.linspace(0, 0.999, 200)
    seen = torch.zeros_like(logits, dtype=torch.bool)
    return {int(sample(logits, RowSettings(params, table), x.view(1, 1), seen, TorchKernels())) for x in noise}
assert drawn(0.5) == {0, 1} and drawn(0.0) == {0, 1, 2, 3, 4}
"""


def apply(page: str, folder: Path) -> int:
    """Apply the page's blocks to a copy of the code; returns how many there were."""
    blocks = BLOCK.findall(page)
    for name, where, anchor, text in blocks:
        path = folder / name
        if where == "new":
            assert not path.exists(), name
            path.write_text(text)
            continue
        lines = path.read_text().splitlines(keepends=True)
        (place,) = [number for number, line in enumerate(lines) if line.startswith(anchor)]  # exactly one
        start = place + 1 if where == "after" else place
        stop = place if where == "before" else place + 1
        lines[start:stop] = [text]
        path.write_text("".join(lines))
    return len(blocks)


@pytest.mark.slow
def test_every_example_of_the_page_runs(tmp_path):
    for folder in ("nanochat", "scripts"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    assert apply(page, tmp_path) == page.count("```python")
    environment = {**os.environ, "NANOCHAT_BASE_DIR": str(tmp_path / "base"), "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", f"TESTS = {str(ROOT / 'tests')!r}\n{TRIAL}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
