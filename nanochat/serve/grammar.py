"""Replies that follow a JSON schema: which tokens may come next, computed by llguidance.

Before each token the decoder (engine.py) asks a row's grammar for the allowed tokens, and gives all others the logit
-inf. So even a model that has never seen JSON follows the schema; the model chooses the content. The reply always ends
with a complete document: what the schema leaves open gets bounds (bounds.py), and when few tokens are left, the reply
closes (closing.py).

Schemas are written by strangers. Compiling one happens off the event loop, and what it may cost is bounded four times:
by the limits below, by a first attempt in a child process with little time and memory (grammar_trial.py), by
llguidance's own limits, which count steps of work, and by the clock: PREPARE_SECONDS before the first token, and
TOKEN_SECONDS for each token after it, because the tokens of all other clients wait.
"""

import json
import math
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanochat.families.tool_calls import THOUGHT_END, ThoughtReader
from nanochat.ground.cli import UserError
from nanochat.serve.bounds import bounded, parts_of
from nanochat.serve.closing import MOST_STEPS, Closer, Steps, hints_of
from nanochat.tokenizer import Tokenizer

# Seconds of CPU.
PREPARE_SECONDS = 0.5  # for all that a schema costs before the first token,
CHILD_SECONDS = 0.1  # with the start of the child
TOKEN_SECONDS = 0.001  # for each token of a reply, on average,
MORE_SECONDS = 0.05  # and once for a few that cost more
EXPLAINED_TOKENS = 1_000  # a refusal names the length of the shortest reply up to this one
THOUGHT_SHARE = 0.5  # of the tokens of a reply, for the thought before its document
MAX_SCHEMA = 16_384  # characters of JSON
MAX_REPEATS = 1_000  # llguidance writes out every repetition
MAX_LEAST_LENGTH = 10_000  # characters; a text with a minimum length beyond the longest reply would never end
# If several patterns apply to one text, llguidance's work doubles with each: 20 took 3 s, 24 minutes. It is hard to
# find out which patterns apply together (allOf, $ref, anyOf next to others), so the limit counts all of a schema.
MAX_PATTERNS = 12
# A number's remainder is a state of llguidance's lexer, and several divisors of one number multiply: a least common
# multiple of 99,991 takes 1.3 s, of 999,983 46 s. Where divisors meet is as hard to tell, so all of a schema count.
MAX_MULTIPLE = 10_000
MOST = {
    "minItems": MAX_REPEATS, "maxItems": MAX_REPEATS, "minProperties": MAX_REPEATS, "maxProperties": MAX_REPEATS,
    "minLength": MAX_LEAST_LENGTH,
}  # fmt: skip
# Messages of llguidance that only its authors understand.
EXPLAINED = {
    "NoExtensionBias": "a $ref leads back to itself, and so describes nothing",
    "recursion limit exceeded": "it is nested more than 128 levels deep",
    "Expecting object schema": "it must be an object",
}
# Compact JSON with one optional space, as models write it. With free white space a weak model writes only spaces.
# `oneOf` means `anyOf`: during writing it is impossible to check that only one alternative holds.
OPTIONS: Any = {
    "whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?", "coerce_one_of": True,
    "lenient": False,
}  # fmt: skip
COMPACT: Any = {**OPTIONS, "item_separator": ",", "key_separator": ":"}


class SchemaError(UserError):
    """A schema that cannot be followed."""


class CostlySchema(SchemaError):
    """A schema that takes too much work."""

    def __init__(self) -> None:
        super().__init__(f"preparing the schema takes over {PREPARE_SECONDS} s of work or too much memory: shorten it")


