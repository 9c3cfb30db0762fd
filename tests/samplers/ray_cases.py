"""A Ray cluster on this machine. test_samplers.py runs these in a process of their own.

python -m pytest tests/samplers/ray_cases.py
"""

import functools
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray._private import services
from runs import call, sha256
from test_samplers import failure, open_ray, policy, prompts_and_settings
from test_scripts import base  # noqa: F401 (base is a fixture)
from test_stages import graded, pretrained, start, taught, tutored  # noqa: F401 (fixtures)
from tiny import adapt, cpu_device, tiny_tokenizer

from nanochat import rollout
from nanochat.adapters.lora import Lora
from nanochat.engine import Engine
from nanochat.ground import cli
from nanochat.sampling import SamplingParams


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """The cluster that the first sampler starts on this machine; those of other tests are not joined."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray") as short:
        patch.setattr(services, "find_gcs_addresses", functools.cache(set))
        patch.setenv("RAY_TMPDIR", short)  # the path of a socket has 107 characters at most
        yield ray
        ray.shutdown()


def test_its_processes_listen_on_loopback(cluster):
    psutil = pytest.importorskip("psutil")
    sampler = open_ray(1)
    sampler.hand_over(policy())
    me = psutil.Process()
    connections = []
    for process in [me, *me.children(recursive=True)]:
        connections += process.net_connections(kind="inet")
    addresses = [connection.laddr.ip for connection in connections if connection.status == "LISTEN"]
    cluster.kill(sampler.workers[0])  # the next test needs its processor
    assert len(addresses) > 3 and {one.removeprefix("::ffff:") for one in addresses} <= {"127.0.0.1", "::1"}


def test_ray_workers_sample_what_the_engine_samples_and_are_replaced(cluster, capsys):
    """With new weights each time. A worker that is killed while it samples costs no reply."""
    prompts, settings = prompts_and_settings(1.3)
    sampler = open_ray(2)
    models = (policy(0), policy(1), adapt(policy(2), Lora(4, 8.0)))
    for model, killed in zip(models, (None, "before", "meanwhile"), strict=True):
        expected = rollout.EngineSampler(Engine(model, tiny_tokenizer(), cpu_device()), 8)(prompts, settings, 20)
        sampler.hand_over(model)
        if killed == "before":
            cluster.kill(sampler.workers[1])
        elif killed == "meanwhile":
            threading.Timer(0.005, cluster.kill, [sampler.workers[0]]).start()
        replies = sampler(prompts, settings, 20)
        assert [reply.tokens for reply in replies] == [reply.tokens for reply in expected]
        assert replies[3].logprobs == pytest.approx(expected[3].logprobs, abs=1e-5)
    assert "a worker has died, and is replaced" in capsys.readouterr().err
    assert "fails" in failure(lambda: sampler([[10**6]], [SamplingParams()], 4))
    sampler.should_stop = lambda: True
    with pytest.raises(cli.Interrupted):
        sampler(prompts, settings, 20)


def test_a_run_with_ray_has_the_bits_of_one_without(cluster, taught):  # noqa: F811
    flags = (*graded(taught), "--num_iterations=2", "--eval_every=2", "--importance_cap=0", "--staleness=1")
    call("chat_rl", *flags, "--model_tag=alone")
    call("chat_rl", *flags, "--model_tag=rays", "--sampler=ray:1")
    assert sha256(taught, "rl", 2, "rays") == sha256(taught, "rl", 2, "alone")
