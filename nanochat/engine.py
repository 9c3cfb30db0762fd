"""Generation: prefill a batch of prompts, then decode a token a row at a time, against a cache.

Token ids in, token ids out; one host wait a decoded token, to hand it out, to see which rows ended, and to answer
the calculator's calls: behind `<|python_start|> 2+3 <|python_end|>` the row is given `<|output_start|> 5
<|output_end|>` and goes on from there.

`Engine` generates for prompts that begin together; `Slots` is what serve/scheduler.py batches with: rows of one cache
that are filled, decoded and left each in its own time, with sampling settings of their own.

Legend: B rows, T tokens, V vocab.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from nanochat import device as devices
from nanochat.attention import KVCache
from nanochat.device import Device
from nanochat.gpt import GPT
from nanochat.kernels.cpu import PackedLinear
from nanochat.parallel.fsdp import is_sharded, whole
from nanochat.shell.cli import Interrupted, UserError
from nanochat.tokenizer import Tokenizer
from nanochat.tools.calculator import calculate

NO_ANSWER = "error"  # what a call that the calculator cannot answer is given

GREEDY_BELOW = 1e-6  # a temperature; dividing by less would overflow
TOP_P_FIRST = 64  # best tokens that top_p looks at before it sorts them all

CHUNK_STEP = 16  # a chunk of a prompt is filled up to so many tokens, or a power of two times as many
CACHE_STEP = 64  # attended_len grows by so many tokens, so that shapes repeat
MASK = 2**64 - 1  # whole numbers of 64 bits
GAMMA = 0x9E3779B97F4A7C15  # what SplitMix64 counts by


class Engine:
    """Generates with a snapshot of a model's weights, cast once to the device's dtype. Of a sharded model all ranks
    take it together, and update it together.

    With `graphs` an accelerator records what a decoded token launches and launches it as one from then on.
    Raises UserError: when it is asked for on a CPU."""

    def __init__(self, model: GPT, tokenizer: Tokenizer, device: Device | None = None, graphs: bool = False):
        self.device = device or devices.init(str(model.device))
        self.graphs = graphs
        if graphs:
            devices.check_capture(self.device.kind)
        self.tokenizer = tokenizer
        self.model = self._snapshot(model)
        self.call_start, self.call_end, self.answer_start, self.answer_end = (
            tokenizer.encode_special(f"<|{mark}|>")
            for mark in ("python_start", "python_end", "output_start", "output_end")
        )
        # Its end, and all that is not the assistant's to write: nobody but the tool answers a call.
        self.stop_ids = set(tokenizer.special_ids.values()) - {self.call_start, self.call_end}

    def _snapshot(self, model: GPT) -> GPT:
        if model.is_packed:  # another engine's
            return model
        if is_sharded(model):
            model = self._gathered(model)
        if self.device.packs_weights:
            return model.kernels.pack(copy.deepcopy(model).to(self.device.dtype)).eval()
        if self.device.dtype == torch.float32:
            return model.eval()
        return copy.deepcopy(model).to(self.device.dtype).eval()  # bf16 weights halve what a decoded token reads

    def _gathered(self, model: GPT) -> GPT:
        """A whole copy of a sharded model; one parameter at a time is whole in fp32."""
        with torch.device("meta"):
            copied = GPT(model.config, model.kernels).to(self.device.dtype)
        copied.to_empty(device=self.device.torch_device).fill_rotary()
        _copy_weights(copied, model)
        return copied

    @torch.no_grad()
    def update(self, model: GPT) -> None:
        """Take over a model's weights as they are now."""
        if self.device.packs_weights:
            self.model = self._snapshot(model)
        elif self.model is not model:  # in place: recorded launches read them there
            _copy_weights(self.model, model)

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
        cache.is_empty = False
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
        seed: int | Sequence[int] = 0,
        keep_stop: bool = False,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[list[int | None], list[bool]]]:
        """Yield one column of new tokens at a time: a token for each running row, None for each ended one; and
        whether the model chose it, or the tool gave it.

        Equal prompts are prefilled once. temperature 0 is greedy, top_k 0 and top_p 1 cut nothing off. What a row draws
        comes from its own seed, one of as many as there are prompts or made of the one `seed` and its number, whatever
        rows are beside it.
        Rows end with a stop token, which is handed out only with `keep_stop`, after `max_tokens` (the tool's among
        them), or where the context ends.
        Raises UserError: when a setting is out of range, or a prompt fills the context. Raises Interrupted: when
        `should_stop`, before a token, says to break off.
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
        seeds = [seed_of(seed, row) for row in range(len(prompts))] if isinstance(seed, int) else seed
        drawn = 1 if temperature < GREEDY_BELOW else max(1, *room)
        noise = self.device.to_device(torch.stack([uniforms(one, drawn) for one in seeds]))  # (B, T)

        if all(p == prompts[0] for p in prompts):
            logits, cache = self.prefill(prompts[:1], capacity)
            first = torch.zeros(len(prompts), dtype=torch.long, device=logits.device)
            logits, cache = logits[first], cache.select(first)
        else:
            logits, cache = self.prefill(prompts, capacity)
        rows = [_Row(number, most) for number, most in enumerate(room)]  # those in the batch
        decoder = self._decoder(cache, len(rows))
        for made in range(1, max(room) + 1):
            if should_stop():
                raise Interrupted
            column_noise = noise[:, made - 1 : made]
            tokens = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, noise=column_noise)  # (B,)
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
                    self.follow_call(row, token)
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
                noise = noise[index]
                decoder = self._decoder(cache, len(rows))
            if not self.device.static_shapes:
                cache.attended_len = min(capacity, _round_up(longest + made))
            logits = decoder(tokens)

    def _decoder(self, cache: KVCache, batch: int) -> Callable[[Tensor], Tensor]:
        """decode_one_token for `batch` rows on this cache, recorded and replayed where that is asked for."""
        if not self.graphs:
            return lambda tokens: self.decode_one_token(tokens, cache)
        static = torch.zeros(batch, dtype=torch.long, device=self.model.device)  # what a replay reads
        recorded = Recorded(self.device, lambda: self.decode_one_token(static, cache))

        def decode(tokens: Tensor) -> Tensor:
            static.copy_(tokens)
            return recorded(cache.attended_len)

        return decode

    @torch.inference_mode()
    def exact_sizes(self, sizes: set[int]) -> tuple[int, ...]:
        """Those of `sizes`, ascending, in which this model's matrix products have the same bits for a row as in the
        largest one, which is always among them. A CPU takes other paths for few rows than for many."""
        largest = max(sizes)
        generator = torch.Generator().manual_seed(0)
        exact = set(sizes)
        products: dict[tuple[int, int], Callable[[Tensor], Tensor]] = {
            (one.in_features, one.out_features): one
            for one in self.model.modules()
            if isinstance(one, nn.Linear | PackedLinear) and one is not self.model.head  # that has a way of its own
        }
        products[self.model.config.width, self.model.config.vocab_size] = self.model.logits
        for (width, _), product in products.items():
            rows = torch.randn(largest, width, generator=generator).to(self.model.device, self.device.dtype)
            expected = product(rows)
            exact -= {size for size in exact if not torch.equal(product(rows[:size]), expected[:size])}
        return tuple(sorted(exact))

    def follow_call(self, row: "Call", token: int) -> None:
        """Keep track of a call that the model writes in this row; at its end, line up the tool's answer."""
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
        seed: int | Sequence[int] = 0,
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


