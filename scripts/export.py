"""Copy a checkpoint's weights and tokenizer into a folder of their own, to share or to keep.

python -m scripts.export --to safetensors --source sft --out my_model --dtype bfloat16

python -m scripts.export --to hf --source sft --out my_model --push me/my-model

python -m scripts.export --to hf --source hf:ORG/NAME --adapter from_peft --out merged

`--to hf` writes what AutoModelForCausalLM, vLLM and the like load: the weights under the names of the model's family
(Qwen, Llama, Mistral), with its tokenizer, chat template and generation_config.json. A model of our own shape has no
family: modeling_nanochat.py goes with it, and transformers loads it with trust_remote_code=True. There, as with every
model of a hub, a special token that is spelled out in a chat's text becomes one.

Adapters (LoRA) are merged into their base: those of a source that holds some, and those of `--adapter`, a folder of the
library peft. `--to peft` writes the adapters of the source alone, as such a folder.

With `--to safetensors` the folder holds model.safetensors, config.json, the tokenizer, meta.json (which checkpoint it
was) and manifest.json (every file's size and sha256), and no training state. `load_model("my_model")`, and
`--source my_model` of chat_web and the other commands, read it as it is. The tokenizer is there twice: as
nanochat_tokenizer.json for this project, and as tokenizer.json in the format of Hugging Face's `tokenizers`, with the
same ids. There, too, text never becomes a special token; transformers' AutoTokenizer makes one of it where it is loaded
with split_special_tokens=False.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nanochat.sampling import NEUTRAL
from nanochat.shell.cli import UserError, run
from nanochat.shell.log import print0

if TYPE_CHECKING:
    from nanochat.tokenizer import Tokenizer


MODELING = Path(__file__).parent.parent / "nanochat" / "exported" / "modeling_nanochat.py"


@dataclass(frozen=True)
class Config:
    out: str  # the folder to make; it must not exist yet
    # For this project, for transformers and what reads its folders, or the adapters alone for peft.
    to: Literal["safetensors", "hf", "peft"] = "safetensors"
    adapter: str | None = None  # a folder of peft's: merge its adapters into the source
    source: str = "auto"  # a stage, the furthest of them (auto), a folder, or hf:ORG/NAME
    model_tag: str | None = None  # of the source; default: the tag last written
    step: int | None = None  # of the source; default: its newest whole step
    # Of the weights; auto: as in the source. bfloat16 halves what is float32, and rounds.
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    push: str | None = None  # also upload it: ORG/NAME, a private repository of the hub (HF_TOKEN); made if need be


# What meta.json keeps of a checkpoint's. The rest, such as paths, describes the machine that trained it.
KEPT = ("model", "tokenizer", "step", "stage", "source", "pretraining", "sampling", "tasks", "trained_at")
ENDS = ("<|bos|>", "<|assistant_end|>")  # transformers has names of its own for these two

# The chat format (conversation.py) as a template of transformers: the marks, and the texts as they are.
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- set marks = {"text": ["", ""], "python": ["<|python_start|>", "<|python_end|>"],
    "python_output": ["<|output_start|>", "<|output_end|>"]} %}
{%- for message in messages %}
    {{- "<|" ~ message.role ~ "_start|>" }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content if part.text %}
            {{- marks[part.type][0] ~ part.text ~ marks[part.type][1] }}
        {%- endfor %}
    {%- endif %}
    {{- "<|" ~ message.role ~ "_end|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|assistant_start|>" }}
{%- endif %}
"""


