"""Hugging Face's folders of models: their config.json and ours, their names and ours, weights in and out.

    config.json  generation_config.json      the model's shape, and the settings of its replies
    model.safetensors                        the weights; or, where they are large, several files and their index:
    model-00001-of-00002.safetensors  ...    model.safetensors.index.json names the file of each tensor
    tokenizer.json ...                       tokenizer.py reads these

All families share one model: Qwen, Llama, Mistral and Phi are values of GPTConfig. Weights are read a piece at a time,
each rank its own rows, from files that are mapped and never unpickled. The author of the folder may be hostile, so the
sizes in config.json are compared with the headers of the weights before anything is built.

Source: the configuration and modeling files of transformers 5.24, which is the oracle of tests/families/test_hf.py.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanochat import model_folder
from nanochat.data import hashes
from nanochat.families.imported_tokenizer import ImportedTokenizer, read_tokenizer
from nanochat.families.matrices import stacked_matrices
from nanochat.gpt import SCALAR_HEAD, GPTConfig
from nanochat.ground import storage
from nanochat.ground.log import print0, warn
from nanochat.ground.untrusted import read_json, require_file
from nanochat.rotary import RopeScaling
from nanochat.sampling import CHAT_SAMPLING, NEUTRAL, read_settings, saved_settings

PIECE_BYTES = 32 << 20  # read at once: the memory of a load in addition to the weights
SHARD_BYTES = 5 << 30  # size of a written file: hubs and file systems handle larger ones badly
MAX_SHARDS = 1000
MAX_EXPERTS = 4096
MAX_SIZE = 1 << 24  # largest vocabulary, width or context
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

# ---------------------------------------------------------------------- names

# Ours -> theirs.
NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
# The same below blocks.<n>. and model.layers.<n>.
LAYER_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.shared_gate.weight": "mlp.shared_expert_gate.weight",
    "attention.convolution": "linear_attn.conv1d.weight",
    "attention.log_rate": "linear_attn.A_log",
    "attention.rate_bias": "linear_attn.dt_bias",
    "attention.norm_weight": "linear_attn.norm.weight",
}
# And its matrices and their biases: attention.qkv.bias -> self_attn.q_proj.bias, self_attn.k_proj.bias and so on, the
# parts that matrices.py lists, in the order in which their rows are stacked in ours.
MODULES = {
    "attention.qkv": "self_attn", "attention.output": "self_attn",
    "attention.state_input": "linear_attn", "attention.state_output": "linear_attn",
    "mlp.input": "mlp", "mlp.output": "mlp", "mlp.shared.input": "mlp.shared_expert",
    "mlp.shared.output": "mlp.shared_expert",
}  # fmt: skip
# Phi's files hold them stacked, in the same order.
STACKED = {"attention.qkv": "self_attn.qkv_proj", "mlp.input": "mlp.gate_up_proj"}
# And these the matrices of all experts, also in the same order.
STACKED_EXPERTS = {"mlp.input": "mlp.experts.gate_up_proj", "mlp.output": "mlp.experts.down_proj"}
MIXTRAL_NAMES = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}
# Norms of models with states: their files hold w where the model multiplies by 1 + w.
CENTRED = re.compile(r"norm\.weight|blocks\.\d+\.(attention_norm|mlp_norm|attention\.[qk]_norm)\.weight")
# Parts that we do not compute: vision, and multi-token prediction (mtp). In a model with vision the language model is
# below another name.
SEEING_PREFIX = "model.language_model."
LEFT_OUT = re.compile(r"(model\.visual|mtp)\..+")
# What is not read from files: tables of older ones that follow from the config, a tied head, and these parts.
IGNORED = re.compile(rf"lm_head\.weight|model\.(layers\.\d+\.self_attn\.)?rotary_emb\.\w+|{LEFT_OUT.pattern}")
# Parts of names that a wrapper leaves when the model is saved inside of it: the wrapper, and what to save instead.
WRAPPERS = {
    "_orig_mod": "torch.compile: save the model that was compiled, model._orig_mod",
    "module": "DataParallel, DDP or DeepSpeed: save the model inside, model.module",
    "_fsdp_wrapped_module": "FSDP: save the full state, as accelerate's save_model does",
    "_checkpoint_wrapped_module": "activation checkpointing: save the model without it",
    **dict.fromkeys(
        ("base_model.model", "base_layer", "lora_A", "lora_B"),
        "peft, with adapters beside the weights: save model.merge_and_unload()",
    ),
}
WRAPPED = re.compile(rf"(?:^|\.)({'|'.join(map(re.escape, WRAPPERS))})\.")


def theirs_of(
    name: str, config: GPTConfig, rows: int, is_stacked: bool = False, stacks_experts: bool = False
) -> list[tuple[str, int]]:
    """The tensors that our parameter of `rows` rows is stacked from, and the rows of each; with `is_stacked` a file's
    matrices are stacked as ours are, with `stacks_experts` only the experts' matrices are.

    Raises ValueError: for a parameter that no other family has.
    """
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    if block is None and name in NAMES:
        return [(NAMES[name], rows if name == "norm.weight" else config.vocab_size)]  # without the padding
    if block is not None:
        layer = f"model.layers.{block[1]}"
        module, _, kind = block[2].rpartition(".")
        if is_stacked and module in STACKED:
            return [(f"{layer}.{STACKED[module]}.{kind}", rows)]
        if stacks_experts and module in STACKED_EXPERTS:
            return [(f"{layer}.{STACKED_EXPERTS[module]}", rows)]
        parts = stacked_matrices(config).get(module)
        if parts is not None:
            theirs = MODULES[module]
            if theirs == "mlp" and config.experts:  # all matrices of the first expert, then of the second one
                experts = [f"{layer}.mlp.experts.{expert}" for expert in range(config.experts)]
                return [(f"{expert}.{part}.{kind}", count) for expert in experts for part, count in parts.items()]
            return [(f"{layer}.{theirs}.{part}.{kind}", count) for part, count in parts.items()]
        if block[2] in LAYER_NAMES:
            return [(f"{layer}.{LAYER_NAMES[block[2]]}", rows)]
    raise ValueError(f"Hugging Face's families have no {name}")


def as_mixtral(name: str) -> str:
    """Mixtral's name of a tensor; only its experts are named differently."""
    for theirs, its in MIXTRAL_NAMES.items():
        name = name.replace(theirs, its)
    return name