class Recorded:
    """A function of tensors that stay where they are, such as a decoded token: it runs as usual the first time for a
    shape, is recorded the second time, and replayed from then on. Only the last shape's record is kept."""

    def __init__(self, device: Device, function: Callable[[], Tensor]):
        self.device, self.function = device, function
        self.shape: int | None = None
        self.replay: Callable[[], None] | None = None

    def __call__(self, shape: int) -> Tensor:
        """`shape` is whatever the tensors' shapes depend on."""
        if shape != self.shape:
            self.shape, self.replay = shape, None
            return self.function()
        if self.replay is None:
            self.replay, self.result = self.device.capture(self.function)
        self.replay()
        return self.result


@dataclass(kw_only=True, eq=False)
class Call:
    """How far a row is with a call to the tool."""

    call: list[int] | None = None  # what the call holds so far
    given: deque[int] = field(default_factory=deque)  # the tool's answer, as far as it is not yet in the row


@dataclass(eq=False)
class _Row(Call):
    """A row that is being generated."""

    number: int  # of its prompt
    room: int  # new tokens, at most
    running: bool = True


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one row are chosen."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # keep what has this share of the best token's probability; 0: off
    repetition_penalty: float = 1.0  # on tokens that the prompt or the row holds already; 1: off
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True)
class RowSettings:
    """Sampling settings of each of B rows, (B, 1) each, and which of them any row uses."""

    temperature: Tensor  # 1 where greedy
    greedy: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    penalty: Tensor
    any_drawn: bool
    largest_top_k: int
    any_top_p: bool
    any_min_p: bool
    any_penalty: bool


