"""Tokenizers of the kinds that other model families have, trained here, in folders of Hugging Face's form.

The vocabularies are tiny; normalization, splitting, byte handling and special tokens are those of the family named.
The chat templates are written for these tests in the families' formats.
"""

import functools
import importlib.util
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import EXPERT_SHAPES, SHAPES, lively_model, tiny_config, tiny_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import nanochat.tokenizer
from nanochat.families import hf
from nanochat.gpt import GPT
from nanochat.ground.sharding import whole_weights
from nanochat.tokenizer import EXPORTED_NAME

CORPUS = [
    "Once upon a time there was a small boat. The boat had a red sail, and the sail had 3 patches.",
    "从前有一条小船，船上有一面红帆。红帆上有三块补丁。",
    "def add(a, b):\n    return a + b  # 12 + 34 = 46\n\n\tprint(add(2024, 1999))\n",
    "Hello, hello! It's the boat's sail. You are a helpful assistant. user system assistant naïve café",
    '{"name": "weather", "arguments": {"city": "Paris"}} tool_call tool_response think INST',
] * 3

# One conversation's format per family. `{% generation %}` marks what the assistant writes.
CHATML = """{% for message in messages %}
{% if loop.first and message.role != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

CHATML_MARKED = """{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message['content'] + '<|im_end|>' }}{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# As Qwen3: thoughts of earlier turns are left out; tools and their results are in the system's and the user's turns.
THINKING = """{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{% endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set thought = '' %}{%- set content = message.content or '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
{{- content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

HEADERS = """{{ bos_token }}{% for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

BRACKETS = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content + '\\n\\n' %}{% set turns = messages[1:] %}
{%- else %}{% set system = '' %}{% set turns = messages %}{% endif %}
{%- for message in turns %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if message.role == 'user' %}
{{- '[INST] ' + (system if loop.first else '') + message.content + ' [/INST]' }}
{%- else %}
{{- ' ' + message.content + eos_token }}
{%- endif %}
{%- endfor %}"""

# With tools. As Qwen3 calls, THINKING above; as Llama 3.1 and 3.2, which write one call as the whole reply:
HEADERS_TOOLS = """{{ bos_token }}
{%- if tools %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nEnvironment: ipython\\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n' }}{% endfor %}
{{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('single tool-calls only') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson + '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# As Mistral: a list, with ids of nine characters.
BRACKETS_TOOLS = """{{ bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and loop.last or tools and messages[loop.index0 + 1].role != 'user' %}
{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}
{{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif message.tool_calls %}
CALLS
{{- eos_token }}
{%- else %}
{{- ' ' + message.content + eos_token }}
{%- endif %}
{%- endfor %}"""
LISTED_CALLS = """{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
{%- endfor %}
{{- ']' }}"""
# As its models since 2025.
NAMED_CALLS = """{%- for call in message.tool_calls %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
{%- endfor %}"""
# As Qwen3-Coder: calls in XML.
XML_TOOLS = """{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>\\n<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role }}
{%- if message.content %}{{- '\\n' + message.content | trim + ('\\n' if message.tool_calls else '') }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments | items %}
{%- set text = value | tojson if value is not string and value is iterable else value | string %}
{{- '<parameter=' + key + '>\\n' + text + '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
TOOL_FAMILIES = {
    "qwen": ("qwen3", THINKING),
    "coder": ("qwen3", XML_TOOLS),
    "llama": ("llama3", HEADERS_TOOLS),
    "mistral": ("tekken", BRACKETS_TOOLS.replace("CALLS\n", LISTED_CALLS + "\n", 1)),
    "mistral named": ("tekken", BRACKETS_TOOLS.replace("CALLS\n", NAMED_CALLS + "\n", 1)),
}

FAMILIES = {
    "qwen2": CHATML,
    "qwen3": THINKING,
    "marked": CHATML_MARKED,
    "llama3": HEADERS,
    "mistral": BRACKETS,
    "metaspace": BRACKETS,
}


def save_family(folder: Path, family: str, **config: Any) -> Path:
    """A folder with the tokenizer's files of a family."""
    folder.mkdir(parents=True, exist_ok=True)
    library, facts, ends = _build(family)
    library.save(str(folder / "tokenizer.json"))
    facts |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, **config}
    template = facts.pop("chat_template", FAMILIES.get(family))
    if family in ("qwen2", "mistral"):  # older models have it there
        facts["chat_template"] = template
    else:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(facts), encoding="utf-8")
    ids = [library.token_to_id(name) for name in ends]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}), encoding="utf-8")
    return folder


