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
line with its checkpoint, and the resumed run begins with the evaluation. The first turn evaluates the weights that the
run starts from; its numbers are in the line of step 0, as `val_bpb_before` and the like.
"""

import contextlib
import dataclasses
import datetime
import gc
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from nanochat import checkpoint_manager, model_folder, provenance, scaling, screen, user_code
from nanochat import device as devices
from nanochat.adapters import lora
from nanochat.cli import Interrupted, UserError, frozen_flags
from nanochat.collectives import decide_on_rank_zero
from nanochat.device import Device
from nanochat.flags import ChatFlags, EpochFlags, SourceFlags, TrainFlags
from nanochat.gpt import GPT
from nanochat.log import RunLog, check_trackers, counted, duration, print0, record, warn
from nanochat.mixture import EpochMixture, Mixture
from nanochat.optim import Optimizer
from nanochat.parallel.mesh import Layout, lay_out
from nanochat.paths import SCRIPTS, checkpoint_dir, lock, naming, run_dir, safe_tag, unlock
from nanochat.run.compiling import CompilerClock, compile_blocks
from nanochat.run.faults import Faults
from nanochat.run.memory import Ledger
from nanochat.run.profiling import Recorder
from nanochat.sampling import CHAT_SAMPLING, SamplingParams, saved_settings
from nanochat.scaling import Rates
from nanochat.task import Task
from nanochat.tokenizer import Tokenizer
from nanochat.train import Meter, Progress, StepStats, make_adamw, make_optimizer

SAVE_SECONDS = 900.0  # how long a save may take before it counts as a hang
LONG_RUN_SECONDS = 86400.0  # a run that is estimated to take longer begins with a warning
FREEZE_AFTER = 3  # steps of a process: then the compiler's code is there too

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
    # What the model has read: data, tokens and batch_tokens of the base model, conversations of mid-training and SFT.
    pretraining: dict[str, Any]
    source: Path | None = None  # the checkpoint it began from
    tasks: list[str] = dataclasses.field(default_factory=list)  # those that the source has learned
    # How its replies are to be drawn.
    sampling: dict[str, float] = dataclasses.field(default_factory=lambda: saved_settings(CHAT_SAMPLING))
    reference: Any = None  # the source's model: a frozen copy of it, or the model itself without its adapters
    reference_source: Path | None = None  # its checkpoint; another one's of a teacher
    adapter: dict[str, Any] | None = None  # of a model that trains adapters alone: their settings and their base
    ledger: Ledger | None = None  # of a dry run: the model has no weights, and everything is counted


def open_device(config: TrainFlags) -> tuple[Device, Layout]:
    """Join the process group, take this process's device, seed its generators.

    Raises UserError: when the device is not there or cannot train, or the processes' flags contradict each other.
    """
    check_trackers(config.track)
    if config.run and not config.track:
        warn(f"--run {config.run} names the run at a tracker, and there is none: add --track, or leave --run out")
    if config.model_tag is not None:
        safe_tag(config.model_tag)
    device = devices.init(config.device, config.dtype, config.deterministic)
    if not device.can_train:
        raise UserError(f"{device.name} is made for inference and cannot train: train elsewhere, and chat here")
    if config.offload_optimizer and device.kind == "cpu":
        raise UserError("--offload_optimizer: on a CPU the state is in main memory already: leave the flag out")
    device.seed(config.seed)
    layout = lay_out(device, config.parallel, config.replicate)
    print0(f"device: {device}; {layout}")
    return device, layout


def begin(
    config: SourceFlags, with_reference: bool = False, teacher: str | None = None, with_scalar_head: bool = False
) -> Start:
    """Open the device, and load the checkpoint that a stage begins from.

    `with_reference` also keeps a frozen copy of its model, for losses that compare with it; `teacher` is the source of
    another model in its place. `with_scalar_head` gives the model a scalar head, of zeros where the source has none.
    Raises UserError: when there is no such checkpoint, or it is damaged, or the teacher reads other tokens.
    """
    began = time.time()
    device, layout = open_device(config)
    source_tag = config.source_tag
    if source_tag is None and config.source in ("auto", *SCRIPTS):
        source_tag = config.model_tag
    source = model_folder.find_source(config.source, source_tag, config.source_step, device)
    model, tokenizer, meta = checkpoint_manager.load_model(
        source, device, verified=True, layout=layout, activation_checkpointing=config.activation_checkpointing,
        max_seq_len=config.max_seq_len, rope_scaling=config.rope_scaling, seed=config.seed,
        without_weights=config.dry_run, new_adapters=config.lora if isinstance(config, ChatFlags) else None,
        with_scalar_head=with_scalar_head,
    )  # fmt: skip
    settings = lora.settings_of(model)
    reference: Any = None
    reference_source = source
    if teacher is not None:
        reference_source = model_folder.find_source(teacher, None, None, device, flag="--teacher ")
    if with_reference and teacher is None and settings is not None:
        reference = lora.without_adapters(model)
    elif with_reference or teacher is not None:
        reference, its_tokenizer, _ = checkpoint_manager.load_model(
            reference_source, device, verified=True, layout=layout, max_seq_len=config.max_seq_len,
            rope_scaling=config.rope_scaling, without_weights=config.dry_run,
        )  # fmt: skip
        if its_tokenizer.fingerprint() != tokenizer.fingerprint():
            raise UserError(
                f"--teacher {teacher} has another tokenizer than {source}: have it write replies (chat_batch) "
                "and train on them (chat_sft --tasks), as docs/rl.md shows"
            )
        if reference.config.sequence_len < model.config.sequence_len:
            raise UserError(
                f"--teacher {teacher}: its context is {reference.config.sequence_len} tokens, the student's "
                f"{model.config.sequence_len}: set --max_seq_len {reference.config.sequence_len}"
            )
    ledger = None
    if config.dry_run:
        ledger = Ledger.begin(device, model, *([reference] if isinstance(reference, GPT) else []))
    model.train()
    print0(f"source: {source}")
    if config.max_seq_len:
        scaled = model.config.rope_scaling
        by = "" if scaled is None else f", positions scaled by {scaled.factor:g} ({scaled.kind})"
        print0(f"context: {model.config.sequence_len:,} tokens, rope_theta {model.config.rope_theta:,.0f}{by}")
    if settings is not None:
        print0(lora.describe(model, settings))
    return Start(
        began, device, layout, model, tokenizer,
        tag=config.model_tag or model_folder.tag_of(source),
        pretraining={"data": "", "tokens": 0, **meta.get("pretraining", {})},
        source=source, tasks=meta["tasks"], sampling=saved_settings(SamplingParams(**meta["sampling"])),
        reference=reference, reference_source=reference_source, ledger=ledger,
        adapter=None if settings is None else {**lora.facts(settings), **model_folder.base_of(source)},
    )  # fmt: skip


def count_micro_batches(micro_tokens: int, by_rule: int, total: int | None, requested: int | None = None) -> int:
    """Micro-batches a step: from --total_batch_size, from a `requested` number, or for `by_rule` tokens a step.

    Raises UserError: when the flags contradict each other.
    """
    if total is None:
        return requested or max(1, round(by_rule / micro_tokens))
    count, rest = divmod(total, micro_tokens)
    if rest == 0 and requested in (None, count):
        return count
    nearest = requested or max(1, round(total / micro_tokens))
    wanted = "a multiple of" if requested is None else f"{requested} x"
    raise UserError(
        f"--total_batch_size {total} is not {wanted} {micro_tokens} tokens (device_batch_size x context x processes): "
        f"use {nearest * micro_tokens}, or another --device_batch_size"
    )


@dataclass(frozen=True)
class Horizon:
    """Which examples each step of SFT or DPO learns from: a function of the step, so a resume needs no position."""

    steps: int
    examples: int  # per step
    first: int = 0  # number of the run's first example
    epoch: int = 0  # examples in an epoch, whose last step has those that are left; 0: there are no epochs

    @classmethod
    def of(cls, config: EpochFlags, mixture: Mixture, first: int = 0) -> "Horizon":
        """That of --num_iterations or --num_epochs; of the latter, an epoch is all of the mixture."""
        examples = config.target_examples_per_step
        if config.num_epochs is None:
            return cls(config.num_iterations, examples, first)
        assert isinstance(mixture, EpochMixture)
        epoch = len(mixture)
        # Rounded: 1.1 epochs of 10 steps are 11.000000000000002 in floats.
        steps = math.ceil(round(config.num_epochs * math.ceil(epoch / examples), 6))
        return cls(max(1, steps), examples, epoch=epoch)

    def draws(self, step: int) -> range:
        """The numbers of a step's examples."""
        if not self.epoch:
            start = self.first + step * self.examples
            return range(start, start + self.examples)
        epoch, place = divmod(step, math.ceil(self.epoch / self.examples))
        start = epoch * self.epoch + place * self.examples
        return range(start, min(start + self.examples, (epoch + 1) * self.epoch))


