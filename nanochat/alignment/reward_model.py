"""Reward models: a language model whose scalar head rates a reply (scripts/chat_rm). Read at a reply's last token.

A reply's tokens end with its end token. Row packing keeps a last token as a target only, and the head must read it: a
place holder follows, which is the reply's one target, so that the loss finds the place where to read.

Legend: S replies, N rows, T tokens a row.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from nanochat import device as devices
from nanochat.alignment.preferences import Replies
from nanochat.checkpoint_manager import load_model
from nanochat.cli import UserError
from nanochat.conversation import Message, Rendered, render
from nanochat.cross_entropy import IGNORE
from nanochat.device import Device
from nanochat.mixture import JudgedReply
from nanochat.packing import pack_sequences

ROWS = 8  # that are rated at once


def with_place(rendered: Rendered) -> Rendered:
    """A conversation with its one target at its last token."""
    return Rendered([*rendered.ids, 0], [0] * len(rendered.ids) + [1], cut=rendered.cut)


def to_rate(replies: Replies) -> Replies:
    return [JudgedReply(with_place(reply.rendered), reply.is_good) for reply in replies]


def load_reward_model(
    source: str | Path, device: str | Device | None = None, verified: bool = False
) -> Callable[[Sequence[Sequence[Message]]], list[float]]:
    """A function that rates conversations by a reward model's checkpoint: higher is better, and 0 has no meaning.

    `source`, `device` and `verified` are those of `load_model`. A conversation that is longer than the model's context
    is rated by its beginning.

    Raises UserError: when there is no such checkpoint, or it is no reward model.
    """
    if not isinstance(device, Device):
        device = devices.init(device or "auto")
    model, tokenizer, _ = load_model(source, device, verified=verified)
    if model.scalar_head is None:
        raise UserError(f"{source} is no reward model: python -m scripts.chat_rm trains one")
    row_tokens = model.config.sequence_len

    @torch.no_grad()
    def rate(conversations: Sequence[Sequence[Message]]) -> list[float]:
        texts = [with_place(render(tokenizer, messages, row_tokens)) for messages in conversations]
        packed = pack_sequences([text.ids for text in texts], [text.mask for text in texts], row_tokens)
        scores = torch.zeros(len(texts))
        for rows in packed.micro_batches(ROWS, device):
            rated = model(rows.inputs, segments=rows.segments, scalars=True)  # (N, T)
            is_place = rows.targets != IGNORE
            scores[rows.source[is_place].cpu()] = rated[is_place].cpu()
        return scores.tolist()

    return rate