def published(name: str) -> str:
    """A template as its authors publish it."""
    package = importlib.util.find_spec("trl")
    if package is None:
        pytest.skip("pip install --no-deps trl==1.16.0")
    return Path((package.submodule_search_locations or [""])[0], "chat_templates", f"{name}.jinja").read_text()


def in_xml(name: str, **arguments: str) -> str:
    """A call as Qwen3-Coder writes it."""
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def save_qwen3(folder: Path, model_type: str = "qwen3") -> Path:
    """A tiny Qwen3, or with "qwen3_moe" its mixture of experts, in Hugging Face's layout."""
    save_family(folder, "qwen3")
    sizes = {"vocab_size": nanochat.tokenizer.Tokenizer.load(folder).vocab_size, "sequence_len": 128}
    model = lively_model(tiny_config(**sizes, **(SHAPES | EXPERT_SHAPES)[model_type]))
    hf.write_weights(folder, model.config, whole_weights(model), torch.float32)
    (folder / "config.json").write_text(json.dumps(hf.from_config(model.config, model_type)))
    return folder


def _build(family: str) -> tuple[Tokenizer, dict[str, Any], list[str]]:
    if family in ("mistral", "metaspace"):
        return _sentencepiece(family), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, ["</s>"]
    if family == "llama3":
        names = ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id", "eom_id", "python_tag")
        special = [f"<|{name}|>" for name in names]
        pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        library = _byte_level(special, pattern, ignore_merges=True)
        template = processors.TemplateProcessing(
            single="<|begin_of_text|> $A",
            pair=None,
            special_tokens=[("<|begin_of_text|>", library.token_to_id(special[0]))],
        )
        library.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
        ends = ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
        return library, {"bos_token": special[0], "eos_token": "<|eot_id|>"}, ends
    if family == "tekken":  # Mistral's since 2024
        sections = ("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS")
        special = ["<unk>", "<s>", "</s>", *(f"[{mark}{name}]" for name in sections for mark in ("", "/"))]
        special += ["[TOOL_CALLS]", "[ARGS]"]
        library = _byte_level(special, r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}", ignore_merges=True)
        return library, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, ["</s>"]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"]
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    if family == "qwen3_5":
        special += ["<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
        pattern = pattern.replace(r"\p{L}+", r"[\p{L}\p{M}]+")
    library = _byte_level(special, pattern, ignore_merges=False)
    library.normalizer = normalizers.NFC()
    for name in ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"):
        library.add_tokens([AddedToken(name, special=False, normalized=False)])
    facts = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return library, facts, ["<|im_end|>", "<|endoftext|>"]


def _byte_level(special: list[str], words: str, ignore_merges: bool) -> Tokenizer:
    library = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    has_marks = r"\p{M}" in words
    letters = r"\p{L}\p{M}" if has_marks else r"\p{L}"
    pattern = words + rf"| ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    corpus = CORPUS + ["नमस्ते दुनिया"] * 3 * has_marks
    library.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return library


def _sentencepiece(family: str) -> Tokenizer:
    """Llama 2's and Mistral's: a normalizer that puts U+2581 before each text, or a Metaspace that splits at it."""
    special = ["<unk>", "<s>", "</s>"]
    options: dict[str, Any] = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    trained = Tokenizer(models.BPE(**options))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=450, show_progress=False))
    learned = json.loads(trained.to_str())["model"]
    # The ids begin with the special tokens and the bytes.
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(learned["vocab"], key=learned["vocab"].get)]
    vocabulary = {name: index for index, name in enumerate(dict.fromkeys(names))}
    library = Tokenizer(models.BPE(vocabulary, [tuple(pair) for pair in learned["merges"]], **options))
    if family == "mistral":
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    template = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", 1)])
    library.post_processor = template
    return library


