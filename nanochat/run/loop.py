"""A run around the loop of a training script: what is due, its log, its checkpoints, and how it stops.

    run = Run("sft", config, start, optimizer, steps, fingerprints={...})
    with run:
        for step in run.steps():               # at the top of a turn `step` steps are finished
            if run.must_evaluate:
                with run.interruptible("evaluation"):
                    run.log_evaluation(val_loss=...)
            if run.must_save:
                run.save(loader_state)
            if run.must_leave:
                break
            stats = train_step(...)
            run.count(stats, tokens)
            if run.must_log:
                run.log_step(lr=...)
    run.finish()

A step's log line waits for its evaluation at the top of the next turn. The first turn evaluates the weights that the
run starts from.
"""

import contextlib
import functools
import gc
import math
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from nanochat import device as devices
from nanochat import model_folder
from nanochat.ground import host, screen, user_code
from nanochat.ground.cli import Interrupted, UserError
from nanochat.ground.log import counted, print0, record, warn
from nanochat.ground.paths import checkpoint_dir, lock, run_dir, unlock
from nanochat.ground.untrusted import printable
from nanochat.optim import Optimizer
from nanochat.ranks import decide_on_rank_zero
from nanochat.run import saver, verdict
from nanochat.run.flags import TrainFlags
from nanochat.run.progress import CLEAR, FEW_STEPS, Attendant, Meter, Progress, loss_of
from nanochat.run.run_log import RunLog
from nanochat.run.stage import Start
from nanochat.run.stop import Stop
from nanochat.run.watchdog import Watchdog
from nanochat.train import StepStats

SAVE_SECONDS = 900.0  # how long a save may take before it counts as a hang
SAVE_EVERY_SECONDS = 600.0  # training time between saves, unless --save_every is set
LAST_SAVE_SECONDS = 600.0  # for the last save to find room on the disk
RETRY_SECONDS = 5.0
LEAVE_SECONDS = 10.0  # for a save under way when another rank may be gone
FREEZE_AFTER = 3  # steps of a process: then the compiler's code is there too


