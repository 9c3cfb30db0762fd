"""Samples of RL from workers of a Ray cluster: `--sampler ray:N` starts N workers per process of the trainer.

A worker holds an engine on its own device, on any machine of the cluster; nanochat must be installed there. Weights
travel through Ray's object store. A worker that dies is replaced, and the new one draws its samples with the same
seeds. Anybody who reaches a Ray cluster can run programs on its machines: keep it in a private network.

The cluster is the one in RAY_ADDRESS, or the one that `ray start` has started on this machine; without both, one of
this machine's own processes, which listen on 127.0.0.1.
"""

import importlib.util
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from nanochat import device as devices
from nanochat.adapters.lora import merged_weights
from nanochat.engine import Engine
from nanochat.gpt import GPT, GPTConfig
from nanochat.ground.cli import Failed, Interrupted, UserError
from nanochat.ground.log import print0, warn
from nanochat.ground.screen import Bar
from nanochat.rollout import ROWS_AT_ONCE, EngineSampler, Reply
from nanochat.run.stage import Start
from nanochat.sampling import SamplingParams
from nanochat.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ray import ObjectRef

LOOK_SECONDS = 0.2  # between two checks whether the run has to stop
MOST_LOST = 3  # N workers may die this many times in one call; more is not an accident


class Worker:
    """Runs in a process of the cluster."""

    def __init__(
        self, config: GPTConfig, tokenizer: Tokenizer, kind: str, dtype: str, graphs: Literal["auto", "on", "off"]
    ):
        # Ray's processes may have inherited the trainer's place among its ranks, and would join them.
        for name in [name for name in os.environ if name.endswith(("RANK", "WORLD_SIZE"))]:
            del os.environ[name]
        self.device = devices.init(kind, dtype)
        with torch.device("meta"):
            model = GPT(config, self.device.kernels)
        self.model = model.to_empty(device=self.device.torch_device)
        self.model.fill_rotary()
        self.tokenizer = tokenizer
        self.graphs: Literal["auto", "on", "off"] = graphs
        self.engine: Engine | None = None
        self.version = -1

    @torch.no_grad()
    def update(self, weights: dict[str, torch.Tensor], version: int) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(weights[name])
        if self.engine is None:
            self.engine = Engine(self.model, self.tokenizer, self.device, self.graphs)
        self.engine.update(self.model)
        self.version = version

    def sample(
        self, prompts: Sequence[Sequence[int]], settings: Sequence[SamplingParams], max_tokens: int, version: int
    ) -> list[Reply]:
        assert self.engine is not None and self.version == version
        return EngineSampler(self.engine, ROWS_AT_ONCE)(prompts, settings, max_tokens)


