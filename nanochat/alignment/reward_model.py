"""Reward models: a language model whose scalar head rates a reply at its last token (chat_dpo --loss reward).

A reply's tokens end with its end token. Row packing uses a last token only as a target, but the head must read it. So a
placeholder follows, which is the reply's only target and marks the place at which the loss reads the head.

Legend: S replies, P pairs, N rows, T tokens a row.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanochat.alignment.pair_losses import PairBatch, PairLoss, by_reply, sum_over_pairs
from nanochat.checkpoint_manager import Preparation
from nanochat.conversation import Message, Rendered, render
from nanochat.cross_entropy import IGNORE
from nanochat.device import Device
from nanochat.gpt import GPT, GPTConfig
from nanochat.ground.cli import UserError
from nanochat.mixture import RenderedPair
from nanochat.packing import pack_sequences
from nanochat.tokenizer import Tokenizer

ROWS = 8  # rows that are rated at once


def with_place(rendered: Rendered) -> Rendered:
    """A conversation whose only target is at its last token."""
    return Rendered([*rendered.ids, 0], [0] * len(rendered.ids) + [1], cut=rendered.cut)


def with_places(pairs: Iterable[RenderedPair]) -> list[RenderedPair]:
    return [(with_place(chosen), with_place(rejected)) for chosen, rejected in pairs]


def reward_loss(model: Any, batch: PairBatch, *, stats: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """-log sigmoid(reward of the chosen reply - reward of the rejected one), for a model with a scalar head.

    A reply's only target is at its last token, where the head has read the whole reply.
    """
    # The model of Bradley and Terry, as in DPO, with a learned reward. If the head rates two replies 1.5 and 0.5, the
    # first wins with probability sigmoid(1) = 0.73, and the loss is 0.31. Only differences count: the zero point is
    # arbitrary.
    scores = model(batch.rows.inputs, segments=batch.rows.segments, scalars=True)  # (N, T)
    rewards = by_reply(torch.where(batch.rows.targets != IGNORE, scores, 0.0), batch)  # (P, 2)
    losses = -torch.nn.functional.logsigmoid(rewards[:, 0] - rewards[:, 1])
    return sum_over_pairs(losses, rewards, rewards, batch, 0.0, stats)


REWARD = PairLoss(reward_loss, "Ouyang et al. 2022, InstructGPT")


class NewScalarHead(Preparation):
    """Gives a model a scalar head of zeros, unless it has one."""

    def configure(self, config: GPTConfig, meta: dict[str, Any]) -> tuple[GPTConfig, dict[str, Any]]:
        return replace(config, scalar_head=True), meta


Rate = Callable[[Sequence[Sequence[Message]]], list[float]]


def rating(model: GPT, tokenizer: Tokenizer, device: Device, source: str | Path) -> Rate:
    """A function that rates conversations: higher is better, and 0 has no meaning.

    A conversation that is longer than the model's context is rated by its beginning.

    Raises UserError: when the model, which is from `source`, is not a reward model.
    """
    if model.scalar_head is None:
        raise UserError(f"{source} is not a reward model: python -m scripts.chat_dpo --loss reward trains one")
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
