"""Preferences: turn examples with a better and a worse reply into micro-batches for losses.py.

1. draw       an example's replies as tokens                           `draw_pairs`
2. pack       both replies of a pair into one micro-batch              `pair_batches`
3. compare    add the log probabilities of a frozen reference model    `with_reference`
4. learn      `dpo_loss` in losses.py, pair_losses.py
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanochat import losses
from nanochat.device import Device
from nanochat.ground import rooms
from nanochat.ground.cli import UserError
from nanochat.ground.log import warn
from nanochat.losses import PairBatch, reply_logp
from nanochat.mixture import Mixture, RenderedPair, is_learned
from nanochat.packing import pack_pairs
from nanochat.tokenizer import Tokenizer


def draw_pairs(mixture: Mixture, tokenizer: Tokenizer, numbers: range, max_tokens: int) -> list[RenderedPair]:
    """The pairs of examples by number, the same on every rank.

    Examples with nothing to prefer are left out: a reply is empty, or both replies agree in their first `max_tokens`.
    """
    pairs = [mixture.rendered_pair(tokenizer, number, max_tokens) for number in numbers]
    return [pair for pair in pairs if is_learned(*pair)]


def report_first(pairs: Sequence[RenderedPair], row_tokens: int) -> None:
    """Warn about the data if the context cuts off replies of a run's first examples."""
    replies = [reply for pair in pairs for reply in pair]
    cut = len([reply for reply in replies if reply.cut])
    if cut:
        warn(
            f"{cut} of the first {len(replies)} replies are cut off at the context of {row_tokens} tokens: "
            "they are compared without their ends; shorten them, or use a larger --max_seq_len"
        )


def with_settings(name: str, settings: Mapping[str, Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The loss of --loss with the settings of its flags; a setting of None keeps the loss's default.

    Raises UserError: when a setting is not None, and the loss does not take it.
    """
    names = [*losses.LOSSES["pair losses"], *rooms.names("pair losses")]
    functions = {loss: losses.find("pair losses", loss).function for loss in names}
    chosen = {setting: value for setting, value in settings.items() if value is not None}
    for setting, value in chosen.items():
        takers = [loss for loss in functions if setting in inspect.signature(functions[loss]).parameters]
        if name not in takers:
            raise UserError(f"--{setting} {value}: --loss {name} has none, {', '.join(takers)} has")
    return functools.partial(functions[name], **chosen)


def token_count(pairs: Iterable[RenderedPair]) -> int:
    return sum(len(reply.ids) for pair in pairs for reply in pair)


def pair_batches(pairs: Iterable[RenderedPair], row_tokens: int, rows: int, device: Device) -> Iterator[PairBatch]:
    """This rank's share of pairs, in micro-batches of `rows` rows."""
    replies = [reply for pair in pairs for reply in pair]
    for micro, count in pack_pairs(
        [reply.ids for reply in replies], [reply.mask for reply in replies], row_tokens, rows,
        device, device.data_rank, device.data_ranks,
    ):  # fmt: skip
        yield PairBatch(micro, count)


@torch.no_grad()
def with_reference(batch: PairBatch, reference: Any) -> PairBatch:
    """A micro-batch with the log probabilities of the reference model, which may be compiled; None: unchanged."""
    return batch if reference is None else replace(batch, reference_logp=reply_logp(reference, batch))
