"""A Qwen3 in Hugging Face's layout goes through SFT, DPO and RL with adapters, on the CPU and on simulated NPUs: the
same losses, exact resumes, and once exported the same replies in transformers and peft."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from runs import call, metrics
from safetensors.torch import load_file
from tiny import cpu_device
from tiny_families import save_family

from nanochat.checkpoint_manager import load_model
from nanochat.conversation import render_prompt
from nanochat.engine import Engine
from simnpu.test_pipeline import chain, run_here

transformers = pytest.importorskip("transformers", reason="the extra `dev` brings transformers")
peft = pytest.importorskip("peft", reason="the extra `dev` brings peft")
pytestmark = pytest.mark.slow

STAGES = {
    "sft": "--target_examples_per_step=16 --num_iterations=2",
    "dpo": "--target_examples_per_step=8 --num_iterations=2",
    "rl": "--examples_per_step=4 --num_samples=4 --num_iterations=2 --max_tokens=12",
}
# RL also learns from episodes of two turns, and by a reward function, both of the user's own.
MINE = """
from nanochat.conversation import text_of
from nanochat.task import Environment, Step

class Twice(Environment):
    def __init__(self, rng):
        self.number = rng.randint(10, 99)
        self.replies = 0

    def start(self):
        return [{"role": "user", "content": f"What is {self.number}?"}]

    def step(self, reply):
        self.replies += 1
        if self.replies == 1:
            return Step([{"role": "tool", "name": "again", "content": "Again."}])
        return Step(reward=float("1" in text_of(reply)))

async def brief(episodes):
    return [-episode.tokens for episode in episodes]
"""
# Runs between two commands, on rank 0: the stage's last step is kept elsewhere.
FORGET = """
import os, pathlib, shutil
base = pathlib.Path(os.environ["NANOCHAT_BASE_DIR"])
if os.environ.get("RANK", "0") == "0":
    (base / "straight" / "{stage}").mkdir(parents=True, exist_ok=True)
    shutil.move(base / "checkpoints/{stage}/{tag}/step_000002", base / "straight/{stage}/{tag}")
"""


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("questions")
    rows = [{"question": f"What is {n}?", "answer": f"#### {n % 2 + 1}"} for n in range(64)]
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "mine.py").write_text(MINE)
    return folder


@pytest.fixture(scope="module")
def qwen(questions, tmp_path_factory) -> Path:
    """It has learned a little, so that RL rewards some of its replies."""
    base = tmp_path_factory.mktemp("qwen")
    random = save_family(base / "random", "qwen3")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=640, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).float().save_pretrained(random)
    sizes = "--device_batch_size=4 --target_examples_per_step=16 --num_iterations=32 --eval_examples=8"
    learn = f"chat_sft --device=cpu --source={random} --tasks=gsm8k={questions} {sizes} --learning_rate=0.02"
    run_here(base, base, learn, f"export --source=sft --to=hf --out={base / 'qwen'}")
    return base / "qwen"


def commands(qwen: Path, questions: Path, tag: str, more: str) -> list[str]:
    """Every stage to its end, and again from its first step on."""
    flags = f"{more} --dtype=float32 --tasks=gsm8k={questions} --eval_examples=8 --lora_rank=4 --learning_rate=0.001"
    flags += f" --device_batch_size=2 --log_every=1 --save_every=1 --model_tag={tag}"
    made = []
    for (stage, sizes), source in zip(STAGES.items(), (qwen, "sft", "dpo"), strict=True):
        command = f"chat_{stage} {sizes} {flags} --source={source}"
        if stage == "rl":
            mine = f"{questions}/mine.py"
            command += f" --tasks=gsm8k={questions},{mine}:Twice --reward=task,{mine}:brief:0.02"
        made += [command, f"-c {shlex.quote(FORGET.format(stage=stage, tag=tag))}", f"{command} --resume"]
    return made


def adapters(base: Path, stage: str, tag: str) -> dict[str, torch.Tensor]:
    """Those of a stage's last step, which was resumed; they are the same straight through."""
    last = base / f"checkpoints/{stage}/{tag}/step_000002/adapter.safetensors"
    straight = base / f"straight/{stage}/{tag}/adapter.safetensors"
    assert straight.read_bytes() == last.read_bytes()
    return load_file(last)


@pytest.fixture(scope="module")
def on_cpu(qwen, questions, tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("cpu")
    run_here(base, base, *commands(qwen, questions, "q", "--device=cpu"))
    return base


def test_what_was_tuned_answers_in_transformers_and_peft(qwen, on_cpu, tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(on_cpu))
    for stage in STAGES:
        assert adapters(on_cpu, stage, "q")
    assert all(line["grad_norm"] > 0 for line in metrics(on_cpu, "rl", "q")), "some replies are better than others"
    call("export", "--source=rl", "--to=hf", f"--out={tmp_path / 'merged'}")
    call("export", "--source=sft", "--to=peft", f"--out={tmp_path / 'peft'}")
    library = transformers.AutoModelForCausalLM
    merged = library.from_pretrained(tmp_path / "merged")
    adapted = peft.PeftModel.from_pretrained(library.from_pretrained(qwen), str(tmp_path / "peft"))
    for stage, theirs in (("rl", merged), ("sft", adapted)):
        model, tokenizer, _ = load_model(stage, "cpu")
        engine = Engine(model, tokenizer, cpu_device())
        for number in range(4):
            prompt = render_prompt(tokenizer, [{"role": "user", "content": f"What is {number}?"}])
            ours = engine.generate_batch(prompt, max_tokens=24, temperature=0.0)[0][0]
            ids = torch.tensor([prompt])
            options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
            reply = theirs.generate(input_ids=ids, **options)[0].tolist()
            if reply[-1] in tokenizer.reply_ends:  # our engine leaves it out
                reply.pop()
            assert reply == ours and len(ours) > len(prompt)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_on_several_npus_it_learns_the_same(qwen, questions, on_cpu, tmp_path, ranks: int):
    runs = []
    for layout in ("ddp", "fsdp"):
        runs += commands(qwen, questions, layout, f"--device=npu --parallel={layout}")
    chain(tmp_path, tmp_path, *runs, ranks=ranks)
    for layout in ("ddp", "fsdp"):
        for stage in STAGES:
            # RL's loss is 0 where the samples are its own; its gradient is not.
            for found, expected in zip(metrics(tmp_path, stage, layout), metrics(on_cpu, stage, "q"), strict=True):
                assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)
                assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
            expected = adapters(on_cpu, stage, "q")
            for name, found in adapters(tmp_path, stage, layout).items():
                torch.testing.assert_close(found, expected[name], rtol=1e-3, atol=1e-4)  # a tenth of an update
