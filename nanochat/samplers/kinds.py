"""The kinds of samplers behind one interface, and the flag that names one.

engine                              this process, between its steps
http://HOST:8001[,http://...]       servers (http.py)
ray:N                               N workers for each process, on a Ray cluster (ray.py)
"""

import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from nanochat import rollout
from nanochat.cli import UserError
from nanochat.device import Device
from nanochat.engine import Engine
from nanochat.gpt import GPT
from nanochat.paths import run_dir
from nanochat.rollout import Reply
from nanochat.samplers.http import HttpSampler
from nanochat.samplers.ray import RaySampler
from nanochat.sampling import SamplingParams
from nanochat.tokenizer import Tokenizer


class PolicySampler(Protocol):
    """A `rollout.Sampler` with a copy of the policy's weights."""

    def hand_over(self, model: GPT) -> None:
        """Sample with the model's present weights from now on. All ranks call it together, while none samples."""
        ...

    def __call__(
        self, prompts: Sequence[Sequence[int]], settings: Sequence[SamplingParams], max_tokens: int
    ) -> list[Reply]: ...


class EngineSampler:
    """Samples in this process."""

    def __init__(self, engine: Engine, rows: int, should_stop: Callable[[], bool]):
        self.hand_over = engine.update
        self.sample = rollout.engine_sampler(engine, rows, should_stop)

    def __call__(
        self, prompts: Sequence[Sequence[int]], settings: Sequence[SamplingParams], max_tokens: int
    ) -> list[Reply]:
        return self.sample(prompts, settings, max_tokens)


def require_sampler(name: str) -> None:
    """Raises UserError: when `--sampler name` is of no kind, or needs a package that is missing."""
    is_ray = re.fullmatch(r"ray:[1-9]\d{0,3}", name) is not None
    if is_ray and importlib.util.find_spec("ray") is None:
        raise UserError(f"--sampler {name} needs the package ray: pip install -e '.[ray]'")
    are_servers = all(re.fullmatch(r"https?://[^/\s]\S*", address) for address in name.split(","))
    if not (name == "engine" or is_ray or are_servers):
        raise UserError(
            f"--sampler {name}: engine, ray:N, or the addresses of servers as http://HOST:PORT, with commas"
        )


def open_sampler(
    name: str,
    model: GPT,
    tokenizer: Tokenizer,
    device: Device,
    tag: str,
    *,
    rows: int,
    patience: float,
    graphs: Literal["auto", "on", "off"],
    should_stop: Callable[[], bool],
) -> PolicySampler:
    """The sampler of --sampler, for a run of this tag; see HttpSampler for `rows` and `patience`.

    Raises UserError: when there is none of this name, or it does not answer.
    """
    require_sampler(name)
    if name == "engine":
        return EngineSampler(Engine(model, tokenizer, device, graphs), rows, should_stop)
    if name.startswith("http"):
        return HttpSampler(
            name.split(","), model, tokenizer, device, run_dir("rl", tag) / "weights", rows=rows, patience=patience,
            key=os.environ.get("NANOCHAT_API_KEY", ""), should_stop=should_stop,
        )  # fmt: skip
    return RaySampler(
        int(name.removeprefix("ray:")), model, tokenizer, device, rows=rows, patience=patience, graphs=graphs,
        should_stop=should_stop,
    )  # fmt: skip