class Slots:
    """A cache of a fixed number of rows, each filled, decoded and left in its own time.

    A prompt's tokens but the last are prefilled; the last is the first one decoded. Decoding runs over the first rows
    up to the highest busy one, in one of a few sizes; an idle row among them computes what nobody reads, and writes it
    behind what it holds. What a row computes does not depend on the others, nor on how its prompt was cut into chunks,
    once `choose_sizes` has looked which shapes give the same bits.
    """

    def __init__(self, engine: Engine, slots: int, prefill_chunk: int):
        config, device = engine.model.config, engine.model.device
        self.engine, self.slots, self.context = engine, slots, config.sequence_len
        self.cache = engine.model.new_cache(slots, _round_up(self.context), engine.device.dtype)
        self.cache.is_empty = False
        # A request's last token is never fed, so that nothing worth keeping stands in the context's last place.
        self.cache.max_position = self.context - 1
        self.last = torch.zeros(slots, dtype=torch.long, device=device)  # the token each row goes on from
        self.active = torch.zeros(slots, dtype=torch.long, device=device)  # 1: the row moves on with a decoded token
        self.noise = torch.zeros(slots, self.context, device=device)  # by the place of the token fed
        self.seen = torch.zeros(slots, config.vocab_size, dtype=torch.bool, device=device)
        self.numbers = torch.ones(4, slots, 1, device=device)  # temperature, top_p, min_p, penalty
        self.top_k = torch.zeros(slots, 1, dtype=torch.long, device=device)
        self.greedy = torch.ones(slots, 1, dtype=torch.bool, device=device)
        self.sampling: list[Sampling | None] = [None] * slots  # of the active rows
        self.settings: dict[int, RowSettings] = {}  # by number of rows; anew when a row comes or goes
        self.prefill_chunk = prefill_chunk
        self.logits: dict[int, Recorded] = {}  # by number of rows, where the device records what it launches
        self.row_sizes: tuple[int, ...] = (slots,)
        self.chunk_sizes: tuple[int, ...] = (prefill_chunk,)

    @staticmethod
    def bytes_per_slot(engine: Engine) -> int:
        c = engine.model.config
        values = 2 * c.n_layer * _round_up(c.sequence_len) * c.n_kv_head * c.head_dim
        return values * engine.device.dtype.itemsize

    def choose_sizes(self) -> None:
        """Find which numbers of rows and of a chunk's tokens give the largest one's bits here; on the thread, and with
        the threads, that decode."""
        rows = {min(2**power, self.slots) for power in range(self.slots.bit_length() + 1)}
        chunks = {min(CHUNK_STEP * 2**power, self.prefill_chunk) for power in range(self.prefill_chunk.bit_length())}
        if self.engine.device.static_shapes:
            chunks = {self.prefill_chunk}
        self.row_sizes = self.engine.exact_sizes(rows)
        self.chunk_sizes = self.engine.exact_sizes(chunks)

    @torch.inference_mode()
    def prefill(self, slot: int, tokens: Sequence[int], held: int) -> int:
        """Append a chunk of at most `prefill_chunk` tokens to the `held` ones of the slot; returns its padded size."""
        size = next(size for size in self.chunk_sizes if size >= len(tokens))
        begin = self.engine.device.to_device(torch.tensor([[*tokens, *[0] * (size - len(tokens))]]))
        row = self.cache.view(slot, slot + 1)
        if not self.engine.device.static_shapes:
            row.attended_len = min(row.capacity, _round_up(held + size))
        self.engine.model.hidden(begin, row)
        row.position.add_(len(tokens))
        return size

    @torch.inference_mode()
    def hold(self, slot: int, tokens: int, source: int | None = None) -> None:
        """Keep of an idle slot the first `tokens` tokens, or give it those of another one."""
        self.cache.position[slot].fill_(tokens)
        if source is not None and source != slot:
            self.cache.copy_row(source, slot, tokens)

    @torch.inference_mode()
    def join(self, slot: int, prompt: Sequence[int], room: int, sampling: Sampling) -> None:
        """Have a slot that holds all of its prompt but the last token go on from there, for `room` tokens at most."""
        to_device = self.engine.device.to_device
        self.last[slot].fill_(prompt[-1])
        self.active[slot].fill_(1)
        numbers = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty)
        self.numbers[:, slot, 0] = to_device(torch.tensor((1.0, *numbers[1:]) if sampling.greedy else numbers))
        self.top_k[slot].fill_(sampling.top_k)
        self.greedy[slot].fill_(sampling.greedy)
        if not sampling.greedy:
            first = len(prompt) - 1
            self.noise[slot, first : first + room] = to_device(uniforms(sampling.seed, room))
        if sampling.repetition_penalty != 1:
            self.seen[slot] = False
            self.seen[slot, to_device(torch.tensor(prompt))] = True
        self.sampling[slot] = sampling
        self.settings.clear()

    @torch.inference_mode()
    def leave(self, slot: int, tokens: int) -> None:
        """Have a slot stand idle; it still holds its first `tokens` tokens."""
        self.active[slot].fill_(0)
        self.cache.position[slot].fill_(tokens)
        self.numbers[:, slot] = 1.0
        self.sampling[slot] = None
        self.settings.clear()

    @torch.inference_mode()
    def move(self, source: int, target: int, tokens: int) -> None:
        """Carry a running row of `tokens` tokens over to an idle slot, and leave its own."""
        self.cache.copy_row(source, target, tokens)
        for tensor in (self.last, self.active, self.noise, self.seen, self.top_k, self.greedy):
            tensor[target] = tensor[source]
        self.numbers[:, target] = self.numbers[:, source]
        self.sampling[target] = self.sampling[source]

    def rows_for(self, busy: int) -> int:
        """The size in which the first `busy` rows are decoded."""
        return next(size for size in self.row_sizes if size >= busy)

    @torch.inference_mode()
    def decode(self, rows: int, longest: int, logprobs: int = -1) -> tuple[list[int], list[list[float]]]:
        """The next token of each of the first `rows` slots, none of which holds more than `longest`; the one wait.

        With `logprobs` n, 0 or more, also (rows) lists of 1 + 2n numbers: the token's logprob, those of the n best
        tokens, and their ids."""
        position, settings = self.cache.position[:rows], self._settings(rows)
        noise = self.noise[:rows].gather(1, position[:, None]) if settings.any_drawn else self.noise[:rows, :1]
        logits = self._logits(rows, longest)  # (B, V)
        if settings.any_penalty:
            self.seen[:rows].scatter_(1, self.last[:rows, None], True)
        tokens = sample_rows(logits, settings, noise, self.seen[:rows])
        self.last[:rows] = tokens
        position.add_(self.active[:rows])
        if logprobs < 0:
            return tokens.tolist(), []
        logprob = logits.log_softmax(dim=-1)
        best = logprob.topk(min(logprobs, logprob.size(-1)), dim=-1)
        chosen = logprob.gather(1, tokens[:, None])
        # ids below 2**24 are exact in fp32, and one tensor is one wait
        table = torch.cat((tokens[:, None].float(), chosen, best.values, best.indices.float()), dim=1).tolist()
        return [int(row[0]) for row in table], [row[1:] for row in table]

    def _logits(self, rows: int, longest: int) -> Tensor:
        """Those behind the last token of each of the first `rows` slots; with graphs, against the whole cache."""
        model, cache = self.engine.model, self.cache.view(0, rows)

        def logits() -> Tensor:
            return model.logits(model.hidden(self.last[:rows, None], cache)[:, 0])

        if self.engine.graphs:
            return self.logits.setdefault(rows, Recorded(self.engine.device, logits))(rows)
        if not self.engine.device.static_shapes:
            cache.attended_len = min(cache.capacity, _round_up(longest + 1))
        return logits()

    @torch.inference_mode()
    def give(self, tokens: dict[int, int]) -> None:
        """Put other tokens, by slot, in the place of those that were chosen last."""
        for slot, token in tokens.items():
            self.last[slot].fill_(token)

    def _settings(self, rows: int) -> RowSettings:
        if rows not in self.settings:
            busy = [one for one in self.sampling[:rows] if one is not None]
            drawn = [one for one in busy if not one.greedy]
            temperature, top_p, min_p, penalty = self.numbers[:, :rows]
            self.settings[rows] = RowSettings(
                temperature=temperature,
                greedy=self.greedy[:rows],
                top_k=self.top_k[:rows],
                top_p=top_p,
                min_p=min_p,
                penalty=penalty,
                any_drawn=bool(drawn),
                largest_top_k=max((one.top_k for one in drawn), default=0),
                any_top_p=any(one.top_p < 1 for one in drawn),
                any_min_p=any(one.min_p > 0 for one in drawn),
                any_penalty=any(one.repetition_penalty != 1 for one in busy),
            )
        return self.settings[rows]


