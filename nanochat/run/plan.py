"""--dry_run --plan 8x64: which layout of a run fits 8 cards of 64 GB each, before anything is started.

For each candidate (CANDIDATES, cheapest first) the script's own `main` runs as a dry run (memory.py) three times, in
this process, as rank 0 of that many ranks that do not exist:

    with all blocks    the model, the optimizer and its update; no forward or backward pass
    with 2 blocks      the forward and the backward passes of a step; with 6 blocks, if it has experts
    with 6 blocks      the same; with 10 blocks

Activations and gradients grow by the same amount with every block. So a phase of the step takes what the model and the
optimizer take, which is counted whole, and what the passes take in addition, which is continued by a line from 2 and 6
blocks to all blocks. The first blocks of a backward pass take more where gathered experts, the largest part of a model,
are still in memory, so there the line begins later. The optimizer is not continued: its work is dealt out in whole
matrices and in buckets of parameters. Candidates that differ only in the optimizer share their passes. A plan agrees
with a dry run of all blocks within 3% (tests/run/test_plan.py).

The bytes that a card passes to collectives in a step follow from the shapes of the parameters. With R ranks, n(p)
elements of a parameter whose rows are filled up to a multiple of R, and b micro-batches a step:

    ddp        4 n(p) + 4 n(p)    of each trained parameter that is divided: gradients reduced, new weights gathered
               4 n(p)             of each other one: its gradient is summed everywhere
    fsdp       b s g n(p)         weights gathered: s bytes in transit (2 in the bf16 of products, 4 in fp32), in g = 2
                                  passes (forward and backward; embeddings and head only forward, g = 1)
               4 b n(p)           of each trained parameter: gradients reduced in every micro-batch
    replicas   4 n(p) / R         of each trained parameter, between the groups, once a step; R is the size of a group
    context    p b s t (2 H + 2 K') D     in each block: queries, keys and values of t tokens (the rows of a micro-batch
                                  among R ranks) to the attention, and its result back, in p = 2 passes, 3 with
                                  recomputation; K' is lcm(K, R). And the losses: 4 R bytes of a sum, 4 t R of tokens
    experts    b (f (8 E + 2 e) + 2 e)    in each block, with expert parallelism, where fsdp leaves the experts alone: E
                                  counts, and e = s t K C bytes of t tokens to their K experts, and as many back, in f
                                  forward passes (2 with recomputation, else 1) and in the backward pass
    Muon       4 h + 4 h'         h: the elements of matrices that this rank holds rows of, or owns, whichever is more:
                                  about 1/R of all; h' has one more element a row, for the way back

and 12 bytes for the sums of the step. A collective that takes and returns tensors of different sizes counts the larger
one. The tests count the collectives of a step and compare exactly. The bytes leave out forward passes besides the
training's: of a reference model, of old probabilities, of sampling.

The count leaves out what no tensor of the run holds; LEFT_OUT adds it.
"""

import contextlib
import dataclasses
import io
import math
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanochat import device as devices
from nanochat import rooms, screen
from nanochat.cli import UserError
from nanochat.device import Device
from nanochat.exchange import Exchange
from nanochat.flags import TrainFlags
from nanochat.log import counted, print0
from nanochat.optim import Muon, Optimizer, Stack
from nanochat.run import memory
from nanochat.run.memory import Ledger
from nanochat.screen import track
from nanochat.sharding import is_sharded, local

GB = 10**9  # bytes
CARDS_OF_A_HOST = 8
FEW = 2  # blocks: from two on, a block's weights are gathered while the one before it computes
FEW_WITH_EXPERTS = 6
FURTHER = 4  # blocks more, for the slope: a whole period of SSSL and of value embeddings
PASSES = ("setup", "forward", "loss", "backward")  # the phases that are continued by a line

# ---------------------------------------------------------------------- candidates

