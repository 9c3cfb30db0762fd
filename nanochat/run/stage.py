"""What every training script does around its steps: log lines, evaluation, checkpoints, and the ways a run can end.

    with Stage("sft", tag, config, ...) as stage:
        meter = Meter(progress, device)
        for step in stage.steps(meter):
            stats = train_step(...)
            meter.add(stats, tokens)
            if stage.due(stats):
                stage.report(meter.read(stats) | {"lr": lr})
    stage.finish()

The flags it reads of a script's config: eval_every, log_every, save_every, keep_last, keep_every, profile, resume, run,
track, hang_seconds.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from nanochat import checkpoint_manager
from nanochat import device as devices
from nanochat.checkpoint_manager import Saver, Training
from nanochat.device import Device
from nanochat.gpt import GPT
from nanochat.optim import Optimizer
from nanochat.parallel.mesh import Layout
from nanochat.run.faults import Faults
from nanochat.run.profiling import Recorder
from nanochat.shell.cli import Interrupted, UserError
from nanochat.shell.log import RunLog, print0
from nanochat.shell.paths import checkpoint_dir, lock, run_dir
from nanochat.tokenizer import Tokenizer
from nanochat.train import Meter, Progress, StepStats


class Stage:
    """A context manager around a training loop, on all ranks.

    `evaluate` returns what an evaluation adds to a log line; it asks `stage.should_stop` now and then, and raises
    Interrupted, on every rank, when that said so. `loader_state` and `meta` are asked for when a checkpoint is
    written: the position in the data, and what stands in meta.json beside the stage, the config and the progress.
    """

    def __init__(
        self,
        name: str,
        tag: str,
        config: Any,
        device: Device,
        layout: Layout,
        model: GPT,
        tokenizer: Tokenizer,
        optimizer: Optimizer,
        progress: Progress,
        steps: int,
        *,
        evaluate: Callable[[], dict[str, Any]],
        loader_state: Callable[[], dict[str, Tensor]],
        meta: Callable[[], dict[str, Any]],
    ):
        self.name, self.config, self.device, self.layout = name, config, device, layout
        self.model, self.tokenizer, self.optimizer = model, tokenizer, optimizer
        self.progress, self.last = progress, steps
        self._evaluate, self._loader_state, self._meta = evaluate, loader_state, meta
        self.folder, runs = checkpoint_dir(name, tag), run_dir(name, tag)
        if device.is_main:
            lock(self.folder)
        if not config.resume and (aside := checkpoint_manager.set_aside(self.folder, runs, device)):
            print0(f"an earlier run of this tag is now {aside}; --resume would have gone on with it")
        self.log = RunLog(
            name, runs, steps, run=config.run, trackers=config.track, config=dataclasses.asdict(config),
            rank=device.rank, start_step=progress.step - bool(progress.pending),
        )  # fmt: skip
        self.recorder = Recorder(config.profile, steps - progress.step, device, runs / "profile", self.log.message)
        self.saver = Saver(
            self.folder, device, keep_last=config.keep_last, keep_every=config.keep_every,
            on_saved=lambda path: self.log.message(f"saved {path}"),
        )  # fmt: skip
        self.faults = Faults(device, progress.step, config.hang_seconds)
        self.stopped = False
        self.saved = self.folder / f"step_{progress.step:06d}"
        self.meter: Meter | None = None
        self.evaluates = self.logs = self._saves = False  # what the step that is due has
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Stage":
        for part in (self.faults, self.log, self.recorder, self.saver):
            self._stack.enter_context(part)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.faults.phase("saving", self.saver.patience_seconds):
            try:
                if error is None and (failed := self._last_save_failed()):
                    raise failed
            finally:
                self._stack.__exit__(kind, error, trace)
        if error is not None and self.faults.signal and devices.explain(error):
            sys.exit(128 + self.faults.signal)  # told to end because another rank failed, which has said why

    def should_stop(self) -> bool:
        """Whether a stop was asked for, to be asked at every batch of something long; of a sharded model, whose ranks
        must make equally many forward passes, it is a collective."""
        stopping = self.faults.should_stop()
        return self.faults.agree(stopping) if self.layout.sharded else stopping

    def steps(self, meter: Meter) -> Iterator[int]:
        """The steps still to go, as the loop begins them; it ends where the run is to stop."""
        self.meter = meter
        if self.progress.pending:  # the run was stopped before it could evaluate
            self._log_evaluated()
            meter.restart()
        while self.progress.step < self.last and not self.stopped:
            yield self.progress.step

    def due(self, stats: StepStats) -> bool:
        """Behind a step: whether there is anything to log, to evaluate or to save."""
        config, done = self.config, self.progress.step
        assert self.meter is not None
        self.meter.clock += self.recorder.step()
        self.stopped = self.faults.boundary(done)
        last = done == self.last
        self.evaluates = last or bool(config.eval_every and done % config.eval_every == 0)
        self._saves = last or bool(config.save_every and done % config.save_every == 0)
        self.logs = self.evaluates or self._saves or (done - 1) % config.log_every == 0
        return self.logs or self.stopped

    def report(self, metrics: dict[str, Any]) -> None:
        """Log a step that is due, evaluating and saving where they are.

        Raises UserError: when three steps in a row were not finite.
        """
        self._require_finite()
        if self.evaluates:
            self.progress.pending = metrics
            if not self.stopped:
                self._log_evaluated()
        elif self.logs:
            self.log.step(metrics)
        if self._saves or self.stopped:
            self._save()
        assert self.meter is not None
        self.meter.restart()

    def stop(self) -> None:
        """Leave out of the middle of a step that was interrupted on all ranks: as the last one left things."""
        self.stopped = True
        self._save()

    def _log_evaluated(self) -> None:
        """Log the line that is pending, once the weights of its step are evaluated, or stop."""
        assert self.progress.pending is not None
        try:
            with self.faults.phase("evaluation"):
                found = self._evaluate()
        except Interrupted:
            self.stopped = True
            return
        self.log.step(self.progress.pending | found)
        self.progress.pending = None

    def _require_finite(self) -> None:
        assert self.meter is not None
        if self.meter.since_good < 3:
            return
        good = self.progress.step - self.meter.since_good
        raise UserError(
            f"the loss was not finite three steps in a row; {f'step {good - 1}' if good else 'none'} is the last good "
            f"one, {self._last_saved() or 'none'} the last checkpoint: lower the rates"
            + (", then --resume" if self._last_saved() else "")
        )

    def _last_saved(self) -> Path | None:
        with contextlib.suppress(Exception):  # that one was told when it failed
            self.saver.wait()
        there = checkpoint_manager.steps(self.folder)
        return self.folder / f"step_{there[-1]:06d}" if there else None

    def _save(self) -> None:
        training = Training(self.optimizer.state_dict(), self._loader_state(), self.device.rng_state())
        meta = {
            "stage": self.name, "config": dataclasses.asdict(self.config), "progress": self.progress.to_dict(),
            **self._meta(),
        }  # fmt: skip
        with self.faults.phase("saving", self.saver.patience_seconds):
            self._last_save_failed()  # it has been told; the next one may do better
            self.saved = self.saver.save(self.progress.step, self.model, self.tokenizer, meta, training)

    def _last_save_failed(self) -> Exception | None:
        """Wait for the save under way, on all ranks: those that still write would miss one that had left."""
        own: Exception | None = None
        try:
            self.saver.wait()
        except Exception as error:
            own = error
        if not self.faults.agree(own is not None):
            return None
        return own or UserError("another rank could not save the last checkpoint: its line says why")

    def finish(self) -> None:
        """Behind the `with` block, all is on the disk. Leaves the process where the run was stopped."""
        devices.shutdown(self.device)
        if self.stopped:
            self.faults.leave(self.saved)
