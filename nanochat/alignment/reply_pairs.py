"""Preferences: turn examples with a better and a worse reply into micro-batches for pair_losses.py.

1. draw       an example's replies as tokens                           `draw_pairs`
2. pack       both replies of a pair into one micro-batch              `pair_batches`
3. compare    add the log probabilities of a frozen reference model    `with_reference`
4. learn      `dpo_loss` and others in pair_losses.py
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanochat.alignment.pair_losses import PairBatch, PairLoss, reply_logp
from nanochat.device import Device
from nanochat.ground import rooms
from nanochat.ground.cli import UserError
from nanochat.ground.log import doubt
from nanochat.mixture import Mixture, RenderedPair, is_learned
from nanochat.packing import fill_rows, places_of
from nanochat.tokenizer import Tokenizer


def draw_pairs(mixture: Mixture, tokenizer: Tokenizer, numbers: range, max_tokens: int) -> list[RenderedPair]:
    """The pairs of examples by number, the same on every rank.

    Examples with nothing to prefer are left out: a reply is empty, or both replies agree in their first `max_tokens`.
    """
    pairs = [mixture.rendered_pair(tokenizer, number, max_tokens) for number in numbers]
    return [pair for pair in pairs if is_learned(*pair)]


def report_first(pairs: Sequence[RenderedPair], row_tokens: int, strict_data: bool) -> None:
    """Warn about the data if the context cuts off replies of a run's first examples."""
    replies = [reply for pair in pairs for reply in pair]
    cut = len([reply for reply in replies if reply.cut])
    if cut:
        doubt(
            f"{cut} of the first {len(replies)} replies are cut off at the context of {row_tokens} tokens: "
            "they are compared without their ends; shorten them, or use a larger --max_seq_len",
            strict_data,
        )


def find(name: str) -> PairLoss:
    """The loss of a --loss flag. Raises UserError: when no room has this name."""
    if name not in rooms.names("pair losses"):
        raise UserError(f"--loss {name}: one of {', '.join(rooms.names('pair losses'))}")
    return rooms.find("pair losses", name)


def with_settings(name: str, settings: Mapping[str, Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The loss of --loss with the settings of its flags; a setting of None keeps the loss's default.

    Raises UserError: when a setting is not None, and the loss does not take it.
    """
    function = find(name).function
    chosen = {setting: value for setting, value in settings.items() if value is not None}
    for setting, value in chosen.items():
        if setting not in inspect.signature(function).parameters:
            losses = rooms.names("pair losses")
            takers = [loss for loss in losses if setting in inspect.signature(find(loss).function).parameters]
            raise UserError(f"--{setting} {value}: --loss {name} has none, {', '.join(takers)} has")
    return functools.partial(function, **chosen)


def token_count(pairs: Iterable[RenderedPair]) -> int:
    return sum(len(reply.ids) for pair in pairs for reply in pair)


def pair_batches(pairs: Iterable[RenderedPair], row_tokens: int, rows: int, device: Device) -> Iterator[PairBatch]:
    """This rank's share of the pairs, in micro-batches of `rows` rows, at least 2.

    A preference loss compares the two replies of a pair, so both go into the same micro-batch (into any of its rows).
    All ranks get the same number of micro-batches; some may hold only padding, which counts as a pair.

    Raises ValueError: when a reply is longer than row_tokens + 1.
    """
    assert rows > 1
    replies = [reply for pair in pairs for reply in pair]
    # Give each pair its micro-batch and rows. Pairs with the longest reply go first, each to the micro-batch with the
    # most room. So the pairs spread evenly, and all ranks compute about the same amount.
    needs = [places_of(reply.ids, row_tokens) for reply in replies]
    micros: list[list[list[int]]] = []  # micro-batch -> row -> its replies
    free: list[list[int]] = []  # micro-batch -> row -> free places
    for first in sorted(range(0, len(replies), 2), key=lambda i: -max(needs[i], needs[i + 1])):
        pair = sorted((first, first + 1), key=lambda i: -needs[i])
        while (placed := _place_pair(free, [needs[i] for i in pair])) is None:
            for _ in range(device.data_ranks):  # an empty micro-batch for each rank; it has room for any pair
                micros.append([[] for _ in range(rows)])
                free.append([row_tokens] * rows)
        micro, pair_rows = placed
        for i, row in zip(pair, pair_rows, strict=True):
            micros[micro][row].append(i)
            free[micro][row] -= needs[i]

    # Fill the micro-batches of this rank with their replies.
    empty: list[list[int]] = [[] for _ in range(rows)]
    for members in micros[device.data_rank :: device.data_ranks] or [empty]:
        # Number the replies again: a pair's two numbers stay neighbours.
        present = sorted(i for row in members for i in row)
        number = {i: n for n, i in enumerate(present)}
        renumbered = [[number[i] for i in row] for row in members]
        ids = [replies[i].ids for i in present]
        batch = fill_rows(renumbered, ids, [replies[i].mask for i in present], row_tokens)
        yield PairBatch(batch.to(device), max(1, len(present) // 2))


def _place_pair(free: Sequence[Sequence[int]], needs: Sequence[int]) -> tuple[int, list[int]] | None:
    """The emptiest micro-batch with room for both sequences, the longer first, and the row for each."""
    for micro in sorted(range(len(free)), key=lambda micro: -sum(free[micro])):
        left = list(free[micro])
        rows = []
        for need in needs:
            fitting = [row for row, room in enumerate(left) if room >= need]
            if not fitting:
                break
            best = min(fitting, key=lambda row: left[row])
            left[best] -= need
            rows.append(best)
        if len(rows) == len(needs):
            return micro, rows
    return None


@torch.no_grad()
def with_reference(batch: PairBatch, reference: Any) -> PairBatch:
    """A micro-batch with the log probabilities of the reference model, which may be compiled; None: unchanged."""
    return batch if reference is None else replace(batch, reference_logp=reply_logp(reference, batch))