class Vocabulary:
    """A tokenizer's tokens in the form for llguidance. `end` is the token that ends a reply."""

    def __init__(self, tokenizer: Tokenizer, end: int):
        try:
            import llguidance  # here, because few requests need it

            from nanochat.serve import grammar_trial
        except ImportError as error:
            raise SchemaError("replies that follow a schema need llguidance: pip install -e '.[serve]'") from error
        self._trial = grammar_trial
        # The attributes that llguidance's wrapper reads. Text never becomes a special token: llguidance treats a token
        # that begins with the byte 0xff as special. Unused ids of the vocabulary get this form too.
        self.tokens = [text or b"\xff<%d>" % index for index, text in enumerate(tokenizer.token_texts)]
        for name, index in tokenizer.special_ids.items():
            self.tokens[index] = b"\xff" + name.encode()
        self.special_token_ids = list(tokenizer.special_ids.values())
        self.eos_token_id = end
        self.bos_token_id = None
        self._encode = tokenizer.encode_continuation
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=end
        )

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text that a schema determines: it is written with the tokens that the model has learned."""
        if not isinstance(text, str):
            raise TypeError("this tokenizer takes texts")  # llguidance tries bytes first
        return self._encode(text)

    def compile(self, schema: dict[str, Any] | bool, max_tokens: int, *, is_compact: bool = False) -> "Grammar":
        """The grammar of replies of at most `max_tokens` tokens, the end token included.

        Raises SchemaError: when the schema is wrong, too large, or uses a keyword that llguidance does not know, or no
        document is found that is short enough.
        """
        _check_size(schema)
        length = len(json.dumps(schema))
        if length > MAX_SCHEMA:
            raise SchemaError(f"the schema has {length:,} characters of JSON: at most {MAX_SCHEMA:,}")
        options = COMPACT if is_compact else OPTIONS
        began = time.thread_time()
        # The bounds may contradict another part of the schema. Then the schema is followed without them.
        narrowed = bounded(schema, max_tokens)
        try:
            matcher = self._make_matcher(narrowed, options)
        except CostlySchema:
            raise
        except SchemaError:
            if narrowed == schema:
                raise
            matcher = self._make_matcher(schema, options)

        closer = Closer(self.tokens, self.eos_token_id, self._encode, hints_of(parts_of(schema)))
        compiled = time.thread_time()
        deadline = compiled - 2 * (compiled - began) + PREPARE_SECONDS - CHILD_SECONDS  # the child did the same work
        closing = closer.first(matcher, max(max_tokens, EXPLAINED_TOKENS), deadline)
        if closing is None and time.thread_time() >= deadline:
            raise CostlySchema
        if closing is None:
            raise SchemaError("the schema cannot be followed: no document was found that completes it")
        if len(closing) > max_tokens:
            needed = f"the shortest reply found that completes the schema takes {len(closing)} tokens"
            raise SchemaError(f"{needed}, and {max_tokens} are left: allow a longer reply, or shorten the messages")
        return Grammar(matcher, len(self.tokens), closer, closing, max_tokens)

    def _make_matcher(self, schema: dict[str, Any] | bool, options: Any) -> Any:
        text = json.dumps(schema)
        try:
            self._trial.try_out(text, json.dumps(options))
            matcher = self._trial.make_matcher(self._tokenizer, text, options)
        except subprocess.SubprocessError as error:
            raise CostlySchema from error
        except ValueError as error:
            raise SchemaError(f"the schema cannot be followed: {_explained(str(error))}") from error
        matcher.compute_bitmask()  # some schemas turn out to be too complex, or impossible, at the first token
        if matcher.is_error():
            raise SchemaError(f"the schema cannot be followed: {_explained(_one_line(matcher.get_error()))}")
        return matcher


def _check_size(schema: Any) -> None:
    """Raises SchemaError: when the schema would take long to compile."""
    patterns = 0
    multiple = 1
    stack = [schema]
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack += value
        elif isinstance(value, dict):
            stack += value.values()
            more = value.get("patternProperties")
            patterns += ("pattern" in value) + ("format" in value) + (len(more) if isinstance(more, dict) else 0)
            if patterns > MAX_PATTERNS:
                raise SchemaError(f"the schema has more than {MAX_PATTERNS} patterns and formats")
            multiple = math.lcm(multiple, _digits(value.get("multipleOf")))
            if multiple > MAX_MULTIPLE:
                raise SchemaError(
                    f"the schema's values of multipleOf have a least common multiple over {MAX_MULTIPLE:,}"
                    " (not counting powers of ten)"
                )
            for name, most in MOST.items():
                count = value.get(name)
                if isinstance(count, int | float) and count > most:
                    shown = f"{count:,}"
                    shown = shown if len(shown) <= 40 else f"{shown[:40]}..."
                    raise SchemaError(f"the schema has {name} {shown}: at most {most:,}")


def _digits(divisor: Any) -> int:
    """A value of multipleOf without its decimal point and the zeros at its end: powers of ten cost nothing."""
    if isinstance(divisor, bool) or not isinstance(divisor, int | float) or not 0 < divisor < math.inf:
        return 1  # none, or wrong
    digits = int("".join(map(str, Decimal(str(divisor)).as_tuple().digits))) if isinstance(divisor, float) else divisor
    while digits % 10 == 0:
        digits //= 10
    return digits


class Grammar:
    """The state of one reply in its schema: where its document stands, and the tokens that would complete it."""

    def __init__(self, matcher: Any, width: int, closer: Closer, closing: list[int], max_tokens: int):
        self._matcher = matcher
        self._steps = Steps(MOST_STEPS)
        self._budget = MORE_SECONDS  # CPU time
        self.width = width  # size of the vocabulary
        self._closer = closer
        self._closing = closing
        self._remaining = max_tokens

    def copy(self, max_tokens: int) -> "Grammar":
        """A copy for another reply of the same request. `max_tokens` are enough to complete the document."""
        return Grammar(self._matcher.deep_copy(), self.width, self._closer, self._closing, max_tokens)

    @property
    def shortest(self) -> int:
        """The tokens of the shortest document that was found."""
        return len(self._closing)

    @property
    def error(self) -> str:
        """Why the reply cannot follow the schema any further; empty: it can."""
        if self._budget < 0:
            return f"it takes over {TOKEN_SECONDS * 1000:g} ms a token"
        return _one_line(self._matcher.get_error()) if self._matcher.is_error() else ""

    def allowed(self) -> Tensor:
        """Which tokens may come next, (V,) of bool on the host."""
        with self._counted():
            allowed = np.zeros(self.width, dtype=bool)
            if len(self._closing) < self._remaining:
                # On a copy: a mask that takes too much work leaves a matcher unusable, which is still needed to close.
                bits = np.frombuffer(self._matcher.deep_copy().compute_bitmask(), dtype=np.uint8)
                allowed = np.unpackbits(bits, bitorder="little")[: self.width].astype(bool)
            if not allowed.any():
                allowed[self._closing[:1]] = True
            return torch.from_numpy(allowed)

    def accept(self, token: int) -> int:
        """Advance by the token that the row has sampled. Returns the token that the reply takes: the sampled one, or
        the first of the closing, if after the sampled one the document could not be completed in time."""
        with self._counted():
            self._remaining -= 1
            self._budget += TOKEN_SECONDS
            self._steps.earn()
            self._steps.deadline = time.thread_time() + self._budget
            if token != self._closing[0] and token != self._closer.end:
                longer = self._matcher.deep_copy()
                longer.consume_token(token)
                closing = self._closer.next(longer, token, self._closing, self._remaining, self._steps)
                if closing is not None:
                    self._matcher = longer
                    self._closing = closing
                    return token
                token = self._closing[0]
            self._matcher.consume_token(token)
            self._closing = self._closing[1:]
            return token

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Takes the time of the block from the budget."""
        began = time.thread_time()
        yield
        self._budget -= time.thread_time() - began