def open_optimizer(config: ChatFlags, start: Start, rates: Rates) -> tuple[Optimizer, float]:
    """The optimizer of SFT, DPO or RL, and its peak rate for the log: that of AdamW, or of Muon's matrices."""
    clipping = ""
    if config.largest_norm is not None:
        clipping = f"; gradients are clipped to a norm of {config.largest_norm:g}"
    rate = config.adamw_rate
    if rate is None:
        print0(f"optimizer: Muon at {rates.matrix:.3g} for matrices, AdamW for the rest{clipping}")
        optimizer = make_optimizer(start.model, rates, start.device, layout=start.layout, kept_as=config.kept_as)
        return optimizer, rates.matrix
    print0(f"optimizer: AdamW at {rate:g}, weight decay of matrices {config.weight_decay:g}{clipping}")
    optimizer = make_adamw(start.model, rate, start.device, config.weight_decay, start.layout, config.kept_as)
    return optimizer, rate


# ---------------------------------------------------------------------- resume, or begin anew


def resume(
    folder: Path, config: TrainFlags, start: Start, optimizer: Optimizer, steps: int, meta: dict[str, Any]
) -> tuple[Progress, list[dict[str, Tensor]]]:
    """Load the weights, optimizer and generators of a folder's newest whole checkpoint.

    Returns the run's progress and the loader's state of every rank that saved; a new progress and no state where
    there is no checkpoint yet. `steps` is where the run is to end, `meta` what it will save about itself.
    Raises UserError: when anything of this is not as in the checkpoint, or when no checkpoint is whole.
    """

    def find() -> str | None:
        lock(folder)
        checkpoint_manager.clean_up(folder)
        found = model_folder.newest(folder)
        if found is None and model_folder.steps(folder):
            raise UserError(f"--resume: no checkpoint in {folder} is whole: move the folder away to start over")
        return str(found[0]) if found else None

    found = decide_on_rank_zero(start.device, find)
    if found is None:
        print0(f"--resume: nothing in {folder} yet, starting from the beginning")
        others = [path.name for path in model_folder.tags(folder.parent.name)]
        if others:  # the tag may be mistyped
            warn(f"--resume found nothing in {folder}; the tags that could be resumed are {', '.join(others)}")
        return Progress(), []
    step_folder = Path(found)
    saved = json.loads((step_folder / "meta.json").read_text(encoding="utf-8"))
    meta = {"model": dataclasses.asdict(start.model.config), "tokenizer": start.tokenizer.fingerprint(), **meta}
    changes = _refuse_changes(saved, meta, frozen_flags(type(config)), step_folder)
    progress = Progress(**saved["progress"])
    if progress.step > steps:
        flag = "--num_iterations" if getattr(config, "num_epochs", None) is None else "--num_epochs"
        raise UserError(f"--resume: {step_folder} is beyond {steps} steps: raise {flag} to continue")
    try:
        checkpoint_manager.load_weights(start.model, step_folder)
        loader_states, rng_states = checkpoint_manager.load_training(step_folder, saved, optimizer, start.device)
    except ValueError as error:  # not what its manifest promises, weights alone, or of another optimizer
        raise UserError(f"--resume: {error}; or move {step_folder} away to continue from the step before it") from error
    start.device.set_rng_state(rng_states[start.device.rank % len(rng_states)])
    print0(f"resumed from {step_folder}")
    if changes:
        print0(f"resumed with other settings: {', '.join(changes)}")
    return progress, loader_states


