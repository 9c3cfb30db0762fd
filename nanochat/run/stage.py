"""What every training script does around its steps: start from a checkpoint, and log, evaluate, save and stop.

    start = begin(config)                      # device, source checkpoint, model, tokenizer, tag
    ...
    run = Run("sft", config, start, optimizer, steps)
    with run:
        for step in run.steps():               # at the top of a turn `step` steps are finished
            if run.should_evaluate:
                with run.interruptible("evaluation"):
                    run.log_evaluation(val_loss=...)
            if run.should_save:
                run.save(loader_state)
            if run.should_leave:
                break
            stats = train_step(...)
            run.add(stats, tokens)
            if run.should_log:
                run.log(stats, lr=...)
    run.finish()

A step's log line waits for its evaluation at the top of the next turn. A run that a signal stops in between saves the
line with its checkpoint, and the resumed run begins with the evaluation.
"""

import contextlib
import copy
import dataclasses
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
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
from nanochat.parallel.fsdp import shard
from nanochat.parallel.mesh import Layout, lay_out
from nanochat.run.faults import Faults
from nanochat.run.flags import StageFlags, TrainFlags
from nanochat.run.profiling import Recorder
from nanochat.run.resume import resume, set_aside
from nanochat.shell.cli import Interrupted, UserError
from nanochat.shell.log import RunLog, check_trackers, print0, record
from nanochat.shell.paths import checkpoint_dir, lock, run_dir, safe_tag
from nanochat.tokenizer import Tokenizer
from nanochat.train import Meter, Progress, StepStats

# ---------------------------------------------------------------------- before the loop


@dataclass
class Start:
    """What a run has before its first step."""

    began: float  # time.time() when the command started
    device: Device
    layout: Layout
    model: GPT  # sharded by the layout
    tokenizer: Tokenizer
    tag: str  # name of the checkpoints' folder
    pretraining: dict[str, Any]  # what the base model read: data, tokens, batch_tokens
    source: Path | None = None  # the checkpoint it began from
    reference: GPT | None = None  # a frozen copy of the source's model


def open_device(config: TrainFlags) -> tuple[Device, Layout]:
    """Join the process group, take this process's device, seed its generators.

    Raises UserError: when the device is not there, or the flags of the processes contradict each other.
    """
    check_trackers(config.track)
    safe_tag(config.model_tag or "default")
    device = devices.init(config.device, config.dtype)
    device.seed(config.seed)
    layout = lay_out(device, config.parallel, config.replicate)
    print0(f"device: {device}; {layout}")
    return device, layout


def begin(config: StageFlags, with_reference: bool = False) -> Start:
    """Open the device, and load the checkpoint that a stage begins from.

    `with_reference` also keeps a frozen copy of its model, for losses that compare with it.
    Raises UserError: when there is no such checkpoint, or it is damaged.
    """
    began = time.time()
    device, layout = open_device(config)
    source_tag = config.source_tag or config.model_tag
    source = checkpoint_manager.find_source(config.source, source_tag, config.source_step, device)
    model, tokenizer, meta = checkpoint_manager.load_model(source, device, verified=True)
    reference = copy.deepcopy(model) if with_reference else None
    shard(model.train(), layout, device, config.activation_checkpointing)
    if reference is not None:
        shard(reference, layout, device)
    print0(f"source: {source}")
    return Start(
        began, device, layout, model, tokenizer,
        tag=config.model_tag or checkpoint_manager.tag_of(source),
        pretraining={"data": "", "tokens": 0, **meta.get("pretraining", {})},
        source=source, reference=reference,
    )  # fmt: skip


# ---------------------------------------------------------------------- around the loop