def random_string(source: random.Random) -> str:
    """Words, Chinese, emoji, combining marks, code, white space, and the names of special and added tokens."""
    alphabets = (
        ["boat", " sail", "The", " helpful", "naïve", "e\u0301", " "],
        list("从前有一条小船，。！"),
        list("😀👩\u200d👧🏽🇨🇳\u0308\u0336"),
        list(" \t\n\r\u00a0\u3000\u2581"),
        list("0123456789+-*/=(){}[]'\"<>|"),
        ["    return a", "\n\n", "def ", "\r\n", "it's", "'LL"],
        [
            "<|im_end|>",
            "<|im_start|>",
            "<s>",
            "</s>",
            "<|eot_id|>",
            "<think>",
            "</think>",
            "<tool_call>",
            "<0x0A>",
            "<|",
        ],
        list("\x00\x1b\x7f\u200b\ufeff\ufffd\U0010ffffאب"),
    )
    parts: list[str] = []
    for _ in range(source.randrange(6)):
        parts += source.choices(source.choice(alphabets), k=source.randrange(1, 5))
    return "".join(parts)


# ---------------------------------------------------------------------- models of transformers

MODEL_SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 384, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LLAMA3_POSITIONS = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 96, "rope_theta": 1000.0}
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 10_000.0}
EXPERTS = {"moe_intermediate_size": 20, "head_dim": 10, "norm_topk_prob": True}
STATES = {
    "head_dim": 24, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "rms_norm_eps": 1e-3,  # a norm of what a head has read amplifies rounding where that cancels to nearly 0
}  # fmt: skip
# What a model of each name has in its config.json besides: the model's type is the name's first word.
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen2 window": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "qwen3": {"head_dim": 10, "tie_word_embeddings": True, "rope_theta": 1e6},
    "qwen3 yarn": {"head_dim": 14, "num_key_value_heads": 1, "rope_parameters": YARN, "rms_norm_eps": 1e-5},
    "qwen3_moe": {**EXPERTS, "num_experts": 7, "num_experts_per_tok": 3},
    "qwen3_moe tied": {
        **EXPERTS, "num_experts": 4, "num_experts_per_tok": 1, "norm_topk_prob": False, "tie_word_embeddings": True,
    },
    "qwen3_moe window": {
        **EXPERTS, "num_experts": 8, "num_experts_per_tok": 8, "use_sliding_window": True, "sliding_window": 16,
    },
    "qwen3_5_text": {**STATES, "linear_num_value_heads": 6, "tie_word_embeddings": True},
    "qwen3_5_text own rotary": {
        **STATES, "num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    },
    "qwen3_5_moe_text": {
        **STATES, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 24, "num_experts": 5,
        "num_experts_per_tok": 2,
    },
    "qwen2_moe": {
        "moe_intermediate_size": 20, "shared_expert_intermediate_size": 60, "num_experts": 6, "num_experts_per_tok": 2,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
    "seed_oss": {"head_dim": 10, "tie_word_embeddings": True},
    "llama": {"num_key_value_heads": 8},
    "llama 3": {"head_dim": 18, "rope_parameters": LLAMA3_POSITIONS, "tie_word_embeddings": True},
    "llama linear": {"num_key_value_heads": 1, "rope_parameters": LINEAR},
    "mistral": {"sliding_window": 24},
    "mistral whole": {"sliding_window": None, "num_key_value_heads": 4},
    "phi3": {"pad_token_id": None, "rope_theta": 250_000.0},
    "phi3 window": {"pad_token_id": None, "sliding_window": 24, "num_key_value_heads": 8},
}  # fmt: skip
FOLDERS = tempfile.TemporaryDirectory()


def make_oracle(name: str) -> Any:
    """A random model of transformers in fp32, whose every weight matters."""
    import transformers

    config = transformers.AutoConfig.for_model(name.split()[0], **{**MODEL_SIZES, **MODELS[name]})
    config.torch_dtype = torch.float32
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for weight_name, parameter in model.named_parameters():
            if "norm" in weight_name:
                parameter.uniform_(0.5, 1.5).copy_(parameter.bfloat16())  # as in files: 1 + w is exact in fp32
            else:
                spread = 0.08 if "qwen3_5" in name else 0.15
                parameter.normal_(0, spread if parameter.ndim == 2 else 0.3)
    return model.float().eval()


@functools.cache
def oracle_folder(name: str) -> Path:
    """That model's folder, as transformers writes it. Tests copy it before they change it."""
    folder = Path(FOLDERS.name) / name.replace(" ", "_")
    make_oracle(name).save_pretrained(folder)
    tiny_tokenizer().save(folder, EXPORTED_NAME)
    return folder


def oracle_of(folder: Path) -> Any:
    """What transformers reads from a folder."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens) if isinstance(model, GPT) else model(tokens).logits
