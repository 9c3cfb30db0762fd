"""The flags that scripts share: a training script's Config inherits them and adds its own.

An annotation states a flag's range, and `Frozen` that a resumed run must not change it (see ground/cli.py).
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from nanochat.ground.cli import Count, Fraction, Frozen, Positive, Range, Seed, UserError

Examples = TypeVar("Examples", bound="EpochFlags")
Epochs = Annotated[float, Range(1e-9, 10**6)]
HeldOut = Annotated[float, Range(0, 0.9)]  # part of a file
Rate = Annotated[float, Range(0, 1e4)]

if TYPE_CHECKING:
    from nanochat.optim import StateFormat


@dataclass(frozen=True)
class TrainFlags:
    """The flags of every training script."""

    # evaluation, logging, saving
    eval_every: Count = 100  # steps between evaluations; 0: only at the beginning and the end
    log_every: Positive = 10  # steps between log lines; reading a loss waits for the device
    # Steps between checkpoints; 0: only at the end. Default: about every ten minutes, in place of the one before.
    save_every: Count | None = None
    keep_last: Count = 0  # checkpoints to keep: this many newest, and the best by validation; 0: all
    profile: Count = 0  # steps to record after the first few: a trace and its summary in the run's folder
    run: str | None = None  # the run's name at a tracker
    track: str = ""  # wandb, swanlab, tensorboard; several with commas
    model_tag: str | None = None  # the checkpoints' folder name; default: d<depth> in pretraining, then the source's
    resume: bool = False  # continue from the newest whole checkpoint of this tag
    dry_run: bool = False  # print how much memory a step takes on each device, and end
    dry_run_devices: Positive = 1  # with --dry_run: count for one of this many devices, which need not be here
    # data
    strict_data: bool = False  # each warning about the data is an error: rows left out, files or columns not read
    # processes
    parallel: Literal["ddp", "fsdp"] = "ddp"  # each process holds the whole model, or a shard of it
    replicate: Positive = 1  # fsdp: groups of neighbouring processes that hold a whole model each, sharded inside
    context_parallel: Positive = 1  # this many neighbouring processes share each row: a part of its tokens each
    expert_parallel: bool = False  # fsdp: each process holds whole experts, and tokens travel to them
    activation_checkpointing: bool = False  # compute a block's activations twice to save memory
    # AdamW's second mean stays in float32 where it moves too slowly to be rounded, as in fine-tuning (optim.py).
    optimizer_dtype: Frozen[Literal["float32", "bfloat16"]] = "float32"  # running means; bfloat16: half, but rounded
    offload_optimizer: bool = False  # keep the optimizer's state in main memory; each step copies it there and back
    hang_seconds: Positive = 600  # a rank that makes no progress for this long ends the run, which names it
    # device
    device: str = "auto"  # auto, npu, cuda or cpu
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # the dtype of matrix products; parameters stay in float32
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto: where it pays
    deterministic: bool = False  # an accelerator adds up in one order, slower: the same run has the same bits
    seed: Frozen[Seed] = 0  # decides everything random: new weights, the data's order, samples

    @property
    def kept_as(self) -> "StateFormat":
        """How the optimizer keeps its state."""
        import torch  # not at the top: --help must answer at once

        from nanochat.optim import StateFormat

        return StateFormat(getattr(torch, self.optimizer_dtype), self.offload_optimizer)


@dataclass(frozen=True)
class StageFlags(TrainFlags):
    """The flags of every stage that starts from a checkpoint of an earlier stage and learns from tasks."""

    # model
    source: str = "base"  # a stage, a folder (ours, Hugging Face's or peft's) or hf:ORG/NAME
    source_tag: str | None = None  # tag of the source; default: --model_tag, or else the tag written last
    max_seq_len: Frozen[Annotated[int, Range(0, 10**7)]] = 0  # tokens of a row; 0: the model's whole context
    # How to reach a longer context than the source's; auto: by the source's method, if it has one.
    rope_scaling: Frozen[Literal["auto", "yarn"]] = "auto"
    # data
    tasks: Frozen[str] = ""  # NAME[=PATH][:WEIGHT],..., PATH, ORG/NAME, FILE.py:CLASS; default: by what the base read
    columns: str = ""  # columns that have other names: question=COLUMN,answer=COLUMN; also system, messages, chosen
    thoughts: Literal["keep", "drop"] = "keep"  # thoughts in the files' replies (reasoning_content, <think>)
    hub: Literal["hf", "modelscope"] = "hf"  # where tasks with data are downloaded from
    # optimizer
    lr_scale: Annotated[float, Range(0, 100)] | None = None  # multiplies all learning rates of pretraining


@dataclass(frozen=True)
class ChatFlags(StageFlags):
    """The flags of our stages after pretraining, which can train at an absolute rate, and only adapters (lora.py)."""

    # A Jinja file instead of an imported model's own template, such as one that marks replies by {% generation %}.
    chat_template: str | None = None
    # batch
    gradient_accumulation_steps: Positive | None = None  # instead of the examples of a step: micro-batches per device
    # optimizer
    learning_rate: Annotated[float, Range(1e-9, 1)] | None = None  # absolute, of AdamW; default: Muon, by --lr_scale
    weight_decay: Annotated[float, Range(0, 100)] = 0.0  # decay of matrices, with --learning_rate
    max_grad_norm: Annotated[float, Range(0)] | None = None  # 0: do not clip; default: 1 under AdamW, else 0
    # adapters
    lora_rank: Frozen[Annotated[int, Range(0, 4096)]] = 0  # train only adapters of this rank; 0: the model itself
    lora_alpha: Frozen[Annotated[float, Range(1e-6, 1e6)]] = 32.0  # adapters are multiplied by alpha / rank
    lora_dropout: Frozen[Annotated[float, Range(0, 0.99)]] = 0.0  # dropout on an adapter's input, in training
    lora_targets: Frozen[str] = "all"  # q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj, or some of them
    lora_base: Frozen[Literal["plain", "nf4"]] = "plain"  # nf4: the frozen weights take 4.5 bits each (QLoRA)

    def __post_init__(self):
        if not self.lora_rank:
            for name in ("lora_alpha", "lora_dropout", "lora_targets", "lora_base"):
                if getattr(self, name) != getattr(ChatFlags, name):
                    raise UserError(f"--{name} needs --lora_rank: without it the model itself is trained, not adapters")
        if self.adamw_rate is not None and self.lr_scale != type(self).lr_scale:
            chosen_by = "--learning_rate" if self.learning_rate is not None else "the rate of --lora_rank"
            raise UserError(f"{chosen_by} is absolute: leave --lr_scale out")
        if self.weight_decay and self.adamw_rate is None:
            raise UserError(f"--weight_decay {self.weight_decay:g} needs --learning_rate, which selects AdamW")

    @property
    def adapter_rate(self) -> float:
        """The default of --learning_rate with adapters."""
        # Good rates for adapters are about ten times the rates of full fine-tuning, at any rank (source: Schulman et
        # al. 2025, LoRA Without Regret). The rate of SFT is from QLoRA (source: Dettmers et al. 2023).
        return 2e-4

    @property
    def adamw_rate(self) -> float | None:
        """The rate of AdamW; None: Muon trains, at the rates by rule."""
        if self.learning_rate is None and self.lora_rank:
            return self.adapter_rate
        return self.learning_rate

    @property
    def largest_norm(self) -> float | None:
        """The norm to which `train_step` clips gradients; None: it does not."""
        # Trainers of models from elsewhere clip to 1, and so do their recipes. Muon's updates have one size, however
        # large the gradient is.
        default = 0.0 if self.adamw_rate is None else 1.0
        norm = default if self.max_grad_norm is None else self.max_grad_norm
        return norm or None


@dataclass(frozen=True)
class EpochFlags(ChatFlags):
    """The flags of SFT and DPO, which learn from given examples."""

    # horizon and batch
    num_iterations: Positive = 200  # steps
    num_epochs: Epochs | None = None  # instead of --num_iterations: every example of --tasks comes once an epoch
    device_batch_size: Positive = 8  # rows a device computes at once; a row holds as many conversations as fit
    # Elsewhere: batch size x gradient accumulation x devices.
    target_examples_per_step: Frozen[Positive] = 32  # per step over all devices, in as many micro-batches as needed
    # Held out of a file without a test split; default: 2%, at most 200 rows, and none of less than 100.
    val_share: Frozen[HeldOut | None] = None
    # optimizer
    lr_schedule: Literal["linear", "cosine", "constant"] = "linear"  # how the rates fall; constant: not at all
    # The first part of the run, in which the rates rise; default: at most 40 steps.
    warmup_ratio: Annotated[float, Range(0, 0.9)] | None = None
    warmdown_fraction: Fraction = 1.0  # the last part of the run, in which the rates fall

    def __post_init__(self):
        super().__post_init__()
        forbid_both(self, "num_epochs", "num_iterations", "the horizon")
        forbid_both(self, "gradient_accumulation_steps", "target_examples_per_step", "the examples of a step")

    def for_devices(self: "Examples", count: int) -> "Examples":
        """These flags with --gradient_accumulation_steps as a number of examples: a checkpoint records that number."""
        if self.gradient_accumulation_steps is None:
            return self
        examples = self.device_batch_size * self.gradient_accumulation_steps * count
        return replace(self, target_examples_per_step=examples, gradient_accumulation_steps=None)


def forbid_both(flags: TrainFlags, optional: str, other: str, what: str) -> None:
    """Raises UserError: when both flags are set; the first one is None by default."""
    if getattr(flags, optional) is not None and getattr(flags, other) != getattr(type(flags), other):
        raise UserError(f"--{optional} and --{other} both set {what}: leave one of them out")
