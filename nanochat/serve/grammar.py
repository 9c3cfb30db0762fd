"""Replies that follow a JSON schema: which tokens may come next, computed by llguidance.

Before each token the decoder (engine.py) asks a row's grammar for the allowed tokens, and gives all others the logit
-inf. So even a model that has never seen JSON follows the schema; the model chooses the content. The reply always ends
with a complete document: what the schema leaves open gets bounds (bounds.py), and when few tokens are left, the reply
closes (closing.py).

Schemas are written by strangers. Compiling one happens off the event loop, and what it may cost is bounded four times:
by the limits below, by a first attempt in a child process with little time and memory (grammar_trial.py), by
llguidance's own limits, which count steps of work, and by a budget of CPU time and steps (closing.py).
"""

import json
import subprocess
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanochat.families.tool_calls import THOUGHT_END, ThoughtReader
from nanochat.serve.bounds import SchemaError, bounded, exact, parts_of
from nanochat.serve.closing import FIRST_STEPS, MOST_SECONDS, MOST_STEPS, TOKEN_SECONDS, Budget, Closer, hints_of
from nanochat.serve.schema import shortened
from nanochat.tokenizer import Tokenizer

# CPU seconds before the first token. The child process takes 0.2 more at most, and other clients wait for all of it.
PREPARE_SECONDS = 0.3
RECENT = 32  # compiled schemas that are kept: clients send the same one again and again
EXPLAINED_TOKENS = 1_000  # a refusal names the length of the shortest reply up to this one
THOUGHT_SHARE = 0.5  # most of a reply's tokens that its thought gets before a document
MAX_SCHEMA = 131_072  # characters of JSON
# Messages of llguidance that only its authors understand.
EXPLAINED = {
    "NoExtensionBias": "a $ref leads back to itself, and so describes nothing",
    "recursion limit exceeded": "it is nested more than 128 levels deep",
}
# Compact JSON with one optional space, as models write it. With free white space a weak model writes only spaces.
# `oneOf` means `anyOf`: during writing it is impossible to check that only one alternative holds.
OPTIONS: Any = {
    "whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?", "coerce_one_of": True,
    "lenient": False,
}  # fmt: skip
COMPACT: Any = {**OPTIONS, "item_separator": ",", "key_separator": ":"}


class CostlySchema(SchemaError):
    """A schema that takes too much work."""

    def __init__(self) -> None:
        super().__init__("preparing the schema takes over 0.5 s of work or too much memory: shorten it")