class AfterThought:
    """The grammar of a reply whose document comes after its thought, which is free and gets THOUGHT_SHARE of the tokens
    at most. `end` are the tokens that close the thought and begin the document."""

    def __init__(self, grammar: Grammar, end: list[int], tokenizer: Tokenizer, max_tokens: int):
        self._document = grammar
        self._end = end
        self._after = next(end[n:] for n in range(len(end) + 1) if THOUGHT_END in tokenizer.decode(end[:n]))
        self._tokenizer = tokenizer
        self._left = max_tokens
        # The tokens that the thought may still have: the shortest document must fit after it.
        self._budget = min(int(THOUGHT_SHARE * max_tokens), max_tokens - len(end) - grammar.shortest)
        self._thought: ThoughtReader | None = ThoughtReader(in_thought=True)  # None: it is closed
        self._forced: deque[int] = deque()  # tokens before the document

    def copy(self, max_tokens: int) -> "AfterThought":
        """See `Grammar.copy`."""
        return AfterThought(self._document, self._end, self._tokenizer, max_tokens)

    @property
    def error(self) -> str:
        return self._document.error

    def allowed(self) -> Tensor:
        """See `Grammar.allowed`."""
        is_before = self._thought is not None or self._forced  # `accept` takes the forced tokens whatever is sampled
        return torch.ones(self._document.width, dtype=torch.bool) if is_before else self._document.allowed()

    def accept(self, token: int) -> int:
        """See `Grammar.accept`."""
        self._left -= 1
        if self._thought is not None:
            self._budget -= 1
            self._thought.add(self._tokenizer.decode([token]))
            place = self._thought.place
            if place == "thought" and self._budget >= 0 and token not in self._tokenizer.stop_ids:
                return token
            self._thought = None
            is_closed = place == "after thought"  # by the model; otherwise `end` begins with this token
            self._forced.extend(self._after if is_closed else self._end)
            left = self._left if is_closed else self._left + 1
            self._document = self._document.copy(left - len(self._forced))
            if is_closed:
                return token
        return self._forced.popleft() if self._forced else self._document.accept(token)


def _explained(text: str) -> str:
    for words, plain in EXPLAINED.items():
        if words in text:
            return plain
    return _one_line(text)


def _one_line(text: str) -> str:
    line = " ".join(text.replace("<non-verbose/>", "").split())
    return line if len(line) <= 200 else line[:200] + "..."
