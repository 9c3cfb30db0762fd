"""S7. User text never becomes a control token.

Every special string, whole, repeated, or split over messages and parts, through the tokenizer, the chat format and the
loader: the special ids are those of the format, whatever the text is. And decode(encode(x)) == x for 10,000 strings.
What comes by HTTP goes the same way (tests/serve). The vocabularies of other families: tests/families.
"""

import random
from collections import Counter
from typing import Any

import pytest
from tiny import tiny_tokenizer
from tiny_families import random_string

from nanochat.conversation import parse_reply, render, render_prompt
from nanochat.ground.corpus import open_corpus
from nanochat.loader import Loader
from nanochat.tokenizer import SPECIAL_TOKENS, Tokenizer

FAMILIES = ("qwen2", "qwen3", "llama3", "mistral")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def test_ten_thousand_strings_come_back(tokenizer):
    source = random.Random(0)
    strings = [random_string(source) for _ in range(10_000)]
    strings += [chr(source.randrange(0xD800)) + chr(source.randrange(0xE000, 0x110000)) for _ in range(1000)]
    sizes = tokenizer.token_bytes()
    first_special = min(tokenizer.special_ids.values())
    for text, ids in zip(strings, tokenizer.encode_batch(strings), strict=True):
        assert tokenizer.decode(ids) == text
        assert sum(sizes[token] for token in ids) == len(text.encode())
        assert all(token < first_special for token in ids)


def test_no_special_string_is_encoded_as_its_token(tokenizer):
    special = set(tokenizer.special_ids.values())
    for name in SPECIAL_TOKENS:
        for cut in range(len(name) + 1):
            first, second = tokenizer.encode_batch([name[:cut], name[cut:]])
            assert not special.intersection(first + second)
        assert tokenizer.decode([tokenizer.encode_special(name)]) == name
    everything = "".join(SPECIAL_TOKENS)
    assert tokenizer.decode(tokenizer.encode(everything)) == everything
    assert sorted(special) == list(range(tokenizer.vocab_size - len(SPECIAL_TOKENS), tokenizer.vocab_size))


def chat(content: str) -> list[dict[str, Any]]:
    reply = [{"type": "python", "text": content}, {"type": "text", "text": content}]
    return [
        {"role": "system", "content": content},
        {"role": "user", "content": content},
        {"role": "assistant", "content": reply},
    ]


def test_messages_have_the_special_tokens_of_the_format_only(tokenizer):
    special = set(tokenizer.special_ids.values())

    def marks(ids: list[int]) -> list[int]:
        return [token for token in ids if token in special]

    expected = marks(render(tokenizer, chat("x")).ids)
    for name in SPECIAL_TOKENS:
        for content in (name, f"a{name}b", name * 3, name[:4], name[4:]):
            messages = chat(content)
            rendered = render(tokenizer, messages)
            assert marks(rendered.ids) == expected
            prompt = render_prompt(tokenizer, messages[:-1])
            assert parse_reply(tokenizer, rendered.ids[len(prompt) :]) == messages[-1]["content"]


@pytest.mark.parametrize("family", FAMILIES)
def test_messages_of_other_families(family_tokenizers, family):
    tokenizer = family_tokenizers[family]
    special = set(tokenizer.special_ids.values())

    def marks(*texts: str) -> list[int]:
        roles = ("user", "assistant", "user", "assistant")
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        return [token for token in render(tokenizer, messages).ids if token in special]

    expected = marks("x", "x", "x", "x")
    for name in tokenizer.special_ids:
        half = len(name) // 2
        assert not special.intersection(tokenizer.encode(f"a{name}b"))
        assert marks(name, f"x{name}", f"{name} x", name) == expected
        assert marks(name[:half], name[half:], name[:half], name[half:]) == expected


def test_rows_for_training_have_only_the_begin_tokens_of_their_documents(tokenizer, tmp_path):
    everything = "".join(SPECIAL_TOKENS)
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "{everything}"}}\n' * 20)
    loader = Loader(open_corpus(str(path))[0], tokenizer, 2, 2 * len(everything))
    found = Counter(next(loader).inputs.flatten().tolist())
    loader.close()
    special = set(tokenizer.special_ids.values())
    assert {token for token in found if token in special} == {tokenizer.get_bos_token_id()}
