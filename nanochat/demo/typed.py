"""How people type a well-spelled question: in lower case, without its last mark, `whats` for `What is`, with typos."""

import random
import re

SHORT_FORMS = (  # well spelled | what people type instead
    (r"\b([Ww])hat is\b", (r"\1hat's", r"\1hats")),
    (r"\b([Ww])ho is\b", (r"\1ho's", r"\1hos")),
    (r"\b([Hh])ow is\b", (r"\1ow's",)),
    (r"\bI am\b", ("I'm", "im")),
    (r"\b([Dd])o not\b", (r"\1on't",)),
    (r"\bcannot\b", ("can't",)),
    (r"\b([Yy])ou\b", (r"\1ou", "u")),
    (r"\b([Tt])hanks\b", (r"\1hanks", r"\1hx")),
    (r"\b([Pp])lease\b", (r"\1lease", r"\1ls")),
)
TYPO_SHARE = 0.08
# A word in which a typo may be: no slot, nothing with a digit, no name after the first word.
WORD = re.compile(r"(?<!\w)(?:^[A-Z]|[a-z])[a-z]{3,}(?![}\w])")


def as_typed(rng: random.Random, text: str) -> str:
    """The text as somebody may type it, often unchanged."""
    if rng.random() < 0.4:
        return text
    for long, short in SHORT_FORMS:
        if rng.random() < 0.4:
            text = re.sub(long, rng.choice(short), text)
    if rng.random() < 0.6:
        text = text.lower()
    if rng.random() < 0.6 and len(text) > 3:
        text = text.rstrip(" .?!。？！")
    return text


def mistyped(rng: random.Random, text: str) -> str:
    """A text, whose `{slots}` are still empty, sometimes with a typo: letters swapped, left out or doubled."""
    words = list(WORD.finditer(text))
    if not words or rng.random() >= TYPO_SHARE:
        return text
    word = rng.choice(words)
    place = rng.randrange(word.start() + 1, word.end() - 1)
    first, second = text[place : place + 2]
    typo = rng.choice((second + first, second, first + first + second))
    return text[:place] + typo + text[place + 2 :]
