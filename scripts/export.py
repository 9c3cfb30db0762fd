"""Copy a checkpoint's weights and tokenizer into a new folder, to share or to keep.

python -m scripts.export --to safetensors --source sft --out my_model --dtype bfloat16

python -m scripts.export --to hf --source sft --out my_model

`--to hf` writes the folder that AutoModelForCausalLM, vLLM and similar programs load: the weights under the names of
the model's family (Qwen, Llama, Mistral), its tokenizer, chat template and generation_config.json. A model of our own
shape has no family: the folder includes modeling_nanochat.py, and transformers loads it with trust_remote_code=True.
There, as with every model of a hub, a special token that is spelled out in the text of a chat becomes a special token.

Adapters (LoRA) of the source, a checkpoint or a folder of the library peft, are merged into their base. `--to peft`
writes only the adapters, as such a folder.

With `--to safetensors` the folder holds model.safetensors, config.json, the tokenizer, meta.json (which checkpoint it
was) and manifest.json (every file's size and sha256), but not the training state. `load_model("my_model")` and the
flag `--source my_model` of chat_web and the other commands read it directly. The folder has the tokenizer twice: as
nanochat_tokenizer.json for this project, and as tokenizer.json in the format of Hugging Face's `tokenizers`, with the
same ids. With both, text never becomes a special token; transformers' AutoTokenizer turns it into one if it is loaded
with split_special_tokens=False.
"""

import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nanochat.ground.cli import UserError, run
from nanochat.ground.log import print0, warn
from nanochat.sampling import NEUTRAL

if TYPE_CHECKING:
    import torch

    from nanochat.gpt import GPT, GPTConfig
    from nanochat.tokenizer import Tokenizer

MODELING = Path(__file__).parent.parent / "nanochat" / "exported" / "modeling_nanochat.py"
# The entries of a checkpoint's meta.json to keep. The rest, such as paths, describes the machine that trained it.
KEPT = ("model", "tokenizer", "step", "stage", "source", "pretraining", "sampling", "tasks", "trained_at")
# Fields of GPTConfig that the modeling file does not read: what follows from them is written in their place.
DERIVED = {"rope_theta", "rope_scaling", "sequence_len", "window_pattern", "window_tokens"}


@dataclass(frozen=True)
class Config:
    out: str  # the folder to create; it must not exist yet
    # The format: for this project; for transformers and programs that read its folders; or only the adapters, for peft.
    to: Literal["safetensors", "hf", "peft"] = "safetensors"
    source: str = "auto"  # a stage, a folder (ours, Hugging Face's or peft's) or hf:ORG/NAME; auto: the furthest stage
    model_tag: str | None = None  # tag of the source; default: the tag written last
    # The dtype of the weights; auto: as in the source. bfloat16 halves the size of float32 weights, and rounds them.
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"


def main(config: Config) -> None:
    # The heavy imports are here so that --help answers at once.
    import torch

    from nanochat import checkpoint_manager, model_folder
    from nanochat import device as devices
    from nanochat.adapters import folders, peft
    from nanochat.families import hf
    from nanochat.run import saver
    from nanochat.scaling import parameter_counts

    out = Path(config.out).expanduser().absolute()
    if out.exists():
        raise UserError(f"--out {config.out} exists already: name another folder, or remove it")
    source = model_folder.find_source(config.source, config.model_tag)

    if config.to == "peft":
        peft.require_same_modules(model_folder.lineage(source)[-1], "--to peft")
        shape, _, meta = checkpoint_manager.load_config(source)
        adapters = folders.read_adapters(source, shape)
        peft.require_whole_experts(adapters.lora, shape, meta.get("pretraining", {}).get("family", ""))
        base = peft.base_of(source) if peft.is_folder(source) else str(meta["adapter"]["base"])
        with saver.new_folder(out) as folder:
            peft.write(folder, adapters, shape, base)
        print0(f"exported the adapters of {source} to {out}")
        if adapters.lora.base_format == "nf4":
            warn(
                "they were trained over a base of 4 bits, which peft's folders do not say: over the base as it is they "
                "are a little off; --to hf merges them into the rounded one"
            )
    else:
        model, tokenizer, meta = checkpoint_manager.load_folder(source, devices.init("cpu"))
        dtype = getattr(torch, config.dtype, None) or stored_dtype(source)
        family = None
        if config.to == "hf":
            family = meta.get("pretraining", {}).get("family")  # the family of the folder from which the source came
            if family not in hf.FAMILIES or not hf.computes(family, model.config):
                family = hf.family_of(model.config)
            require_exported(model.config, family)
        with saver.new_folder(out, parameter_counts(model)["total"] * dtype.itemsize) as folder:
            if family is None:
                write_as_ours(folder, model, tokenizer, meta, dtype, for_transformers=config.to == "hf")
            else:
                write_as_family(folder, model, tokenizer, meta, dtype, family)
        size = sum(path.stat().st_size for path in out.iterdir())
        shape = f", as {family}" if family else ""
        print0(f"exported {source} to {out}: {size:,} bytes, weights in {dtype_name(dtype)}{shape}")


def require_exported(config: "GPTConfig", family: str | None) -> None:
    """Raises UserError: when no family has the model, and modeling_nanochat.py does not compute a part of it."""
    if family is not None:
        return
    # The fields that its code reads, as config.width, c.width or getattr(config, "experts", 0).
    read = set(re.findall(r"\b(?:config|c)(?:\.|, \")(\w+)", MODELING.read_text(encoding="utf-8")))
    read |= {"scalar_head", *DERIVED}  # the head is not in the logits
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in read and value != field.default:
            raise UserError(
                f"--to hf: {MODELING.name} does not know GPTConfig.{field.name}, which is {value}: compute it "
                "there, or leave --to hf out"
            )


