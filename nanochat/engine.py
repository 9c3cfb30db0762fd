"""Generation: read the prompts, then decode one token at a time for every running row, against a cache.

Token ids in, token ids out. There is one decoder, `Slots`: a cache with a fixed number of slots, whose running rows all
advance by one token a step. The command line, evaluation and RL use it through `Engine`; serve/scheduler.py admits and
releases rows while others run. A step:

    1. forward   the last token of each row against the row's cached keys and values -> logits (`Slots._step`)
    2. sample    one token for each row, by the row's own settings and noise (`sampling.sample`)
    3. hand out  the one wait for the device: which rows have ended, and which called the tool
    4. release   rows that have ended leave, and the others close the gaps

A reply depends only on its prompt, its settings and its seed, not on the rows next to it. In fp32 on a CPU this is
exact. Elsewhere, with experts, and with weights in fp16 under AVX2, the number of rows changes the shapes of the
products, and with them their rounding.

The model calls a calculator: after `<|python_start|> 2+3 <|python_end|>` the row is forced to continue with
`<|output_start|> 5 <|output_end|>`, and the model resumes after that.

Legend: B rows, T tokens, C width, V vocab.
"""

import contextlib
import inspect
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from nanochat import device as devices
from nanochat.attention import KVCache
from nanochat.calculator import calculate, can_continue
from nanochat.device import Device
from nanochat.gpt import GPT, GPTConfig
from nanochat.ground import host
from nanochat.ground.cli import Interrupted, UserError, check_ranges
from nanochat.ground.screen import Bar
from nanochat.ground.sharding import is_sharded, whole
from nanochat.operators import WeightFormat
from nanochat.sampling import RowSettings, SamplingParams, sample, seed_of, uniforms
from nanochat.tokenizer import Tokenizer

__all__ = ["Engine", "NewToken", "Row", "SamplingParams", "Slots", "round_up", "sample", "seed_of", "uniforms"]

NO_ANSWER = "error"  # the answer to a call that the calculator cannot compute

CACHE_STEP = 64  # a cache has room for a multiple of this many tokens
ATTENDED_STEP = 16  # attended_len is a multiple of this: whole vectors, and few keys that no row has yet
CHUNK_STEP = 16  # a piece of a prompt is padded to a multiple of this, so that shapes repeat
PREFILL_CHUNK = 256  # tokens of a prompt read at once: a longer piece needs a larger mask and takes as long per token
PREFILL_TOKENS = 8192  # read at once over all prompts: bounds the memory of their activations
# Up to this many rows of a model up to this wide, one thread of a CPU decodes as fast as two in bf16, and a tenth
# slower in fp32. Two threads wait for each other at every operator: beside a busy program one thread is 3.9 times as
# fast with 1 row (AMD EPYC, 2026-11-28), and 2.7 times with 8 (Xeon with AMX, 2026-11-29).
ONE_THREAD_ROWS = 8
ONE_THREAD_WIDTH = 256


# A reply is complete with the assistant's end token, cut off by its length or the context, and broken by any other
# special token, which the assistant must not write. Models of other families may have several end tokens.
Ending = Literal["complete", "cut off", "broken"]


def ending(tokens: Sequence[int], mask: Sequence[int], tokenizer: Tokenizer) -> Ending:
    """How a reply has ended, by all its tokens, the last included; `mask` has 1 where the model chose the token."""
    # The tool's answer ends with a stop token too, which the model has not chosen: the reply was cut off there.
    if not tokens or not mask[-1] or tokens[-1] not in tokenizer.stop_ids:
        return "cut off"
    return "complete" if tokens[-1] in tokenizer.reply_ends else "broken"


# ---------------------------------------------------------------------- a row and its tokens


@dataclass(eq=False)
class Row:
    """One reply that is being generated."""

    prompt: Sequence[int]  # token ids, begin token first
    max_tokens: int  # new tokens at most, the tool's among them
    sampling: SamplingParams
    number: int = 0  # the index of its prompt among those that are generated together
    answers_calls: bool = True  # False: a tool call gets no answer
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of these tokens
    stop_ids: Collection[int] = ()  # further tokens that end the reply
    grammar: Any = None  # the grammar that its tokens must follow (serve/grammar.py)
    slot: int = -1  # its row of the cache
    made: int = 0  # new tokens so far
    tool_call: list[int] | None = None  # the tokens of an open call
    forced_tokens: deque[int] = field(default_factory=deque)  # the tool's answer that the row has yet to read