class RaySampler:
    """Samples from the workers of a --sampler flag; see `rollout.Sampler`.

    Raises UserError: when there is no cluster.
    """

    def __init__(self, config: Any, start: Start, should_stop: Callable[[], bool]):
        import ray
        from ray import exceptions

        device = start.device
        self.ray = ray
        self.errors = exceptions
        if not ray.is_initialized():
            handler = signal.getsignal(signal.SIGTERM)
            try:
                _join_or_start(alone=device.world_size == 1 and "RAY_ADDRESS" not in os.environ)
                signal.signal(signal.SIGTERM, handler)  # Ray's handler exits with status 15
            except ConnectionError as error:
                raise UserError(
                    "--sampler ray:N found no cluster: `ray start --head` starts one, RAY_ADDRESS names one"
                ) from error
        self.count = int(config.sampler.removeprefix("ray:"))
        self.patience = config.sampler_patience
        self.should_stop = should_stop
        self.device = device
        dtype = str(device.dtype).removeprefix("torch.")
        options = device.runtime.ray_options
        made = ray.remote(**options)(Worker)
        settings = (start.model.config, start.tokenizer, device.kind, dtype, config.graphs)
        self.start: Callable[[], Any] = lambda: made.remote(*settings)
        self.workers = [self.start() for _ in range(self.count)]
        self.weights: ObjectRef[Any] | None = None
        self.version = 0
        print0(f"sampler: {self.count} workers of Ray for each process, each with {options}")

    @staticmethod
    def check_flag(flag: str) -> None:
        """Raises UserError: when `--sampler flag` is not ray:N, or the package is missing."""
        if re.fullmatch(r"ray:[1-9]\d{0,3}", flag) is None:
            raise UserError(f"--sampler {flag}: ray:N has a number of workers, 1 to 9999")
        if importlib.util.find_spec("ray") is None:
            raise UserError(f"--sampler {flag} needs the package ray: pip install -e '.[ray]'")

    def hand_over(self, model: GPT) -> None:
        """Sample with the model's present weights from now on. All ranks call it together.

        Raises Failed: when the workers do not take the weights.
        """
        dtype = self.device.dtype
        weights = {name: weight.to("cpu", dtype) for name, weight in merged_weights(model)}
        self.weights = self.ray.put(weights)
        self.version += 1
        self._run([self._update] * self.count)

    def __call__(
        self, prompts: Sequence[Sequence[int]], settings: Sequence[SamplingParams], max_tokens: int
    ) -> list[Reply]:
        # Neighbours are samples of one question, with similar lengths: every worker gets some of them.
        shares = [range(first, len(prompts), self.count) for first in range(min(self.count, len(prompts)))]

        def ask(numbers: range) -> Callable[[Any], Any]:
            own = [prompts[number] for number in numbers], [settings[number] for number in numbers]
            return lambda worker: worker.sample.remote(*own, max_tokens, self.version)

        replies: list[Any] = [None] * len(prompts)
        with Bar("replies", len(prompts)) as progress:
            drawn = self._run([ask(numbers) for numbers in shares])
            for numbers, share in zip(shares, drawn, strict=True):
                progress.done += len(numbers)
                for number, reply in zip(numbers, share, strict=True):
                    replies[number] = reply
        return replies

    def _update(self, worker: Any) -> Any:
        return worker.update.remote(self.weights, self.version)

    def _run(self, calls: Sequence[Callable[[Any], Any]]) -> list[Any]:
        """The results of calls, one call per worker; a worker that dies is replaced.

        Raises Interrupted: when the run has to stop. Raises Failed: when a worker fails, or no worker replies.
        """
        results: list[Any] = [None] * len(calls)
        pending = {call(worker): place for place, (call, worker) in enumerate(zip(calls, self.workers, strict=False))}
        lost = 0
        last_reply = time.monotonic()
        while pending:
            done, _ = self.ray.wait(list(pending), timeout=LOOK_SECONDS)
            for reference in done:
                place = pending.pop(reference)
                try:
                    results[place] = self.ray.get(reference)
                    last_reply = time.monotonic()
                except self.errors.RayActorError as error:
                    lost += 1
                    if lost > MOST_LOST * self.count:
                        raise Failed(
                            f"--sampler ray:{self.count}: {lost} workers have died: {_words(error)}"
                        ) from error
                    warn(f"--sampler ray:{self.count}: a worker has died, and is replaced ({_words(error)})")
                    # A worker runs its calls in order: it has the weights before it samples.
                    self.workers[place] = self.start()
                    update = self._update(self.workers[place])
                    pending[update if calls[place] == self._update else calls[place](self.workers[place])] = place
                except self.errors.RayError as error:
                    raise Failed(f"--sampler ray:{self.count}: a worker fails: {_words(error)}") from error
            if self.should_stop():
                raise Interrupted
            if time.monotonic() - last_reply > self.patience:
                raise Failed(
                    f"--sampler ray:{self.count}: no reply for {self.patience:g} s (--sampler_patience); `ray status` "
                    "shows whether the cluster has room for the workers"
                )
        return results


def _join_or_start(alone: bool) -> None:
    """Join the cluster, or start one of this machine's processes; only where this process is `alone`, because several
    that found no cluster would each start one.

    Raises ConnectionError: when there is no cluster.
    """
    import ray
    from ray._private import ray_constants

    settings: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    try:
        ray.init("auto", **settings)
    except ConnectionError:
        if not alone:
            raise
        # Ray's processes would listen on all interfaces, and run the programs of whoever connects. Its name for
        # 127.0.0.1 only, as it is on other systems than Linux (RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER).
        ray_constants.ENABLE_RAY_CLUSTER = False
        ray.init("local", **settings)


def _words(error: BaseException) -> str:
    """The last line of Ray's report, which is the error itself."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__
