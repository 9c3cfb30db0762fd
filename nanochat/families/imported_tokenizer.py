"""Tokenizers of other model families, unchanged: Hugging Face's tokenizer.json with the interface of `Tokenizer`.

The `tokenizers` library encodes, with the family's normalization, splitting and merges. This file adds the rest: which
ids are special, which tokens begin a document and end a reply, and the bytes of each id.

A folder in Hugging Face's form has these facts in several files. Our checkpoints have all of them in one
tokenizer.json, with its sha256. Two kinds are supported, which cover nearly every language model of today:

    byte-level BPE    Qwen, Llama 3, Mistral's tekken, GPT-2: a character of a token's name is a byte
    SentencePiece     Llama 2, Mistral, Gemma: the space is U+2581, and text without a token is bytes such as <0x0A>
"""

import base64
import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from nanochat.families.chat_format import TemplateFormat
from nanochat.families.chat_template import ChatTemplate, RenderedText
from nanochat.ground import rooms
from nanochat.ground.cli import UserError
from nanochat.ground.untrusted import read_json, read_text
from nanochat.tokenizer import MAX_FILE, Tokenizer, replace_surrogates

MAX_IDS = 1 << 20  # the largest vocabularies have 262,144; a single id of 10**9 would fill the memory with empty tokens
MAX_GROWTH = 16  # a text of 1 MB in a request takes 0.5 GB while it is normalized to 16 MB
MAX_TEMPLATE = 1 << 18  # characters; the longest that are in use have about 15,000
NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")  # the roles that templates may name
SPACE = "\u2581"  # SentencePiece's name of it
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def read_tokenizer(path: Path, content: Any) -> "ImportedTokenizer":
    """The tokenizer of a tokenizer.json: in the form of Hugging Face, with the other files of its folder, or as a
    checkpoint has it.

    Raises UserError: when it cannot be used.
    """
    try:
        if "model" in content:
            return ImportedTokenizer.from_folder(path.parent, content)
        if content["version"] != ImportedTokenizer.format_version:
            raise ValueError(f"it has format version {content['version']}, this code reads 2")
        return ImportedTokenizer.from_checkpoint(path, content)
    except ModuleNotFoundError as error:
        raise rooms.explain_missing(error) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be used ({str(error)[:500]}): download it again") from error