class Vocabulary:
    """A tokenizer's tokens in the form for llguidance. `end` is the token that ends a reply."""

    def __init__(self, tokenizer: Tokenizer, end: int):
        import llguidance  # here, because few requests need it

        from nanochat.serve import grammar_trial

        self._trial = grammar_trial
        self._recent: dict[tuple[str, int, bool], Grammar] = {}
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

        Raises SchemaError: when the schema is wrong, takes too much work, or uses a keyword that cannot be followed, or
        no document is found that is short enough.
        """
        grammar = self.recent(schema, max_tokens, is_compact=is_compact)
        if grammar is None:
            key = _key(schema, max_tokens, is_compact)
            self._recent[key] = self._compile(*key)
            if len(self._recent) > RECENT:
                del self._recent[next(iter(self._recent))]
            grammar = self._recent[key].copy(max_tokens)
        return grammar

    def recent(self, schema: dict[str, Any] | bool, max_tokens: int, *, is_compact: bool = False) -> "Grammar | None":
        """What `compile` returns, if the schema has been compiled lately. Raises as `compile`."""
        grammar = self._recent.get(_key(schema, max_tokens, is_compact))
        return grammar and grammar.copy(max_tokens)

    def _compile(self, text: str, bits: int, is_compact: bool) -> "Grammar":
        if len(text) > MAX_SCHEMA:
            raise SchemaError(f"the schema has {len(text):,} characters of JSON: at most {MAX_SCHEMA:,}")
        max_tokens = 2**bits - 1
        options = COMPACT if is_compact else OPTIONS
        budget = Budget(PREPARE_SECONDS, FIRST_STEPS)
        with budget:
            schema = exact(json.loads(text))
            narrowed = bounded(schema, max_tokens)
            try:
                matcher = self._make_matcher(narrowed, options)
            except CostlySchema:
                raise
            except SchemaError:
                if narrowed == schema:
                    raise
                # The bounds may contradict another part of the schema. Then it is followed without them.
                matcher = self._make_matcher(schema, options)
            closer = Closer(self.tokens, self.eos_token_id, self._encode, hints_of(parts_of(json.loads(text))))
            closing = closer.first(matcher, max(max_tokens, EXPLAINED_TOKENS), budget)
            if closing is None and budget.is_over:
                raise CostlySchema
        if closing is None:
            raise SchemaError("the schema cannot be followed: no document was found that completes it")
        return Grammar(matcher, len(self.tokens), closer, closing, max_tokens)

    def _make_matcher(self, schema: dict[str, Any] | bool, options: Any) -> Any:
        text = json.dumps(schema)
        try:
            self._trial.try_out(text, json.dumps(options))
            matcher = self._trial.make_matcher(self._tokenizer, text, options)
        except subprocess.SubprocessError as error:
            raise CostlySchema from error
        except ValueError as error:
            raise SchemaError(f"the schema cannot be followed: {_one_line(str(error))}") from error
        matcher.compute_bitmask()  # some schemas turn out to be too complex, or impossible, at the first token
        if matcher.is_error():
            raise SchemaError(f"the schema cannot be followed: {_one_line(matcher.get_error())}")
        return matcher


class Grammar:
    """The state of one reply in its schema: where its document stands, and the tokens that would complete it."""

    def __init__(self, matcher: Any, width: int, closer: Closer, closing: list[int], max_tokens: int):
        self._matcher = matcher
        self._budget = Budget(MOST_SECONDS, MOST_STEPS)
        self.width = width  # size of the vocabulary
        self._closer = closer
        self._closing = closing
        self._remaining = max_tokens

    def copy(self, max_tokens: int) -> "Grammar":
        """A copy for another reply. Raises SchemaError: when `max_tokens` do not complete the document."""
        if len(self._closing) > max_tokens:
            needed = f"the shortest reply found that completes the schema takes {len(self._closing)} tokens"
            raise SchemaError(f"{needed}, and {max_tokens} are left: allow a longer reply, or shorten the messages")
        return Grammar(self._matcher.deep_copy(), self.width, self._closer, self._closing, max_tokens)

    @property
    def shortest(self) -> int:
        """The tokens of the shortest document that was found."""
        return len(self._closing)

    @property
    def error(self) -> str:
        """Why the reply cannot follow the schema any further; empty: it can."""
        if self._budget.seconds < 0:
            return f"it takes over {TOKEN_SECONDS * 1000:g} ms a token"
        return _one_line(self._matcher.get_error()) if self._matcher.is_error() else ""

    def allowed(self) -> Tensor:
        """Which tokens may come next, (V,) of bool on the host."""
        with self._budget:
            if len(self._closing) < self._remaining:
                # On a copy: a mask that takes too much work leaves a matcher unusable, which is still needed to close.
                bits = np.frombuffer(self._matcher.deep_copy().compute_bitmask(), dtype=np.uint8)
                allowed = np.unpackbits(bits, count=self.width, bitorder="little").view(bool)
                if allowed.any():
                    return torch.from_numpy(allowed)
            only_closing = torch.zeros(self.width, dtype=torch.bool)
            only_closing[self._closing[0]] = True
            return only_closing

    def accept(self, token: int) -> int:
        """Advance by the token that the row has sampled. Returns the token that the reply takes: the sampled one, or
        the first of the closing, if after the sampled one the document could not be completed in time."""
        self._remaining -= 1
        self._budget.earn_token()
        with self._budget:
            if token != self._closing[0] and token != self._closer.end:
                longer = self._matcher.deep_copy()
                longer.consume_token(token)
                closing = self._closer.next(longer, token, self._closing, self._remaining, self._budget)
                if closing is not None:
                    self._matcher = longer
                    self._closing = closing
                    return token
                token = self._closing[0]
            self._matcher.consume_token(token)
            self._closing = self._closing[1:]
            return token


def _key(schema: Any, max_tokens: int, is_compact: bool) -> tuple[str, int, bool]:
    """By the bits of `max_tokens`, so that chats of many lengths bring few grammars to compile."""
    return json.dumps(schema), max_tokens.bit_length(), is_compact


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


def _one_line(text: str) -> str:
    for words, plain in EXPLAINED.items():
        if words in text:
            return plain
    return shortened(" ".join(text.replace("<non-verbose/>", "").split()))