@torch.no_grad()
def _copy_weights(copied: GPT, model: GPT) -> None:
    for mine, theirs in zip(copied.parameters(), model.parameters(), strict=True):
        mine.copy_(whole(theirs))


def check_sampling(
    temperature: float, top_k: int, top_p: float, min_p: float = 0.0, repetition_penalty: float = 1.0
) -> None:
    """Raises UserError: when a sampling setting is out of range."""
    if not 0 <= temperature < 100:
        raise UserError(f"--temperature {temperature}: from 0 (greedy) to below 100")
    if top_k < 0:
        raise UserError(f"--top_k {top_k}: 0 (off) or more")
    if not 0 < top_p <= 1:
        raise UserError(f"--top_p {top_p}: above 0, at most 1 (off)")
    if not 0 <= min_p <= 1:
        raise UserError(f"--min_p {min_p}: from 0 (off) to 1")
    if not 0 < repetition_penalty < 100:
        raise UserError(f"--repetition_penalty {repetition_penalty}: above 0 and below 100, 1 is off")


def sample(logits: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0, noise: Tensor) -> Tensor:
    """Draw one token a row from logits (B, V) in fp32, by `noise` (B, 1) in [0, 1); returns (B,).

    top_k keeps the k best; top_p keeps the fewest best whose probabilities reach p (source: Holtzman et al. 2020).
    """
    if temperature < GREEDY_BELOW:
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
    return _drawn(probabilities, noise)


