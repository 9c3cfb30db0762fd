"""The models of the clients. Each is a GPT whose frozen weights are the one base in memory.

    Base               the model that all clients start from
    Base.adapted       a GPT that shares the base's weights and has its own adapters, or a whole copy to train
    TrainedModel       such a GPT with its gradients and its optimizer, for one training client

Nothing is swapped in or out: the models of two clients differ in their adapters' tensors, and share the memory of the
base's tensors. So a client's numbers do not depend on other clients.

Legend: N rows, T tokens a row.
"""

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
import torch.nn as nn
from pydantic import Field
from torch import Tensor

from nanochat import model_folder
from nanochat.adapters import lora
from nanochat.adapters.folders import base_of
from nanochat.adapters.lora import Lora
from nanochat.checkpoint_manager import load_folder
from nanochat.cross_entropy import IGNORE, soft_cap
from nanochat.device import Device
from nanochat.gpt import GPT, read_out
from nanochat.ground.cli import UserError
from nanochat.optim import Optimizer, ParameterGroup
from nanochat.ranks import lay_out
from nanochat.run import saver
from nanochat.serve.schema import Strict
from nanochat.train_service.losses import TokenLoss, find_loss
from nanochat.train_service.wire import Datum

MAX_RANK = 1024
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
Result = TypeVar("Result")
Slices = Generator[None, None, Result]  # a computation that pauses where requests of others may run


@dataclass(frozen=True)
class Trained:
    """The parts of a model that a client trains; rank 0: the whole model."""

    rank: int
    seed: int = 0
    attention: bool = True
    mlp: bool = True
    head: bool = True

    @property
    def lora(self) -> Lora:
        """The settings of the adapters in the blocks."""
        return Lora(self.rank, targets=(ATTENTION if self.attention else ()) + (MLP if self.mlp else ()))


Rate = Annotated[float, Field(ge=0)]


class AdamBody(Strict):
    """The settings of one step, as a client sends them."""

    learning_rate: Rate = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Rate = 1e-12
    weight_decay: Rate = 0.0
    grad_clip_norm: Rate = 0.0  # 0: gradients are not clipped


# ---------------------------------------------------------------------- models over one base


class Base:
    """The model that all clients start from; its weights are frozen, in the dtype of the products."""

    def __init__(self, source: Path, device: Device):
        self.source = source
        self.device = device
        # Adapters of rank 1 that are never trained, and add exact zeros. So loading and sampling work for the base in
        # the same way as for its models.
        added = lora.NewAdapters(lambda config: Lora(1))
        self.model, self.tokenizer, self.meta = load_folder(source, device, prepare=[added])
        self.about = base_of(source, device)  # for the checkpoints of adapters

    def adapted(self, trained: Trained) -> GPT:
        """A GPT to train, on the device: with new adapters over the base's weights, or with a copy of them in fp32."""
        if not trained.rank:
            return load_folder(self.source, self.device)[0]
        with torch.device("meta"):
            kind = HeadAdaptedGPT if trained.head else GPT
            model = kind(self.model.config, self.model.kernels)
            lora.attach(model, trained.lora)
            if isinstance(model, HeadAdaptedGPT):
                c = self.model.config
                model.head_adapter = lora.Adapter(c.vocab_size, c.width, Lora(trained.rank), torch.device("meta"))
        # `assign` replaces the tensors without memory by the base's tensors; adapters are not among them.
        frozen = {name: one for name, one in self.model.named_parameters() if not one.requires_grad}
        model.load_state_dict(frozen, strict=False, assign=True)
        model.rotary = self.model.rotary
        for module in model.modules():
            if isinstance(module, lora.Adapter):
                module.to_empty(device=self.device.torch_device)
        lora.init_adapters(model, trained.seed)
        if isinstance(model, HeadAdaptedGPT):
            lora.init_adapters(model.head_adapter, trained.seed)  # does not depend on which blocks have adapters
        return model.eval()


class HeadAdaptedGPT(GPT):
    """A GPT whose output head has an adapter too, which nanochat/adapters/lora.py leaves out."""

    head_adapter: lora.Adapter

    def _read_out(self, hidden: Tensor, *loss: Any) -> Tensor:
        """All logits and losses of a model pass through this method."""
        adapter = self.head_adapter
        head = self.head_weight().to(hidden.dtype)
        if not loss:
            logits = nn.functional.linear(hidden, head) + adapter(hidden)
            return soft_cap(logits.float(), self.config.logit_cap)
        # W h + B (s A h) is one product, of the matrix (W, B) and the vector (h, s A h): the fused loss accepts it as
        # a head.
        inner = nn.functional.linear(hidden, adapter.lora_A.to(hidden.dtype)) * adapter.scale  # (..., r)
        weight = torch.cat((head, adapter.lora_B.to(hidden.dtype)), dim=1)
        hidden = torch.cat((hidden, inner), dim=-1)
        return read_out(self.config, self.kernels, weight, hidden, *loss)


