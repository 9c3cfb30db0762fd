"""Our tokenizer in Hugging Face's form: the files that go with exported weights."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from nanochat.families.imported_tokenizer import BYTE_CHARACTERS, ImportedTokenizer
from nanochat.tokenizer import Tokenizer

# The chat format (conversation.py) as a template of transformers: the marks, and the texts as they are.
CHAT_TEMPLATE = Path(__file__).parent / "chat_template.jinja"
ENDS = ("<|bos|>", "<|assistant_end|>")  # transformers has its own names for these two


def tokenizer_files(tokenizer: Tokenizer, context: int, for_others: bool) -> dict[str, Any]:
    """The tokenizer's files in Hugging Face's form by name, as JSON or text. `for_others`: a rendered chat is a text
    whose marks the tokenizer must find."""
    if isinstance(tokenizer, ImportedTokenizer):
        return tokenizer.hugging_face_files()
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|assistant_end|>",
        "additional_special_tokens": [name for name in tokenizer.special_ids if name not in ENDS],
        "split_special_tokens": not for_others,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    form = hugging_face_form(tokenizer)
    if for_others:
        form.add_special_tokens(list(tokenizer.special_ids))
        # Documents begin with this mark: transformers and vLLM put it before a text that is not a chat.
        mark = ("<|bos|>", tokenizer.get_bos_token_id())
        form.post_processor = TemplateProcessing("<|bos|> $A", "<|bos|> $A $B", special_tokens=[mark])
    files: dict[str, Any] = {"tokenizer.json": json.loads(form.to_str()), "tokenizer_config.json": settings}
    if for_others:
        files["chat_template.jinja"] = CHAT_TEMPLATE.read_text(encoding="utf-8")
    return files


def hugging_face_form(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer as one of Hugging Face's `tokenizers`, which gives every text the same ids.

    One difference is left: within runs of more than 512 letters, spaces or marks `Tokenizer.encode` cuts.
    Source: the names of bytes: Radford et al. 2019.
    """
    # A vocabulary in JSON cannot hold bytes: GPT-2 has named each of them by a character.
    character_of = {byte: character for character, byte in BYTE_CHARACTERS.items()}

    def named(token: bytes) -> str:
        return "".join(character_of[byte] for byte in token)

    # tiktoken joins two neighbours where together they are a token, and takes the lowest id first. Here each pair has
    # its own line, so a token has one for every way to divide it into two tokens.
    ranks = {token: rank for rank, token in enumerate(tokenizer.tokens)}
    merges = []
    for token in tokenizer.tokens:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                merges.append((named(left), named(right)))

    # The special tokens have their ids in the vocabulary. They are not among the added tokens, which are looked for in
    # every text: the split pattern divides a spelled-out one, and it is encoded letter by letter.
    vocabulary = {named(token): rank for token, rank in ranks.items()} | tokenizer.special_ids
    # `ignore_merges`: a piece that is a token as a whole is that token, as with tiktoken.
    form = tokenizers.Tokenizer(BPE(vocabulary, merges, ignore_merges=True))
    split = pre_tokenizers.Split(tokenizers.Regex(tokenizer.pattern), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    form.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    form.decoder = decoders.ByteLevel()
    return form