def write_as_ours(
    folder: Path, model: "GPT", tokenizer: "Tokenizer", meta: dict[str, Any], dtype: "torch.dtype",
    for_transformers: bool,
) -> None:  # fmt: skip
    """A checkpoint of this project without training state; `for_transformers` adds its modeling file."""
    from nanochat import model_folder
    from nanochat.exported.tokenizer_files import tokenizer_files
    from nanochat.ground import storage
    from nanochat.run import saver
    from nanochat.tokenizer import EXPORTED_NAME

    kept = {key: meta[key] for key in KEPT if key in meta}
    kept["exported_from"] = model_folder.short_name(Path(meta["folder"]))
    weights = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    files = saver.write_model(folder, model.config, weights, tokenizer, kept, EXPORTED_NAME)

    contents = tokenizer_files(tokenizer, model.config.sequence_len, for_others=for_transformers)
    settings = {"model_type": "nanochat", "dtype": dtype_name(dtype), **asdict(model.config)}
    if for_transformers:
        contents["generation_config.json"] = generation_settings(meta["sampling"], tokenizer)
        settings |= text_ends(tokenizer)
        settings |= {"architectures": ["NanochatForCausalLM"], "tie_word_embeddings": False}
        settings |= derived_settings(model.config)
        del settings["rope_scaling"]  # transformers expects another form under this name
        settings["auto_map"] = {
            "AutoConfig": "modeling_nanochat.NanochatConfig",
            "AutoModelForCausalLM": "modeling_nanochat.NanochatForCausalLM",
        }
        # The file is not in the manifest: a download for this project leaves it out (data/hub.py).
        storage.write_file(folder / MODELING.name, [MODELING.read_bytes()])
    contents["config.json"] = settings
    files |= write_contents(folder, contents)
    storage.write_json(folder / "manifest.json", files)


def derived_settings(config: "GPTConfig") -> dict[str, Any]:
    """What the modeling file reads in place of the fields DERIVED."""
    import torch

    frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    if config.rope_scaling is not None:
        frequencies = config.rope_scaling.apply(frequencies, config.rope_theta)
    return {
        "rotary_frequencies": frequencies.tolist(),
        "rotary_gain": 1.0 if config.rope_scaling is None else config.rope_scaling.gain,
        "windows": [config.window(layer) for layer in range(config.n_layer)],
    }


def write_as_family(
    folder: Path, model: "GPT", tokenizer: "Tokenizer", meta: dict[str, Any], dtype: "torch.dtype", family: str
) -> None:
    """A model of another family, under its names. A manifest is left out: it would mark a checkpoint of ours."""
    from nanochat.exported.tokenizer_files import tokenizer_files
    from nanochat.families import hf
    from nanochat.ground.sharding import whole_weights
    from nanochat.ground.untrusted import read_json

    whole_model = hf.find_whole_model(meta)
    hf.write_weights(folder, model.config, whole_weights(model), dtype, family=family, whole_model=whole_model)
    settings = {**hf.from_config(model.config, family), "dtype": dtype_name(dtype), **text_ends(tokenizer)}
    context = meta.get("pretraining", {}).get("context")  # before a stage has trained with shorter rows
    if isinstance(context, int) and context > model.config.sequence_len:
        settings["max_position_embeddings"] = context
    if whole_model is not None:
        whole = read_json(whole_model / "config.json")
        shared = {key: settings[key] for key in ("dtype", "tie_word_embeddings")}
        settings = {**whole, **shared, "text_config": {**whole["text_config"], **settings}}
    contents = tokenizer_files(tokenizer, model.config.sequence_len, for_others=True)
    contents["generation_config.json"] = generation_settings(meta["sampling"], tokenizer)
    contents["config.json"] = settings
    write_contents(folder, contents)


def write_contents(folder: Path, contents: dict[str, Any]) -> dict[str, Any]:
    """Write files by name, as JSON or as text; returns their manifest entries."""
    from nanochat.ground import storage

    files = {}
    for name, content in contents.items():
        if isinstance(content, str):
            files[name] = storage.write_file(folder / name, [content.encode()])
        else:
            files[name] = storage.write_json(folder / name, content)
    return files


def stored_dtype(folder: Path) -> "torch.dtype":
    """The dtype in which a folder holds a model's matrices: fp32, unless it was exported or comes from elsewhere."""
    from nanochat import model_folder

    base = model_folder.lineage(folder)[-1]
    its_format = model_folder.format_of(base)
    config, _ = its_format.describe(base)
    return its_format.weights(base, config).dtype


def dtype_name(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")


def text_ends(tokenizer: "Tokenizer") -> dict[str, int]:
    """The entries of config.json for the first and last token of a text."""
    return {"bos_token_id": tokenizer.get_bos_token_id(), "eos_token_id": tokenizer.reply_ends[0]}


def generation_settings(sampling: dict[str, Any], tokenizer: "Tokenizer") -> dict[str, Any]:
    """The content of generation_config.json: how replies are sampled and where they end."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    drawn = {name: sampling[name] for name in names if sampling[name] != NEUTRAL[name]}
    # The usual end of a reply comes first. A reply of our models ends at any special token except the start and end of
    # a call. Other programs do not answer calls, so the reply ends at the token that starts the answer.
    ends = list(tokenizer.reply_ends)
    if "<|assistant_end|>" in tokenizer.special_ids:
        ends += sorted(tokenizer.stop_ids - set(ends))
    settings: dict[str, Any] = {"bos_token_id": tokenizer.get_bos_token_id(), "eos_token_id": ends}
    settings |= {"pad_token_id": ends[0], "do_sample": sampling["temperature"] > 0}
    return settings | (drawn if settings["do_sample"] else {})


if __name__ == "__main__":
    run(main, Config)