def main(config: Config) -> None:
    # The heavy imports are here so that --help answers at once.
    import shutil

    import torch

    from nanochat import checkpoint_manager, hf, lora
    from nanochat.data import hub
    from nanochat.shell import storage
    from nanochat.tokenizer import EXPORTED_NAME

    # ------------------------------------------------------------------ the checkpoint, in the dtype requested
    if config.push is not None:
        hub.check_name(config.push)
    source = checkpoint_manager.find_source(config.source, config.model_tag, config.step)
    model, tokenizer, meta = checkpoint_manager.load_model(source, "cpu", verified=True)
    if config.adapter is not None:
        lora.merge(model, lora.read_peft(Path(config.adapter).expanduser(), model.config))
    dtype = getattr(torch, config.dtype, None) or checkpoint_manager.stored_dtype(source)
    exported = {key: meta[key] for key in KEPT if key in meta}
    exported["version"] = checkpoint_manager.FORMAT_VERSION
    exported["world_size"] = 0  # no training state
    exported["exported_from"] = checkpoint_manager.short_name(source)
    family = None
    if config.to == "hf":
        known = meta.get("pretraining", {}).get("family")
        family = known if known in hf.FAMILIES else hf.family_of(model.config)

    # ------------------------------------------------------------------ the folder, as atomically as a checkpoint
    out = Path(config.out).expanduser().absolute()
    unfinished = checkpoint_manager.unfinished_path(out)
    if out.exists():
        raise UserError(f"--out {config.out} exists already: name another folder, or remove it")
    if config.to == "peft":
        adapters, base = checkpoint_manager.load_adapters(source)
        unfinished.mkdir(parents=True)
        lora.write_peft(unfinished, adapters, model.config, base)
        checkpoint_manager.publish(unfinished, out)
        print0(f"exported the adapters of {source} to {out}")
        return
    weight_bytes = sum(tensor.numel() for tensor in model.state_dict().values()) * dtype.itemsize
    with checkpoint_manager.explained_full_disk(out, weight_bytes):
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        described: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
        contents = tokenizer_files(tokenizer, model.config.sequence_len, for_others=config.to == "hf")
        if config.to == "hf":
            described |= {"bos_token_id": tokenizer.get_bos_token_id(), "eos_token_id": end_ids(tokenizer)[0]}
            contents["generation_config.json"] = generation_settings(meta["sampling"], tokenizer)
        if family is None:
            # Our own names, which modeling_nanochat.py has too: this project reads the folder as it is.
            weights = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
            files = checkpoint_manager.write_model(unfinished, weights, tokenizer, exported, EXPORTED_NAME)
            described = {"model_type": "nanochat", **described, **meta["model"]}
            if config.to == "hf":
                described |= {"architectures": ["NanochatForCausalLM"], "tie_word_embeddings": False}
                described["auto_map"] = {
                    "AutoConfig": "modeling_nanochat.NanochatConfig",
                    "AutoModelForCausalLM": "modeling_nanochat.NanochatForCausalLM",
                }
                contents["modeling_nanochat.py"] = MODELING.read_text(encoding="utf-8")
        else:
            files = hf.write_weights(unfinished, model, dtype)
            described = {**hf.from_config(model.config, family), **described}
            context = meta.get("pretraining", {}).get("context")  # before a stage has trained with shorter rows
            if isinstance(context, int) and context > model.config.sequence_len:
                described["max_position_embeddings"] = context
        contents["config.json"] = described
        for name, content in contents.items():
            if isinstance(content, str):
                files[name] = storage.write_file(unfinished / name, [content.encode()])
            else:
                files[name] = storage.write_json(unfinished / name, content)
        size = sum(file["bytes"] for file in files.values())
        if family is None:
            files.pop("modeling_nanochat.py", None)  # a download for this project leaves it out (data/hub.py)
            checkpoint_manager.commit(unfinished, out, files)
        else:  # a manifest would make it a checkpoint of ours
            checkpoint_manager.publish(unfinished, out)

    shape = f", as {family}" if family else ""
    print0(f"exported {source} to {out}: {size:,} bytes, weights in {described['dtype']}{shape}")
    if config.push is not None:
        print0(f"uploaded to {hub.push_model(out, config.push)}, which is private: its page makes it public")


def end_ids(tokenizer: "Tokenizer") -> list[int]:
    """The tokens that end a reply, the usual one first."""
    if "<|assistant_end|>" not in tokenizer.special_ids:  # another family's
        return list(tokenizer.reply_ends)
    # Ours ends with any mark but those of a call. There nobody answers a call: the mark of the answer ends the reply.
    return [*tokenizer.reply_ends, *sorted(tokenizer.stop_ids - set(tokenizer.reply_ends))]


def generation_settings(sampling: dict[str, Any], tokenizer: "Tokenizer") -> dict[str, Any]:
    """generation_config.json: how replies are drawn and where they end."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    drawn = {name: sampling[name] for name in names if sampling[name] != NEUTRAL[name]}
    ends = end_ids(tokenizer)
    settings: dict[str, Any] = {"bos_token_id": tokenizer.get_bos_token_id(), "eos_token_id": ends}
    settings |= {"pad_token_id": ends[0], "do_sample": sampling["temperature"] > 0}
    return settings | (drawn if settings["do_sample"] else {})


def tokenizer_files(tokenizer: "Tokenizer", context: int, for_others: bool) -> dict[str, Any]:
    """The tokenizer's files in Hugging Face's form by name, as JSON or text. `for_others`: a rendered chat is a text
    whose marks the tokenizer must find."""
    from nanochat.imported_tokenizer import ImportedTokenizer

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
        files["chat_template.jinja"] = CHAT_TEMPLATE
    return files


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
