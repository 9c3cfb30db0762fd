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
# Steps of walks. A step takes 10 us, with a vocabulary of 150,000 tokens 60 us.
FIRST_STEPS = 4_000  # for each walk before a reply starts
TOKEN_STEPS = 12  # each token of a reply earns this many, so that a walk now and then may take more,
MOST_STEPS = 500  # and at most this many
MAX_HINTS = 32
MAX_DIGITS = 32  # the same one in a walk: a number goes round in circles if it must be a multiple of another
# Short texts of formats that are hard to come across.
EXAMPLES = {"email": "a@b.co", "uri": "a:b", "ipv6": "::"}
NEVER = 1 << 32  # the rank of a byte that is not allowed


class Steps:
    """How many steps walks may still take; none once `time.thread_time()` is `deadline`."""

    def __init__(self, left: int, deadline: float = math.inf):
        self.left = left
        self.deadline = deadline

    def take(self) -> bool:
        """Whether there is another step."""
        self.left -= 1
        return self.left >= 0 and time.thread_time() < self.deadline

    def earn(self) -> None:
        """Add the steps of a further token."""
        self.left = min(max(self.left, 0) + TOKEN_STEPS, MOST_STEPS)


class Closer:
    """Finds closings in the grammar of one schema.

    `texts` are the bytes of each token, `end` is the token that ends a reply. `hints` are pieces of text that walks try
    before single bytes: byte by byte they would hardly come across the end of the pattern `.*\\.txt`.
    """

    def __init__(self, texts: Sequence[bytes], end: int, encode: Callable[[str], list[int]], hints: Iterable[str]):
        self._texts = texts
        self.end = end
        self._encode = encode
        # The tokens of a single byte, and their ranks in each order: a walk takes the lowest.
        self._singles = np.array([token for token, text in enumerate(texts) if len(text) == 1], dtype=np.int64)
        values = np.array([texts[token][0] for token in self._singles], dtype=np.int64)
        self._single = dict(zip(values.tolist(), self._singles.tolist(), strict=True))
        self._orders = [(inside[values], outside[values]) for inside, outside in _orders()]
        self._inside = np.array([value not in OUTSIDE for value in values])
        self._hints = [encode(text) for text in list(dict.fromkeys(hints))[:MAX_HINTS]]
        self._best_walk = 0

    def first(self, matcher: Any, limit: int, deadline: float) -> list[int] | None:
        """The shortest closing found for a document that has not begun; None: none of at most `limit` tokens.

        The search ends when `time.thread_time()` is `deadline`.
        """
        best = None
        for number in range(len(self._orders) + 2):
            found = self._walk(matcher, number, limit, Steps(FIRST_STEPS, deadline))
            if found is not None and (best is None or len(found) < len(best)):
                best = found
                limit = len(found)
                self._best_walk = number
        return best

    def next(self, matcher: Any, token: int, closing: Sequence[int], limit: int, steps: "Steps") -> list[int] | None:
        """A closing after a `token` that is not the first of the old `closing`; None: none of at most `limit` tokens
        is found within `steps`."""
        # Usually a part of the old one will do: inside of a string, or at the end of one.
        for rest in self._ends(closing, len(self._texts[token])):
            if len(rest) <= limit and matcher.validate_tokens(rest) == len(rest):
                return rest
        for number in dict.fromkeys((self._best_walk, 0, 1, 2)):
            found = self._walk(matcher, number, limit, steps)
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

    def _walk(self, begin: Any, number: int, limit: int, steps: "Steps") -> list[int] | None:
        """Walk from the state `begin` of a matcher to the end of its document, within `steps`; None: there is no end
        within them, or more than `limit` tokens before it.

        Walk 0 takes the preferred byte. Walk 1 also takes hints, each once in a value. Walk 2 takes the byte that it
        has taken least often. The others are like walk 1, in orders drawn at random.
        """
        inside, outside = self._orders[max(number - 2, 0)]
        uses = np.zeros(len(inside), dtype=np.int64)
        turn = number % max(len(self._hints), 1)
        hints = self._hints[turn:] + self._hints[:turn]  # each walk begins with another one
        used: list[list[int]] = []
        matcher = begin.deep_copy()
        tokens: list[int] = []
        # Bytes are joined to longer tokens at the end, so there may be more steps than tokens.
        for _ in range(4 * limit):
            if not steps.take():
                return None
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            if bits[self.end >> 3] >> (self.end & 7) & 1:
                tokens = self._joined(begin, tokens)
                return tokens if len(tokens) <= limit else None
            allowed = (bits[self._singles >> 3] >> (self._singles & 7) & 1).astype(bool)
            # Where the schema determines the text, all of it is one step.
            determined = matcher.compute_ff_tokens() if allowed.sum() <= 1 else []
            if determined:
                taken = determined
            elif allowed.any():
                is_inside = (allowed & self._inside).any()
                rank = np.where(allowed, inside if is_inside else outside, NEVER)
                place = int(rank.argmin())
                closes = rank[place] < len(CLOSE_STRING if is_inside else CLOSE_OTHERS)
                if number == 2 and not closes:
                    place = int((rank + 256 * uses).argmin())
                uses[place] += 1
                if not is_inside and not closes and number != 2 and uses[place] > MAX_DIGITS:
                    return None
                taken = [int(self._singles[place])]
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
                taken = np.unpackbits(bits, bitorder="little").nonzero()[0][:1].tolist()
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


def _orders() -> list[tuple[np.ndarray, np.ndarray]]:
    """The rank of each byte, (256,), in and outside of strings, for each order."""
    others = bytes(value for value in range(128) if value not in CLOSE_OTHERS + SHORT + LONG)
    middle = list(SHORT + others + LONG)
    random = np.random.default_rng(0)
    drawn = [random.permutation(middle).tolist() for _ in range(RANDOM_ORDERS)]
    orders = []
    for order in (middle, *drawn):
        inside = [*CLOSE_STRING, *order, *b"}],", *range(128, 256)]
        outside = [*CLOSE_OTHERS, *order, *range(128, 256)]
        orders.append((np.argsort(inside), np.argsort(outside)))  # the inverse permutations: byte -> rank
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
        hints += [text for name, text in EXAMPLES.items() if name == part.get("format")]
        if isinstance(divisor, int) and isinstance(minimum, int) and divisor > 0:
            hints.append(str(max(-(-minimum // divisor), 1) * divisor))  # the smallest multiple
    return hints