def sample_rows(logits: Tensor, settings: RowSettings, noise: Tensor, seen: Tensor) -> Tensor:
    """Draw one token a row, each row by its own settings, from logits (B, V) in fp32; returns (B,).

    `noise` (B, 1) in [0, 1) decides by the inverse of the summed-up probabilities. `seen` (B, V) is True for the tokens
    that the penalty is for. What a row draws does not depend on its neighbours: a setting that is off changes no bit.
    In order: the penalty, temperature, top_k, top_p, min_p. Where several tokens are as good as the last one that is
    kept, all of them are.
    Sources: Keskar et al. 2019 (penalty), Holtzman et al. 2020 (top_p), Nguyen et al. 2024 (min_p).
    """
    if settings.any_penalty:
        punished = torch.where(logits > 0, logits / settings.penalty, logits * settings.penalty)
        logits = torch.where(seen, punished, logits)
    best = logits.argmax(dim=-1)
    if not settings.any_drawn:
        return best
    vocabulary = logits.size(-1)
    logits = logits / settings.temperature
    if settings.largest_top_k:
        values = logits.topk(min(settings.largest_top_k, vocabulary), dim=-1).values
        worst = values.gather(-1, (settings.top_k - 1).clamp(0, values.size(-1) - 1))  # (B, 1): the last one kept
        logits = logits.masked_fill((logits < worst) & (settings.top_k > 0), -torch.inf)
    probabilities = logits.softmax(dim=-1)
    least = settings.min_p * probabilities.amax(dim=-1, keepdim=True) if settings.any_min_p else None  # (B, 1)
    if settings.any_top_p:
        off = settings.top_p >= 1
        # sorting all of a vocabulary takes a CPU milliseconds; elsewhere, looking whether it is needed is a wait
        width = min(TOP_P_FIRST, vocabulary) if logits.device.type == "cpu" else vocabulary
        while True:
            ordered = probabilities.topk(width, dim=-1).values
            mass = ordered.cumsum(dim=-1)
            if width == vocabulary or bool(((mass[:, -1:] >= settings.top_p) | off).all()):
                break
            width = min(8 * width, vocabulary)
        kept = (mass - ordered) < settings.top_p  # the best one always
        worst = ordered.masked_fill(~kept, torch.inf).amin(dim=-1, keepdim=True).masked_fill(off, 0.0)
        least = worst if least is None else torch.maximum(least, worst)
    if least is not None:
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
    return torch.where(settings.greedy[:, 0], best, _drawn(probabilities, noise))


