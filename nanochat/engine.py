"""Generation: prefill a batch of prompts, then decode a token a row at a time, against a cache.

Token ids in, token ids out; one host wait a decoded token, to hand it out, to see which rows ended, and to answer
the calculator's calls: behind `<|python_start|> 2+3 <|python_end|>` the row is given `<|output_start|> 5
<|output_end|>` and goes on from there.

Legend: B rows, T tokens, V vocab.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nanochat import device as devices
from nanochat.attention import KVCache
from nanochat.cli import UserError
from nanochat.device import Device
from nanochat.gpt import GPT
from nanochat.tokenizer import Tokenizer
from nanochat.tools import calculate

NO_ANSWER = "error"  # what a call that the calculator cannot answer is given

CACHE_STEP = 64  # the visible part of the cache grows by so many tokens, so that shapes repeat


class Engine:
    """Generates with a snapshot of a model's weights, cast once to the device's dtype.

    With `graphs` an accelerator records what a decoded token launches and launches it as one from then on.
    Raises UserError: when it is asked for on a CPU."""

    def __init__(self, model: GPT, tokenizer: Tokenizer, device: Device | None = None, graphs: bool = False):
        self.device = device or devices.init(str(model.device))
        self.graphs = graphs
        if graphs:
            self.device.check_capture()
        self.tokenizer = tokenizer
        # bf16 weights halve what a decoded token reads
        self.model = (
            model if self.device.dtype == torch.float32 else copy.deepcopy(model).to(self.device.dtype)
        ).eval()
        self.call_start, self.call_end, self.answer_start, self.answer_end = (
            tokenizer.encode_special(f"<|{mark}|>")
            for mark in ("python_start", "python_end", "output_start", "output_end")
        )
        # Its end, and all that is not the assistant's to write: nobody but the tool answers a call.
        self.stop_ids = set(tokenizer.special_ids.values()) - {self.call_start, self.call_end}

    @torch.no_grad()
    def update(self, model: GPT) -> None:
        """Take over a model's weights as they are now."""
        if self.model is not model:
            for mine, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
                mine.copy_(theirs)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], capacity: int) -> tuple[Tensor, KVCache]:
        """Run whole prompts; returns the logits behind each one's last token (B, V), and the cache of `capacity`."""
        lengths = self.device.to_device(torch.tensor([len(p) for p in prompts]))
        longest = max(len(p) for p in prompts)
        tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)  # what stands behind a short prompt is overwritten later
        cache = self.model.new_cache(len(prompts), capacity, self.device.dtype)
        hidden = self.model.hidden(self.device.to_device(tokens), cache)  # (B, T, C)
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
        keep_stop: bool = False,
    ) -> Iterator[tuple[list[int | None], list[bool]]]:
        """Yield one column of new tokens at a time: a token for each running row, None for each ended one; and
        whether the model chose it, or the tool gave it.

        Equal prompts are prefilled once. temperature 0 is greedy, top_k 0 and top_p 1 cut nothing off.
        Rows end with a stop token, which is handed out only with `keep_stop`, after `max_tokens` (the tool's among
        them), or where the context ends.
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
            first = torch.zeros(len(prompts), dtype=torch.long, device=logits.device)
            logits, cache = logits[first], cache.select(first)
        else:
            logits, cache = self.prefill(prompts, capacity)
        rows = [_Row(number, most) for number, most in enumerate(room)]  # those in the batch
        decoder = self._decoder(cache)
        for made in range(1, max(room) + 1):
            tokens = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)  # (B,)
            column: list[int | None] = [None] * len(prompts)
            chosen = [True] * len(prompts)
            next_tokens = tokens.tolist()  # the one wait for the device
            for place, row in enumerate(rows):
                if not row.running:
                    continue
                if row.given:
                    next_tokens[place], chosen[row.number] = row.given.popleft(), False
                token, by_model = next_tokens[place], chosen[row.number]
                stops = by_model and token in self.stop_ids
                if keep_stop or not stops:
                    column[row.number] = token
                row.running = made < row.room and not stops
                if row.running and by_model:
                    self._follow_call(row, token)
            if any(token is not None for token in column):
                yield column, chosen
            running = [place for place, row in enumerate(rows) if row.running]
            if not running:
                return
            if not all(chosen):
                tokens = self.device.to_device(torch.tensor(next_tokens))
            if 2 * len(running) <= len(rows):  # half the batch has ended: go on without it
                index = self.device.to_device(torch.tensor(running))
                rows, tokens, cache = [rows[place] for place in running], tokens[index], cache.select(index)
                decoder = self._decoder(cache)
            if not self.device.static_shapes:
                cache.visible = min(capacity, _round_up(longest + made))
            logits = decoder(tokens)

    def _decoder(self, cache: KVCache) -> Callable[[Tensor], Tensor]:
        """decode_one_token on this cache, recorded and replayed where that is asked for."""
        if self.graphs:
            return _RecordedDecoder(self, cache)
        return lambda tokens: self.decode_one_token(tokens, cache)

    def _follow_call(self, row: "_Row", token: int) -> None:
        """Keep track of a call that the row writes; at its end, line up the tool's answer."""
        if token == self.call_start:
            row.call = []
        elif token == self.call_end and row.call is not None:
            answer = calculate(self.tokenizer.decode(row.call))
            row.given.extend(
                self.tokenizer.encode(
                    NO_ANSWER if answer is None else answer, prepend=self.answer_start, append=self.answer_end
                )
            )
            row.call = None
        elif row.call is not None:
            row.call.append(token)

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, **settings: Any
    ) -> tuple[list[list[int]], list[list[int]]]:
        """The new tokens behind each prompt, and masks with a 1 under every token the model chose. Settings as in
        `stream`."""
        sequences: list[list[int]] = [[] for _ in prompts]
        masks: list[list[int]] = [[] for _ in prompts]
        for column, chosen in self.stream(prompts, max_tokens=max_tokens, **settings):
            for sequence, mask, token, by_model in zip(sequences, masks, column, chosen, strict=True):
                if token is not None:
                    sequence.append(token)
                    mask.append(int(by_model))
        return sequences, masks

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
        sequences, masks = self.generate(
            [list(tokens)] * num_samples,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
        )
        return [[*tokens, *new] for new in sequences], [[0] * len(tokens) + mask for mask in masks]


class _RecordedDecoder:
    """One token a row against one cache: run as usual the first time for a size of the cache's visible part, recorded
    the second time, replayed from then on."""

    def __init__(self, engine: Engine, cache: KVCache):
        self.engine, self.cache = engine, cache
        self.tokens: Tensor | None = None  # what a replay reads
        self.visible = 0
        self.replay: Callable[[], None] | None = None

    def __call__(self, tokens: Tensor) -> Tensor:
        engine, cache = self.engine, self.cache
        if cache.visible != self.visible:
            self.visible, self.replay = cache.visible, None
            self.tokens = tokens.clone()
            return engine.decode_one_token(self.tokens, cache)
        assert self.tokens is not None
        self.tokens.copy_(tokens)
        if self.replay is None:
            static = self.tokens
            self.replay, self.logits = engine.device.capture(lambda: engine.decode_one_token(static, cache))
        self.replay()
        return self.logits


@dataclass
class _Row:
    """A row that is being generated."""

    number: int  # of its prompt
    room: int  # new tokens, at most
    running: bool = True
    call: list[int] | None = None  # what a call to the tool holds so far
    given: deque[int] = field(default_factory=deque)  # the tool's answer, as far as it is not yet in the row


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