# What a candidate is made of, as flags. HOSTS is the number of hosts.
HOSTS = -1
PARTS: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": "ddp"},
    "fsdp in each host": {"parallel": "fsdp", "replicate": HOSTS},
    "fsdp": {"parallel": "fsdp"},
    "recomputation": {"activation_checkpointing": True},
    "offloaded optimizer": {"offload_optimizer": True},
    "expert parallelism": {"expert_parallel": True},
    "context 2": {"context_parallel": 2},
    "context 4": {"context_parallel": 4},
    "context 8": {"context_parallel": 8},
}
# Cheapest in time first. FSDP's gathers hide behind the computing of a host's cards, mostly; recomputation is a third
# more computing, which nothing hides; an offloaded optimizer waits for twice its state to cross the bus to main memory.
# Cards that share rows leave fewer rows for a step, or make it take more micro-batches.
CANDIDATES = (
    ("ddp",),
    ("fsdp in each host",),
    ("fsdp",),
    ("ddp", "recomputation"),
    ("fsdp in each host", "recomputation"),
    ("fsdp", "recomputation"),
    ("fsdp in each host", "recomputation", "expert parallelism"),
    ("fsdp", "recomputation", "expert parallelism"),
    ("ddp", "recomputation", "offloaded optimizer"),
    ("fsdp in each host", "recomputation", "offloaded optimizer"),
    ("fsdp", "recomputation", "offloaded optimizer"),
    ("fsdp in each host", "recomputation", "offloaded optimizer", "expert parallelism"),
    ("fsdp", "recomputation", "offloaded optimizer", "expert parallelism"),
    ("fsdp in each host", "recomputation", "context 2"),
    ("fsdp in each host", "recomputation", "context 4"),
    ("fsdp in each host", "recomputation", "context 8"),
    ("fsdp", "recomputation", "context 2"),
    ("fsdp", "recomputation", "context 4"),
    ("fsdp", "recomputation", "context 8"),
    ("fsdp", "recomputation", "offloaded optimizer", "context 8"),
)


@dataclass(frozen=True)
class Reserve:
    """Memory of a card that no tensor of the run holds."""

    runtime: int = 3 * GB  # the device's runtime, its kernels, and workspaces of operators
    group: int = 400_000_000  # buffers of a group of ranks: 200 MB for sending and 200 for receiving
    gaps: float = 0.04  # of what is counted: unused memory between the allocator's blocks

    def needed(self, counted: float, groups: int) -> float:
        """The bytes of a card for a step of `counted` bytes, with this number of process groups."""
        return counted * (1 + self.gaps) + self.runtime + self.group * groups


LEFT_OUT = Reserve()


