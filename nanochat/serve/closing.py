"""Replies that end in time: the tokens that complete a JSON document from where it stands.

A schema says what a document may contain, and often not where it ends: a string goes on until the model writes its
closing quote, which a small model may never do. So each reply carries its *closing*: tokens that complete the document
from here, such as `"}` and the end token. The closing always fits into the tokens that are left:

- after each sampled token, a closing of the longer document is sought;
- if one is found that fits, the reply takes the token;
- otherwise it takes the first token of the closing that it has.

No theory of schemas is needed for this: only that the first closing fits, which is checked before the reply starts.
The search is a greedy walk through the grammar, in a few orders of preference. It may find a longer closing than
necessary, or none. Then the reply has less freedom, but it stays valid and ends in time.
"""

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from nanochat.serve.bounds import FORMATS

# What a walk prefers where the grammar leaves a choice. What closes comes first: in a string a quote, because brackets
# are characters there; outside brackets, because a quote begins a string there, and a comma if another field must
# follow. Then bytes that begin short values: one digit is a whole number, while an object needs its fields.
CLOSE_STRING = b'"'
CLOSE_OTHERS = b'}]",'
SHORT = b"0123456789" + bytes(range(ord("a"), ord("z") + 1)) + bytes(range(ord("A"), ord("Z") + 1))
LONG = b"-[{\\"
OUTSIDE = b'{}[]":,+-.0123456789eEtruefalsn \t\r\n'  # all other bytes occur in strings only
# Some schemas send a walk in circles, such as a tree if the walk prefers the node that has children. Orders drawn at
# random find the way out.
RANDOM_ORDERS = 6
FIRST_STEPS = 4_000  # for each walk before a reply starts
MAX_HINTS = 32
MAX_DIGITS = 32  # the same one in a walk: a number goes round in circles if it must be a multiple of another
# Short texts of formats that are hard to come across.
EXAMPLES = {"email": "a@b.co", "uri": "ab://a.bc", "ipv6": "::", "duration": "P1D"}
# What a token of a reply adds to its budget, which is at most MOST. A step takes 10 us, with a vocabulary of 150,000
# tokens 60 us; a walk that closes a few brackets has 5.
TOKEN_SECONDS = 0.001
MOST_SECONDS = 0.05
TOKEN_STEPS = 12
MOST_STEPS = 500


class Budget:
    """The work that a schema may still cost: steps of walks, and CPU seconds of the thread within `with budget:`.

    Steps come first, because a reply that depends on them is the same on every machine. The seconds end what the steps
    have not foreseen.
    """

    def __init__(self, seconds: float, steps: int):
        self.seconds = seconds
        self.steps = steps
        self._end = math.inf

    def __enter__(self) -> None:
        self._end = time.thread_time() + self.seconds

    def __exit__(self, *error: object) -> None:
        self.seconds = self._end - time.thread_time()

    @property
    def is_over(self) -> bool:
        """Whether all seconds are spent, within `with`."""
        return time.thread_time() >= self._end

    def take_step(self) -> bool:
        """Whether there is another step."""
        self.steps -= 1
        return self.steps >= 0 and not self.is_over

    def earn_token(self) -> None:
        """Add the work of a further token."""
        self.seconds = min(self.seconds + TOKEN_SECONDS, MOST_SECONDS)
        self.steps = min(max(self.steps, 0) + TOKEN_STEPS, MOST_STEPS)


