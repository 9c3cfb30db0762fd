"""How far a run has come and how fast it is, and the interface of what accompanies it."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from nanochat.device import Device
from nanochat.train import StepStats

SIGNS = {"val_bpb": 1, "val_loss": 1, "eval_reward": -1}  # the number that ranks evaluations; -1: the higher the better
WATCHED = ("loss", "square", "updated", "no_signal", "reward", "accuracy", "kl", "expert_max_share", "expert_entropy")
FEW_STEPS = 10  # a shorter run is a trial, too short for a small change
FLAT = 0.001  # a loss that changes by a smaller part has not changed
CLEAR = 0.05  # a loss that changes by a larger part has not done so by chance
Evaluation = dict[str, float]  # "step", and the metrics of the evaluation after it


@dataclass
class Progress:
    """How far a run has come; saved with every checkpoint."""

    step: int = 0  # finished steps
    tokens: int = 0  # consumed, over all ranks
    seconds: float = 0.0  # time of training, without evaluation and saving
    skipped_steps: int = 0  # steps whose loss or gradients were not finite
    idle_steps: int = 0  # steps with nothing to learn: no target, or no gradient
    evaluated: Evaluation | None = None  # the newest evaluation
    best: Evaluation | None = None  # the best evaluation, the one before the first step included
    best_saved: Evaluation | None = None  # the best of those after which a checkpoint was saved
    pending: dict[str, Any] | None = None  # a log line that waits for its evaluation; a resumed run makes up for it
    initial: dict[str, float] | None = None  # the evaluation before the first step; None: not yet, or no run had one
    window: int = FEW_STEPS  # steps at the run's beginning and at its end that are compared
    first: dict[str, float] = field(default_factory=dict)  # means of WATCHED in that beginning, and the opening loss
    recent: dict[str, float] = field(default_factory=dict)  # running means of them over about the last window
    warned: dict[str, float] = field(default_factory=dict)  # by problem, the held-out loss at its last warning

    def note(self, numbers: Mapping[str, Any], steps: int) -> None:
        """Add the means of the last `steps` steps to `first` and `recent`."""
        for name in WATCHED:
            value = numbers.get(name)
            if value is not None and math.isfinite(value):
                mean = self.recent.get(name, value)
                self.recent[name] = mean + (value - mean) * min(1.0, steps / min(self.window, self.step))
        if self.step - steps < self.window:
            self.first = {"opening": self.recent.get("loss", 1e9), **self.first, **self.recent}

    def training_loss(self) -> tuple[float, float, float]:
        """The loss at the beginning and now, and how much of their difference may be chance."""
        before, now = self.first["loss"], self.recent["loss"]
        # The noise of a batch grows with the loss. Two standard errors; of the first steps nothing can be said.
        relative = max(0.0, self.recent["square"] / max(now, 1e-9) ** 2 - 1)
        noise = 2 * math.sqrt(relative * (before**2 + now**2) / self.window)
        return before, now, noise if self.step >= max(FEW_STEPS, 3 * self.window) else math.inf


def loss_of(evaluation: Evaluation | None) -> float:
    """The number by which evaluations are compared, the lower the better; infinite where there is none."""
    metrics = evaluation or {}
    return next((sign * metrics[name] for name, sign in SIGNS.items() if name in metrics), math.inf)


class Meter:
    """Speed, and steps that were skipped, between two log lines. Only `read` waits for the device.

    A host that reads a loss waits until the device has computed it, and meanwhile launches nothing. The counts of
    every step therefore stay on the device, and are read once per log line.
    """

    def __init__(self, progress: Progress, device: Device, token_flops: int | None = None):
        self.progress = progress
        self.device = device
        self.token_flops = token_flops
        self.more: Callable[[], dict[str, Any]] = dict  # further numbers of a line; all ranks call it
        # Since the last line: finite steps, steps that changed something, their losses, and the squares of these.
        self.sums = torch.zeros(4, device=device.torch_device)
        self.bad_in_a_row = torch.zeros((), device=device.torch_device)
        self.since_good = 0  # steps since the last finite one, as of the last line; three or more end a run
        self.read_step = progress.step  # the step of the last line
        self.steps = 0  # from the line before it
        self.compiling = 0.0  # seconds of torch.compile so far, which the speed leaves out
        self.restart()

    def restart(self) -> None:
        """Begin to measure here: evaluation and saving are over."""
        self.clock = time.perf_counter()
        self.clock_tokens = self.progress.tokens
        self.clock_compiling = self.compiling

    def add(self, stats: StepStats, tokens: int) -> None:
        """Count a step of `tokens` tokens over all ranks; it has been launched, not computed."""
        # Sums on the device: the host does not know `finite` yet, and does not wait to learn it.
        loss = stats.loss.masked_fill(stats.finite == 0, 0.0)
        self.sums += torch.stack((stats.finite, stats.updated, loss, loss * loss))
        # A finite step resets the count of bad steps in a row. Once the count is three it stays: the run must end, and
        # only the next log line reads the count.
        good = (stats.finite > 0) & (self.bad_in_a_row < 3)
        self.bad_in_a_row = (self.bad_in_a_row + 1).masked_fill_(good, 0)
        self.progress.step += 1
        self.progress.tokens += tokens

    def read(self, stats: StepStats) -> dict[str, Any]:
        """The numbers of a log line; `stats` are the last step's. Utilisation needs the model's FLOPs a token."""
        # The one wait for the device, for all numbers together.
        numbers = torch.cat((torch.stack((stats.loss, stats.grad_norm, self.bad_in_a_row)), self.sums))
        loss, grad_norm, bad_in_a_row, finite, updated, losses, squares = numbers.tolist()
        now = time.perf_counter()

        # Speed over all steps since the last line. MFU: the share of the devices' peak that the model's own products
        # take (source: Chowdhery et al. 2022, PaLM).
        progress = self.progress
        compiling = self.compiling - self.clock_compiling
        rate = (progress.tokens - self.clock_tokens) / (now - self.clock - compiling)
        mfu = None
        if self.token_flops and self.device.peak_flops:
            mfu = self.token_flops * rate / (self.device.peak_flops * self.device.world_size)

        # Start the next line's counts. `bad_in_a_row` is kept: a row of bad steps may cross a log line.
        progress.seconds += now - self.clock
        self.steps = progress.step - self.read_step
        self.read_step = progress.step
        progress.skipped_steps += self.steps - int(finite)
        progress.idle_steps += int(finite - updated)
        self.sums.zero_()
        self.since_good = int(bad_in_a_row)
        means = {"loss": losses / finite, "square": squares / finite} if finite else {}
        more = self.more()
        progress.note(means | more | {"updated": updated / max(1, self.steps)}, self.steps)
        self.restart()
        return {
            "step": progress.step - 1, "loss": loss, "tokens": progress.tokens, "tok_per_sec": rate, "mfu": mfu,
            "seconds": progress.seconds, "peak_memory_bytes": self.device.peak_memory(),
            "grad_norm": grad_norm, "skipped_steps": progress.skipped_steps, "idle_steps": progress.idle_steps,
            **more,
        }  # fmt: skip


class Attendant(AbstractContextManager[Any]):
    """Accompanies a run: a context manager around its loop. A method that a subclass does not define does nothing."""

    def boundary(self, step: int) -> float:
        """`step` steps are launched. Returns the seconds that this call took from the run: they are not training."""
        return 0.0