class Run:
    """A context manager around a training loop, on all ranks.

    The `must_...` decide the work of a turn of the loop, by the flags and the end; `stop` receives signals. With
    `--resume`, `progress` and `loader_states` (of every rank that saved) come from the newest checkpoint.
    `attendants` accompany the loop; the run enters them and reports its steps to them. A script whose data has nothing
    held out sets `has_validation` to False: nothing is due for evaluation then.
    `fingerprints` and `tasks` are described in `saver.describe`.
    """

    def __init__(
        self,
        stage: str,
        config: TrainFlags,
        start: Start,
        optimizer: Optimizer,
        steps: int,
        *,
        fingerprints: dict[str, Any],
        tasks: Sequence[str] = (),
        token_flops: int | None = None,
    ):
        self.stage = stage
        self.config = config
        self.start = start
        self.optimizer = optimizer
        self.device = start.device
        self.last = steps
        if config.offload_optimizer:
            size = optimizer.state_bytes()["cpu"] / 2**20
            print0(f"optimizer state: {size:,.1f} MiB in main memory, copied to the device and back in every step")
        self.folder = checkpoint_dir(stage, start.tag)
        self.log_folder = run_dir(stage, start.tag)
        self.meta = saver.describe(stage, config, start, optimizer, tasks, fingerprints)
        self.progress = Progress()
        self.loader_states: list[dict[str, Tensor]] = []
        if config.resume:
            self.progress, self.loader_states = saver.resume(self.folder, config, start, optimizer, steps, self.meta)
        self.first_step = self.progress.step  # first step of this process: more than 0 if it resumes
        self.checkpoint_bytes = saver.bytes_of_checkpoint(start.model, optimizer.state_dict(), self.device)
        self.loader_bytes = 0  # what the loaders of all ranks add to a checkpoint; a script with large ones sets it
        # Step of the newest checkpoint. One whose evaluation a signal ended is saved again, with the evaluation.
        self.saved_step = self.first_step if self.loader_states and not self.progress.pending else None
        self.in_time: list[int] = []  # steps that this process saved because it was time, and no flag requested
        self.saved_seconds = self.progress.seconds  # training time up to that checkpoint
        self.step_seconds = 0.0  # time of a step since then, as of the last log line
        self.next_save: int | None = None  # without --save_every: the step at which it is time
        self.saving: futures.Future[str] | None = None  # the save that a thread writes
        self.saving_progress: dict[str, Any] = {}  # and the progress in it
        self.warned_of_room = False
        self.warned_of_memory = False
        self.stopped = False  # a signal ends the run, or a failure
        self.has_validation = True
        self._stats: StepStats | None = None  # stats of the last step, until a log line has read them
        self.meter = Meter(self.progress, start.device, token_flops)
        self.progress.window = max(steps // 10, min(FEW_STEPS, steps // 4), 1)
        if start.model.config.experts:
            experts: Any = start.model.blocks[0].mlp  # as in all blocks
            self.meter.more = functools.partial(experts.read_loads, start.model, start.device)
        self.stop = Stop(start.device, self.progress.step)
        self.failure = ""  # why the run ends early, unless by a signal
        self.error: BaseException | None = None  # the cause of `failure`
        self.attendants: list[Attendant] = []

    def __enter__(self) -> "Run":
        config = self.config
        device = self.device
        progress = self.progress
        if device.is_main:
            lock(self.folder)
        # The optimizer has its state before the first step, so the bytes are known: a run of days must not learn at its
        # first save that the disk is too small. Of a resumed run some checkpoints are there, and older ones make room.
        self.checkpoint_bytes += self.loader_bytes
        new_steps = 0 if self.first_step else self.last
        saver.require_room_for_run(self.folder, config, device, self.checkpoint_bytes, new_steps)
        if not config.resume:
            aside = saver.set_aside(self.folder, self.log_folder, device)
            if aside is not None:
                print0(f"an earlier run of this tag is now {aside}; --resume would have continued it")
        first_line = progress.step - (1 if progress.pending else 0)
        self.logger = RunLog(self.stage, self.log_folder, self.last, first_line, device.is_main)
        if config.track and device.is_main:
            from nanochat.run import trackers

            name = config.run or f"{self.stage}-{self.start.tag}"
            self.logger.trackers = trackers.start(config.track, name, self.log_folder, self.meta["config"])
        self.watchdog = Watchdog(device, self.stop, progress.step, config.hang_seconds)
        self.attendants.append(self.watchdog)
        self._stack = contextlib.ExitStack()
        self._stack.callback(unlock, self.folder)
        self._stack.callback(gc.unfreeze)
        self._stack.enter_context(self.stop)
        self._stack.enter_context(self.logger)
        for attendant in self.attendants:
            self._stack.enter_context(attendant)
        if self.first_step == 0 and device.is_main:
            saver.write_facts(self.log_folder / "run.json", self.start, self.stage, self.last)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and self.saving is not None:
            # After a failed collective another rank may be gone, and with it its part of the save.
            with self.phase("saving", SAVE_SECONDS):
                futures.wait([self.saving], LEAVE_SECONDS if devices.explain(error) else SAVE_SECONDS)
        self._stack.__exit__(kind, error, trace)
        if error is not None and self.stop.signal and devices.explain(error):
            sys.exit(128 + self.stop.signal)  # another rank failed, has printed why, and made torchrun end this one

    def steps(self) -> Iterator[int]:
        """The number of finished steps, at the top of every turn; the loop breaks when leaving is due."""
        self.meter.restart()
        while True:
            if self.progress.step - self.first_step == FREEZE_AFTER:
                # Python's garbage collector now and then visits every object, 300,000 after the imports, in half a
                # second of a busy core (AMD EPYC, 2026-11-23). Each rank does it at another moment, and all ranks
                # wait. The objects loaded so far stay: the collector can skip them.
                gc.collect()
                gc.freeze()
            yield self.progress.step
            for attendant in self.attendants:
                self.meter.clock += attendant.boundary(self.progress.step)
            # All ranks stop at the same step. The loop then has one more turn, which saves and leaves.
            self.stopped = self.stopped or self.stop.boundary(self.progress.step)

    def should_stop(self) -> bool:
        """Whether a signal requests a stop; long work calls it at every batch. Ranks of a sharded model must make
        equally many forward passes, so there it is a collective."""
        stopping = self.stop.should_stop()
        return self.stop.agree(stopping) if self.start.layout.sharded else stopping

    @contextlib.contextmanager
    def interruptible(self, phase: str) -> Iterator[None]:
        """Long work that a signal may end with Interrupted: the run then stops, and skips the rest of the block.

        The run also stops where the work has failed on any rank; `finish` then raises the reason.
        """
        try:
            with self.phase(phase), user_code.failures():
                yield
        except Interrupted as reason:
            self.stopped = True
            self.failure = str(reason)
            self.stop.publish()  # the signal may have come to another rank

    def read_ahead(self, read: Callable[[int], Any]) -> Callable[[int], Any]:
        """`read(step)`, which reads a step's data, called a step early: after an error all ranks train once more, if
        none has launched further steps."""
        ahead: dict[int, Any] = {}

        def take(step: int) -> Any:
            data = ahead.pop(step) if step in ahead else read(step)
            if step + 1 < self.last and self.error is None:
                try:
                    ahead[step + 1] = read(step + 1)
                except (UserError, OSError) as error:
                    self.fail(error)
            return data

        return take

    def fail(self, error: BaseException) -> None:
        """Have all ranks stop before this one is without data: they save and leave, and `finish` raises this error."""
        line = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        self.failure, self.error = line, error
        if not self.device.is_main:
            print(f"error: rank {self.device.rank}: {printable(line)}", file=sys.stderr, flush=True)
        self.stop.request(signal.SIGTERM)
        if self.stop.publish():
            self.stop.choose_last()

    def phase(self, name: str, seconds: float = 0.0) -> contextlib.AbstractContextManager[None]:
        """Report to the watchdog work other than training, which may make no progress for `seconds`."""
        return self.watchdog.phase(name, seconds)

    # ---------------------------------------------------------------------- what is due after the finished steps

    @property
    def must_evaluate(self) -> bool:
        """Before the first step, and after a step whose log line waits for its evaluation."""
        first = self.progress.step == 0 and self.progress.initial is None
        return (first or self.progress.pending is not None) and self.has_validation and not self.stopped

    @property
    def must_save(self) -> bool:
        due = self.stopped or self.every(self.config.save_every or 0) or self.progress.step == self.next_save
        return due and self.progress.step != self.saved_step

    @property
    def must_leave(self) -> bool:
        return self.stopped or self.progress.step >= self.last

    @property
    def must_log(self) -> bool:
        """After a step; steps that are evaluated or saved are always logged. So is the third: its line has the time
        that the run still takes, and the first two may compile."""
        config = self.config
        regular = (self.progress.step - 1) % config.log_every == 0 or self.progress.step == 3
        return regular or self.every(config.eval_every) or self.every(config.save_every or 0)

    def every(self, steps: int) -> bool:
        """Whether this is a multiple of `steps` or the end of the run; 0: only the end."""
        step = self.progress.step
        return step == self.last or (steps > 0 and step > 0 and step % steps == 0)

    # ---------------------------------------------------------------------- log lines; they wait for the device

    def count(self, stats: StepStats, tokens: int) -> None:
        """Count a step of `tokens` tokens over all ranks."""
        self.meter.add(stats, tokens)
        self.logger.bar.done = self.progress.step
        self._stats = stats

    def log_step(self, **more: Any) -> None:
        """Log the last step with `more` numbers, or keep its line in `progress.pending` until its evaluation.

        Raises UserError: when three steps in a row were not finite.
        """
        line = self._read() | more
        self.progress.note(more, self.meter.steps)
        self.settle_save(wait=False)
        steps = self.progress.step - (self.saved_step or self.first_step)
        self.step_seconds = (self.progress.seconds - self.saved_seconds) / steps
        self._plan_save()
        if self.progress.step == 1:
            line |= self.progress.initial or {}
        # A step that is due for evaluation has one line for both: kept here, which makes `must_evaluate` true, it is
        # completed by `log_evaluation` at the top of the next turn. If a signal comes first, the line is saved with
        # `progress`, and the resumed run begins with the evaluation.
        if self.every(self.config.eval_every) and self.has_validation:
            self.progress.pending = line
        else:
            self.logger.step(line)
            self._judge()
            self.meter.restart()

    def log_evaluation(self, **metrics: float) -> None:
        """Complete the line that waits for this evaluation, and log it.

        The evaluation before the first step has no line yet: `log_step` adds its numbers to line 0, as `..._before`.

        Raises UserError: when a validation loss is not finite.
        """
        for name in ("val_bpb", "val_loss"):
            if not math.isfinite(metrics.get(name, 0.0)):
                hint = "lower the rates"
                if not self.progress.step:
                    hint = "nothing is trained yet, look at --source, or for a parameter that init_weights leaves out"
                raise UserError(
                    f"validation is {metrics[name]} at step {self.progress.step}, nothing more was saved: {hint}"
                )
        self.progress.evaluated = {"step": self.progress.step, **metrics}
        if loss_of(self.progress.evaluated) < loss_of(self.progress.best):
            self.progress.best = self.progress.evaluated
        if self.progress.step == 0:
            self.progress.initial = {f"{name}_before": value for name, value in metrics.items()}
            numbers = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            print0(f"before the first step: {numbers}")
        elif self.progress.pending is not None:
            self.logger.step(self.progress.pending | metrics)
            self.progress.pending = None
        self._judge()
        self.meter.restart()

    def _judge(self, is_over: bool = False) -> str:
        """What is wrong with the run. A line on stderr says so once, again when a loss has become clearly worse, and at
        the end."""
        problem, _, advice = verdict.judge(self).partition(": ")
        kind, *_ = re.split(r"\d", problem)
        evaluated = self.progress.evaluated or {}
        loss = evaluated.get("val_bpb", evaluated.get("val_loss", 0.0))
        warned = self.progress.warned
        if problem and (is_over or (not self.must_leave and loss > (1 + CLEAR) * warned.get(kind, -1.0))):
            warned[kind] = loss
            warn(f"after {counted(self.progress.step, 'step')} {problem}: {advice}")
        return problem

    def _report_best(self) -> None:
        """One line where the best checkpoint is not the last one, or where the best weights were not saved."""
        last = self.progress.step
        best = self.progress.best_saved
        if best is None or best["step"] == last:
            best = self.progress.best
        if best is None or best["step"] in (0, last):
            return
        folder = model_folder.step_path(self.folder, int(best["step"]))
        use = f"--source {self.stage}/{self.start.tag}/{folder.name}"
        if not model_folder.is_whole(folder):
            use = f"which is damaged or not saved; --save_every {self.config.eval_every} --keep_last 1 keeps the best"
        print0(f"validation was best at step {best['step']}: {use}")

    def _read(self) -> dict[str, Any]:
        """The numbers of the last step that no line has read; refuses to continue where training has diverged."""
        stats = self._stats
        self._stats = None
        if stats is None:
            return {}
        line = self.meter.read(stats)
        if self.meter.since_good >= 3:
            self.settle_save()
            last_good = self.progress.step - self.meter.since_good - 1
            raise saver.divergence(self.folder, last_good, self.first_step)
        return line

    # ---------------------------------------------------------------------- saving, and the end

    def save(self, loader_state: dict[str, Tensor]) -> None:
        """Write a checkpoint of the present weights: a thread does, while training continues. The last one is waited
        for, and tried for LAST_SAVE_SECONDS before trained weights are lost.

        `loader_state` is this rank's position in the data.
        Raises UserError: when it cannot be written and the run ends here. Else a later save may succeed.
        """
        self._read()  # a signal may have stopped the run between two log lines
        self.settle_save()  # one at a time
        if self.progress.step == self.saved_step:  # a failure stopped the run before the next step
            return
        give_up = time.monotonic() + LAST_SAVE_SECONDS
        error = self._try_save(loader_state)
        if error is not None:
            hint = f"; trying again for {LAST_SAVE_SECONDS:g} s" if self.must_leave else ""
            warn(f"step {self.progress.step} was not saved: {error}{hint}")
        while error is not None and self.must_leave:
            if not decide_on_rank_zero(self.device, lambda: time.monotonic() < give_up):
                raise error
            time.sleep(RETRY_SECONDS)
            self.stop.should_stop()  # the watchdog sees that this is not a hang
            error = self._try_save(loader_state)
        self.meter.restart()

    def _try_save(self, loader_state: dict[str, Tensor]) -> Exception | None:
        """Save, or begin to; returns why that failed."""
        step = self.progress.step
        best = self.progress.best_saved
        evaluated = self.progress.evaluated
        if evaluated is not None and evaluated["step"] == step and loss_of(evaluated) < loss_of(best):
            best = evaluated
        best_step = None if best is None else int(best["step"])
        progress = {**asdict(self.progress), "best_saved": best}
        beside = not self.must_leave and decide_on_rank_zero(self.device, self._has_memory)
        try:
            with self.phase("saving", SAVE_SECONDS), screen.Bar("saving"):
                write = saver.prepare(
                    self.folder, step, self.start.model, self.start.tokenizer, {**self.meta, "progress": progress},
                    self.optimizer.state_dict(), loader_state, self.device, keep_last=self.config.keep_last,
                    best=best_step, replaces=() if self.config.keep_last else self.in_time, beside=beside,
                )  # fmt: skip
                if beside:
                    self.saving = saver.in_thread(write, self.stop)
                    self.saving_progress = progress
                    self.next_save = None  # planned when this one is over
                else:
                    self._count_save(write(None), progress)
        except (UserError, OSError) as error:
            return error
        return None

    def settle_save(self, wait: bool = True) -> None:
        """Count the save that a thread writes, or warn that it failed; without `wait`, only if it is over. All ranks
        call this together."""
        saving = self.saving
        if saving is None or not (wait or decide_on_rank_zero(self.device, saving.done)):
            return
        self.saving = None
        try:
            with self.phase("saving", SAVE_SECONDS), screen.Bar("saving"):
                saved = decide_on_rank_zero(self.device, saving.result)
            self._count_save(saved, self.saving_progress)
        except (UserError, OSError) as error:
            warn(f"step {self.saving_progress['step']} was not saved: {error}")

    def _count_save(self, saved: Path | str, progress: dict[str, Any]) -> None:
        """A checkpoint with this progress is on the disk."""
        print0(f"saved {saved}")
        best = self.progress.best_saved = progress["best_saved"]
        if self.config.save_every is None:
            self.in_time = [one for one in self.in_time if best is not None and one == best["step"]]
            self.in_time.append(progress["step"])
        self.saved_step = progress["step"]
        self.saved_seconds = progress["seconds"]
        if not self.must_leave:
            self._plan_save()

    def _has_memory(self) -> bool:
        """Whether main memory has room for a copy of the checkpoint, which training would change, and to spare."""
        free = host.free_memory() or math.inf
        fits = 2 * self.checkpoint_bytes < free
        if not fits and not self.warned_of_memory:
            warn(
                f"training waits while a checkpoint is written: a copy of its {self.checkpoint_bytes:,} bytes takes "
                f"more than half of the free memory, {free:,} bytes"
            )
            self.warned_of_memory = True
        return fits

    def _plan_save(self) -> None:
        """Without --save_every: choose the step of the next save, by the time of the steps so far. A collective."""
        if self.config.save_every is not None or self.saving is not None:
            return

        # The ranks' clocks differ, so rank 0 chooses. All ranks are here, at a log line or after a save.
        def choose() -> int | None:
            # A save before the end leaves room for the one at the end. An earlier save in time makes room, unless it is
            # the best one.
            best = self.progress.best_saved
            leaving = [step for step in self.in_time if best is None or step != best["step"]]
            count = 1 if leaving else 2
            if saver.free_bytes(self.folder) <= saver.ROOM * count * self.checkpoint_bytes:
                if not self.warned_of_room:
                    warn(f"{self.folder} has room only for a last checkpoint: make room, or a crash loses this run")
                self.warned_of_room = True
                return None
            steps = max(1, int(SAVE_EVERY_SECONDS / self.step_seconds))
            save = max(self.progress.step, (self.saved_step or self.first_step) + steps)
            # With an evaluation a checkpoint can be the best one: wait for the next, up to as much time again.
            rest = -save % (self.config.eval_every or 1)
            return save + rest if rest < steps else save

        self.next_save = decide_on_rank_zero(self.device, choose)

    def finish(self, summary: str = "") -> None:
        """Call after the `with` block, when everything is on the disk. Ends the process if a signal stopped the run.

        Raises UserError: when a failure stopped it.
        """
        devices.shutdown(self.device)
        record(self.stage, self.start.tag, self.start.began, self.device, (self.first_step, self.progress.step))
        saved = model_folder.step_path(self.folder, self.progress.step)
        if self.failure:
            if not self.device.is_main:  # one line for all ranks
                sys.exit(1)
            raise UserError(f"{self.failure}; saved {saved}, --resume continues") from self.error
        if self.stopped:
            self.stop.leave(saved)
        problem = self._judge(is_over=True)
        if self.device.is_main:  # it may read a checkpoint
            self._report_best()
        changes = verdict.compared(self.progress)
        outcome = [f"{name} {sign * before:.4f} -> {sign * now:.4f}" for name, sign, before, _, now, _ in changes]
        parts = [counted(self.progress.step, "step"), *(outcome or ["nothing was held out"]), summary]
        print0(f"done{problem and f', but {problem}'}: {', '.join(filter(None, parts))}")
