"""How a run is spread over its processes: the layout of one process; parallel/ has the layouts of several."""

from dataclasses import dataclass
from typing import Any, Literal

from nanochat import rooms
from nanochat.device import Device
from nanochat.exchange import Exchange


@dataclass(frozen=True)
class Layout:
    """One process, which holds the whole model and does all of the work."""

    # Whether ranks hold only parts of the parameters: then each forward pass is a collective.
    sharded = False

    def __str__(self) -> str:
        return "one process"

    def shard(self, model: Any, device: Device) -> None:
        """Leave this process its part of the parameters of a GPT, in place. Make the optimizer afterwards.

        The model may still be on the meta device.
        """

    def exchange(self, model: Any) -> Exchange:
        """The exchange between the ranks in a step, for a model that `shard` has laid out: one for each optimizer."""
        return Exchange()


def lay_out(
    device: Device, parallel: Literal["ddp", "fsdp"] = "ddp", replicate: int = 1, expert_parallel: bool = False
) -> Layout:
    """The layout of a run on all of its processes: `ddp` keeps the whole model on each, `fsdp` a part of it.

    Raises UserError: when the processes do not form `replicate` groups, or not groups of `device.context_ranks`, or
    when they cannot hold experts in parts.
    """
    if expert_parallel:
        layout = rooms.find("layouts", "experts")(device, parallel, replicate)
    elif device.world_size == replicate == device.context_ranks == 1:
        return Layout()
    else:
        layout = rooms.find("layouts", parallel)(device, replicate)
    if device.context_ranks > 1:
        layout = rooms.find("layouts", "context")(device, layout)
    return layout