def _drawn(probabilities: Tensor, noise: Tensor) -> Tensor:
    """The token (B,) whose part of the summed-up probabilities (B, V) the noise (B, 1) falls into. It costs a fifth of
    torch.multinomial, which draws a random number for every token of the vocabulary."""
    mass = probabilities.cumsum(dim=-1)
    # noise of 23 bits stays below the last sum, so that what has no probability, and adds nothing to it, is never drawn
    return (mass <= noise * mass[:, -1:]).sum(dim=-1)


def uniforms(seed: int, count: int) -> Tensor:
    """`count` numbers in [0, 1) by counter: number i of a seed is the same however many are asked for, on any machine.

    Source: Steele, Lea and Flood 2014 (SplitMix64)."""
    start = np.uint64(_mix(seed * GAMMA & MASK))  # or neighbouring seeds would share numbers
    with np.errstate(over="ignore"):
        bits = start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GAMMA)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits ^= bits >> np.uint64(31)
    return torch.from_numpy((bits >> np.uint64(41)).astype(np.float32) * np.float32(2**-23))


def seed_of(seed: int, *numbers: int) -> int:
    """A seed of its own, of 64 bits, for the whole numbers under a seed: a step's, a question's, a sample's."""
    for number in numbers:
        seed = _mix((_mix(seed * GAMMA & MASK) + (number + 1) * GAMMA) & MASK)
    return seed


def _mix(bits: int) -> int:
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & MASK
    return bits ^ (bits >> 31)


def _round_up(tokens: int) -> int:
    return -(-tokens // CACHE_STEP) * CACHE_STEP