# ---------------------------------------------------------------------- a model in training


@dataclass(frozen=True)
class _Rows:
    """A micro-batch: sequences of about one length, each in its own row."""

    places: list[int]  # the place of each row's datum in the request
    tokens: Tensor  # (N, T)
    targets: Tensor  # (N, T, K), IGNORE after a sequence's end; K is 1 except for distillation of several tokens
    weights: Tensor  # (N, T, K), 0 after a sequence's end
    inputs: list[Tensor]  # inputs of the loss, (N, T, K) each, 0 after a sequence's end


class TrainedModel:
    """A model with its gradients and its optimizer. One thread calls its methods, in the order of the requests."""

    def __init__(self, base: Base, trained: Trained, batch_tokens: int):
        self.base = base
        self.trained = trained
        self.device = base.device
        self.batch_tokens = batch_tokens  # tokens of a micro-batch, padding included
        self.model = base.adapted(trained)
        self.steps = 0
        self.has_gradients = False
        self.lost_gradients = False  # whether a forward_backward has failed half-way since the last step
        self.is_broken = False  # whether a step has produced weights that are not finite
        self._start_optimizer()

    def _start_optimizer(self) -> None:
        # A rate and a decay of 1: each step multiplies them by its settings.
        parameters = [(name, one) for name, one in self.model.named_parameters() if one.requires_grad]
        group = ParameterGroup("adamw", parameters, 1.0, weight_decay=1.0)
        self.optimizer = Optimizer(
            [group],
            exchange=lay_out(self.device).exchange(self.model),
            dtype=self.device.dtype,
            kernels=self.model.kernels,
        )

    # ---- gradients

    def forward(
        self, data: Sequence[Datum], loss: str, settings: dict[str, float], has_backward: bool
    ) -> Slices[tuple[list[dict[str, np.ndarray]], dict[str, float]]]:
        """The log probability of each target and its loss, for each datum, and the sum of all losses.

        With `has_backward` the gradients of the sum are added to the gradients since the last step. It pauses between
        micro-batches. Other models may compute meanwhile: they share only frozen weights with this one.
        """
        self._require_finite()
        token_loss, settings = find_loss(loss, settings)
        try:
            return (yield from self._forward(data, token_loss, settings, has_backward))
        except BaseException:  # after any error, some micro-batches have added their gradients and others have not
            self.lost_gradients |= has_backward
            raise

    def _forward(
        self, data: Sequence[Datum], token_loss: TokenLoss, settings: dict[str, float], has_backward: bool
    ) -> Slices[tuple[list[dict[str, np.ndarray]], dict[str, float]]]:
        results: list[dict[str, np.ndarray]] = [{} for _ in data]
        total = 0.0
        for number, rows in enumerate(self._micro_batches(data, token_loss)):
            if number:
                yield
            loss_sum, *tables = self._add(rows, token_loss, settings, has_backward)
            # The host adds the micro-batches up in fp64; each datum gets its own part of the tables.
            total += loss_sum
            for row, place in enumerate(rows.places):
                shape = data[place].inputs["target_tokens"].shape
                logprobs, own_losses = (table[row, : shape[0]].reshape(shape) for table in tables)
                results[place] = {"logprobs": logprobs, "elementwise_loss": own_losses}
        return results, {"loss:sum": total}

    def _add(
        self, rows: _Rows, token_loss: TokenLoss, settings: dict[str, float], has_backward: bool
    ) -> tuple[float, np.ndarray, np.ndarray]:
        """The loss of a micro-batch, and for each token its logprob and its loss (N, T, K). Adds the gradients."""
        with torch.set_grad_enabled(has_backward):
            # One target per token at a time, so that the logits of all tokens are never in memory.
            hidden = self.model.hidden(rows.tokens)
            targets = rows.targets.unbind(-1)
            logp = torch.stack([-self.model._read_out(hidden, one, "none") for one in targets], dim=-1)
            losses = token_loss.function(logp, *rows.inputs, **settings) * rows.weights  # (N, T, K)
            loss_sum = losses.sum()
        if has_backward:
            loss_sum.backward()
            self.has_gradients = True
        return float(loss_sum.detach()), logp.detach().float().cpu().numpy(), losses.detach().float().cpu().numpy()

    def _micro_batches(self, data: Sequence[Datum], loss: TokenLoss) -> Iterator[_Rows]:
        """Sequences in order of length, the longest first, in batches that fit `batch_tokens`."""
        # Attention only looks back: tokens after a sequence's end do not change it.
        order = sorted(range(len(data)), key=lambda place: -len(data[place].tokens))
        while order:
            longest = len(data[order[0]].tokens)
            count = max(1, self.batch_tokens // longest)
            places, order = order[:count], order[count:]
            shape = (len(places), longest, data[0].inputs["target_tokens"][0].size)
            tokens = torch.zeros(shape[:2], dtype=torch.long)
            targets = torch.full(shape, IGNORE, dtype=torch.long)
            weights = torch.zeros(shape)
            inputs = [torch.zeros(shape) for _ in loss.inputs]
            for row, place in enumerate(places):
                datum = data[place]
                length = len(datum.tokens)
                tables = {name: torch.from_numpy(values).view(length, -1) for name, values in datum.inputs.items()}
                tokens[row, :length] = torch.from_numpy(datum.tokens)
                targets[row, :length] = tables["target_tokens"]
                weights[row, :length] = tables.get("weights", torch.ones(()))
                for name, table in zip(loss.inputs, inputs, strict=True):
                    table[row, :length] = tables[name]
            move = self.device.to_device
            yield _Rows(places, move(tokens), move(targets), move(weights), [move(table) for table in inputs])

    # ---- a step

    @torch.no_grad()
    def step(self, adam: AdamBody) -> dict[str, float]:
        """One step of AdamW from the gradients since the last one; returns their norm.

        Raises UserError: when gradients are missing or not finite. Then they are dropped, and nothing else changes.
        Also when the settings produce weights that are not finite.
        """
        self._require_finite()
        if self.lost_gradients:
            self._drop_gradients()
            raise UserError("optim_step: a forward_backward since the last one failed, so all gradients are dropped")
        if not self.has_gradients:
            raise UserError("optim_step: no gradients were computed since the last one; call forward_backward first")
        self.has_gradients = False
        squares = self.optimizer.reduce()
        norm = squares.sqrt()
        # Gradients with a larger norm are scaled down to the limit, as in `train_step`.
        divisor = torch.ones_like(norm)
        if adam.grad_clip_norm > 0:
            divisor = ((norm + 1e-6) / adam.grad_clip_norm).clamp(min=1.0)
        finite = torch.isfinite(squares).float()
        (group,) = self.optimizer.groups
        group.betas = (adam.beta1, adam.beta2)  # for this step; the running means stay
        group.eps = adam.eps
        self.optimizer.step(divisor, finite, lr_scale=adam.learning_rate, weight_decay_scale=adam.weight_decay)
        if not finite.item():
            raise UserError("optim_step: the gradients were not finite, so they are dropped and no weight has changed")
        self.steps += 1
        squares = [one.square().sum() for one in self.model.parameters() if one.requires_grad]
        self.is_broken = not math.isfinite(torch.stack(squares).sum())
        self._require_finite()
        return {"grad_norm:mean": float(norm), "step:max": float(self.steps)}

    def _require_finite(self) -> None:
        """Raises UserError: when the weights are broken. Only loading a saved state can repair them."""
        if self.is_broken:
            raise UserError("optim_step has made weights that are not finite, by its learning_rate or eps: create a "
                            "training client from a saved state, or a new one")  # fmt: skip

    def _drop_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        self.has_gradients = False
        self.lost_gradients = False

    # ---- failures

    def after_failure(self) -> str:
        """What a request that has just failed has left behind, in one word."""
        if self.is_broken:
            return "broken"
        if self.lost_gradients:
            return "lost"
        return "kept" if self.has_gradients else "none"

    def repeat_failure(self, left: str) -> None:
        """Become what a failed request has left behind, without running it."""
        if left in ("broken", "none"):
            self._drop_gradients()
        self.is_broken |= left == "broken"
        self.lost_gradients |= left == "lost"

    # ---- on the disk

    def save(self, folder: Path, with_optimizer: bool) -> None:
        """Write a checkpoint of this project, the only step in its folder.

        Raises UserError: when the weights are not finite.
        """
        self._require_finite()
        facts = ("stage", "tasks", "sampling", "pretraining")
        meta: dict[str, Any] = {name: self.base.meta[name] for name in facts if name in self.base.meta}
        if self.model.extension is not None:
            meta["adapter"] = self.model.extension.facts() | self.base.about
        state = self.optimizer.state_dict() if with_optimizer else {}
        saver.save(folder, self.steps, self.model, self.base.tokenizer, meta, state, {}, self.device)

    def load(self, step_folder: Path, with_optimizer: bool) -> None:
        """Load the weights, and optionally the optimizer's state, from a checkpoint of `save`.

        Raises UserError: when it is damaged, or belongs to a model with other adapters.
        """
        meta = model_folder.verify(step_folder)
        load_weights(self.model, step_folder)
        self._drop_gradients()
        self.is_broken = False
        self.steps = 0
        self._start_optimizer()
        if with_optimizer:
            saver.load_training(step_folder, meta, self.optimizer.state_dict())
            self.steps = meta["step"]


def load_weights(model: GPT, step_folder: Path) -> None:
    """Copy a checkpoint's weights or adapters into the same model."""
    try:
        saver.load_trained(model, step_folder / model_folder.weights_name({"adapter": model.extension}))
    except (ValueError, OSError) as error:
        raise UserError(f"the checkpoint is of a model with other adapters, or of another base ({error})") from error