class Closer:
    """Finds closings in the grammar of one schema.

    `texts` are the bytes of each token, `end` is the token that ends a reply. `hints` are pieces of text that walks try
    before single bytes: byte by byte they would hardly come across the end of the pattern `.*\\.txt`.
    """

    def __init__(self, texts: Sequence[bytes], end: int, encode: Callable[[str], list[int]], hints: Iterable[str]):
        self._texts = texts
        self.end = end
        self._encode = encode
        # The tokens of a single byte: by byte, in each order of preference, and as bits of a mask.
        self._single = {text[0]: token for token, text in enumerate(texts) if len(text) == 1}
        self._orders = []
        for pair in _orders():
            inside, outside = ([self._single[byte] for byte in order if byte in self._single] for order in pair)
            self._orders.append((inside, outside))
        self._singles = sum(1 << token for token in self._single.values())
        self._inside = sum(1 << token for byte, token in self._single.items() if byte not in OUTSIDE)
        self._hints = [encode(text) for text in list(dict.fromkeys(hints))[:MAX_HINTS]]
        self._best_walk = 0

    def first(self, matcher: Any, limit: int, budget: Budget) -> list[int] | None:
        """The shortest closing found for a document that has not begun; None: none of at most `limit` tokens."""
        best = None
        for number in range(len(self._orders) + 1):
            budget.steps = FIRST_STEPS
            found = self._walk(matcher, number, limit, budget)
            if found is not None and (best is None or len(found) < len(best)):
                best = found
                limit = len(found)
                self._best_walk = number
        return best

    def next(self, matcher: Any, token: int, closing: Sequence[int], limit: int, budget: Budget) -> list[int] | None:
        """A closing after a `token` that is not the first of the old `closing`; None: none of at most `limit` tokens
        is found within the budget."""
        # Usually a part of the old one will do: inside of a string, or at the end of one.
        for rest in self._ends(closing, len(self._texts[token])):
            if len(rest) <= limit and matcher.validate_tokens(rest) == len(rest):
                return rest
        for number in dict.fromkeys((self._best_walk, 0, 1)):
            found = self._walk(matcher, number, limit, budget, closing)
            if found is not None:
                return found
        return None

    def _ends(self, closing: Sequence[int], size: int) -> Iterator[list[int]]:
        """The ends of a closing that may follow a token of `size` bytes, which replaces at most as many of its tokens;
        the shortest first. Then the end that begins within a token, where that is cut at `size` bytes."""
        for begin in range(min(size, len(closing) - 1), -1, -1):
            yield list(closing[begin:])
        for place, token in enumerate(closing[:-1]):
            text = self._texts[token]
            if size < len(text):
                pieces = [self._single[byte] for byte in text[size:] if byte in self._single]
                if len(pieces) == len(text) - size:
                    yield [*pieces, *closing[place + 1 :]]
                return
            size -= len(text)

    def _walk(
        self, begin: Any, number: int, limit: int, budget: Budget, closing: Sequence[int] = ()
    ) -> list[int] | None:
        """Walk from the state `begin` of a matcher to the end of its document, or to where a known `closing` follows;
        None: the budget is spent before, or the end is more than `limit` tokens away.

        Walk 0 takes the preferred byte. Walk 1 also takes hints, each once in a value. The others do so in orders drawn
        at random.
        """
        orders = self._orders[max(number - 1, 0)]
        uses: dict[int, int] = {}
        turn = number % max(len(self._hints), 1)
        hints = self._hints[turn:] + self._hints[:turn]  # each walk begins with another one
        used: list[list[int]] = []
        matcher = begin.deep_copy()
        tokens: list[int] = []
        # Bytes are joined to longer tokens at the end, so there may be more steps than tokens.
        for _ in range(4 * limit):
            if not budget.take_step():
                return None
            # Most walks complete a character or a value, and then the rest of the document is as before.
            if closing and len(tokens) + len(closing) <= limit and matcher.validate_tokens(closing) == len(closing):
                return [*tokens, *closing]
            bits = matcher.compute_bitmask()
            if bits[self.end >> 3] >> (self.end & 7) & 1:
                tokens = self._joined(begin, tokens)
                return tokens if len(tokens) <= limit else None
            allowed = int.from_bytes(bits, "little") & self._singles
            # Where the schema determines the text, all of it is one step.
            determined = matcher.compute_ff_tokens() if allowed.bit_count() <= 1 else []
            if determined:
                taken = determined
            elif allowed:
                is_inside = bool(allowed & self._inside)
                token = next(token for token in orders[not is_inside] if bits[token >> 3] >> (token & 7) & 1)
                closes = self._texts[token] in (CLOSE_STRING if is_inside else CLOSE_OTHERS)
                uses[token] = uses.get(token, 0) + 1
                if not is_inside and not closes and uses[token] > MAX_DIGITS:
                    return None
                taken = [token]
                if closes:
                    hints = hints + used
                    used = []
                elif number > 0:
                    for hint in hints:
                        if matcher.validate_tokens(hint) == len(hint):
                            hints.remove(hint)
                            used.append(hint)
                            taken = hint
                            break
            else:
                taken = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").nonzero()[0][:1].tolist()
                if not taken:
                    return None  # the matcher has reached a limit of its own
            if not matcher.consume_tokens(taken):
                return None
            tokens += taken
        return None

    def _joined(self, matcher: Any, tokens: list[int]) -> list[int]:
        """The tokens as the tokenizer writes their text, if that is shorter, and the end token."""
        tokens = [*tokens, self.end]
        try:
            text = b"".join(self._texts[token] for token in tokens[:-1]).decode()
        except UnicodeDecodeError:  # the document stands within a character
            return tokens
        joined = [*self._encode(text), self.end]
        is_valid = len(joined) < len(tokens) and matcher.validate_tokens(joined) == len(joined)
        return joined if is_valid else tokens


def _orders() -> list[tuple[list[int], list[int]]]:
    """The bytes in each order of preference, in and outside of strings."""
    others = bytes(value for value in range(128) if value not in CLOSE_OTHERS + SHORT + LONG)
    middle = list(SHORT + others + LONG)
    random = np.random.default_rng(0)
    orders = []
    for order in (middle, *(random.permutation(middle).tolist() for _ in range(RANDOM_ORDERS))):
        inside = [*CLOSE_STRING, *order, *b"}],", *range(128, 256)]
        outside = [*CLOSE_OTHERS, *order, *range(128, 256)]
        orders.append((inside, outside))
    return orders


def hints_of(schema_parts: Iterable[dict[str, Any]]) -> list[str]:
    """Pieces of text that may be part of the values of these schemas.

    Of patterns, runs of plain characters. Some are not literal, such as the `a` of `a+`, which does no harm.
    """
    hints = []
    for part in schema_parts:
        pattern = part.get("pattern")
        divisor = part.get("multipleOf")
        minimum = part.get("minimum", 1)
        if isinstance(pattern, str):
            hints += [run.replace("\\", "") for run in re.findall(r"(?:[\w @/:-]|\\\W)+", pattern)]
        name = part.get("format")
        form = FORMATS.get(name) if isinstance(name, str) else None
        hints += [text for name, text in EXAMPLES.items() if FORMATS[name] == form]
        if isinstance(divisor, int) and isinstance(minimum, int) and divisor > 0:
            hints.append(str(max(-(-minimum // divisor), 1) * divisor))  # the smallest multiple
    return hints
