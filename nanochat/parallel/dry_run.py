"""--dry_run: count the device memory of a step before the run.

The run's code builds its model and its optimizer and takes one step, on tensors that have a shape, a dtype and a device
but no data (torch's FakeTensorMode). Nothing is computed, and a model of any size fits. The count includes every
storage, from the operator that returns it until Python drops it, in the blocks of 512 bytes to which allocators round.
No formula can become outdated, and the count covers every option of a run. It leaves out memory inside operators,
unused memory between an allocator's blocks, and the device's runtime. torch.compile usually takes less: the counted
step is eager.

The tests compare the count with the peak of the device's allocator: they agree within 2%
(tests/simnpu/test_adapters.py).

With `--dry_run_devices N` one process counts for N devices: it is rank 0 of N, whose part is the largest, in a process
group in which nothing travels.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanochat import device as devices
from nanochat.attention import Segments
from nanochat.device import Device
from nanochat.ground.cli import UserError
from nanochat.ground.log import print0
from nanochat.ground.sharding import is_dtensor, local
from nanochat.optim import Optimizer
from nanochat.packing import PackedBatch
from nanochat.train import LossFunction, train_step

BLOCK = 512  # bytes
MIB = 1 << 20
PRETENDED = "pretended"  # the process group of --dry_run_devices


def pretend(device: Device, ranks: int) -> Device:
    """Make this process rank 0 of `ranks` processes that do not exist. Collectives return at once."""
    from torch.testing._internal.distributed import fake_pg

    if device.world_size > 1:
        raise UserError("--dry_run_devices counts for devices without their processes: run it in a single process")
    if not hasattr(dist.Backend, PRETENDED.upper()):
        kinds = sorted({device.kind, "cpu"})
        dist.Backend.register_backend(PRETENDED, fake_pg._create_fake_pg, extended_api=True, devices=kinds)
    if dist.is_initialized():  # from an earlier count of this process
        dist.destroy_process_group()
    dist.init_process_group(PRETENDED, store=fake_pg.FakeStore(), rank=0, world_size=ranks)
    return dataclasses.replace(device, world_size=ranks)


def begin(device: Device, *models: Any) -> "Ledger":
    """Place models from the meta device on the device, and count everything that follows."""
    ledger = Ledger(device)
    # Existing models and batches are real tensors: they enter the count when an operator reads them.
    ledger.modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
    ledger.modes.enter_context(ledger.resizing())
    ledger.modes.enter_context(ledger)
    for model in models:
        model.to_empty(device=device.torch_device)
    return ledger


class Ledger(TorchDispatchMode):
    """The bytes of a device's tensors in each phase of a step; from `begin` to `report` tensors have no data."""

    def __init__(self, device: Device):
        super().__init__()
        self.device = device
        self.live = 0  # bytes
        self.phase = "setup"
        self.entered: dict[str, int] = {}  # live bytes when a phase last began
        self.peaks: dict[str, int] = {}  # peak bytes of each phase
        self._sizes: dict[int, int] = {}  # bytes of each live storage
        self.modes = contextlib.ExitStack()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.device.type == self.device.kind:
                # Not `local`, whose detach() takes as long as all of the counting.
                held: Any = value._local_tensor if is_dtensor(value) else value  # pyright: ignore[reportAttributeAccessIssue]
                self._count(held.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        """Count a storage's present size, and notice its end."""
        key = storage._cdata
        if key not in self._sizes:
            weakref.finalize(storage, self._drop, key)
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        self.live += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.live)

    def _drop(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    @contextlib.contextmanager
    def resizing(self) -> Iterator[None]:
        """Count `resize_` of a storage, by which FSDP frees and reuses gathered weights; no dispatch mode sees it."""
        resize = torch.UntypedStorage.resize_

        def counted(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self._count(storage)
            return result

        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.entered[phase] = self.peaks[phase] = self.live

    def count_step(
        self, model: Any, optimizer: Optimizer, batches: Iterable[Any], loss_fn: LossFunction, **settings: Any
    ) -> dict[str, int]:
        """Take a step as the run would; returns the bytes of its parts and, last, the peak.

        `batches` are the largest micro-batches; from the second one on, gradients are in memory.
        """

        def counted_loss(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
            self.enter("forward")
            result = loss_fn(model, batch)
            self.enter("backward")
            return result

        def counted_update(*inputs: Any, **options: Any) -> None:
            self.enter("update")
            optimizer.step(*inputs, **options)
            self.enter("end")

        counted_optimizer: Any = SimpleNamespace(
            before_backward=optimizer.before_backward, reduce=optimizer.reduce, step=counted_update
        )
        hooks = [
            model.register_forward_pre_hook(lambda *_: self.enter("forward")),
            model.norm.register_forward_hook(lambda *_: self.enter("loss")),  # the last module before the loss
        ]
        train_step(model, counted_optimizer, batches, counted_loss, device=self.device, **settings)
        for hook in hooks:
            hook.remove()
        self.modes.close()
        state = optimizer.state_bytes()
        phase = max(self.peaks, key=lambda phase: self.peaks[phase])
        return {
            "parameters": _bytes([*model.parameters(), *model.buffers()]),
            "gradients": _bytes(parameter for parameter in model.parameters() if parameter.requires_grad),
            "optimizer state": state.pop(self.device.kind, 0),
            "optimizer state in main memory": state.get("cpu", 0),
            "activations": self.entered["loss"] - self.entered["forward"],
            "logits and loss": self.peaks["loss"] - self.entered["loss"],
            f"most at once, in the {phase}": self.peaks[phase],
        }

    def report(
        self,
        model: Any,
        optimizer: Optimizer,
        loss_fn: LossFunction,
        rows: int,
        *,
        batch_of: Callable[[PackedBatch], Any] = lambda rows: rows,
        micro_batches: int = 2,
        max_grad_norm: float | None = None,
    ) -> None:
        """Print the counts of `count_step` for micro-batches of full rows, and leave the process group: the command
        ends here. `batch_of` converts the rows to the loss's batch. Of `micro_batches` the first two are counted: later
        ones take no more."""
        batch = batch_of(full_rows(rows, model.config.sequence_len, self.device))
        counted = [batch] * min(micro_batches, 2)
        sizes = self.count_step(model, optimizer, counted, loss_fn, max_grad_norm=max_grad_norm)
        total = self.device.total_memory()
        if total is not None:
            sizes["the device has"] = total
        print0("memory of a step on each device, counted on tensors without data:")
        for name, size in sizes.items():
            if size:
                print0(f"  {name:32}{size / MIB:10,.1f} MiB")
        devices.shutdown(self.device)


def _bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of the tensors that this process holds."""
    return sum(local(tensor).nbytes for tensor in tensors)


def full_rows(rows: int, tokens: int, device: Device) -> PackedBatch:
    """A micro-batch without data, with one document per row: other divisions into documents do not take more."""
    ids = [torch.zeros(rows, tokens, dtype=torch.long, device=device.torch_device) for _ in range(4)]
    bounds = torch.zeros(rows + 1, dtype=torch.int32, device=device.torch_device)
    ends = [tokens * (row + 1) for row in range(rows)]
    return PackedBatch(ids[0], ids[1], Segments(ids[2], ends, bounds), ids[3])
