"""Every stage on simulated NPUs: the scripts as people run them, one device, several, and what goes wrong there."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from connections import is_ready
from fake_server import until
from runs import call, copied_speedrun, losses, metrics

from simnpu import build
from simnpu.forks import simulated

ROOT = Path(__file__).resolve().parents[2]
RUN = str(ROOT / "tests/simnpu/run")
CHAIN = str(ROOT / "tests/simnpu/chain.py")
SHORT = "--tasks=addition,identity,spelling"
STEP = "--device_batch_size=2 --log_every=1"
BASE = (
    f"{STEP} --data=texts.txt --depth=2 --head_dim=32 --max_seq_len=64 --total_batch_size=512 --num_iterations=3 "
    "--eval_tokens=512 --compile=off"
)
MID = f"{STEP} {SHORT} --total_batch_size=512 --num_iterations=2 --eval_tokens=512"
SFT = f"{STEP} {SHORT} --target_examples_per_step=8 --num_iterations=2 --eval_examples=8"
DPO = f"{STEP} {SHORT} --target_examples_per_step=8 --num_iterations=2 --eval_examples=8 --lr_scale=0.2"
RL = (
    "--device_batch_size=2 --tasks=addition --examples_per_step=4 --num_samples=4 --num_iterations=2 --max_tokens=12 "
    "--eval_examples=8 --lr_scale=0.2 --log_every=1 --reward=mine.py:short"
)
# Replies of a model that knows nothing differ, and so does this reward of them.
MINE = "def short(episodes):\n    return [len(one.reply) % 7 / 7 for one in episodes]\n"
STAGES = ("base", "mid", "sft", "rm", "dpo", "rl")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("built")]


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    lines = [f"What is {n} + {m}? The word is spelled {n * m}. I am nanochat." for n in range(60) for m in range(9)]
    (folder / "texts.txt").write_text("\n\n".join(lines))
    (folder / "mine.py").write_text(MINE)
    return folder


def chain(base: Path, folder: Path, *commands: str, ranks: int = 1) -> str:
    """What scripts print, one behind the other in the same simulated processes."""
    done = simulated([CHAIN, *commands], ranks=ranks, cwd=folder, env={"NANOCHAT_BASE_DIR": str(base)})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


def commands(device: str, dtype: str) -> list[str]:
    on = f"--device={device} --dtype={dtype}"
    return [
        f"base_train {on} {BASE}", f"mid_train {on} {MID}", f"chat_sft {on} {SFT}",
        f"chat_dpo {on} {DPO} --loss=reward", f"chat_dpo {on} {DPO}", f"chat_rl {on} {RL}",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def on_cpu(texts, tmp_path_factory) -> Path:
    """tok, base, mid, SFT, reward model, DPO and RL in fp32 on the CPU."""
    base = tmp_path_factory.mktemp("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(base))
        patch.chdir(texts)
        for command in ("tok_train --data=texts.txt --vocab_size=400", *commands("cpu", "float32")):
            call(*shlex.split(command))
    return base


@pytest.fixture(scope="module")
def on_npu(texts, tmp_path_factory) -> tuple[Path, str]:
    """All stages in fp32 on one simulated NPU, and what they printed."""
    base = tmp_path_factory.mktemp("npu")
    on = "--device=npu --dtype=float32"
    out = chain(
        base, texts, "tok_train --data=texts.txt --vocab_size=400", *commands("npu", "float32"),
        f"base_eval {on} --data=texts.txt --eval_tokens=512 --samples=1 --stories=2",
        f"chat_eval {on} --source=rl --tasks=addition,identity --max_examples=6 --max_tokens=8",
        f"chat_cli {on} --source=rl -p hello --max_tokens=8 --graphs=on",
        f"base_train {on} {BASE} --model_tag=profiled --profile=2",
    )  # fmt: skip
    return base, out


def test_stages_in_fp32_have_the_cpus_losses(on_cpu, on_npu):
    for stage in STAGES:
        assert losses(on_npu[0], stage, "d2") == pytest.approx(losses(on_cpu, stage, "d2"), rel=1e-5, abs=1e-6)
    # RL's loss is 0 where the samples are its own; its gradient is not.
    norms = [[line["grad_norm"] for line in metrics(base, "rl", "d2")] for base in (on_npu[0], on_cpu)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3) and min(norms[0]) > 0


def test_every_stage_runs_and_says_which_device_and_kernels(on_npu):
    base, out = on_npu
    assert out.count("== ") == 11 and "Ascend910B3 (npu, float32)" in out and "npu_fusion_attention" in out
    assert "ChatCORE" in out and len(losses(base, "rl", "d2")) == 2
    line = json.loads((base / "runs/base/d2/metrics.jsonl").read_text().splitlines()[-1])
    assert 1e6 < line["peak_memory_bytes"] < 1e9


def test_a_profiled_run_is_the_same(on_npu):
    """The real torch_npu.profiler, which has no device to record here."""
    base, out = on_npu
    assert (base / "runs/base/profiled/profile/summary.txt").read_text() in out
    assert losses(base, "base", "profiled") == losses(base, "base", "d2")


def test_a_chat_over_the_pages_api(on_npu, texts):
    """What the page sends and gets, from a server on a simulated NPU."""
    command = [sys.executable, RUN, sys.executable, "-m", "scripts.chat_web", "--device=npu", "--source=rl", "--port=0"]
    keep = {**os.environ, "NANOCHAT_BASE_DIR": str(on_npu[0]), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(command, cwd=texts, env=keep, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        port = int(re.search(r"http://[\w.]+:(\d+)", next(line for line in server.stdout if "http://" in line))[1])
        until(lambda: is_ready(port))
        body = {
            "model": "", "messages": [{"role": "user", "content": "hello"}], "stream": True, "temperature": 0,
            "truncation": "auto", "stream_options": {"include_usage": True}, "max_tokens": 8,
        }  # fmt: skip
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=60) as client:
            body["model"] = client.get("models").json()["data"][0]["id"]
            lines = client.post("chat/completions", json=body).text.split("\n\n")[:-1]
        assert lines.pop() == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        usage = next(event["usage"] for event in events if event.get("usage"))
        assert 1 <= usage["completion_tokens"] <= 8
        assert any(choice["finish_reason"] for event in events for choice in event["choices"])
    finally:
        server.terminate()
        assert server.wait(30) in (0, -signal.SIGTERM)


def test_the_speedrun_of_two_npus_is_rehearsed(texts, tmp_path, monkeypatch):
    """By the launcher on both, up to a failure in base_eval, which came after hours before there was a rehearsal."""
    monkeypatch.setenv("NANOCHAT_BASE_TRAIN", BASE.replace("--num_iterations=4", "").replace("--data=texts.txt", ""))
    monkeypatch.setenv("NANOCHAT_BASE_EVAL", "--graphs=planted")
    base = tmp_path / "base"
    command, settings = copied_speedrun(tmp_path / "copy")
    settings["env"] |= {**build.environment(devices=2), "NANOCHAT_BASE_DIR": str(base)}
    done = subprocess.run([*command, "--data", "texts.txt"], cwd=texts, capture_output=True, timeout=240, **settings)
    assert done.returncode == 1 and "profile npu, " in done.stdout, done.stderr
    lines = [line.split() for line in done.stdout.partition("== rehearsal")[2].splitlines()[1:]]
    assert [line[0] for line in lines] == ["tok_train", "base_train", "base_eval"]
    assert "error: base_eval failed in the rehearsal, before anything was trained: " in done.stderr
    (folder,) = (base / "speedrun").iterdir()
    assert {path.name for path in folder.iterdir()} == {"data", "rehearsal.log"}
    assert "--nproc_per_node=2" in (folder / "rehearsal.log").read_text()


# ---------------------------------------------------------------------- eight cards

# Tiny sizes for commands that are run as people's documents have them; in bfloat16 a CPU multiplies slowly.
EIGHT = {
    "NANOCHAT_BASE_TRAIN": f"{BASE} --depth=1 --device_batch_size=1 --save_every=0 --num_iterations=2",
    "NANOCHAT_MID_TRAIN": f"{MID} --device_batch_size=1 --num_iterations=2",
    "NANOCHAT_CHAT_SFT": f"{SFT} --device_batch_size=1 --num_iterations=2",
    "NANOCHAT_CHAT_RL": f"{RL} --examples_per_step=8 --num_iterations=1",
}


def documented() -> list[str]:
    """The eight-card commands that users' documents already have, and of our own pages those of other scripts or
    flags."""
    pages = "".join((ROOT / name).read_text() for name in ("README.md", "docs/ascend.md"))
    ours = re.findall(r"^python -m nanochat\.run\.launch --nproc_per_node=8 .*$", pages, re.MULTILINE)
    theirs = "torchrun --standalone --nproc_per_node=8 -m scripts"
    return [
        f"{theirs}.base_train -- --depth=12 --device_batch_size=16 --total_batch_size=262144",
        *(command for command in ours if "mid_train" in command),  # before what goes on from it
        f"{theirs}.chat_sft -- --device_batch_size=8 --target_examples_per_step=32",
        f"{theirs}.chat_rl -- --device_batch_size=4 --examples_per_step=16",
        *(command for command in ours if "--device_batch_size=8 --examples_per_step=16" in command),
    ]


def test_the_eight_card_commands_run(on_cpu, texts, tmp_path, monkeypatch):
    """All of them as documented, in one start of eight processes."""
    base = tmp_path / "base"
    shutil.copytree(on_cpu / "tokenizer", base / "tokenizer")
    for name, flags in EIGHT.items():
        monkeypatch.setenv(name, flags)
    launchers = ("torchrun --standalone", "python -m nanochat.run.launch")
    commands = []
    for command in documented():
        launcher, found, rest = command.partition(" --nproc_per_node=8 -m scripts.")
        assert found and launcher in launchers
        commands.append(rest)
    assert len(commands) == 5
    out = chain(base, texts, *commands, ranks=8)
    assert out.count("8 x Ascend910B3 (npu, bfloat16)") == out.count("done: ") == 5


# ---------------------------------------------------------------------- what goes wrong


def one_error(done: subprocess.CompletedProcess, *words: str) -> None:
    """The command, or its ranks, failed with one line between them; torchrun adds its summary."""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and len(errors) == 1, done.stderr[-4000:]
    assert all(word in errors[0] for word in words), errors
    ours = done.stderr.partition("torch/distributed/elastic")[0].partition("error: ")[0]
    assert "Traceback" not in ours, done.stderr[-4000:]


def test_out_of_memory_is_one_line(on_npu, texts):
    big = BASE.replace("--device_batch_size=2", "--device_batch_size=128").replace("=512", "=8192")
    command = f"-m scripts.base_train --device=npu {big} --model_tag=big".split()
    done = simulated(command, memory="48MiB", cwd=texts, env={"NANOCHAT_BASE_DIR": str(on_npu[0])})
    one_error(done, "--device_batch_size", "NPU out of memory")


def test_a_missing_set_env_is_one_line(texts, tmp_path):
    variables = {**build.environment(), "NANOCHAT_BASE_DIR": str(tmp_path), "LD_LIBRARY_PATH": ""}
    command = [sys.executable, "-m", "scripts.base_train", "--data=texts.txt", "--depth=1"]
    done = subprocess.run(command, cwd=texts, capture_output=True, text=True, env={**os.environ, **variables})
    one_error(done, "set_env.sh")


def test_a_failed_collective_is_one_line(on_npu, texts):
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node=2 -m scripts.base_train"
    command = f"{torchrun} --device=npu {BASE} --model_tag=fault".split()
    env = {"NANOCHAT_BASE_DIR": str(on_npu[0])}
    done = simulated(command, devices=2, hccl_fail="all_reduce:4@1", cwd=texts, env=env)
    one_error(done, "rank 1", "check_npu.py")


def test_a_collective_that_hangs_is_one_line(on_npu, texts):
    command = f"-m scripts.base_train --device=npu {BASE} --model_tag=fault".split()
    env = {"HCCL_EXEC_TIMEOUT": "5", "NANOCHAT_BASE_DIR": str(on_npu[0])}
    done = simulated(command, ranks=2, hccl_hang="all_reduce:4@1", cwd=texts, env=env)
    one_error(done, "rank 0", "HCCL_EXEC_TIMEOUT")
