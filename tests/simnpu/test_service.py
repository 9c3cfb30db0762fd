"""A session of the tinker client with the training service on a simulated NPU: the numbers of the CPU."""

import json
from pathlib import Path

import pytest
import tiny

from simnpu.forks import simulated

pytest.importorskip("tinker", reason="the extra `dev` brings tinker")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("built")]

SESSION = """
import json, sys, threading
import numpy as np
import tinker
from nanochat.serve.listener import listening, make_server
from nanochat.train_service.app import create_app
from scripts.train_server import Config, open_service

device = sys.argv[1]
service = open_service(Config(source="sft", device=device, dtype="float32", name="tiny"))
with listening("127.0.0.1", 0) as listener:
    server = make_server(create_app(service), 1)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    client = tinker.ServiceClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", api_key="tml-any")
    training = client.create_lora_training_client(base_model="tiny", rank=4, seed=0).result()
    ids = [5, 90, 14, 30, 7, 80, 21, 9]
    data = [
        tinker.Datum(tinker.ModelInput.from_ints(one[:-1]), {"target_tokens": np.array(one[1:])})
        for one in (ids, ids[::-1], ids[2:])
    ]
    losses = []
    for _ in range(3):
        gradients = training.forward_backward(data, "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        losses.append(gradients.result().metrics["loss:sum"])
    sampler = training.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=8, temperature=0.8, seed=3)
    sequence = sampler.sample(tinker.ModelInput.from_ints(ids), 1, params).result().sequences[0]
    server.should_exit = True
    thread.join(20)
print(json.dumps([losses, sequence.tokens, sequence.logprobs]))
"""


def test_a_clients_session_has_the_cpus_numbers(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    tokenizer = tiny.tiny_tokenizer()
    model = tiny.lively_model(tiny.tiny_config(vocab_size=tokenizer.vocab_size, sequence_len=64))
    script = tmp_path / "session.py"
    script.write_text(SESSION)
    results = []
    for device in ("cpu", "npu"):
        base = tmp_path / device
        folder = base / "checkpoints" / "sft" / "tiny"
        tiny.save_checkpoint(folder, 0, model, tokenizer, {"stage": "sft", "tasks": []})
        done = simulated([str(script), device], env={"NANOCHAT_BASE_DIR": str(base)})
        assert done.returncode == 0, done.stderr[-3000:]
        results.append(json.loads(done.stdout.splitlines()[-1]))
    (losses, tokens, logprobs), on_npu = results
    assert losses[-1] < losses[0]
    assert on_npu[0] == pytest.approx(losses, rel=1e-5) and on_npu[1] == tokens
    assert on_npu[2] == pytest.approx(logprobs, abs=1e-4)
