"""Our tokenizer in Hugging Face's form: the files that go with exported weights."""

from pathlib import Path
from typing import Any

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
    files: dict[str, Any] = {"tokenizer.json": form, "tokenizer_config.json": settings}
    if for_others:
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        form["added_tokens"] = [{"id": i, "content": name, **plain} for name, i in tokenizer.special_ids.items()]
        # Documents begin with this mark: transformers and vLLM put it before a text that is not a chat.
        begin = {"SpecialToken": {"id": "<|bos|>", "type_id": 0}}
        first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        mark = {"id": "<|bos|>", "ids": [tokenizer.get_bos_token_id()], "tokens": ["<|bos|>"]}
        form["post_processor"] = {
            "type": "TemplateProcessing", "single": [begin, first], "pair": [begin, first, second],
            "special_tokens": {"<|bos|>": mark},
        }  # fmt: skip
        files["chat_template.jinja"] = CHAT_TEMPLATE.read_text(encoding="utf-8")
    return files


def hugging_face_form(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokenizer as a tokenizer.json of Hugging Face's `tokenizers`, which gives every text the same ids.

    One difference is left: within runs of more than 512 letters, spaces or marks `Tokenizer.encode` cuts.
    Source: the file format of https://github.com/huggingface/tokenizers; the names of bytes: Radford et al. 2019.
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
                merges.append(f"{named(left)} {named(right)}")

    # The special tokens have their ids in the vocabulary. They are not among `added_tokens`, which are looked for in
    # every text: the split pattern divides a spelled-out one, and it is encoded letter by letter.
    vocabulary = {named(token): rank for token, rank in ranks.items()} | tokenizer.special_ids
    split = {"type": "Split", "pattern": {"Regex": tokenizer.pattern}, "behavior": "Isolated", "invert": False}
    as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, as_bytes]},
        "post_processor": None,
        "decoder": as_bytes,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # a piece that is a token as a whole is that token, as with tiktoken
            "vocab": vocabulary,
            "merges": merges,
        },
    }