class ImportedTokenizer(Tokenizer):
    """Another family's vocabulary. It never changes, so threads may share it; it can be pickled to a worker.

    Special ids lie anywhere among the others. What a text may become:

    - A special token (`"special": true`), never: spelled out in a text it is encoded as plain text, as transformers
      does with `split_special_tokens=True`.
    - Another added token, such as <think> or <tool_call> of Qwen3, always, as the family's own tokenizer does: the
      model has read them in texts, and they have no power over whose turn it is.

    A document begins with the `bos` token. Qwen has none: there documents begin with <|endoftext|>, which separates
    them in its own pretraining. Where a family has neither, it is the token that ends its texts.
    """

    format_version = 2
    indent = None  # a line for each of 400,000 merges would take 10 MB

    def __init__(self, definition: dict[str, Any], template_file: str = ""):
        """`definition` has the keys of `_definition`; `template_file` is where its chat templates were read.

        Raises ValueError: when it is not a tokenizer, or its kind is not supported.
        """
        self._content = definition["tokenizer"]
        self.config: dict[str, Any] = definition["config"]  # tokenizer_config.json
        self.templates: dict[str, str] = definition["chat_templates"]  # by name; "default" renders chats
        if not all(isinstance(one, dict) for one in (self._content, self.config, self.templates)):
            raise ValueError("its parts are not objects")
        self._library = _build(self._content)

        # Which ids there are. A vocabulary may have gaps.
        names = self._library.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(names.values(), default=-1)
        if not 0 < self.vocab_size <= MAX_IDS:
            raise ValueError(f"it has ids up to {self.vocab_size - 1:,}: up to {MAX_IDS - 1:,} are read")
        added = self._library.get_added_tokens_decoder()
        self.special_ids = {token.content: index for index, token in added.items() if token.special}
        self._special = {token.content: token for token in added.values() if token.special}

        # Their meanings.
        kinds = set(_types(self._content.get("decoder"))) | set(_types(self._content.get("pre_tokenizer")))
        if "ByteLevel" in kinds:
            bytes_of = _bytes_of_byte_level
        elif kinds & {"Metaspace", "ByteFallback"}:
            bytes_of = _bytes_of_sentencepiece
        else:
            raise ValueError("it is neither byte-level BPE nor SentencePiece, the kinds that are read")
        self._spelled = [b""] * self.vocab_size  # with the names of special tokens
        for name, index in names.items():
            self._spelled[index] = name.encode() if index in added else bytes_of(name)
        self.token_texts = list(self._spelled)
        for index in self.special_ids.values():
            self.token_texts[index] = b""
        # SentencePiece puts a space before a text, and takes it away again when it decodes one.
        self.strips_space = any(_strips_space(part) for part in _parts(self._content.get("decoder")))

        # Where a space is put: before each text, also before what follows a special token?
        self._adds_space, self._adds_space_after_special = self._probe()

        # What begins a document and ends a reply.
        self.names = {role: name for role in NAMES if (name := _name(self.config.get(role))) is not None}
        ends = [names[self.names["eos_token"]]] if self.names.get("eos_token") in names else []
        ends += [index for index in definition["eos_token_ids"] if index not in ends]
        if not ends or not all(isinstance(index, int) and 0 <= index < self.vocab_size for index in ends):
            raise ValueError("no token of its vocabulary ends a text: eos_token in tokenizer_config.json names none")
        self.reply_ends = tuple(ends)
        bos = names.get(self.names.get("bos_token", ""), self.special_ids.get("<|endoftext|>"))
        self._bos = ends[0] if bos is None else bos
        self.text_end = ends[0]
        self.stop_ids = frozenset({*ends, self._bos})
        if not {*ends, self._bos} <= set(self.special_ids.values()):
            raise ValueError("the tokens that begin and end a text are not special in it: texts could contain them")
        self.chat_template: ChatTemplate | None = None
        if self.templates:
            self.chat_template = ChatTemplate(self.templates, self.names, self.special_ids, template_file)
        self.chat_format = TemplateFormat(self, self.chat_template)
        self.can_chat = self.chat_template is not None

    @classmethod
    def from_folder(cls, folder: Path, content: dict[str, Any]) -> "ImportedTokenizer":
        """From files in Hugging Face's format; `content` is the content of tokenizer.json.

        Raises ValueError: when one of them cannot be used.
        """
        config = _optional(folder / "tokenizer_config.json")
        for role, name in _optional(folder / "special_tokens_map.json").items():
            config.setdefault(role, name)
        # A list of ids or one id, in generation_config.json or, of older models, config.json.
        ends = _optional(folder / "generation_config.json").get("eos_token_id")
        if ends is None:
            model = _optional(folder / "config.json")
            # A model that also reads images has the settings of its text model apart.
            ends = {**model, **model.get("text_config", {})}.get("eos_token_id")
        ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
        added = config.pop("added_tokens_decoder", {})
        content = _with_added(content, added, config, ends)

        # A separate file, a text in the config, or several by name in the config.
        template = config.pop("chat_template", None)
        file = "tokenizer_config.json"
        if (folder / "chat_template.jinja").exists():
            file = "chat_template.jinja"
            template = read_text(folder / "chat_template.jinja", MAX_TEMPLATE)
        templates = {} if template is None else {"default": template}
        if isinstance(template, list):
            templates = {one["name"]: one["template"] for one in template}
        file = f"{folder.resolve().name}/{file}"
        _check_templates(templates)
        definition = {"tokenizer": content, "config": config, "chat_templates": templates, "eos_token_ids": ends}
        return cls(definition, file)

    @classmethod
    def from_checkpoint(cls, path: Path, content: dict[str, Any]) -> "ImportedTokenizer":
        """From the one file that `save` writes. Raises ValueError: when it is damaged."""
        file = "/".join(path.resolve().parts[-4:])  # <stage>/<tag>/step_<n>/tokenizer.json
        _check_templates(content["chat_templates"])
        tokenizer = cls(content, file)
        if tokenizer.fingerprint() != content["sha256"]:
            raise ValueError("its content does not match its sha256")
        return tokenizer

    def with_chat_template(self, source: str, file: str) -> "ImportedTokenizer":
        try:
            _check_templates({"default": source})
            return ImportedTokenizer({**self._definition(), "chat_templates": {"default": source}}, file)
        except ValueError as error:
            raise UserError(f"--chat_template: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return ImportedTokenizer, (self._definition(), self.chat_template.file if self.chat_template else "")

    def hugging_face_files(self) -> dict[str, Any]:
        """The files of Hugging Face's format by name, as JSON or as text, without the model's files."""
        files: dict[str, Any] = {"tokenizer.json": self._content, "tokenizer_config.json": dict(self.config)}
        if set(self.templates) == {"default"}:
            files["chat_template.jinja"] = self.templates["default"]
        elif self.templates:
            named = [{"name": name, "template": text} for name, text in self.templates.items()]
            files["tokenizer_config.json"]["chat_template"] = named
        return files

    def fingerprint(self) -> str:
        return self._sha256

    @cached_property
    def _sha256(self) -> str:  # cached: it hashes megabytes
        return super().fingerprint()

    def _definition(self) -> dict[str, Any]:
        return {
            "tokenizer": self._content,
            "config": self.config,
            "chat_templates": self.templates,
            "eos_token_ids": list(self.reply_ends),
        }

    # ---------------------------------------------------------------------- encode, decode

    def encode(self, text: str, prepend: int | str | None = None, append: int | str | None = None) -> list[int]:
        ids = [] if prepend is None else [self._special_id(prepend)]
        ids += self._encode(replace_surrogates(text))
        if append is not None:
            ids.append(self._special_id(append))
        return ids

    def _encode(self, text: str) -> list[int]:
        # "fast": without the place of each token in the text, which takes most of the time. The batch of one releases
        # the interpreter's lock.
        with _complaints("this model's tokenizer cannot encode a text"):
            return self._library.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_continuation(self, text: str) -> list[int]:
        if self._adds_space:
            # Without the space that SentencePiece puts before a text. A line end is a token that nothing joins.
            line_end = self.encode("\n")
            ids = self.encode("\n" + text)
            if ids[: len(line_end)] == line_end:
                return ids[len(line_end) :]
        return self.encode(text)

    def encode_rendered(
        self, rendered: RenderedText, spans: Sequence[tuple[int, int]] = ()
    ) -> tuple[list[int], list[int]]:
        """The ids of a conversation, and a mask with a 1 under the tokens of the spans (start, end) of its text.

        The ids equal the encoding of the whole text, unless a token would cross the border of a span or the beginning
        of a reply: the model reads the text before a reply as a prompt, and begins the reply with a new token.
        """
        ids: list[int] = []
        mask: list[int] = []
        opening = self.chat_template.reply_opening if self.chat_template is not None else ""
        begins = [match.end() for match in re.finditer(re.escape(opening), rendered.text)] if opening else []
        borders = sorted({*begins, *(border for span in spans for border in span)})

        def add(tokens: Sequence[int], start: int) -> None:
            ids.extend(tokens)
            mask.extend([int(any(first <= start < end for first, end in spans))] * len(tokens))

        at = 0
        text = rendered.text
        follows_special = False
        for start, end, name in [*rendered.specials, (len(text), len(text), "")]:
            flags = self._special.get(name)
            stop = at + len(text[at:start].rstrip()) if flags is not None and flags.lstrip else start
            if stop > at:
                cuts = [border - at for border in borders if at < border < stop]
                is_begin = self._adds_space_after_special if follows_special else at == 0
                place = at
                for piece, length in self._pieces(text[at:stop], cuts, is_begin):
                    add(piece, place)
                    place += length
            if flags is not None:
                add([self.special_ids[name]], start)
            at = end
            if flags is not None and flags.rstrip:  # it takes the white space after it along
                at = len(text) - len(text[end:].lstrip())
            follows_special = True
        return ids, mask

    def _pieces(self, text: str, cuts: Sequence[int], is_begin: bool) -> list[tuple[list[int], int]]:
        """The ids of a text, in pieces that end at the cuts, each with the length of its text."""
        encode = self.encode if is_begin else self.encode_continuation
        whole = encode(text)
        pieces = []
        done = 0  # tokens
        last = 0  # cut
        for number, cut in enumerate(cuts):
            before = encode(text[:cut])
            if whole[: len(before)] != before:  # a token crosses the cut
                left = self._pieces(text[:cut], cuts[:number], is_begin)
                return left + self._pieces(text[cut:], [other - cut for other in cuts[number + 1 :]], False)
            pieces.append((whole[done : len(before)], cut - last))
            done = len(before)
            last = cut
        return [*pieces, (whole[done:], len(text) - last)]

    def _probe(self) -> tuple[bool, bool]:
        """Whether a space is put before a text, and before a text after a special token."""
        first = self.decode_bytes(self.encode("a"))[:1] == b" "
        name = next((name for name, token in self._special.items() if not token.rstrip), None)
        if not first or name is None:
            return first, False
        self._library.encode_special_tokens = False
        _, *after = self._encode(f"{name}a")
        self._library.encode_special_tokens = True
        return first, self.decode_bytes(after)[:1] == b" "

    def decode(self, ids: Iterable[int]) -> str:
        text = super().decode(ids)
        return text.removeprefix(" ") if self.strips_space else text

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        # The output layer may be wider than the vocabulary.
        return b"".join(self._spelled[index] for index in ids if index < self.vocab_size)

    def get_bos_token_id(self) -> int:
        return self._bos

    def token_bytes(self) -> list[int]:
        return [len(text) for text in self.token_texts]


# ---------------------------------------------------------------------- tokenizer.json


def _optional(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one if the file is missing."""
    if not path.exists():
        return {}
    try:
        content = read_json(path, **MAX_FILE)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is not an object")
    return content


def _check_templates(templates: dict[str, str]) -> None:
    """Raises ValueError: when they are not chat templates."""
    if not all(isinstance(one, str) and len(one) <= MAX_TEMPLATE for one in templates.values()):
        raise ValueError(f"its chat template is not a text of at most {MAX_TEMPLATE:,} characters")
    if templates and "default" not in templates:
        raise ValueError("none of its chat templates is the default one")


def _name(token: Any) -> str | None:
    """A token's name, from a text or an object with its name and flags."""
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) and name else None


def _with_added(
    content: dict[str, Any], added: dict[str, Any], config: dict[str, Any], ends: list[int]
) -> dict[str, Any]:
    """tokenizer.json with the tokens that only tokenizer_config.json adds, in the form for the library."""
    tokens = {one["id"]: one for one in content.get("added_tokens") or []}
    for index, one in added.items():
        tokens.setdefault(int(index), {"id": int(index), **one})
    # The tokens that begin and end a text are special, whatever the file says: no text may contain them.
    vocabulary = content["model"]["vocab"]
    ids = vocabulary if isinstance(vocabulary, dict) else {name: index for index, (name, _) in enumerate(vocabulary)}
    name_of = {index: name for name, index in ids.items()} | {one["id"]: one["content"] for one in tokens.values()}
    marks = {_name(config.get(role)) for role in ("bos_token", "eos_token")}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for index, name in name_of.items():
        if name in marks or index in ends:
            tokens[index] = {"id": index, "content": name, **plain, **tokens.get(index, {}), "special": True}
    in_order = sorted(tokens.values(), key=lambda one: one["id"])
    # Qwen3.5's pattern for words is in its config: tokenizer.json may have the one of Qwen2, which divides at marks.
    pattern = config.get("pretokenize_regex")
    for part in _parts(content.get("pre_tokenizer")):
        if part.get("type") == "Split" and isinstance(pattern, str):
            part["pattern"] = {"Regex": pattern}
    # A file may have been saved with a limit of the length, or with the padding of a batch.
    return {**content, "added_tokens": in_order, "truncation": None, "padding": None}


def _build(content: dict[str, Any]) -> Any:
    """The library's tokenizer. Raises ValueError: with its complaint."""
    # Its threads would compete with torch's threads, and it warns about them after a fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import tokenizers  # here, because our own tokenizer does not need it

    growth = math.prod(_growth(part) for part in _parts(content.get("normalizer")))
    if growth > MAX_GROWTH:
        raise ValueError(
            f"its normalizers make a text up to {min(growth, 1e9):,.0f} times as long: {MAX_GROWTH} at most"
        )
    with _complaints("the tokenizers library cannot read it"):
        library = tokenizers.Tokenizer.from_str(json.dumps(content))
    if getattr(library.model, "dropout", None):
        library.model.dropout = None  # dropout is for training: here a text has one encoding
    library.encode_special_tokens = True  # as plain text; see ImportedTokenizer
    return library


@contextlib.contextmanager
def _complaints(what: str) -> Iterator[None]:
    """One line for whatever the library raises: Exception itself and, for a panic such as a regex that backtracks for
    too long, a BaseException. Raises UserError."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise UserError(f"{what}: {' '.join(str(error).split())[:200]}") from error


def _growth(part: dict[str, Any]) -> float:
    """How many times as long a normalizer makes a text at most. Those of Unicode (NFKC: 18 characters for one) are left
    out."""
    if part.get("type") == "Prepend":
        return max(1, len(part["prepend"]))
    if part.get("type") == "Replace":
        pattern = part["pattern"].get("String")
        # A regex may match between all characters.
        return max(1, len(part["content"]) / len(pattern)) if pattern else 1 + len(part["content"])
    if part.get("type") == "Precompiled":  # SentencePiece's: a trie, then all replacements
        charsmap = base64.b64decode(part["precompiled_charsmap"] or "")
        replacements = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
        return max(1, max(map(len, replacements)) / 54)  # the longest of NFKC has 18 characters of 3 bytes
    return 1


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """A normalizer, splitter or decoder, and its parts."""
    if isinstance(component, dict):
        yield component
        for name in ("normalizers", "pretokenizers", "decoders"):
            for part in component.get(name) or []:
                yield from _parts(part)


def _types(component: Any) -> list[str]:
    return [part.get("type", "") for part in _parts(component)]


def _strips_space(part: dict[str, Any]) -> bool:
    if part.get("type") == "Strip":
        return part.get("content") == " " and part.get("start", 0) > 0
    # Before there was a `prepend_scheme`, `add_prefix_space` meant the same.
    return part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never"


# ---------------------------------------------------------------------- bytes of tokens


def _byte_characters() -> dict[str, int]:
    """GPT-2's names of bytes: a printable byte is its own name, the others have the characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)]
    bytes_of = {chr(byte): byte for byte in printable}
    for byte in range(256):
        if byte not in printable:
            bytes_of[chr(256 + len(bytes_of) - len(printable))] = byte
    return bytes_of


BYTE_CHARACTERS = _byte_characters()


def _bytes_of_byte_level(name: str) -> bytes:
    if all(character in BYTE_CHARACTERS for character in name):
        return bytes(BYTE_CHARACTERS[character] for character in name)
    return name.encode()  # as the library decodes it


def _bytes_of_sentencepiece(name: str) -> bytes:
    byte = BYTE_TOKEN.fullmatch(name)
    return bytes([int(byte[1], 16)]) if byte else name.replace(SPACE, " ").encode()
