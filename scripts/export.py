"""Copy a checkpoint's weights and tokenizer into a folder of their own, to share or to keep.

python -m scripts.export --to safetensors --source sft --out my_model --dtype bfloat16

The folder holds model.safetensors, config.json, the tokenizer, meta.json (which checkpoint it was) and manifest.json
(every file's size and sha256), and no training state. `load_model("my_model")`, and `--source my_model` of chat_web and
the other commands, read it as it is. The tokenizer is there twice: as nanochat_tokenizer.json for this project, and as
tokenizer.json in the format of Hugging Face's `tokenizers`, with the same ids. There, too, text never becomes a special
token; transformers' AutoTokenizer makes one of it where it is loaded with split_special_tokens=False.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nanochat.shell.cli import UserError, run
from nanochat.shell.log import print0

if TYPE_CHECKING:
    from nanochat.tokenizer import Tokenizer


@dataclass(frozen=True)
class Config:
    out: str  # the folder to make; it must not exist yet
    to: Literal["safetensors"] = "safetensors"  # the format; there is one so far
    source: str = "auto"  # base, mid, sft, dpo, rl, the furthest of them (auto), or a checkpoint's folder
    model_tag: str | None = None  # of the source; default: the tag last written
    step: int | None = None  # of the source; default: its newest whole step
    dtype: Literal["bfloat16", "float32"] = "float32"  # of the weights; bfloat16 halves the file and rounds


# What meta.json keeps of a checkpoint's. The rest, such as paths, describes the machine that trained it.
KEPT = ("model", "tokenizer", "step", "stage", "source", "pretraining", "sampling", "tasks", "trained_at")
ENDS = ("<|bos|>", "<|assistant_end|>")  # transformers has names of its own for these two


def main(config: Config) -> None:
    # The heavy imports are here so that --help answers at once.
    import shutil

    import torch

    from nanochat import checkpoint_manager
    from nanochat.shell import storage
    from nanochat.tokenizer import EXPORTED_NAME

    # ------------------------------------------------------------------ the checkpoint, in the dtype requested
    source = checkpoint_manager.find_source(config.source, config.model_tag, config.step)
    model, tokenizer, meta = checkpoint_manager.load_model(source, "cpu", verified=True)
    weights = {}
    for name, tensor in model.state_dict().items():
        weights[name] = tensor.to(getattr(torch, config.dtype)) if tensor.is_floating_point() else tensor

    exported = {key: meta[key] for key in KEPT if key in meta}
    exported["version"] = checkpoint_manager.FORMAT_VERSION
    exported["world_size"] = 0  # no training state
    exported["exported_from"] = checkpoint_manager.short_name(source)

    # ------------------------------------------------------------------ the folder, as atomically as a checkpoint
    out = Path(config.out).expanduser().absolute()
    unfinished = checkpoint_manager.unfinished_path(out)
    if out.exists():
        raise UserError(f"--out {config.out} exists already: name another folder, or remove it")
    with checkpoint_manager.explained_full_disk(out, sum(tensor.nbytes for tensor in weights.values())):
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        files = checkpoint_manager.write_model(unfinished, weights, tokenizer, exported, EXPORTED_NAME)
        files["tokenizer.json"] = storage.write_json(unfinished / "tokenizer.json", hugging_face_form(tokenizer))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|bos|>",
            "eos_token": "<|assistant_end|>",
            "additional_special_tokens": [name for name in tokenizer.special_ids if name not in ENDS],
            "split_special_tokens": True,
            "clean_up_tokenization_spaces": False,
            "model_max_length": model.config.sequence_len,
        }
        files["tokenizer_config.json"] = storage.write_json(unfinished / "tokenizer_config.json", settings)
        description = {"model_type": "nanochat", "dtype": config.dtype, **meta["model"]}
        files["config.json"] = storage.write_json(unfinished / "config.json", description)
        checkpoint_manager.commit(unfinished, out, files)

    size = sum(file["bytes"] for file in files.values())
    print0(f"exported {source} to {out}: {size:,} bytes, weights in {config.dtype}")


def hugging_face_form(tokenizer: "Tokenizer") -> dict[str, Any]:
    """The tokenizer as a tokenizer.json of Hugging Face's `tokenizers`, which gives every text the same ids.

    One difference is left: within runs of more than 512 letters, spaces or marks `Tokenizer.encode` cuts.
    Source: the file format of https://github.com/huggingface/tokenizers; the names of bytes: Radford et al. 2019.
    """
    # A vocabulary in JSON cannot hold bytes. GPT-2 has named each byte by a character: printable ones by themselves,
    # the others by the characters from U+0100 on.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    character_of = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in character_of:
            character_of[byte] = chr(256 + len(character_of) - len(printable))

    def named(token: bytes) -> str:
        return "".join(character_of[byte] for byte in token)

    # tiktoken joins two neighbours where together they are a token, and takes the lowest id first. Here each pair has a
    # line of its own, so a token has one for every way to divide it into two tokens.
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


if __name__ == "__main__":
    run(main, Config)