def _refuse_changes(saved: dict[str, Any], meta: dict[str, Any], frozen: list[str], step_folder: Path) -> list[str]:
    """Compare what a run is with its checkpoint; returns `--flag old -> new` of the flags that may change and did.

    Raises UserError: when anything else changed.
    """
    free = {f"--{flag}" for flag in meta["config"] if flag not in frozen}
    before = _facts(saved)
    changes = []
    for name, now in _facts(meta).items():
        if before.get(name, now) == now:
            continue
        if name not in free:
            flag = "--total_batch_size (tokens a step)" if name == "tokens a step" else name
            was, requested = ("(default)" if value in ("", None) else value for value in (before[name], now))
            raise UserError(
                f"--resume: {step_folder} was trained with {flag} {was}, not {requested}: use its flags, or another "
                "--model_tag"
            )
        changes.append(f"{name} {before[name]} -> {now}")
    return changes


def _facts(meta: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint's meta data say about its run, by the name in a message."""
    facts = {f"--{flag}": value for flag, value in meta["config"].items() if flag != "resume"}
    if meta.get("stage") == "base":  # before the flag existed, every token read its whole row
        facts.setdefault("--document_mask", "off")
    facts.setdefault("--lora_rank", 0)  # likewise
    facts.setdefault("--optimizer_dtype", "float32")  # likewise
    # The one draws by weight, the other each example once: another order.
    facts["the horizon in"] = "steps" if meta["config"].get("num_epochs") is None else "epochs"
    facts |= {"source": meta.get("source"), "tokenizer": meta["tokenizer"]}
    return {**facts, **meta["model"], **meta.get("fingerprints", {})}


def set_aside(folder: Path, run_folder: Path, device: Device) -> Path | None:
    """Move an earlier run's checkpoints and metrics to `<tag>.<n>`, before a run of the same tag begins anew.

    Returns where the checkpoints are now, None if there were none.
    """

    def move() -> str | None:
        if not any(folder.glob("step_*")):  # an unfinished step of a killed run counts too
            return None
        # A run that cannot start must not move anything: try its folder first.
        run_folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=run_folder).close()
        number = 1
        while folder.with_name(f"{folder.name}.{number}").exists():
            number += 1
        name = f"{folder.name}.{number}"
        folder.rename(folder.with_name(name))
        if not run_folder.with_name(name).exists():
            run_folder.rename(run_folder.with_name(name))
        return name

    name = decide_on_rank_zero(device, move)
    return folder.with_name(name) if name else None


