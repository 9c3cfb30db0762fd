"""How people type a well-spelled question: in lower case, without its last mark, `What's` or `whats` for `What is`."""

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
)


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