class NewToken(NamedTuple):
    """The newest token of a row."""

    row: Row
    id: int
    kind: str  # "text", "python" (of a call) or "python_output" (of the tool's answer), as in conversation.py
    finish_reason: str | None  # "stop": it is a stop token; "length": it is the last one that fits; None: more follow
    logprobs: Sequence[float] = ()  # see Slots.decode

    @property
    def by_model(self) -> bool:
        """Whether the model chose it; the tool's answer is forced."""
        return self.kind != "python_output"


# ---------------------------------------------------------------------- the engine


class Engine:
    """Generates with a snapshot of a model's weights, cast once to the device's dtype.

    All ranks of a sharded model make the snapshot together, and update it together. Unless `graphs` is "off" an
    accelerator records the launches of a decoded token and replays them as one. `weights` "fp16" takes half the memory
    and time of products in fp32, and rounds weights to 11 bits. The model itself is packed, so that no copy is there in
    fp32: it can neither be trained nor saved any more. With `tempered_logprobs`, which samplers of RL set, the logprobs
    of new tokens are at their row's temperature, otherwise at temperature 1.
    Raises UserError: when graphs are "on" on a CPU, or the device has no products with such weights.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        device: Device | None = None,
        graphs: Literal["auto", "on", "off"] = "auto",
        weights: WeightFormat = "auto",
    ):
        self.weights: WeightFormat = weights
        self.tempered_logprobs = False
        self.device = device or devices.init(str(model.device))
        # Tokens are dealt out to experts by operators that nobody has recorded on a card yet.
        # A recording would also advance the states of slots whose prompts are still being read.
        records = self.device.runtime.records(graphs) and not model.config.experts and not model.config.has_states
        # Makes an accelerator's decoders (kernels/decoding.py); None: they are `Slots`, as it is here.
        self.decoders = self.device.runtime.decoders(records)
        self.tokenizer = tokenizer
        self.model = self._snapshot(model)
        # The marks of calculator calls. Models of other families have none: no token has the id -1.
        self.call_start = tokenizer.special_ids.get("<|python_start|>", -1)
        self.call_end = tokenizer.special_ids.get("<|python_end|>", -1)
        self.answer_start = tokenizer.special_ids.get("<|output_start|>", -1)
        self.answer_end = tokenizer.special_ids.get("<|output_end|>", -1)
        self.stop_ids = set(tokenizer.stop_ids)

    # ---- weights

    def _snapshot(self, model: GPT) -> GPT:
        if model.is_packed:  # by another engine
            return model
        if self.weights != "auto":
            assert model.extension is None and not is_sharded(model), "a model in training is not packed"
            return model.kernels.pack(model, self.weights).eval()
        # Where the snapshot would be equal to the model, the engine shares its weights: in fp32, and in a server.
        packs = model.kernels.packs(self.device.dtype)
        # Adapters in training stay apart from their frozen base, which is in the device's dtype already. Merged in bf16
        # they would be lost where they change a weight by less than it resolves.
        adapted = model.extension
        if adapted is not None and not is_sharded(model):
            return model.eval()
        if model.embedding.weight.dtype == self.device.dtype and not packs and not is_sharded(model):
            return model.eval()
        # Decoding a few rows is bound by reading the weights once per token, not by arithmetic: bf16 halves the bytes.
        # A model on "meta" has shapes and no memory: no fp32 copy is ever there as a whole.
        with torch.device("meta"):
            copied = GPT(model.config, model.kernels).to(self.device.dtype)
            if adapted is not None:
                adapted.add_to(copied)
        copied.to_empty(device=self.device.torch_device).fill_rotary()
        # FSDP leaves each rank a part of every weight. They are gathered once here, and not at every decoded token.
        _copy_weights(copied, model)
        # Weights packed for a CPU: the products of one token take 0.36 instead of 0.70 ms in bf16 (depth 4, two cores
        # of an AMD EPYC, 2026-11-21).
        if packs and adapted is None:
            copied = model.kernels.pack(copied, may_round=self.device.may_round)
        return copied.eval()

    @torch.no_grad()
    def update(self, model: GPT) -> None:
        """Take over a model's present weights, as RL does before it samples."""
        if self.model.is_packed:
            self.model = self._snapshot(model)
        elif self.model is not model:
            _copy_weights(self.model, model)  # in place: recorded launches read them there

    # ---- generation

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        sampling: SamplingParams | Sequence[SamplingParams],
        max_rows: int | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        logprobs: int = -1,
    ) -> Iterator[NewToken]:
        """Yield the new tokens of all prompts, step by step; `row.number` says whose a token is.

        `sampling` holds for all prompts, or is a list with one for each. At most `max_rows` prompts run at once; the
        others begin as rows end. A row ends with a stop token, which is yielded too, after `max_tokens`, or at the end
        of the context; setting `row.max_tokens` to 0 ends it with its next token. `should_stop` is called before
        each step. `logprobs` as in `Slots.decode`.
        Raises UserError: when a setting is out of range or a prompt does not fit. Raises Interrupted: when
        `should_stop` returns True.
        """
        # Check the request, and give every row its settings.
        settings = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        for one in set(settings):
            check_ranges(one)
        if not prompts or not all(prompts):
            raise UserError("there is an empty prompt: begin it with the begin token")
        context = self.model.config.sequence_len
        longest = max(len(prompt) for prompt in prompts)
        if longest >= context:
            raise UserError(f"the prompt has {longest} tokens, the model's context {context}: shorten the prompt")
        if max_tokens < 1:
            return
        waiting: deque[Row] = deque()
        for number, (prompt, params) in enumerate(zip(prompts, settings, strict=True)):
            # The rotary tables end with the context, so prompt and reply together must fit into it.
            waiting.append(Row(prompt, min(max_tokens, context - len(prompt)), params, number))

        # The cache is as large as the longest row needs. It is written once and read at every token.
        size = min(len(waiting), max_rows or len(waiting))
        with self.slots(size, min(context, longest + max_tokens)) as slots:
            while waiting or slots.rows:
                if should_stop():
                    raise Interrupted
                # Prompts are read a quarter of the slots at a time: reading few costs nearly as much as reading many.
                free = size - len(slots.rows)
                if waiting and (not slots.rows or free >= max(1, size // 4)):
                    slots.fill([waiting.popleft() for _ in range(min(free, len(waiting)))])
                new_tokens = slots.decode(logprobs)
                slots.release({new.row for new in new_tokens if new.finish_reason})
                yield from new_tokens

    def decoder(self, size: int, capacity: int = 0, prefill_chunk: int = PREFILL_CHUNK) -> "Slots":
        """A decoder with `size` slots of `capacity` tokens; 0: as many as the model's context has."""
        return (self.decoders or Slots)(self, size, capacity, prefill_chunk)

    def slots(self, size: int, capacity: int) -> "contextlib.AbstractContextManager[Slots]":
        """A decoder with at least `size` slots of `capacity` tokens, for one caller at a time."""
        if self.decoders is not None:
            return self.decoders.lend(self, size, capacity)
        return contextlib.nullcontext(self.decoder(size, capacity))

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 256, keep_stop: bool = False, **settings: Any
    ) -> tuple[list[list[int]], list[list[int]]]:
        """The new tokens after each prompt, and masks with a 1 under every token that the model chose.

        `settings` are arguments of `stream`. Without `sampling` they may name fields of SamplingParams, such as
        temperature=0.7; prompt i then draws by `seed` + i. With `keep_stop` a stop token is among the new tokens: RL
        rewards the end, too.
        Raises TypeError: for any other setting, and for `sampling` together with one of its fields.
        """
        named = {field.name: settings.pop(field.name) for field in fields(SamplingParams) if field.name in settings}
        unknown = settings.keys() - inspect.signature(self.stream).parameters.keys()
        if unknown:
            raise TypeError(f"generate() has no setting {', '.join(sorted(unknown))}")
        if named and "sampling" in settings:
            raise TypeError(f"generate() takes either sampling or its fields, not both: {', '.join(named)}")
        if "sampling" not in settings:
            params = SamplingParams(**named)
            # With one seed for all, the replies to equal prompts would be copies of each other.
            settings["sampling"] = [replace(params, seed=params.seed + number) for number in range(len(prompts))]
        sequences: list[list[int]] = [[] for _ in prompts]
        masks: list[list[int]] = [[] for _ in prompts]
        with Bar("replies", len(prompts)) as replies:
            for new in self.stream(prompts, max_tokens=max_tokens, **settings):
                if new.finish_reason != "stop" or keep_stop:
                    sequences[new.row.number].append(new.id)
                    masks[new.row.number].append(int(new.by_model))
                replies.done += new.finish_reason is not None
        return sequences, masks

    def generate_batch(
        self, tokens: Sequence[int], num_samples: int = 1, max_tokens: int = 256, **sampling: Any
    ) -> tuple[list[list[int]], list[list[int]]]:
        """`num_samples` continuations of one prompt: whole sequences, the prompt included, and masks with a 1 under
        every token that the model chose.

        `sampling` names fields of SamplingParams, such as temperature=0.7; `**meta["sampling"]` of `load_model` draws
        as the checkpoint's server does. Sample i draws by `seed` + i, as choice i of a request to the server does.
        """
        sequences, masks = self.generate([tokens] * num_samples, max_tokens=max_tokens, **sampling)
        return [[*tokens, *new] for new in sequences], [[0] * len(tokens) + mask for mask in masks]

    def advance_row(self, row: Row, token: int, forced: bool) -> tuple[str, str | None]:
        """Take a new token into the row: count it, and queue the tool's answer at the end of a call.

        Returns the token's kind and, where the row ends with it, the reason. See NewToken.
        """
        # The row's state after each token of "It is <|python_start|> 2+3 <|python_end|>" (a text is one token here):
        #
        #     token             tool_call   forced_tokens                          kind
        #     It is             None        -                                      text
        #     <|python_start|>  []          -                                      python
        #     2+3               [2+3]       -                                      python
        #     <|python_end|>    None        <|output_start|> 5 <|output_end|>      python
        #
        # The next three steps take the queued tokens instead of the model's choices.
        #
        # If the model does not close a call, the engine closes it: when the model ends its turn inside the call (see
        # `Slots.decode`), and when the text of the call can no longer become an expression. Otherwise 4 to 7% of the
        # demo's replies would be an open call without text. The model reads the mark but did not choose it, so it
        # counts as part of the answer.
        kind = "text"
        if forced:
            kind = "python_output"
        # The marks around the tool's answer end the reply where the model writes them, but not where they are forced.
        elif token in self.stop_ids or token in row.stop_ids:
            return kind, "stop"
        elif token == self.call_start:
            kind = "python"
            row.tool_call = []
        elif row.tool_call is not None:
            kind = "python"
            is_closed = token == self.call_end
            if not is_closed:
                row.tool_call.append(token)
            if not row.answers_calls:
                row.tool_call = None if is_closed else row.tool_call
            elif is_closed or not can_continue(self.tokenizer.decode(row.tool_call)):
                self.answer_call(row, is_closed)
        row.made += 1
        return kind, "length" if row.made >= row.max_tokens else None

    def answer_call(self, row: Row, is_closed: bool) -> None:
        """End a row's call and queue the tool's answer to it, after the call's end mark where that is missing."""
        assert row.tool_call is not None
        text = calculate(self.tokenizer.decode(row.tool_call)) or NO_ANSWER
        if not is_closed:
            row.forced_tokens.append(self.call_end)
        row.forced_tokens.extend(self.tokenizer.encode(text, prepend=self.answer_start, append=self.answer_end))
        row.tool_call = None


@torch.no_grad()
def _copy_weights(copied: GPT, model: GPT) -> None:
    for mine, theirs in zip(copied.parameters(), model.parameters(), strict=True):
        mine.copy_(whole(theirs))
    for mine, theirs in zip(copied.buffers(), model.buffers(), strict=True):  # a base of 4 bits consists of buffers
        mine.copy_(theirs)


# ---------------------------------------------------------------------- the decoder


# Three rows decode in a cache of 4 slots; ^ is the begin token. Before a step:
#
#     slot   in the cache   position   last
#      0     ^ a b x           4        y      its prompt is "^ a b", and it has generated x and y
#      1     ^ c d             3        e      its prompt is "^ c d e", and it has just been admitted
#      2     ^ f p q r         5        s      its prompt is "^ f", and it has generated p, q, r and s
#      3                                       free: the next prompt is read here
#
# The step feeds y, e and s, stores their keys and values at positions 4, 3 and 5, and samples one new token for each
# row. If row 0 ends with its token, row 2 moves to slot 0, and the next step computes only slots 0 and 1.


class Slots:
    """The decoder: a cache of `size` slots, in which running rows advance together, a token at a time.

    The running rows occupy the first slots without gaps: slot i holds `rows[i]`, and a step computes the rows that run
    and no others. Prompts are read into the slots after them.

    Rows do not affect one another. In fp32 on a CPU that is exact without experts: a packed product
    computes a row with the same bits whatever the number of rows (kernels/cpu.py), attention computes each row by
    itself, and pieces and attended keys are padded to whole vectors, which adds exact zeros.
    test_s05_batched_is_alone.py compares random requests.
    """

    def __init__(self, engine: Engine, size: int, capacity: int = 0, prefill_chunk: int = PREFILL_CHUNK):
        config = engine.model.config
        device = engine.model.device
        self.engine = engine
        self.size = size
        self.capacity = capacity = capacity or config.sequence_len  # tokens that a slot holds
        self.prefill_chunk = prefill_chunk
        self.rows: list[Row] = []
        self.cache = KVCache.empty(
            len(config.attention_layers), size, round_up(capacity, CACHE_STEP), config.n_kv_head, config.head_dim,
            device, engine.device.dtype,
        )  # fmt: skip
        self.cache.states = engine.model.kernels.row_states(config, size, device, engine.device.dtype)
        # Padding never lands on a position that counts: the last token of a full row is never fed.
        self.cache.max_position = capacity - 1
        # The state of each row, on the device. So a step needs nothing from the host except its launches.
        self.index = torch.arange(size, device=device)[:, None]  # (size, 1): 0, 1, 2, ...
        self.last = torch.zeros(size, dtype=torch.long, device=device)  # each row's newest token: it is fed next
        # A random number for every token to come, drawn when the row is admitted.
        self.noise = torch.zeros(size, capacity, device=device)  # for the token after each position
        self.table = torch.zeros(size, len(RowSettings.numbers(SamplingParams())), device=device)
        self.seen = torch.zeros(size, config.vocab_size, dtype=torch.bool, device=device)  # for the repetition penalty
        # For settings that few requests have: allocated with the first row that needs them, read while one is running.
        self.counts: Tensor | None = None  # (size, V): how often a token is in the reply
        self.bias: Tensor | None = None  # (size, V): added to the logits
        # Made by `decode` for the running rows: their settings and their part of the cache. None: to be made again.
        self._settings: RowSettings | None = None
        self._running: KVCache | None = None

    @staticmethod
    def bytes_per_slot(c: GPTConfig, dtype: torch.dtype) -> int:
        # Twice, for keys and values; one vector of head_dim per layer, token and key head.
        values = 2 * len(c.attention_layers) * round_up(c.sequence_len, CACHE_STEP) * c.n_kv_head * c.head_dim
        states = devices.runtime_of("cpu").kernels(dtype, "").row_states(c, 1, "meta", dtype)
        return values * dtype.itemsize + sum(state.nbytes for state in states)

    # ---- prompts

    def fill(self, rows: Sequence[Row]) -> None:
        """Read the prompts of new rows and admit the rows. Equal prompts are read once and copied."""
        first = len(self.rows)
        # Each distinct prompt gets one slot, the longest first. The prompts that still have tokens at some chunk are
        # then the first ones, in neighbouring slots, and one `prefill` reads a piece of each.
        prompts = sorted(dict.fromkeys(tuple(row.prompt) for row in rows), key=len, reverse=True)
        slot_of = {prompt: first + place for place, prompt in enumerate(prompts)}
        # At most `group` prompts are read at once, 32 with pieces of 256 tokens, and of these only such as are about as
        # long, because all are padded to the length of the longest. About as long: one bit_length of the padded length.
        #
        #     tokens to read     100   89   59   40   11
        #     padded             112   96   64   48   16
        #     bit_length           7    7    7    6    5      the first three are read together, then one, then one
        #
        # Longest first, so equal bit_lengths are neighbours: as many prompts as have the first one's are read.
        group = max(1, PREFILL_TOKENS // min(self.prefill_chunk, len(prompts[0])))
        start = 0
        while start < len(prompts):
            sizes = [round_up(len(prompt) - 1, CHUNK_STEP).bit_length() for prompt in prompts[start : start + group]]
            together = prompts[start : start + sizes.count(sizes[0])]
            # A prompt's last token is not read with the rest: it is the first one decoded, and its logits predict
            # the reply's first token. A prompt of 600 tokens is read as 256 + 256 + 87.
            for filled in range(0, len(together[0]) - 1, self.prefill_chunk):
                pieces = [prompt[filled:-1][: self.prefill_chunk] for prompt in together if len(prompt) - 1 > filled]
                self.prefill(first + start, pieces, filled)
            start += len(together)
        # RL and `generate_batch` sample one prompt many times. Rows of an equal prompt begin with the same slot, and
        # `admit` copies it for all but one.
        for row in rows:
            row.slot = slot_of[tuple(row.prompt)]
        self.admit(rows)

    @torch.inference_mode()
    def prefill(self, slot: int, pieces: Sequence[Sequence[int]], filled: int) -> int:
        """Read a piece of a prompt into each of the slots from `slot` on, which hold `filled` tokens each.

        Returns the number of tokens computed, padding included.
        """
        # Only keys and values: the logits of a prompt's tokens are not wanted.
        B, T, _ = self.read(slot, pieces, filled).shape
        return B * T

    def read(self, slot: int, pieces: Sequence[Sequence[int]], filled: int) -> Tensor:
        """Feed a piece to each of the slots from `slot` on; returns hidden states (B, T, C), padding included."""
        # Pad to one length. A padding token's keys and values are overwritten before anything attends to them: a query
        # attends to positions up to its own, and the row's next tokens take these positions.
        size = round_up(max(len(piece) for piece in pieces), CHUNK_STEP)
        tokens = torch.tensor([[*piece, *[0] * (size - len(piece))] for piece in pieces])
        lengths = torch.tensor([len(piece) for piece in pieces])
        attended_len = self._attended_len(filled + size)
        cache = self.cache.view(slot, slot + len(pieces))
        cache.attended_len = attended_len
        cache.position.fill_(filled)
        for memory in cache.states if filled == 0 else ():  # a slot keeps what its last row left there
            memory.zero_()
        cache.lengths = self.engine.device.to_device(lengths)
        hidden = self.engine.model.hidden(self.engine.device.to_device(tokens), cache)
        cache.position.add_(cache.lengths)
        return hidden

    @torch.inference_mode()
    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first tokens of a slot's prompt into another slot, which then does not have to read them."""
        self.cache.copy_rows(self._index([source]), self._index([target]), tokens)
        self.cache.position[target] = tokens

    # ---- rows

    @torch.inference_mode()
    def admit(self, rows: Sequence[Row]) -> None:
        """Start rows whose prompts, all but the last token, are in the cache at `row.slot`."""
        to_device = self.engine.device.to_device
        first = len(self.rows)
        end = len(self.rows) + len(rows)
        # Rows go to the slots after the running ones, wherever their prompts were read. A row that is in its slot
        # already needs no copy, which is the usual case for a new prompt.
        targets = [slot for slot, row in enumerate(rows, first) if row.slot != slot]
        if targets:
            sources = [rows[slot - first].slot for slot in targets]
            longest = max(len(row.prompt) for row in rows)
            self.cache.copy_rows(self._index(sources), self._index(targets), longest)
        self.last[first:end] = to_device(torch.tensor([row.prompt[-1] for row in rows]))
        self.cache.position[first:end] = to_device(torch.tensor([len(row.prompt) - 1 for row in rows]))
        self.table[first:end] = to_device(torch.tensor([RowSettings.numbers(row.sampling) for row in rows]))

        # The noise for a token is stored at the position of the token before it, where `decode` finds it.
        noise = torch.zeros(len(rows), self.noise.size(1))
        for place, row in enumerate(rows):
            if not row.sampling.is_greedy:
                begin = len(row.prompt) - 1
                drawn = torch.from_numpy(uniforms(row.sampling.seed, row.max_tokens))
                noise[place, begin : begin + row.max_tokens] = drawn
        self.noise[first:end] = to_device(noise)

        # The repetition penalty counts the prompt's tokens too; the slot's last row may have left its own.
        for slot, row in enumerate(rows, first):
            row.slot = slot
            for memory in self.cache.states if len(row.prompt) == 1 else ():  # nothing was read
                memory[:, slot] = 0
            if row.sampling.repetition_penalty != 1:
                self.seen[slot] = False
                self.seen[slot, to_device(torch.tensor(row.prompt))] = True
            if row.sampling.presence_penalty or row.sampling.frequency_penalty:
                if self.counts is None:
                    self.counts = torch.zeros(self.seen.shape, device=self.seen.device)
                # `decode` counts each token that it feeds. The first is the prompt's last one, which must not count.
                self.counts[slot] = 0
                self.counts[slot, row.prompt[-1]] = -1
            if row.logit_bias and self.bias is None:
                self.bias = torch.zeros(self.seen.shape, device=self.seen.device)
            if self.bias is not None:
                self.bias[slot] = 0
            if self.bias is not None and row.logit_bias:
                values = to_device(torch.tensor(list(row.logit_bias.values()), dtype=torch.float32))
                self.bias[slot, self._index(list(row.logit_bias))] = values
        self.rows += rows
        self._settings = None

    @torch.inference_mode()
    def release(self, ended: Collection[Row]) -> None:
        """Let rows go, wherever they are; the last running rows move into the gaps."""
        # A move copies the row's keys and values once, which costs about as much as one token of the row. A gap would
        # cost that much at every token from then on.
        kept = [row for row in self.rows if row not in ended]
        if len(kept) == len(self.rows):
            return
        # n rows stay, in slots 0 to n - 1 from now on. As many rows lie above as there are gaps below.
        gaps = [row.slot for row in self.rows[: len(kept)] if row in ended]
        movers = [row for row in kept if row.slot >= len(kept)]
        if movers:
            source = self._index([row.slot for row in movers])
            target = self._index(gaps)
            self.cache.copy_rows(source, target, max(len(row.prompt) + row.made for row in movers))
            tensors = (self.last, self.cache.position, self.noise, self.table, self.seen)
            for tensor in (*tensors, self.counts, self.bias):
                if tensor is not None:
                    tensor[target] = tensor[source]
            for row, slot in zip(movers, gaps, strict=True):
                row.slot = slot
        self.rows = sorted(kept, key=lambda row: row.slot)
        self._settings = None

    def reset(self) -> None:
        """Let all rows go. Raises the error of a device that accepts no more work."""
        self.rows = []
        self._settings = None
        self.cache.position.zero_()
        self.engine.device.synchronize()

    # ---- tokens

    @torch.inference_mode()
    def decode(self, logprobs: int = -1) -> list[NewToken]:
        """One new token for every running row, in the order of `rows`.

        With `logprobs` n >= 0, `NewToken.logprobs` has 1 + 2n numbers: the token's logprob, the n largest
        logprobs, and their ids.
        """
        B = len(self.rows)
        if self._settings is None:
            self._settings = RowSettings([row.sampling for row in self.rows], self.table[:B])
            self._running = None

        # 1. Forward: each row's last token joins the cache and yields the logits of the next.
        logits, noise = self._step()  # (B, V), (B, 1)
        allowed = self._masked(logits)

        # 2. Sample. The new token stays on the device as the next one to feed.
        seen = self.seen[:B]
        if "repetition_penalty" in self._settings.in_use:
            seen.view(torch.uint8).scatter_(1, self.last[:B, None], 1)  # NPUs write bool on their slow AI CPU
        counts = None
        if self.counts is not None and self._settings.in_use & {"presence_penalty", "frequency_penalty"}:
            counts = self.counts[:B]
            counts.scatter_add_(1, self.last[:B, None], torch.ones_like(noise))
        bias = None
        if self.bias is not None and any(row.logit_bias for row in self.rows):
            bias = self.bias[:B]
        kernels = self.engine.model.kernels
        tokens = sample(allowed, self._settings, noise, seen, kernels, counts, bias)  # (B,)
        self.last[:B] = tokens

        # 3. The one wait for the device: `tolist` needs the results. Everything before it only queues work. Logprobs
        #    travel with the tokens in one table, because a second copy would be a second wait. Ids below 2**24 are
        #    exact in fp32.
        likely: Sequence[Sequence[float]] = [()] * len(tokens)
        if logprobs < 0:
            chosen = tokens.tolist()
        else:
            if self.engine.tempered_logprobs and "temperature" in self._settings.in_use:
                logits = logits / self._settings["temperature"]
            columns = (tokens[:, None].float(), logprob_table(logits, tokens, logprobs))
            table = torch.cat(columns, dim=1).tolist()
            chosen = [int(numbers[0]) for numbers in table]
            likely = [numbers[1:] for numbers in table]

        # 4. A row that reads the tool's answer takes the answer's next token instead of the model's. A grammar may
        #    replace a token with one that completes the text in time.
        replaced: dict[int, int] = {}  # by slot
        new_tokens = []
        for row, token, numbers in zip(self.rows, chosen, likely, strict=True):
            if row.tool_call is not None and row.answers_calls and token in self.engine.stop_ids:
                self.engine.answer_call(row, is_closed=False)  # and not end its reply with an open call
            is_forced = bool(row.forced_tokens)
            taken = row.forced_tokens.popleft() if is_forced else token
            if row.grammar is not None:
                taken = row.grammar.accept(taken)
                if taken != token and numbers:  # rare, so a wait for the device
                    id_on_device = self._index([taken])
                    numbers = logprob_table(logits[row.slot, None], id_on_device, logprobs)[0].tolist()
            if taken != token:
                replaced[row.slot] = taken
            kind, finish_reason = self.engine.advance_row(row, taken, is_forced)
            new_tokens.append(NewToken(row, taken, kind, finish_reason, numbers))
        if replaced:
            self.last[self._index(list(replaced))] = self._index(list(replaced.values()))
        return new_tokens

    def _masked(self, logits: Tensor) -> Tensor:
        """The logits (B, V) with -inf where a row's grammar does not allow the token; other rows keep every bit."""
        grammars = {row.slot: row.grammar for row in self.rows if row.grammar is not None}
        if not grammars:
            return logits
        # The host computes the masks while the device computes the logits.
        allowed = torch.zeros(len(grammars), logits.size(1), dtype=torch.bool)
        for place, grammar in enumerate(grammars.values()):
            tokens = grammar.allowed()
            allowed[place, : len(tokens)] = tokens  # the output layer may be wider than the vocabulary
        slots = self._index(list(grammars))
        masked = logits.clone()  # logprobs are read from the unmasked ones
        masked[slots] = logits[slots].masked_fill(~self.engine.device.to_device(allowed), -math.inf)
        return masked

    def _step(self) -> tuple[Tensor, Tensor]:
        """Feed the last token of each running row; returns logits (B, V) and noise (B, 1) for the token after it."""
        B = len(self.rows)
        attended_len = self._attended_len(max(len(row.prompt) + row.made for row in self.rows))
        if self._running is None:
            self._running = replace(self.cache.view(0, B), max_position=None)
        self._running.attended_len = attended_len
        is_small = B <= ONE_THREAD_ROWS and self.engine.model.config.width <= ONE_THREAD_WIDTH
        with host.at_most_threads(1) if is_small else contextlib.nullcontext():
            return self._forward(self._running)

    def _forward(self, cache: KVCache) -> tuple[Tensor, Tensor]:
        B = len(cache.position)
        # Everything here is a tensor operation on the device, position included, so that it can be recorded.
        positions = cache.positions(1)  # (B, 1)
        # By index and not by gather: a simulated recording computes shapes with indices of -1, which gather refuses.
        noise = self.noise[self.index[:B], positions]  # (B, 1)
        hidden = self.engine.model.hidden(self.last[:B, None], cache)  # (B, 1, C)
        cache.position.add_(1)
        return self.engine.model.logits(hidden.flatten(0, 1)), noise

    def _attended_len(self, tokens: int) -> int:
        """How much of the cache is attended to when the longest row has this many tokens, which then have their place
        there."""
        return min(round_up(tokens, ATTENDED_STEP), self.cache.capacity)

    def shrink(self, longest: int) -> None:
        """Rows have left, and no slot in use has more than `longest` tokens: a chance for an accelerator's decoder to
        attend to fewer."""

    def _index(self, numbers: Sequence[int]) -> Tensor:
        return self.engine.device.to_device(torch.tensor(numbers))


def logprob_table(logits: Tensor, tokens: Tensor, alternatives: int) -> Tensor:
    """For each row of logits (B, V): the logprob of its token, the n largest logprobs, and their ids, (B, 1 + 2n)."""
    logprob = logits.log_softmax(dim=-1)
    best = logprob.topk(min(alternatives, logprob.size(-1)), dim=-1)
    return torch.cat((logprob.gather(1, tokens[:, None]), best.values, best.indices.float()), dim=1)


def round_up(tokens: int, step: int) -> int:
    return -(-tokens // step) * step  # // rounds down, and down from -tokens is up from tokens
