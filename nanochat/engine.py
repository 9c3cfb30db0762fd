"""Generation: prefill a batch of prompts, then decode a token a row at a time, against a cache.

Token ids in, token ids out; one host wait a decoded token, to hand it out and to see which rows ended.

Legend: B rows, T tokens, V vocab.
"""

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nanochat import device as devices
from nanochat.attention import KVCache
from nanochat.cli import UserError
from nanochat.device import Device
from nanochat.gpt import GPT
from nanochat.tokenizer import Tokenizer

CACHE_STEP = 64  # the visible part of the cache grows by so many tokens, so that shapes repeat


class Engine:
    """Generates with a snapshot of a model's weights, cast once to the device's dtype."""

    def __init__(self, model: GPT, tokenizer: Tokenizer, device: Device | None = None):
        self.device = device or devices.init(str(model.device))
        self.tokenizer = tokenizer
        # bf16 weights halve what a decoded token reads
        self.model = (
            model if self.device.dtype == torch.float32 else copy.deepcopy(model).to(self.device.dtype)
        ).eval()
        self.stop_ids = {tokenizer.get_bos_token_id(), tokenizer.encode_special("<|assistant_end|>")}

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], capacity: int) -> tuple[Tensor, KVCache]:
        """Run whole prompts; returns the logits behind each one's last token (B, V), and the cache of `capacity`."""
        lengths = torch.tensor([len(p) for p in prompts], device=self.device.torch_device)
        longest = max(len(p) for p in prompts)
        tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)  # what stands behind a short prompt is overwritten later
        cache = self.model.new_cache(len(prompts), capacity, self.device.dtype)
        hidden = self.model.hidden(tokens.to(self.device.torch_device), cache)  # (B, T, C)
        cache.position += lengths
        cache.fresh = False
        last = hidden[torch.arange(len(prompts), device=hidden.device), lengths - 1]  # (B, C)
        return self.model.logits(last), cache

    @torch.inference_mode()
    def decode_one_token(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """tokens (B,), the last of each row, continue the cache; returns the logits behind them (B, V)."""
        hidden = self.model.hidden(tokens[:, None], cache)
        cache.position.add_(1).clamp_(max=cache.capacity - 1)  # a row that has ended stays inside
        return self.model.logits(hidden[:, 0])

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Iterator[list[int | None]]:
        """Yield one column of new tokens at a time: a token for each running row, None for each ended one.

        Equal prompts are prefilled once. temperature 0 is greedy, top_k 0 and top_p 1 cut nothing off.
        Rows end with a stop token, which is not handed out, after `max_tokens`, or where the context ends.
        Raises UserError: when a setting is out of range, or a prompt fills the context.
        """
        check_sampling(temperature, top_k, top_p)
        context = self.model.config.sequence_len
        if not prompts or any(not p for p in prompts):
            raise UserError("there is an empty prompt: begin it with the begin token")
        longest = max(len(p) for p in prompts)
        if longest >= context:
            raise UserError(f"the prompt has {longest} tokens, the model's context {context}: shorten the prompt")
        room = [min(max_tokens, context - len(p)) for p in prompts]  # new tokens of each row, at most
        capacity = min(context, _round_up(longest + max_tokens))
        generator = torch.Generator(self.device.torch_device).manual_seed(seed)

        if all(p == prompts[0] for p in prompts):
            logits, cache = self.prefill(prompts[:1], capacity)
            logits, cache = logits.expand(len(prompts), -1), cache.repeat(len(prompts))
        else:
            logits, cache = self.prefill(prompts, capacity)
        running = [True] * len(prompts)
        for made in range(1, max(room) + 1):
            tokens = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)  # (B,)
            column = tokens.tolist()  # the one wait for the device
            running = [
                alive and made <= most and token not in self.stop_ids
                for alive, most, token in zip(running, room, column, strict=True)
            ]
            if not any(running):
                return
            yield [token if alive else None for alive, token in zip(running, column, strict=True)]
            if made < max(room):
                cache.visible = min(capacity, _round_up(longest + made))
                logits = self.decode_one_token(tokens, cache)

    def generate_batch(
        self,
        tokens: Sequence[int],
        num_samples: int = 1,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> tuple[list[list[int]], list[list[int]]]:
        """`num_samples` continuations of one prompt: whole sequences, the prompt included, and masks with a 1
        under every token the model chose. Settings as in `stream`."""
        sequences = [list(tokens) for _ in range(num_samples)]
        masks = [[0] * len(tokens) for _ in range(num_samples)]
        for column in self.stream(
            [list(tokens)] * num_samples,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
        ):
            for sequence, mask, token in zip(sequences, masks, column, strict=True):
                if token is not None:
                    sequence.append(token)
                    mask.append(1)
        return sequences, masks


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Raises UserError: when a sampling setting is out of range."""
    if not 0 <= temperature < 100:
        raise UserError(f"--temperature {temperature}: from 0 (greedy) to below 100")
    if top_k < 0:
        raise UserError(f"--top_k {top_k}: 0 (off) or more")
    if not 0 < top_p <= 1:
        raise UserError(f"--top_p {top_p}: above 0, at most 1 (off)")


def sample(
    logits: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """Draw one token a row from logits (B, V) in fp32; returns (B,).

    top_k keeps the k best; top_p keeps the fewest best whose probabilities reach p (source: Holtzman et al. 2020).
    """
    if temperature < 1e-6:  # greedy; dividing by less would overflow
        return logits.argmax(dim=-1)
    logits = logits.float() / temperature
    if 0 < top_k < logits.size(-1):
        best = logits.topk(top_k, dim=-1)
        logits = torch.full_like(logits, -torch.inf).scatter_(-1, best.indices, best.values)
    probabilities = logits.softmax(dim=-1)
    if top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered  # mass of the better ones; the best token always stays
        probabilities = torch.zeros_like(probabilities).scatter_(-1, order, ordered.masked_fill(before >= top_p, 0.0))
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def _round_up(tokens: int) -> int:
    return -(-tokens // CACHE_STEP) * CACHE_STEP