class Run:
    """A run's progress, log, checkpoints and faults; a context manager around the training loop, on all ranks.

    With `--resume` its constructor loads the newest checkpoint into the model and the optimizer: `progress` and
    `loader_states` (one of every rank that saved, none in a new run) are the checkpoint's. `steps` is where the run
    ends, `fingerprints` are digests of what a resumed run must find unchanged, by its name in a message, `batch_tokens`
    the tokens of a step where all steps have equally many.
    """

    def __init__(
        self,
        stage: str,
        config: TrainFlags,
        start: Start,
        optimizer: Optimizer,
        steps: int,
        *,
        fingerprints: dict[str, str],
        batch_tokens: int | None = None,
        token_flops: int | None = None,
    ):
        self.stage = stage
        self.config = config
        self.start = start
        self.device = start.device
        self.optimizer = optimizer
        self.last = steps  # the run ends when so many steps are finished
        self.fingerprints = fingerprints
        self.folder = checkpoint_dir(stage, start.tag)
        self.progress = Progress()
        self.loader_states: list[dict[str, Tensor]] = []
        if config.resume:
            self.progress, self.loader_states = resume(
                self.folder, config, steps, start.model, start.tokenizer, optimizer, start.device,
                source=start.source, batch_tokens=batch_tokens, fingerprints=fingerprints,
            )  # fmt: skip
        self.meter = Meter(self.progress, start.device, token_flops)
        self.stopped = False  # a signal ends the run
        self.saved = self.folder / f"step_{self.progress.step:06d}"  # the newest checkpoint
        self._saved_step = self.progress.step if self.loader_states else None
        self._stats: StepStats | None = None  # of the last step, while no log line has read it

    def __enter__(self) -> "Run":
        config = self.config
        device = self.device
        progress = self.progress
        runs = run_dir(self.stage, self.start.tag)
        if device.is_main:
            lock(self.folder)
        if not config.resume:
            aside = set_aside(self.folder, runs, device)
            if aside is not None:
                print0(f"an earlier run of this tag is now {aside}; --resume would have continued it")
        self.logger = RunLog(
            self.stage, runs, self.last, run=config.run, trackers=config.track, config=dataclasses.asdict(config),
            rank=device.rank, start_step=progress.step - (1 if progress.pending else 0),
        )  # fmt: skip
        self.recorder = Recorder(
            config.profile, self.last - progress.step, device, runs / "profile", self.logger.message
        )
        self.saver = Saver(
            self.folder, device, keep_last=config.keep_last, keep_every=config.keep_every,
            on_saved=lambda path: self.logger.message(f"saved {path}"),
        )  # fmt: skip
        self.faults = Faults(device, progress.step, config.hang_seconds)
        self._stack = contextlib.ExitStack()
        for part in (self.faults, self.logger, self.recorder, self.saver):
            self._stack.enter_context(part)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.faults.phase("saving", self.saver.patience_seconds):
            try:
                failed = self._last_save_failed() if error is None else None
                if failed is not None:
                    raise failed
            finally:
                self._stack.__exit__(kind, error, trace)
        if error is not None and self.faults.signal and devices.explain(error):
            sys.exit(128 + self.faults.signal)  # another rank failed, has printed why, and made torchrun end this one

    def steps(self) -> Iterator[int]:
        """The number of finished steps, at the top of every turn; the loop leaves it by `should_leave`."""
        self.meter.restart()
        while True:
            yield self.progress.step
            # All ranks stop at the same step. The loop then has one more turn, which saves and leaves.
            self.stopped = self.stopped or self.faults.boundary(self.progress.step)

    # ------------------------------------------------------------------ what is due

    @property
    def should_evaluate(self) -> bool:
        """A log line waits for the evaluation of the present weights."""
        return self.progress.pending is not None and not self.stopped

    @property
    def should_save(self) -> bool:
        due = self.stopped or self._is_due(self.config.save_every)
        return due and self.progress.step != self._saved_step

    @property
    def should_leave(self) -> bool:
        return self.stopped or self.progress.step >= self.last

    @property
    def should_log(self) -> bool:
        """After a step; steps that are evaluated or saved are always logged."""
        config = self.config
        regular = (self.progress.step - 1) % config.log_every == 0
        return regular or self._is_due(config.eval_every) or self._is_due(config.save_every)

    def _is_due(self, every: int) -> bool:
        step = self.progress.step
        return step == self.last or (every > 0 and step > 0 and step % every == 0)

    def should_stop(self) -> bool:
        """Whether a signal requests a stop: long work calls it at every batch. Where the model is sharded, ranks must
        make equally many forward passes, so that it is a collective there."""
        stopping = self.faults.should_stop()
        return self.faults.agree(stopping) if self.start.layout.sharded else stopping

    # ------------------------------------------------------------------ what the loop calls

    @contextlib.contextmanager
    def interruptible(self, phase: str) -> Iterator[None]:
        """Long work that a signal may end with Interrupted: the run is stopped then, and the block's rest left out."""
        try:
            with self.faults.phase(phase):
                yield
        except Interrupted:
            self.stopped = True

    def add(self, stats: StepStats, tokens: int) -> None:
        """Count a step of so many tokens over all ranks."""
        self.meter.add(stats, tokens)
        self.meter.clock += self.recorder.step()
        self._stats = stats

    def log(self, stats: StepStats, **more: Any) -> None:
        """Log the last step, or keep its line until its evaluation; this waits for the device.

        Raises UserError: when three steps in a row were not finite.
        """
        line = self._read(stats) | more
        if self._is_due(self.config.eval_every):
            self.progress.pending = line
        else:
            self.logger.step(line)
            self.meter.restart()

    def log_evaluation(self, **metrics: float) -> None:
        """Complete the line that waits for this evaluation, and log it.

        Raises UserError: when a validation loss in bits per byte is not finite.
        """
        val_bpb = metrics.get("val_bpb")
        if val_bpb is not None:
            if not math.isfinite(val_bpb):
                raise UserError(
                    f"validation is {val_bpb} at step {self.progress.step}, nothing more was saved: lower the rates"
                )
            self.progress.best_val_bpb = min(val_bpb, self.progress.best_val_bpb or math.inf)
        if self.progress.pending is not None:
            self.logger.step(self.progress.pending | metrics)
            self.progress.pending = None
        self.meter.restart()

    def save(self, loader_state: dict[str, Tensor], **meta: Any) -> None:
        """Begin to write a checkpoint of the present weights; training continues meanwhile.

        `loader_state` is this rank's position in the data, `meta` further entries of meta.json.
        """
        if self._stats is not None:
            self._read(self._stats)  # a signal stopped the run between two log lines
        start = self.start
        training = Training(self.optimizer.state_dict(), loader_state, self.device.rng_state())
        source = {} if start.source is None else {"source": checkpoint_manager.short_name(start.source)}
        meta = {
            "stage": self.stage, "config": dataclasses.asdict(self.config), "progress": self.progress.to_dict(),
            **source, "pretraining": start.pretraining, "fingerprints": self.fingerprints, **meta,
        }  # fmt: skip
        with self.faults.phase("saving", self.saver.patience_seconds):
            self._last_save_failed()  # wait for it; a failure was reported already, and this save may succeed
            self.saved = self.saver.save(self.progress.step, start.model, start.tokenizer, meta, training)
        self._saved_step = self.progress.step
        self.meter.restart()

    def finish(self, summary: str = "") -> None:
        """Call after the `with` block, when everything is on the disk. Ends the process if a signal stopped the run."""
        devices.shutdown(self.device)
        if self.stopped:
            self.faults.leave(self.saved)
        summary = summary or f"{self.progress.seconds:.1f} s of training"
        print0(f"done: {self.progress.step:,} steps, {summary}")
        record(self.stage, self.start.tag, self.start.began, self.device)

    # ------------------------------------------------------------------ details

    def _read(self, stats: StepStats) -> dict[str, Any]:
        """The numbers of a log line; refuses to continue after three steps in a row that were not finite."""
        self._stats = None
        line = self.meter.read(stats)
        if self.meter.since_good < 3:
            return line
        good = self.progress.step - self.meter.since_good
        last_good = str(good - 1) if good else "none"
        checkpoint = self._newest_checkpoint()
        hint = ", then --resume" if checkpoint else ""
        raise UserError(
            f"the loss or its gradient was not finite three steps in a row; last good step: {last_good}, newest "
            f"checkpoint: {checkpoint or 'none'}; lower the learning rates{hint}"
        )

    def _newest_checkpoint(self) -> Path | None:
        with contextlib.suppress(Exception):  # a failed save was reported when it failed
            self.saver.wait()
        steps = checkpoint_manager.steps(self.folder)
        return self.folder / f"step_{steps[-1]:06d}" if steps else None

    def _last_save_failed(self) -> Exception | None:
        """Wait for the save under way, on all ranks: those that still write would miss one that had left."""
        own: Exception | None = None
        try:
            self.saver.wait()
        except Exception as error:
            own = error
        if not self.faults.agree(own is not None):
            return None
        return own or UserError("another rank could not save the last checkpoint: see its error line")