# ---------------------------------------------------------------------- config.json


@dataclass(frozen=True)
class Family:
    """The differences of one family from the others."""

    architecture: str  # the class in transformers
    defaults: dict[str, Any] = field(default_factory=dict)  # defaults for config.json, as in transformers
    qk_norm: bool = False
    qkv_bias: bool = False
    is_stacked: bool = False  # see STACKED
    has_experts: bool = False
    has_shared: bool = False  # an expert for every token, weighed by a gate
    has_states: bool = False


ALWAYS_NORMALIZED = ("mixtral", "qwen3_5_moe")  # the weights of a token's experts add up to 1
STATES = {
    "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
QWEN3_5_MOE = STATES | {
    "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip
QWEN2_MOE = {
    "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}  # fmt: skip
FAMILIES = {
    "qwen2": Family("Qwen2ForCausalLM", {"num_key_value_heads": 32}, qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", {"num_key_value_heads": 32, "head_dim": 128}, qk_norm=True),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        qk_norm=True,
        has_experts=True,
    ),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", QWEN2_MOE, qkv_bias=True, has_experts=True, has_shared=True),
    "mixtral": Family(
        "MixtralForCausalLM",
        {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
        has_experts=True,
    ),
    "seed_oss": Family("SeedOssForCausalLM", {"num_key_value_heads": 8, "head_dim": 128}, qkv_bias=True),
    "qwen3_5": Family("Qwen3_5ForCausalLM", STATES, qk_norm=True, has_states=True),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeForCausalLM", QWEN3_5_MOE, qk_norm=True, has_experts=True, has_shared=True, has_states=True
    ),
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", {"num_key_value_heads": 8, "sliding_window": 4096}),
    "phi3": Family("Phi3ForCausalLM", {"rms_norm_eps": 1e-5}, is_stacked=True),  # Phi-4 too
}

# Features that the model does not compute: the key of config.json, the harmless values, and the meaning of others.
REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("hidden_act", (None, "silu", "swish"), "an activation other than silu"),
    ("attention_bias", (None, False), "a bias on the attention's output"),
    ("mlp_bias", (None, False), "biases in the MLP"),
    ("quantization_config", (None,), "quantized weights"),
    ("mlp_only_layers", (None, []), "layers without experts between layers with experts"),
    ("decoder_sparse_step", (None, 1), "layers without experts between layers with experts"),
    ("use_mrope", (None, False), "rotary positions in several dimensions (mrope)"),
)


def model_type(folder: Path) -> str:
    """The family's name in config.json; empty if it cannot be read."""
    try:
        return str(read_json(folder / "config.json").get("model_type", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def to_config(theirs: dict[str, Any]) -> GPTConfig:
    """Our config of the same model. Raises ValueError: when our model cannot compute it."""
    if theirs.get("model_type") == "nanochat":
        raise ValueError("it is a model of ours without its manifest.json: export it again")
    name = str(theirs.get("model_type"))[:80].removesuffix("_text")
    family = FAMILIES.get(name)
    if family is None:
        known = ", ".join(FAMILIES)
        raise ValueError(
            f"model_type {name} is not read: one of {known} (docs/finetune.md says what others would need)"
        )
    for key, harmless, meaning in REFUSED:
        if key == "attention_bias" and name == "seed_oss":  # there it has no say on the output
            key = "attention_out_bias"
        if theirs.get(key) not in harmless:
            raise ValueError(f"config.json has {key} {str(theirs[key])[:80]}: {meaning}, which this model has not")
    # transformers 5 writes the number of Qwen's experts under another name.
    experts = theirs.get("num_experts", theirs.get("num_local_experts"))
    if experts and not family.has_experts:
        raise ValueError(f"config.json has num_experts {str(experts)[:80]}: a mixture of experts, which {name} has not")
    theirs = {**family.defaults, **theirs, "model_type": name}
    if experts:
        theirs["num_experts"] = experts
    if name == "mixtral":
        theirs |= {"num_experts": theirs["num_local_experts"], "moe_intermediate_size": theirs.get("intermediate_size")}

    def size(key: str, default: int | None = None) -> int:
        value = default if theirs.get(key) is None else theirs[key]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_SIZE:
            raise ValueError(f"config.json: {key} is {str(value)[:80]}, not a number from 1 to {MAX_SIZE:,}")
        return value

    heads = size("num_attention_heads")
    width = size("hidden_size")
    layers = size("num_hidden_layers")
    context = size("max_position_embeddings")
    theta, scaling, rotary = _rope(theirs, context)
    pattern, window = _windows(theirs, layers)
    head_dim = size("head_dim", width // heads)
    mixture: dict[str, Any] = {}
    if family.has_states:
        if size("linear_conv_kernel_dim") != 4:
            raise ValueError(f"config.json: linear_conv_kernel_dim {theirs['linear_conv_kernel_dim']}: only 4 is known")
        mixture = {
            "attention_gate": True,
            "state_key_heads": size("linear_num_key_heads"),
            "state_value_heads": size("linear_num_value_heads"),
            "state_key_dim": size("linear_key_head_dim"),
            "state_value_dim": size("linear_value_head_dim"),
        }
        if mixture["state_value_heads"] % mixture["state_key_heads"]:
            raise ValueError("config.json: linear_num_value_heads is not a multiple of linear_num_key_heads")
    rotary_dims = 0 if rotary == 1 else int(head_dim * rotary)
    if rotary != 1 and (rotary_dims % 2 or not rotary_dims):
        raise ValueError(f"config.json: partial_rotary_factor {rotary}: {rotary_dims} channels, which turn in pairs")
    if family.has_shared:
        shared, remainder = divmod(size("shared_expert_intermediate_size"), size("moe_intermediate_size"))
        if remainder:
            raise ValueError("config.json: shared_expert_intermediate_size is not a multiple of moe_intermediate_size")
        mixture |= {"shared_experts": shared, "shared_gate": True}
    if family.has_experts:
        mixture |= {
            "experts": size("num_experts"),
            "experts_per_token": size("num_experts_per_tok"),
            "router": "softmax",
            "router_normalized": theirs.get("norm_topk_prob", name in ALWAYS_NORMALIZED) is True,
        }
        if mixture["experts"] > MAX_EXPERTS or mixture["experts_per_token"] > mixture["experts"]:
            raise ValueError(
                f"config.json: num_experts_per_tok {mixture['experts_per_token']} of num_experts "
                f"{mixture['experts']}: at most all of at most {MAX_EXPERTS:,}"
            )
    return GPTConfig(
        vocab_size=size("vocab_size"),
        sequence_len=context,
        n_layer=layers,
        width=width,
        n_head=heads,
        n_kv_head=size("num_key_value_heads", heads),
        head_dim=head_dim,
        mlp="swiglu",
        mlp_width=size("moe_intermediate_size" if family.has_experts else "intermediate_size"),
        window_pattern=pattern,
        window_tokens=window,
        rope_theta=theta,
        rope_scaling=scaling,
        rotary_dims=rotary_dims,
        qk_norm="before_rotary" if family.qk_norm else "none",
        qk_scale=1.0,
        norm_weight=True,
        norm_eps=_number(theirs, "rms_norm_eps", 1e-6),
        attention_bias=family.qkv_bias,
        tied_head=theirs.get("tie_word_embeddings") is True,
        embedding_norm=False,
        value_embeddings=False,
        residual_scales=False,
        logit_cap=0.0,
        **mixture,
    )


def _number(values: dict[str, Any], key: str, default: float | None = None) -> float:
    value = default if values.get(key) is None else values[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e12:
        raise ValueError(f"config.json: {key} is {str(value)[:80]}, not a number above 0")
    return float(value)


def _rope(theirs: dict[str, Any], context: int) -> tuple[float, RopeScaling | None, float]:
    """The base of the wavelengths, how they are scaled, and the part of the channels that is rotated."""
    # One object since transformers 5, a number and an object before that.
    rope = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError("config.json: the rotary settings are not an object")
    # Gemma's families have one such object for each kind of layer. Read as one, they would be the defaults.
    by_layer = [name for name, value in rope.items() if isinstance(value, dict) or name.endswith("_attention")]
    if by_layer:
        names = ", ".join(sorted(by_layer))[:80]
        raise ValueError(f"config.json: rotary settings by layer type ({names}): this model has one for all layers")
    theta = _number({"rope_theta": rope.get("rope_theta", theirs.get("rope_theta"))}, "rope_theta", 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    has_states = FAMILIES[theirs["model_type"]].has_states
    if "mrope_section" in rope and not has_states:  # for text these have the same positions in all dimensions
        raise ValueError("config.json: rotary positions in several dimensions (mrope)")
    key = "partial_rotary_factor"
    part = _number({key: rope.get(key, theirs.get(key))}, key, 0.25 if has_states else 1.0)
    if part > 1:
        raise ValueError(f"config.json: {key} {part}: at most 1")
    if part < 1 and not has_states:
        raise ValueError(f"config.json: partial_rotary_factor {part}: rotary positions in a part of the channels")
    if kind == "default":
        return theta, None, part
    if kind not in ("linear", "llama3", "yarn"):
        raise ValueError(f"config.json: rope_type {str(kind)[:80]} is not known: one of default, linear, llama3, yarn")
    factor = _number(rope, "factor")
    if kind == "linear":
        return theta, RopeScaling("linear", factor), part
    original = theirs.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings", context)
    original = int(_number({"original_max_position_embeddings": original}, "original_max_position_embeddings"))
    if kind == "llama3":
        turns = (_number(rope, "low_freq_factor"), _number(rope, "high_freq_factor"))
        return theta, RopeScaling("llama3", factor, original, *turns), part
    # The gain of YaRN: 0.1 ln(factor) + 1, unless the folder says otherwise.
    gain = rope.get("attention_factor")
    if gain is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        gain = _yarn_gain(factor, _number(rope, "mscale")) / _yarn_gain(factor, _number(rope, "mscale_all_dim"))
    elif gain is None:
        gain = _yarn_gain(factor, 1.0)
    turns = (_number(rope, "beta_slow", 1.0), _number(rope, "beta_fast", 32.0))
    gain = _number({"attention_factor": gain}, "attention_factor")
    return theta, RopeScaling("yarn", factor, original, *turns, gain, rope.get("truncate", True) is True), part


def _yarn_gain(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _windows(theirs: dict[str, Any], layers: int) -> tuple[str, int]:
    """The window pattern and the tokens of a short window, 0 where no layer has one."""
    window = theirs.get("sliding_window")
    kinds = theirs.get("layer_types")
    first = theirs.get("max_window_layers", 28)  # the first layer of Qwen's with a window
    if theirs["model_type"].startswith("qwen"):  # where it is switched on
        window = (window or 4096) if theirs.get("use_sliding_window") is True else None
    if theirs["model_type"] in ("mistral", "mixtral", "phi3", "qwen3_moe"):  # all layers alike
        kinds = None
        first = 0
    letters = {"full_attention": "L", "sliding_attention": "S"}
    if FAMILIES[theirs["model_type"]].has_states:
        letters = {"full_attention": "L", "linear_attention": "D"}
        every = max(1, int(_number(theirs, "full_attention_interval", 4)))
        kinds = kinds or [
            "linear_attention" if layer % every < every - 1 else "full_attention" for layer in range(layers)
        ]
    elif theirs["model_type"] == "llama" or window is None:
        return "L", 0
    if kinds is None:
        kinds = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(str(kind) in letters for kind in kinds):
        raise ValueError(f"config.json: layer_types is not a list of {layers}, each one of {', '.join(letters)}")
    pattern = "".join(letters[kind] for kind in kinds)
    if "S" not in pattern:
        return pattern if "D" in pattern else "L", 0
    tokens = int(_number({"sliding_window": window}, "sliding_window"))
    return pattern if "L" in pattern else "S", tokens


def computes(family: str, config: GPTConfig) -> bool:
    """Whether a family's config.json can express everything in this config, except for a scalar head."""
    if FAMILIES[family].has_experts != (config.experts > 0) or FAMILIES[family].has_states != config.has_states:
        return False
    if family == "phi3" and config.rope_scaling is not None:
        return False  # it has only longrope
    return to_config(from_config(config, family)) == replace(config, scalar_head=False)


def family_of(config: GPTConfig) -> str | None:
    """The first family in FAMILIES that computes this config; None: none does."""
    return next((family for family in FAMILIES if computes(family, config)), None)


def from_config(config: GPTConfig, family: str) -> dict[str, Any]:
    """config.json of the same model in a family that computes it, in the form that all versions of transformers,
    vLLM and llama.cpp read."""
    windows = [config.window(layer) for layer in range(config.n_layer)]
    theirs: dict[str, Any] = {
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.sequence_len,
        "num_hidden_layers": config.n_layer,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_kv_head,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tied_head,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
    }
    if FAMILIES[family].has_experts:
        theirs["moe_intermediate_size"] = config.mlp_width
        theirs["num_experts"] = config.experts
        theirs["num_experts_per_tok"] = config.experts_per_token
        theirs["norm_topk_prob"] = config.router_normalized
        theirs["decoder_sparse_step"] = 1  # experts in every layer
        theirs["mlp_only_layers"] = []
    if config.has_states:
        theirs["model_type"] = f"{family}_text"
        kinds = {"L": "full_attention", "D": "linear_attention"}
        theirs["layer_types"] = [kinds[config.letter(layer)] for layer in range(config.n_layer)]
        theirs["linear_num_key_heads"] = config.state_key_heads
        theirs["linear_num_value_heads"] = config.state_value_heads
        theirs["linear_key_head_dim"] = config.state_key_dim
        theirs["linear_value_head_dim"] = config.state_value_dim
        theirs["linear_conv_kernel_dim"] = 4
        part = config.rotary_dims / config.head_dim if config.rotary_dims else 1.0
        if int(part * config.head_dim) < config.rotary_dims:  # rounded down; transformers cuts the rest off
            part = (config.rotary_dims + 0.5) / config.head_dim
        theirs["partial_rotary_factor"] = part
    if family in ("llama", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"):
        theirs["attention_bias"] = False
    if family == "llama":
        theirs["mlp_bias"] = False
    if family == "mixtral":
        theirs["num_local_experts"] = config.experts
    if family == "seed_oss":
        theirs |= {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "residual_dropout": 0.0}
    if config.shared_experts:
        theirs["shared_expert_intermediate_size"] = config.shared_experts * config.mlp_width
    if family in ("mistral", "mixtral", "phi3"):
        theirs["sliding_window"] = windows[0] or None
    if family == "phi3":
        theirs["pad_token_id"] = None  # its default is a token of Phi-3, whose embedding would then not learn
    if family in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"):
        theirs["use_sliding_window"] = any(windows)
        if any(windows):
            theirs["sliding_window"] = max(windows)
            theirs["max_window_layers"] = windows.index(max(windows))
            theirs["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
    scaling = config.rope_scaling
    if scaling is not None:
        rope: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind != "linear":
            rope["original_max_position_embeddings"] = scaling.original_len
        if scaling.kind == "llama3":
            rope |= {"low_freq_factor": scaling.fewest_turns, "high_freq_factor": scaling.most_turns}
        if scaling.kind == "yarn":
            rope |= {"beta_slow": scaling.fewest_turns, "beta_fast": scaling.most_turns}
            rope |= {"attention_factor": scaling.gain, "truncate": scaling.whole_pairs}
        theirs["rope_scaling"] = rope
    return theirs


# ---------------------------------------------------------------------- a folder's facts


def _sampling(folder: Path) -> dict[str, float]:
    """How replies are drawn, by generation_config.json; a chat model's own settings where it names none."""
    path = folder / "generation_config.json"
    theirs = read_json(path) if path.is_file() else None
    if isinstance(theirs, dict) and theirs.get("do_sample") is True:
        chosen = {name: theirs[name] for name in NEUTRAL if theirs.get(name) is not None}
        try:
            return saved_settings(read_settings(chosen))
        except ValueError as error:
            warn(f"{path}: its settings cannot be used ({error}), the usual ones are")
    return saved_settings(CHAT_SAMPLING)


# ---------------------------------------------------------------------- weights in


@dataclass(frozen=True)
class Stored:
    """One tensor of a folder, by its header."""

    path: Path
    shape: list[int]
    dtype: str  # a key of DTYPES


def index(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder by name, read from the headers of its files.

    Raises ValueError: when there is nothing to read; names what is there instead.
    """
    listing = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    places: dict[str, str] | None = None
    if listing.is_file():
        places = read_json(listing).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise ValueError(f"{listing.name} has no weight_map")
        files = sorted(set(places.values()))
        if len(files) > MAX_SHARDS or any(
            Path(file).name != file or not file.endswith(".safetensors") for file in files
        ):
            raise ValueError(f"{listing.name} names files that are not plain .safetensors, or more than {MAX_SHARDS}")
    elif single.exists():
        files = [single.name]
    else:
        raise ValueError(_what_is_there(folder))
    tensors: dict[str, Stored] = {}
    for file in files:
        path = folder / file
        if not path.exists():
            raise ValueError(f"{file} is missing: download it again")
        for name, tensor in _headers(path):
            if places is None or places.get(name) == file:
                tensors[name] = tensor
    for name in sorted(tensors):
        wrapper = WRAPPED.search(name)
        if wrapper is not None:
            raise ValueError(f"its weights were saved with names such as {name[:200]} by {WRAPPERS[wrapper[1]]}")
    missing = set(places or ()) - set(tensors)
    if missing:
        raise ValueError(f"{listing.name} names {sorted(missing)[0][:200]}, which is in none of the files")
    return tensors


def _headers(path: Path) -> Iterator[tuple[str, Stored]]:
    require_file(path)
    try:
        for name, (shape, dtype) in storage.header(path).items():
            yield name, Stored(path, shape, dtype)
    except SafetensorError as error:
        raise ValueError(f"{path.name} is cut off or damaged ({error}): download it again") from error


def _what_is_there(folder: Path) -> str:
    """Why a folder without safetensors cannot be read."""
    if any(folder.glob("*.gguf")):
        return "it has GGUF files, which are quantized for llama.cpp: name the repository of the original weights"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        return "its weights are pickled (.bin, .pt), and a pickle can run anything: convert them to safetensors"
    return "it has no model.safetensors: download it again"


class FamilyWeights(model_folder.Weights):
    def __init__(self, folder: Path, config: GPTConfig):
        self.stored = index(folder)
        self.config = config
        self.files = sorted({tensor.path for tensor in self.stored.values()})
        sees = any(name.startswith(SEEING_PREFIX) for name in self.stored)
        self.prefix = SEEING_PREFIX if sees else "model."
        self.is_stacked = any(name.endswith(".qkv_proj.weight") for name in self.stored)
        self.is_mixtral = any(".block_sparse_moe." in name for name in self.stored)
        self.stacks_experts = any(name.endswith(".mlp.experts.gate_up_proj") for name in self.stored)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most matrices."""
        dtypes = [tensor.dtype for tensor in self.stored.values() if len(tensor.shape) > 1]
        return DTYPES[max(set(dtypes), key=dtypes.count)]

    def theirs_of(self, name: str, rows: int) -> list[tuple[str, int]]:
        """The folder's tensors that are stacked in our parameter `name`, with their rows; a family may override it."""
        found = theirs_of(name, self.config, rows, self.is_stacked, self.stacks_experts)
        if self.is_mixtral:
            found = [(as_mixtral(theirs), count) for theirs, count in found]
        return [(re.sub(r"^model\.", self.prefix, theirs), count) for theirs, count in found]

    def layers(self) -> int:
        names = [name.removeprefix(self.prefix) for name in self.stored]
        return len({name.split(".")[1] for name in names if name.startswith("layers.")})

    def holds(self, name: str) -> bool:
        return name != SCALAR_HEAD

    def require_shapes(self, shapes: dict[str, torch.Size]) -> None:
        unknown = set(self.stored)
        for name, ours in shapes.items():
            for theirs, rows in self.theirs_of(name, ours[0]):
                shape = [rows, *ours[1:]]
                if theirs.endswith(tuple(STACKED_EXPERTS.values())):
                    shape = [self.config.experts, rows // self.config.experts, *ours[1:]]
                if theirs not in self.stored:
                    raise ValueError(f"the weights have no {theirs}, which config.json asks for")
                if self.stored[theirs].shape != shape:
                    raise ValueError(f"{theirs} is {self.stored[theirs].shape}, config.json asks for {shape}")
                if self.stored[theirs].dtype not in DTYPES:
                    raise ValueError(f"{theirs} is stored as {self.stored[theirs].dtype}: one of {', '.join(DTYPES)}")
                unknown.discard(theirs)
        unseen = sorted(name for name in unknown if LEFT_OUT.fullmatch(name))
        if unseen:
            parts = " and ".join(sorted({name.removeprefix("model.").partition(".")[0] for name in unseen}))
            again = "--to hf writes them again" if self.prefix == SEEING_PREFIX else "an export has none of them"
            print0(f"{self.files[0].parent}: only its text is read, not {parts}: {again} ({len(unseen)} tensors)")
        unknown = {name for name in unknown if not IGNORED.fullmatch(name)}
        if unknown:
            raise ValueError(f"the weights have {sorted(unknown)[0][:200]}, which config.json does not ask for")

    def read(self, name: str, rows: int, first: int, target: Tensor) -> None:
        start = 0  # the first row of their next tensor, counted in the parameter's rows
        end = first + len(target)
        for theirs, count in self.theirs_of(name, rows):
            begin = max(start, first)
            stop = min(start + count, end)
            if begin < stop:
                _read_part(self.stored[theirs], theirs, begin - start, target[begin - first : stop - first])
            start += count
        if self.config.has_states and CENTRED.fullmatch(name):
            target.add_(1)
        # The remaining rows are padding of the vocabulary. Nothing reads them; set them to zero instead of old memory.
        target[max(start - first, 0) :].zero_()


def _read_part(stored: Stored, name: str, first: int, target: Tensor) -> None:
    """Fill a target with rows of a tensor, from row `first` on."""
    if len(stored.shape) > target.ndim:  # each expert's matrix by itself
        end = first + len(target)
        rows = stored.shape[1]
        for expert in range(first // rows, -(-end // rows)):
            begin = max(first, expert * rows)
            stop = min(end, (expert + 1) * rows)
            with safe_open(stored.path, framework="pt") as file:
                part = file.get_slice(name)[expert, begin - expert * rows : stop - expert * rows]
                target[begin - first : stop - first].copy_(part)
        return
    # A mapped file's pages count as this process's memory until the mapping ends, so open it again for each piece.
    # That costs a look at the header; a whole file, mapped once, would double the memory of a load.
    step = max(1, PIECE_BYTES // (4 * max(1, target[0].numel())))
    for row in range(0, len(target), step):
        part = target[row : row + step]
        with safe_open(stored.path, framework="pt") as file:
            part.copy_(file.get_slice(name)[first + row : first + row + len(part)])


def _has_other_head(folder: Path) -> bool:
    """Whether a folder whose config.json ties the head to the embedding has another head; a warning names it."""
    # transformers keeps such a head, too. Adapters with a trained head, merged by other programs, leave these folders.
    try:
        stored = index(folder)
    except ValueError:  # without weights, as for --dry_run, or damaged: their reader says so
        return False
    embedding_name = NAMES["embedding.weight"]
    embedding = stored.get(embedding_name) or stored.get(embedding_name.replace("model.", SEEING_PREFIX))
    head = stored.get(NAMES["head.weight"])
    if head is None or embedding is None:
        return False
    if head.shape != embedding.shape or len(head.shape) != 2:
        return True  # read as a separate head, it is refused by its shape
    return _differ(head.path, embedding.path, *head.shape, changed=head.path.stat().st_mtime_ns)


@lru_cache(maxsize=16)  # several readers of one folder ask
def _differ(head_path: Path, embedding_path: Path, rows: int, columns: int, changed: int) -> bool:
    """Whether the head has other values than the embedding; `changed`: when its file was."""
    step = max(1, PIECE_BYTES // (4 * max(1, columns)))
    for row in range(0, rows, step):
        with safe_open(head_path, framework="pt") as file:
            head = file.get_slice(NAMES["head.weight"])[row : row + step]
        with safe_open(embedding_path, framework="pt") as file:
            embedding = file.get_slice(NAMES["embedding.weight"])[row : row + step]
        if not torch.equal(head.float(), embedding.float()):
            warn(f"{head_path}: tie_word_embeddings is true, but lm_head.weight is not the embedding: it is kept")
            return True
    return False


class FolderFormat(model_folder.FolderFormat):
    """Hugging Face's layout. A family with other names derives from it."""

    def is_folder(self, path: Path) -> bool:
        # Our own, exported folders have a manifest too.
        return (path / "config.json").is_file() and not (path / "manifest.json").is_file()

    def settings(self, folder: Path) -> dict[str, Any]:
        """config.json, in the form for `to_config`."""
        settings = read_json(folder / "config.json")
        if not isinstance(settings, dict):
            raise ValueError("config.json is not an object")
        text = settings.get("text_config")
        family = FAMILIES.get(str(settings.get("model_type")))
        if family is None or not family.has_states or not isinstance(text, dict):
            return settings
        # A model that also sees: its text, and what counts for all of it.
        outer = ("model_type", "tie_word_embeddings", "quantization_config")
        return {**text, **{key: settings[key] for key in outer if key in settings}}

    def check(self, folder: Path, without_weights: bool = False) -> None:
        """Such a folder has no sums to compare with. Its headers are read: a file that is cut short is found."""
        to_config(self.settings(folder))
        if not without_weights:
            index(folder)

    def find_base(self, folder: Path) -> Path | None:
        return None

    def describe(self, folder: Path) -> tuple[GPTConfig, dict[str, Any]]:
        settings = self.settings(folder)
        config = to_config(settings)
        if config.tied_head and _has_other_head(folder):
            config = replace(config, tied_head=False)
        # It has read the web: that decides about the default tasks (mixture.py). Family and context are for an export
        # after stages that may have shortened the context.
        family = str(settings.get("model_type")).removesuffix("_text")
        pretraining = {"data": "web", "tokens": 0, "document_mask": True, "family": family}
        if "text_config" in read_json(folder / "config.json"):
            pretraining["whole_model"] = str(folder.absolute())
        return config, {
            "model": asdict(config),
            "step": 0,
            "stage": "hf",
            "tasks": [],
            "sampling": _sampling(folder),
            "pretraining": {**pretraining, "context": config.sequence_len},
            "trained_at": int((folder / "config.json").stat().st_mtime),
        }

    def tokenizer(self, path: Path, content: Any) -> ImportedTokenizer:
        """The tokenizer of a tokenizer.json that is not ours, for tokenizer.py."""
        return read_tokenizer(path, content)

    def weights(self, folder: Path, config: GPTConfig) -> FamilyWeights:
        return FamilyWeights(folder, config)

    def weights_sha256(self, folder: Path) -> str:
        paths = sorted({tensor.path for tensor in index(folder).values()})
        return hashlib.sha256("".join(map(hashes.sha256, paths)).encode()).hexdigest()


FORMAT = FolderFormat()

# ---------------------------------------------------------------------- weights out


def find_whole_model(meta: dict[str, Any]) -> Path | None:
    """The folder of the model that also sees, from whose text a checkpoint's training began; None: there is none."""
    named = meta.get("pretraining", {}).get("whole_model")
    if named is None:
        return None
    if (Path(named) / "config.json").is_file():
        return Path(named)
    warn(f"{named} is not there any more: the parts of it that were left out are missing from the export")
    return None


def write_weights(
    folder: Path,
    config: GPTConfig,
    weights: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
    family: str = "",
    whole_model: Path | None = None,
) -> dict[str, Any]:
    """Write weights by our names under Hugging Face's, in several files where they are large; all families but Phi
    and Mixtral have the same names. `whole_model` is the folder of a model that also sees: what we left out of it is
    copied.

    Returns the facts of each file for a manifest. Raises ValueError: for a model that no family computes.
    """
    is_stacked = family in FAMILIES and FAMILIES[family].is_stacked
    shards: list[dict[str, Tensor]] = [{}]

    def add(theirs: str, part: Tensor) -> None:
        held = sum(tensor.numel() for tensor in shards[-1].values()) * dtype.itemsize
        if shards[-1] and held + part.numel() * dtype.itemsize > shard_bytes:
            shards.append({})
        shards[-1][theirs] = part

    for name, weight in weights:
        start = 0
        if config.has_states and CENTRED.fullmatch(name):
            weight = weight.float() - 1
        for theirs, rows in theirs_of(name, config, weight.shape[0], is_stacked):
            if family == "mixtral":
                theirs = as_mixtral(theirs)
            add(re.sub(r"^model\.", SEEING_PREFIX, theirs) if whole_model else theirs, weight[start : start + rows])
            start += rows
    for theirs, stored in sorted(index(whole_model).items()) if whole_model else ():
        if LEFT_OUT.fullmatch(theirs):
            with safe_open(stored.path, framework="pt") as file:
                add(theirs, file.get_tensor(theirs))
    files = {}
    weight_map = {}
    total = 0
    for number, tensors in enumerate(shards, start=1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        converted = {  # one file at a time
            theirs: part if LEFT_OUT.fullmatch(theirs) else part.to(dtype) for theirs, part in tensors.items()
        }
        files[name] = storage.write_tensors(folder / name, converted, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in converted.values())
    if len(shards) > 1:
        listing = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        name = "model.safetensors.index.json"
        files[name] = storage.write_json(folder / name, listing)
    return files