@dataclass(frozen=True)
class Candidate:
    name: str
    flags: dict[str, Any]

    def groups(self, cards: int) -> int:
        """Process groups that a rank is in: all ranks; with replicas also the ranks of its host, and its peers; and the
        ranks that share rows, where they are not one of these."""
        replicas = self.flags.get("replicate", 1)
        sharing = self.flags.get("context_parallel", 1)
        groups = {cards, cards // replicas} | ({sharing} if sharing > 1 else set())
        return len(groups - {1}) + (1 if replicas > 1 else 0)


def candidates(config: TrainFlags, cards: int) -> list[Candidate]:
    """The candidates for this many cards that do not contradict the user's own flags.

    Raises UserError: when none is left.
    """
    hosts = cards // CARDS_OF_A_HOST
    planned = {flag for part in PARTS.values() for flag in part}
    chosen = {}  # planned flags that the user has set
    for one in dataclasses.fields(config):
        if one.name in planned and getattr(config, one.name) != one.default:
            chosen[one.name] = getattr(config, one.name)
    found: list[Candidate] = []
    for parts in CANDIDATES:
        flags: dict[str, Any] = {}
        for part in parts:
            flags |= {flag: hosts if value == HOSTS else value for flag, value in PARTS[part].items()}
        if any(flags.get(flag, value) != value for flag, value in chosen.items()):
            continue
        own = {flag: value for flag, value in chosen.items() if flag not in flags}
        flags |= own
        is_possible = (
            all(hasattr(config, flag) for flag in flags)
            and ("replicate" in own or flags.get("replicate", 2) > 1)
            and (cards > 1 or flags["parallel"] == "ddp")
            and (flags["parallel"] == "fsdp" or not flags.get("expert_parallel"))
            and ("context_parallel" in own or flags.get("context_parallel", 1) <= cards)
        )
        if is_possible and flags not in [one.flags for one in found]:
            name = [parts[0] if cards > 1 else "one card", *parts[1:]]
            found.append(Candidate(" + ".join((*name, *map(as_flag, own, own.values()))), flags))
    if not found:
        set_flags = " ".join(map(as_flag, chosen, chosen.values()))
        raise UserError(f"--plan {config.plan}: no layout for {cards} cards has {set_flags}: leave them out")
    return found


def as_flag(name: str, value: Any) -> str:
    """A flag as it is typed."""
    return f"--{name}" if value is True else f"--{name} {shlex.quote(str(value))}"


# ---------------------------------------------------------------------- bytes moved


def bytes_moved(model: Any, optimizer: Optimizer, device: Device, rows: int, micro_batches: int) -> dict[str, int]:
    """The bytes that a rank passes to collectives in a step, by what they are for; the formulas are at the top.

    A micro-batch has `rows` whole rows. Without the losses of rows that ranks share, which depend on the loss function.
    """
    exchange: Any = optimizer.exchange
    if type(exchange) is Exchange:  # one process
        return {}
    ranks = exchange.place.ranks
    kinds = ("muon", "gradients", "weights", "between groups", "context", "experts")
    moved = {"sums": 3 * torch.float32.itemsize} | dict.fromkeys(kinds, 0)

    def elements(parameter: Tensor) -> int:
        """n(p)"""
        rows = math.ceil(parameter.size(0) / ranks) * ranks
        return rows * math.prod(parameter.shape[1:])

    at_home: set[nn.Parameter] = getattr(exchange, "experts", set())  # no rank gathers these
    if is_sharded(model):
        for unit, dtype, parameters in _units(model):
            is_table = unit.startswith("value_embeddings.") or unit in ("embedding", "head")
            passes = 1 if is_table else 2
            for parameter in parameters:
                size = (dtype or parameter.dtype).itemsize
                if parameter not in at_home:
                    moved["weights"] += micro_batches * passes * size * elements(parameter)
                if parameter.requires_grad:
                    if parameter not in at_home:
                        moved["gradients"] += micro_batches * torch.float32.itemsize * elements(parameter)
                    if exchange.place.replicas > 1:
                        moved["between groups"] += torch.float32.itemsize * elements(parameter) // ranks
    else:
        for share in exchange.shares:
            if share.is_part:
                moved["gradients"] += share.parameter.element_size() * elements(share.parameter)
                moved["weights"] += share.parameter.element_size() * elements(share.parameter)
            else:
                moved["gradients"] += share.parameter.nbytes
    muons = [rule for rule in optimizer._rules if isinstance(rule, Muon)]
    for muon in muons:
        for stack in muon.stacks:
            columns = stack.shape[1]
            there_and_back = columns + columns + 1
            moved["muon"] += torch.float32.itemsize * _rows_that_travel(stack, ranks) * there_and_back
    c = model.config
    tokens = rows * c.sequence_len // device.context_ranks
    forward_passes = 2 if model.blocks[0].is_recomputed else 1
    if at_home:
        away_and_back = 2 * tokens * c.experts_per_token * c.width * device.dtype.itemsize
        counts = c.experts * torch.int64.itemsize
        moved["experts"] = c.n_layer * micro_batches * (forward_passes * (counts + away_and_back) + away_and_back)
    if device.context_ranks > 1:
        key_heads = math.lcm(c.n_kv_head, device.context_ranks)
        elements_of_token = 2 * (c.n_head + key_heads) * c.head_dim
        layers = c.n_layer * micro_batches * (forward_passes + 1)
        moved["context"] = layers * tokens * elements_of_token * device.dtype.itemsize
    return moved


def _units(model: nn.Module) -> Iterator[tuple[str, torch.dtype | None, list[nn.Parameter]]]:
    """The modules that FSDP gathers one at a time: the name of each ("" is the rest), its dtype in transit (None: the
    parameters' own), and its parameters."""
    units = {name: module for name, module in model.named_modules() if is_sharded(module)}
    seen: set[nn.Parameter] = set()
    for name in sorted(units, reverse=True):  # inner ones first
        parameters = [parameter for parameter in units[name].parameters() if parameter not in seen]
        seen.update(parameters)
        module: Any = units[name]
        yield name, module._get_fsdp_state()._mp_policy.param_dtype, parameters


def _rows_that_travel(stack: Stack, ranks: int) -> int:
    """The rows of a stack's matrices that rank 0 holds, or the rows of those that it owns, whichever are more."""
    held = 0
    for matrix in stack.matrices:
        most = math.ceil(matrix.share.parameter.size(0) / ranks)  # rank 0 holds the rows up to here
        held += max(0, min(matrix.stop, most) - matrix.start)
    return max(held, len(stack.owned) * stack.shape[0])


# ---------------------------------------------------------------------- counting


class Card(Device):
    """A card that is not here, counted on a CPU."""

    @property
    def kernels(self) -> Any:
        return rooms.find("kernels", "counted")(self.dtype, self.name)


@dataclass
class Count(memory.Method):
    """One count for a candidate: its question and, after `main` has run, its answer."""

    config: TrainFlags
    blocks: int | None = None  # how many, from the first on; None: all, without the passes
    has_whole_step: bool = False  # all blocks, with the passes and the update, for tests
    base: int = 0  # bytes of the model and the optimizer
    peaks: dict[str, int] = field(default_factory=dict)  # of each phase, in addition to them
    micro_batches: int = 0  # of a step
    moved: dict[str, int] = field(default_factory=dict)
    model_blocks: int = 0  # of the whole model
    has_experts: bool = False
    losses: int = 0  # bytes of losses that a micro-batch passes to the ranks which share its rows
    remarks: list[str] = field(default_factory=list)  # lines that `main` prints after its count

    def device(self, device: Device) -> Device:
        if device.kind != "cpu":
            return device
        values = {one.name: getattr(device, one.name) for one in dataclasses.fields(device)}
        if self.config.dtype == "auto":
            values["dtype"] = torch.bfloat16
        return Card(**values)

    def ledger(self, device: Device) -> Ledger:
        return PartLedger(device, self)


class PartLedger(Ledger):
    """Counts the parts of a step that its `Count` asks for."""

    def __init__(self, device: Device, count: Count):
        super().__init__(device)
        self.count = count
        self.counts_updates = count.has_whole_step

    def prepare(self, model: Any) -> None:
        """Leave the model some of its blocks."""
        blocks = list(model.blocks)
        self.count.model_blocks = len(blocks)
        self.count.has_experts = model.config.experts > 0
        if self.count.blocks is not None:
            model.blocks = nn.ModuleList(blocks[: self.count.blocks])
            for layer in range(self.count.blocks, len(blocks)):
                if str(layer) in model.value_embeddings:
                    del model.value_embeddings[str(layer)]

    def report(
        self, model: Any, optimizer: Optimizer, loss_fn: Any, rows: int, *, batch_of: Any = lambda rows: rows,
        micro_batches: int = 2, max_grad_norm: float | None = None,
    ) -> None:  # fmt: skip
        """Fill in the count instead of printing it."""
        count = self.count
        in_main_memory, copied = self._state_in_main_memory(optimizer)
        base = self.live
        count.base = base - in_main_memory
        count.micro_batches = micro_batches
        count.moved = bytes_moved(model, optimizer, self.device, rows, micro_batches)
        self.enter("setup")
        if count.blocks is not None or count.has_whole_step:
            batch = batch_of(memory.full_rows(rows, model.config.sequence_len, self.device))
            counted = [batch] * min(micro_batches, 2)
            if self.device.context_ranks > 1:
                model.register_forward_hook(self._count_losses)
            self.count_step(model, optimizer, counted, loss_fn, max_grad_norm=max_grad_norm)
        else:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.empty_like(parameter)
            optimizer.reduce()
            self.enter("update")
            one = torch.ones((), device=self.device.torch_device)
            optimizer.step(one, one)
            self.modes.close()
        count.peaks = {phase: peak - base for phase, peak in self.peaks.items()}
        count.peaks["update"] += copied
        devices.shutdown(self.device)
        assert isinstance(sys.stdout, _Silent)
        sys.stdout.clear()

    def _count_losses(self, model: Any, inputs: Any, result: Tensor) -> None:
        losses = self.device.context_ranks if result.ndim == 0 else result.numel()
        self.count.losses = torch.float32.itemsize * losses

    def _state_in_main_memory(self, optimizer: Optimizer) -> tuple[int, int]:
        """On a CPU, whose memory is the device's too: the bytes of the state that a card keeps in main memory, and the
        most that an update copies to the card at a time."""
        sizes: dict[int, int] = {}
        copies = [0]
        if self.device.kind != "cpu" or not self.count.config.offload_optimizer:
            return 0, 0
        for name, state in optimizer.state_dict().items():
            is_muon = name.startswith("muon.")
            if name.endswith(".steps") or (is_muon and not name.endswith(".momentum")):
                continue  # small: they stay on the card
            part = local(state)
            storage = part.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
            # In fp32: a stack's momentum, or the two means of a bucket.
            elements = storage.nbytes() // part.element_size()
            copies.append((1 if is_muon else 2) * torch.float32.itemsize * elements)
        return sum(sizes.values()), max(copies)


def count_with(main: Callable[[Any], None], config: TrainFlags, **question: Any) -> Count:
    """Run a script's `main` as a dry run, silently."""
    count = Count(config, **question)
    token = memory.method.set(count)
    silent = _Silent(sys.stdout)
    try:
        with contextlib.redirect_stdout(silent):
            main(config)
            count.remarks = silent.getvalue().splitlines()
    finally:
        memory.method.reset(token)
        if dist.is_initialized():  # it failed
            dist.destroy_process_group()
    return count


class _Silent(io.StringIO):
    """Swallows what this thread prints. Bars and heartbeats are printed by another one."""

    def __init__(self, shown: Any):
        super().__init__()
        self.shown = shown
        self.rich_proxied_file = getattr(shown, "rich_proxied_file", shown)  # rich draws its bars there
        self.thread = threading.get_ident()

    def clear(self) -> None:
        self.seek(0)
        self.truncate()

    def write(self, text: str) -> int:
        return self.shown.write(text) if threading.get_ident() != self.thread else super().write(text)


# ---------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class Planned:
    """A candidate's row of the table."""

    candidate: Candidate
    counted: int  # bytes at the peak
    phase: str  # of the peak
    needed: float  # bytes, with what the count leaves out
    micro_batches: int  # of a step
    moved: int  # bytes a step
    least: int  # bytes at the peak of the first few blocks


class Plan:
    """Counts the candidates of a run."""

    def __init__(self, main: Callable[[Any], None], config: TrainFlags, cards: int):
        self.main = main
        self.config = config
        self.cards = cards
        self.remarks: list[str] = []  # of the script, on what it does not count
        self.has_experts: bool | None = None  # whether the model has some; None: nothing is counted yet
        self._passes: dict[tuple[Any, ...], tuple[Count, Count]] = {}

    @property
    def few(self) -> int:
        """The number of blocks from which a phase is continued."""
        return FEW_WITH_EXPERTS if self.has_experts else FEW

    def of(self, candidate: Candidate) -> Planned:
        config = dataclasses.replace(self.config, dry_run_devices=self.cards, **candidate.flags)
        whole = count_with(self.main, config)
        self.remarks = whole.remarks
        self.has_experts = whole.has_experts
        few, more = self._passes_of(candidate)
        blocks = whole.model_blocks
        few_blocks = min(self.few, blocks)
        more_blocks = min(self.few + FURTHER, blocks)
        # In addition to the model and the optimizer.
        peaks = {"update": whole.peaks["update"]}
        for phase in PASSES:
            if phase in few.peaks:  # without a reference model nothing is computed in the setup
                slope = (more.peaks[phase] - few.peaks[phase]) / max(1, more_blocks - few_blocks)
                peaks[phase] = few.peaks[phase] + round(slope * (blocks - few_blocks))
        phase = max(peaks, key=lambda phase: peaks[phase])
        total = whole.base + peaks[phase]
        return Planned(
            candidate, total, phase,
            needed=LEFT_OUT.needed(total, candidate.groups(self.cards)),
            micro_batches=whole.micro_batches,
            moved=sum(whole.moved.values()) + few.losses * whole.micro_batches,
            least=few.base + max(few.peaks.values()),
        )  # fmt: skip

    def _passes_of(self, candidate: Candidate) -> tuple[Count, Count]:
        flags = {flag: value for flag, value in candidate.flags.items() if flag != "offload_optimizer"}
        key = tuple(sorted(flags.items()))
        if key not in self._passes:
            config = dataclasses.replace(self.config, dry_run_devices=self.cards, **flags)
            few = count_with(self.main, config, blocks=self.few)
            is_all = few.model_blocks <= self.few
            more = few if is_all else count_with(self.main, config, blocks=self.few + FURTHER)
            self._passes[key] = (few, more)
        return self._passes[key]


def parse(text: str) -> tuple[int, float]:
    """Cards and GB of each, of `8x64`.

    Raises UserError: when it is not of this form.
    """
    match = re.fullmatch(r"(\d{1,6})x(\d{1,6}(?:\.\d+)?)", text)
    if match is None or not int(match[1]) or not float(match[2]):
        raise UserError(f"--plan {text}: the number of cards and the GB of each, such as 8x64")
    cards = int(match[1])
    if cards > CARDS_OF_A_HOST and cards % CARDS_OF_A_HOST:
        fewer = cards // CARDS_OF_A_HOST * CARDS_OF_A_HOST
        raise UserError(
            f"--plan {text}: more than {CARDS_OF_A_HOST} cards are whole hosts of {CARDS_OF_A_HOST}, such as "
            f"{fewer}x{match[2]}"
        )
    return cards, float(match[2])


def run(main: Callable[[Any], None], config: TrainFlags) -> None:
    """Print a table of the candidates, and the command of the first one that fits.

    Raises UserError: when --plan is not a number of cards and their GB, other flags contradict it, or nothing fits.
    """
    assert config.plan is not None
    cards, size = parse(config.plan)
    if not config.dry_run:
        raise UserError(f"--plan {config.plan} belongs to --dry_run, which counts and ends: add --dry_run")
    if config.dry_run_devices > 1:
        raise UserError(f"--plan {config.plan} names the number of cards: leave --dry_run_devices out")
    rows = candidates(config, cards)
    screen.phase("counting")
    if devices.kind_of(config.device) == "cpu":
        print0("no accelerator is here: counted with operators that allocate what an accelerator's do")
    hosts = f" on {cards // CARDS_OF_A_HOST} hosts" if cards > CARDS_OF_A_HOST else ""
    print0(f"a step on {counted(cards, 'card')} of {size:g} GB{hosts}, in GB of 10^9 bytes:")
    width = max(len(row.name) for row in rows)
    print0(f"  {'':{width}}  {'a card':>8}  {'counted':>8}  {'most in':>8}  {'moved':>8}  micro-batches")
    plan = Plan(main, config, cards)
    table = []
    errors: dict[str, UserError] = {}  # the candidates that failed before one could be counted
    for row in track(rows, "counting"):
        if plan.has_experts is False and row.flags.get("expert_parallel"):
            continue
        try:
            one = plan.of(row)
        except UserError as error:
            if table:
                print0(f"  {row.name:{width}}  {error}")
            else:
                errors[row.name] = error
            continue
        if not table:
            for name, error in errors.items():
                print0(f"  {name:{width}}  {error}")
        table.append(one)
        numbers = f"{one.needed / GB:8.1f}  {one.counted / GB:8.1f}  {one.phase:>8}  {one.moved / GB:8.2f}"
        numbers += f"  {one.micro_batches:13,}"
        print0(f"  {row.name:{width}}  {numbers}{'  fits' if one.needed <= size * GB else ''}")
    if not table:
        raise next(iter(errors.values()))
    left_out = LEFT_OUT
    print0(
        f"a card: what is counted, {left_out.gaps:.0%} for gaps of the allocator, {left_out.runtime / GB:g} GB for the "
        f"runtime and {left_out.group / GB:g} GB for the buffers of each group of ranks; moved: what a card passes to "
        "collectives in a step of these micro-batches, besides those of sampling and of a reference model"
    )
    for line in plan.remarks:
        print0(line)
    fitting = [one for one in table if one.needed <= size * GB]
    if fitting:
        print0(f"the first that fits ({fitting[0].candidate.name}):")
        print0(f"  {command(config, fitting[0].candidate, cards)}")
        return
    least = min(table, key=lambda one: one.needed)
    shorter = "shorten --max_seq_len, lower --device_batch_size, or take more cards"
    if least.least > size * GB:
        raise UserError(
            f"--plan {config.plan}: {plan.few} layers of this model take {least.least / GB:.1f} GB a card by "
            f"themselves: {shorter}"
        )
    if not getattr(config, "lora_rank", 1):
        shorter = f"train adapters (--lora_rank 16), {shorter}"
    raise UserError(
        f"--plan {config.plan}: nothing fits; {least.candidate.name} takes the least, {least.needed / GB:.1f} GB a "
        f"card: {shorter}"
    )


def command(config: TrainFlags, candidate: Candidate, cards: int) -> str:
    """The command line of the run with a candidate's flags."""
    flags = []
    for one in dataclasses.fields(config):
        value = candidate.flags.get(one.name, getattr(config, one.name))
        if one.name in ("plan", "dry_run", "dry_run_devices") or value == one.default:
            continue
        if one.name == "device" and value == "cpu":  # it counted in the place of the cards
            continue
        flags.append(as_flag(one.name, value))
    module = sys.modules[type(config).__module__]
    script = module.__spec__.name if module.__spec__ else type(config).__module__
    if cards == 1:
        return " ".join(("python -m", script, *flags))
    launcher = f"python -m nanochat.run.launch --nproc_per_node={cards}"
    if cards > CARDS_OF_A_HOST:  # on each host, see docs/multinode.md
        launcher = (
            f"torchrun --nnodes={cards // CARDS_OF_A_HOST} --nproc_per_node={CARDS_OF_A_HOST} --rdzv_backend=c10d "
            "--rdzv_id=JOB --rdzv_endpoint=HOST:29500 --local_addr=ADDRESS"
        )
    return " ".join((launcher, "-m", script, "--", *flags))