def write_facts(path: Path, start: Start, stage: str) -> None:
    """Write to `run.json` what a run trains, on what, with which versions: the report's header. Only rank 0 writes."""
    device = start.device
    if not device.is_main:
        return
    model = start.model.config
    facts = {
        "stage": stage,
        "tag": start.tag,
        "started": datetime.datetime.fromtimestamp(start.began, datetime.timezone.utc).isoformat(timespec="seconds"),
        "parameters": scaling.parameter_counts(start.model)["total"],
        "adapter": start.adapter,
        "layers": model.n_layer,
        "context": model.sequence_len,
        "vocab_size": model.vocab_size,
        "data": start.pretraining["data"],
        "world_size": device.world_size,
        "device": device.name,
        "kind": device.kind,
        "dtype": str(device.dtype).removeprefix("torch."),
        "system": f"{platform.platform()}, {os.cpu_count()} cores",
        "commit": provenance.commit(),
        "versions": provenance.versions(),
    }
    with naming(path):
        path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------- around the loop


class Run:
    """A run's progress, log, checkpoints and faults; a context manager around the training loop, on all ranks.

    With `--resume` its constructor loads the newest checkpoint into the model and the optimizer: `progress` and
    `loader_states` (one of every rank that saved, none in a new run) are the checkpoint's. `steps` is where the run
    ends. `fingerprints` are what a resumed run must find unchanged and no flag states, by its name in a message.
    `tasks` are what the model learns in it.
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
        tasks: Sequence[Task] = (),
        token_flops: int | None = None,
    ):
        self.stage = stage
        self.config = config
        self.start = start
        self.device = start.device
        self.optimizer = optimizer
        self.last = steps  # the run ends when so many steps are finished
        self.folder = checkpoint_dir(stage, start.tag)
        self.meta = {"stage": stage, "config": dataclasses.asdict(config), "fingerprints": fingerprints}
        fingerprints["the optimizer"] = " and ".join(sorted({group.kind for group in optimizer.groups}))
        self.meta["pretraining"] = start.pretraining
        # For whoever serves the checkpoint: how to draw its replies, and what to ask it.
        self.meta["sampling"] = start.sampling
        self.meta["tasks"] = list(dict.fromkeys([*start.tasks, *(task.name for task in tasks)]))
        if start.adapter is not None:
            self.meta["adapter"] = start.adapter
            fingerprints["the base's weights"] = start.adapter["base_sha256"]
        if start.source is not None:
            self.meta["source"] = model_folder.short_name(start.source)
        if config.offload_optimizer:
            size = optimizer.state_bytes()["cpu"] / 2**20
            print0(f"optimizer state: {size:,.1f} MiB in main memory, copied to the device and back in every step")
        self.progress = Progress()
        self.loader_states: list[dict[str, Tensor]] = []
        if config.resume:
            self.progress, self.loader_states = resume(self.folder, config, start, optimizer, steps, self.meta)
        self.meter = Meter(self.progress, start.device, token_flops)
        self.compiles = False  # torch.compile is used in the loop
        self.stopped = False  # a signal ends the run, or a failure
        self.failure = ""  # what has failed, where it was no signal
        self.saved_step = self.progress.step if self.loader_states else None  # of the newest checkpoint
        self.first_step = self.progress.step  # of this process: more than 0 if it resumes
        self.resumed_step = self.saved_step
        self._stats: StepStats | None = None  # of the last step, while no log line has read it

    def __enter__(self) -> "Run":
        config = self.config
        device = self.device
        progress = self.progress
        runs = run_dir(self.stage, self.start.tag)
        if device.is_main:
            lock(self.folder)
        self.faults = Faults(device, progress.step, config.hang_seconds)
        if not config.resume:
            aside = set_aside(self.folder, runs, device)
            if aside is not None:
                print0(f"an earlier run of this tag is now {aside}; --resume would have continued it")
        self.logger = RunLog(
            self.stage, runs, self.last, run=config.run, trackers=config.track, config=self.meta["config"],
            rank=device.rank, start_step=progress.step - (1 if progress.pending else 0),
        )  # fmt: skip
        steps_left = self.last - progress.step
        self.recorder = Recorder(config.profile, steps_left, device, runs / "profile", self.logger.message)
        self._stack = contextlib.ExitStack()
        self._stack.callback(unlock, self.folder)
        self._stack.enter_context(self.faults)
        self._stack.enter_context(self.logger)
        self._stack.callback(self.recorder.close)
        self._stack.callback(gc.unfreeze)
        if self.compiles:
            self._stack.enter_context(CompilerClock(self.meter))
        if self.first_step == 0:
            write_facts(runs / "run.json", self.start, self.stage)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._stack.__exit__(kind, error, trace)
        if error is not None and self.faults.signal and devices.explain(error):
            sys.exit(128 + self.faults.signal)  # another rank failed, has printed why, and made torchrun end this one

    def compile(
        self,
        model: Any,
        mode: Literal["auto", "on", "off"],
        step_flops: int,
        shape: Sequence[int] | None = None,
        part: str = "step",
        *,
        forward_alone: bool = False,
    ) -> Any:
        """The model, compiled where that pays over the run's steps; prints how that `part` of it is computed.

        Where micro-batches differ, `shape` (rows, tokens) is the one that is compiled for; the others stay eager. None:
        there is one. `forward_alone`: some passes have no backward pass.
        Raises UserError: when `mode` is "on" and the model cannot be compiled.
        """
        if isinstance(model, lora.without_adapters):
            compiled = self.compile(model.model, mode, step_flops, shape, part, forward_alone=forward_alone)
            return model if compiled is model.model else lora.without_adapters(compiled)
        # A compiled model runs each pass with autograd. FSDP then waits for a backward pass to free what it gathered.
        if forward_alone and self.start.layout.sharded:
            if mode == "on":
                raise UserError(f"--compile on: chat_{self.stage} compiles no sharded model: leave out --parallel fsdp")
            print0(f"{part}: eager (sharded); kernels: {self.device.kernels}")
            return model
        # Neither the decision nor the shape may depend on the step that a run resumes at: compiled code rounds
        # differently.
        compiled, how = compile_blocks(self.device, model, mode, step_flops * self.last, shape)
        print0(f"{part}: {how}; kernels: {self.device.kernels}")
        self.compiles = self.compiles or compiled is not model
        if self.meter.token_flops and part == "step":  # chat_rl samples for longer than it trains
            self._print_time(step_flops)
        return compiled

    def _print_time(self, step_flops: int) -> None:
        """Print how long the run will take by the speed of a bare matrix product, and warn where that is days."""
        product_flops = self.device.product_flops() if self.device.is_main else None
        if product_flops is None:
            return
        # On a CPU a compiled step has half of a bare product's speed, an eager one a quarter (docs/measurements.md).
        share = 0.5 if self.compiles else 0.25
        step_seconds = step_flops / (share * product_flops * self.device.world_size)
        seconds = step_seconds * (self.last - self.progress.step)
        print0(f"time: about {duration(seconds)}, {step_seconds:,.2f} s a step, by the speed of a matrix product")
        if seconds > LONG_RUN_SECONDS:
            warn(
                f"this run takes about {duration(seconds)} here: lower --num_iterations, or train a smaller model "
                "(--depth of base_train); Ctrl-C saves, --resume continues"
            )

    def steps(self) -> Iterator[int]:
        """The number of finished steps, at the top of every turn; the loop leaves it by `should_leave`."""
        self.meter.restart()
        while True:
            if self.progress.step - self.first_step == FREEZE_AFTER:
                # Python's collector of garbage now and then looks through every object that it knows of, 300,000 after
                # the imports, on each rank at another moment, and all ranks wait for the one that does. What is loaded
                # now stays, so it need not look there (docs/measurements.md).
                gc.collect()
                gc.freeze()
            yield self.progress.step
            # All ranks stop at the same step. The loop then has one more turn, which saves and leaves.
            self.stopped = self.stopped or self.faults.boundary(self.progress.step)

    # ------------------------------------------------------------------ what is due

    @property
    def should_evaluate(self) -> bool:
        """Whether the present weights are to be evaluated: before the first step, and where `log` has kept the last
        step's line in `progress.pending`, from where `log_evaluation` takes it."""
        progress = self.progress
        first = progress.step == 0 and progress.initial is None
        return (first or progress.pending is not None) and not self.stopped

    @property
    def should_save(self) -> bool:
        due = self.stopped or self._is_due(self.config.save_every)
        return due and self.progress.step != self.saved_step

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
        """Long work that a signal may end with Interrupted: the run is stopped then, and the block's rest left out. So
        it is where the work has failed on any rank; `finish` then raises the reason."""
        try:
            with self.faults.phase(phase), user_code.failures():
                yield
        except Interrupted as reason:
            self.stopped = True
            self.failure = str(reason)

    def add(self, stats: StepStats, tokens: int) -> None:
        """Count a step of so many tokens over all ranks."""
        self.meter.add(stats, tokens)
        self.logger.advance(self.progress.step)
        self.meter.clock += self.recorder.step()
        self._stats = stats

    def log(self, stats: StepStats, **more: Any) -> None:
        """Log the last step, or keep its line in `progress.pending` until its evaluation; this waits for the device.

        Raises UserError: when three steps in a row were not finite.
        """
        line = self._read(stats) | more
        if self.progress.step == 1:
            line |= self.progress.initial or {}
        # A step that is due for evaluation has one line for both: kept here, which makes `should_evaluate` true, it is
        # completed by `log_evaluation` at the top of the next turn. If a signal comes first, the line is saved with
        # `progress`, and the resumed run begins with the evaluation.
        if self._is_due(self.config.eval_every):
            self.progress.pending = line
        else:
            self.logger.step(line)
            self.meter.restart()

    def log_evaluation(self, **metrics: float) -> None:
        """Complete the line that `log` has kept for this evaluation, and log it.

        The evaluation before the first step has no line yet: `log` adds its numbers to that of step 0, as `..._before`.

        Raises UserError: when a validation loss in bits per byte is not finite.
        """
        val_bpb = metrics.get("val_bpb")
        if val_bpb is not None:
            if not math.isfinite(val_bpb):
                raise UserError(
                    f"validation is {val_bpb} at step {self.progress.step}, nothing more was saved: lower the rates"
                )
            self.progress.best_val_bpb = min(val_bpb, self.progress.best_val_bpb or math.inf)
        if self.progress.step == 0:
            self.progress.initial = {f"{name}_before": value for name, value in metrics.items()}
            numbers = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            self.logger.message(f"before the first step: {numbers or 'nothing to evaluate'}")
        elif self.progress.pending is not None:
            self.logger.step(self.progress.pending | metrics)
            self.progress.pending = None
        self.meter.restart()

    def save(self, loader_state: dict[str, Tensor], **meta: Any) -> None:
        """Write a checkpoint of the present weights; training continues when all ranks have written their part.

        `loader_state` is this rank's position in the data, `meta` further entries of meta.json.
        Raises UserError: when it cannot be written and the run ends here. Else a later save may succeed.
        """
        if self._stats is not None:
            self._read(self._stats)  # a signal stopped the run between two log lines
        start = self.start
        step = self.progress.step
        meta = {**self.meta, "progress": self.progress.to_dict(), **meta}
        try:
            with self.faults.phase("saving", SAVE_SECONDS), screen.bar("saving"):
                saved = checkpoint_manager.save(
                    self.folder, step, start.model, start.tokenizer, meta, self.optimizer, loader_state, self.device,
                    keep_last=self.config.keep_last, keep_every=self.config.keep_every,
                )  # fmt: skip
        except (UserError, OSError) as error:
            if self.should_leave:
                raise
            warn(f"step {step} was not saved: {error}")
        else:
            self.saved_step = step
            self.logger.message(f"saved {saved}")
        self.meter.restart()

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
            raise UserError(f"{self.failure}; saved {saved}, --resume continues")
        if self.stopped:
            self.faults.leave(saved)
        summary = summary or f"{self.progress.seconds:.1f} s of training"
        print0(f"done: {counted(self.progress.step, 'step')}, {summary}")

    # ------------------------------------------------------------------ details

    def _read(self, stats: StepStats) -> dict[str, Any]:
        """The numbers of a log line; refuses to continue after three steps in a row that were not finite."""
        self._stats = None
        line = self.meter.read(stats)
        if self.meter.since_good < 3:
            return line
        last_good = self.progress.step - self.meter.since_good - 1
        steps = model_folder.steps(self.folder)
        checkpoint = model_folder.step_path(self.folder, steps[-1]) if steps else "none"
        hint = ", then --resume" if steps else ""
        # A checkpoint whose next step was not finite has diverged itself; so has the one that this run resumed, if it
        # saved none since.
        earlier = [step for step in steps[:-1] if step <= last_good]
        if earlier and (steps[-1] > last_good or steps[-1] == self.resumed_step):
            good = model_folder.step_path(self.folder, earlier[-1])
            checkpoint = f"{checkpoint}, which diverges: move all after {good} away"
        raise UserError(
            f"the loss or its gradient was not finite three steps in a row; last good step: "
            f"{last_good if last_good >= 0 else 'none'}, newest "
            f"checkpoint: {checkpoint}; lower the learning rates{hint}"
        )
