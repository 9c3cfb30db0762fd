"""What is learned where a template does not write a conversation as its prompts: transformers' masks are the oracle.

Each template here has a twin, the same text with {% generation %} marks where its replies are. transformers computes
the mask of the twin for a conversation that ends with a reply; what we learn of that reply must be the same for the
template without marks. tests/promises has what stands before it (T12).
"""

import random
from pathlib import Path
from typing import Any

import pytest
import tiny
from runs import call, refused
from tiny_families import FAMILIES, save_family

from nanochat.conversation import Rendered, UnrenderableChat, render, renderings
from nanochat.families.chat_template import ChatTemplate
from nanochat.families.imported_tokenizer import ImportedTokenizer
from nanochat.families.reply_spans import Conversation
from nanochat.tasks.flag import Reading, open_mixture
from nanochat.tasks.learned_share import report_learned
from nanochat.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers", reason="the extra `dev` brings transformers")

MARKS = ("{% generation %}", "{% endgeneration %}")

# An empty thought is in the last reply only, so the turn of an earlier one, or of a call, is not how the whole begins.
EMPTY_THOUGHT = """{%- if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' }}
{%- if m.role == 'assistant' %}[
{%- if loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{{- m.content.split('</think>')[-1].lstrip('\\n') }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}]
{%- else %}{{ m.content + '<|im_end|>' }}
{%- endif %}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# The system message is in the question that ends the conversation, so only a prompt has it.
LATE_SYSTEM = """{{ bos_token }}
{%- set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- for m in messages %}
{%- if m.role == 'user' or m.role == 'tool' %}
{{- '[INST] ' + (system if loop.last else '') + m.content + ' [/INST]' }}
{%- elif m.role == 'assistant' %}[
{{- ' ' + m.content }}
{%- for call in m.tool_calls or [] %}{{ ' CALL ' + (call.function | tojson) }}{% endfor %}
{{- eos_token }}]
{%- endif %}
{%- endfor %}"""

# The prompt opens a thought, and replies lose theirs.
OPENED_THOUGHT = """{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|vision_start|>' }}[
{{- m.content.split('</think>')[-1] + '<|im_end|>' }}]
{%- else %}{{ '<|im_start|>' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|vision_start|><think>\\n' }}{% endif %}"""

TEMPLATES = {
    "empty thought": ("qwen3", EMPTY_THOUGHT),
    "late system": ("metaspace", LATE_SYSTEM),
    "opened thought": ("qwen3", OPENED_THOUGHT),
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def folder_of(folder: Path, name: str, marks: tuple[str, str]) -> Path:
    family, source = TEMPLATES[name]
    source = source.replace("assistant' %}[\n", f"assistant' %}}{marks[0]}").replace(
        "start|>' }}[\n", f"start|>' }}}}{marks[0]}"
    )
    source = source.replace(" }}]", f" }}}}{marks[1]}")
    assert (MARKS[0] in source and MARKS[1] in source) == bool(marks[0]) and "[\n" not in source
    return save_family(folder, family, chat_template=source)


def tokenizer_of(name: str, folder: Path) -> ImportedTokenizer:
    tokenizer = Tokenizer.load(folder_of(folder / "plain", name, ("", "")))
    assert isinstance(tokenizer, ImportedTokenizer)
    return tokenizer


def a_call(source: random.Random) -> dict[str, Any]:
    arguments = {"city": source.choice(["Paris", "从前", "the boat"]), "days": source.randrange(9), "unit": ""}
    return {"type": "function", "function": {"name": "weather", "arguments": arguments}}


def conversation(source: random.Random, calls: bool) -> list[dict[str, Any]]:
    def text(of: str) -> str:
        return f"{of} {source.randrange(1000)} " + source.choice(["the sail.", "从前", "hello\nuser", "x"])

    messages: list[dict[str, Any]] = [{"role": "system", "content": text("Be")}] if source.random() < 0.5 else []
    for _ in range(source.randrange(1, 4)):
        messages.append({"role": "user", "content": text("why")})
        if calls and source.random() < 0.6:
            said = text("look") if source.random() < 0.5 else ""
            messages.append({"role": "assistant", "content": said, "tool_calls": [a_call(source)]})
            messages.append({"role": "tool", "content": text("sun")})
        messages.append({"role": "assistant", "content": text("so")})
    return messages


@pytest.mark.parametrize(
    ("name", "calls"),
    [("empty thought", True), ("late system", False), ("late system", True), ("opened thought", False)],
)
def test_the_mask_is_the_one_of_transformers(tmp_path, name, calls):
    tokenizer = tokenizer_of(name, tmp_path)
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(folder_of(tmp_path / "twin", name, MARKS))
    source = random.Random(7)
    lengths = set()
    for _ in range(40):
        messages = conversation(source, calls)
        tools = TOOLS if calls and name == "empty thought" else None
        numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        expected = []
        for number in numbers:
            theirs = oracle.apply_chat_template(
                messages[: number + 1], tools=tools, return_dict=True, return_assistant_tokens_mask=True
            )
            *_, (begin, end) = tiny.runs_of(theirs["assistant_masks"])
            closing = "\n</think>\n\n" if name == "opened thought" else ""
            expected.append(closing + oracle.decode(theirs["input_ids"][begin:end]))
        found = renderings(tokenizer, messages, tools=tools)
        learned = [tokenizer.decode(one.ids[slice(*run)]) for one in found for run in tiny.runs_of(one.mask)]
        assert sorted(learned) == sorted(expected)
        replies = len(numbers)
        assert sum(one.replies for one in found) == replies and not any(one.unlearned for one in found)
        assert sum(one.reply_tokens for one in found) == sum(one.target_count for one in found)
        lengths.add(replies)
    assert len(lengths) > 2


@pytest.mark.parametrize("name", ["qwen2", "llama3", "mistral"])
def test_a_chat_that_a_template_wrote_elsewhere_is_learned_as_its_messages(tmp_path, name):
    """The same tokens and the same mask, read from a column that --columns rendered=COLUMN names."""
    tokenizer = Tokenizer.load(save_family(tmp_path / "model", name))
    assert isinstance(tokenizer, ImportedTokenizer)
    template = tokenizer.chat_format.template
    source = random.Random(3)
    chats = [conversation(source, calls=False) for _ in range(20)]
    texts = [template.render(messages).text for messages in chats]
    rows = [{"text": text} for text in texts]
    mixture = open_mixture(tiny.write_rows(tmp_path / "texts.jsonl", rows), "train", Reading(columns="rendered=text"))
    found = [mixture.rendered_chat(tokenizer, number, 9999) for number in range(20)]
    expected = [renderings(tokenizer, messages) for messages in chats]
    assert sorted((one.ids, one.mask) for [one] in found) == sorted((one.ids, one.mask) for [one] in expected)
    assert sum(one.replies for [one] in found) == sum(one.replies for [one] in expected) and not found[0][0].unlearned
    # The begin token may be missing, as after tokenizers that add it themselves.
    begin = tokenizer.decode([tokenizer.get_bos_token_id()])
    bare = {"role": "rendered", "content": texts[0].removeprefix(begin)}
    assert renderings(tokenizer, [bare])[0].ids == expected[0][0].ids


def test_a_rendered_chat_is_learned_only_where_its_replies_open_as_in_prompts(tmp_path):
    thinks = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
    turns = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    tokenizer = Tokenizer.load(save_family(tmp_path / "model", "qwen3", chat_template=turns + thinks))
    first = "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n"
    (one,) = renderings(tokenizer, [{"role": "rendered", "content": first + first.replace("\n5", "\n<think>\nHm.")}])
    assert [tokenizer.decode(one.ids[slice(*run)]) for run in tiny.runs_of(one.mask)] == ["Hm.<|im_end|>"]
    assert (one.replies, one.unlearned) == (2, 1)
    for model in (tokenizer, tiny.tiny_tokenizer()):
        with pytest.raises(UnrenderableChat, match="rendered"):
            renderings(model, [{"role": "rendered", "content": first}])


def test_a_reply_whose_thoughts_are_dropped_is_not_learned(tmp_path, capsys):
    """It would teach to reply without them. Only a template with marks decides otherwise."""
    tokenizer = tokenizer_of("empty thought", tmp_path)
    messages = [
        {"role": "user", "content": "why"},
        {"role": "assistant", "content": "<think>\nso many words\n</think>\n\nso"},
        {"role": "user", "content": "and"},
        {"role": "assistant", "content": "then"},
    ]
    (rendered,) = renderings(tokenizer, messages)
    assert tiny.learned(tokenizer, rendered) == "<think>\n\n</think>\n\nthen<|im_end|>"
    assert (rendered.replies, rendered.unlearned) == (2, 1)
    (refused_by_data,) = renderings(tokenizer, [{**message, "train": False} for message in messages])
    assert not refused_by_data.target_count and not refused_by_data.unlearned
    (cut,) = renderings(tokenizer, messages, max_tokens=9)
    assert cut.cut and len(cut.ids) == 9
    report_learned([rendered], tokenizer)
    err = capsys.readouterr().err
    share = rendered.target_count / rendered.reply_tokens
    assert share < 0.9
    assert err.startswith(f"warning: learned: 50.0% of the replies and {share:.1%} of their tokens")
    assert err.count("\n") == 1 and "{% generation %}" in err and "scripts.preview" in err


TURNS = [
    {"role": "user", "content": "why"},
    {"role": "assistant", "content": "so"},
    {"role": "user", "content": "and"},
    {"role": "assistant", "content": "then"},
]


# Only the last reply is marked; the text and the end of a turn by themselves; nothing.
MARKED = {
    "last": "{% if loop.last %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}",
    "parts": "{% generation %}{{ m.content }}{% endgeneration %}{% generation %}<|im_end|>{% endgeneration %}",
    "none": "{% if false %}{% generation %}{% endgeneration %}{% endif %}{{ m.content }}<|im_end|>",
}


@pytest.mark.parametrize(
    ("name", "learned", "unlearned"),
    [("last", "then<|im_end|>", 1), ("parts", "so<|im_end|>then<|im_end|>", 0), ("none", "", 2)],
)
def test_exactly_what_a_template_marks_is_learned(tmp_path, name, learned, unlearned):
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
        + MARKED[name]
        + "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
        + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    folder = save_family(tmp_path / "model", "qwen3", chat_template=source)
    tokenizer = Tokenizer.load(folder)
    rendered = render(tokenizer, TURNS)
    assert tiny.learned(tokenizer, rendered) == learned and (rendered.replies, rendered.unlearned) == (2, unlearned)
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    theirs = oracle.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    expected = [token for token, one in zip(theirs["input_ids"], theirs["assistant_masks"], strict=True) if one]
    assert oracle.decode(expected) == learned
    # A reply that the data mark as not to be learned is not, whether its template marks it or not.
    without = render(tokenizer, [TURNS[0], {**TURNS[1], "train": False}, *TURNS[2:]])
    assert tiny.learned(tokenizer, without) == learned.removeprefix("so<|im_end|>") and without.replies == 1


def test_the_share_that_is_learned_is_printed(capsys):
    end = tiny.tiny_tokenizer().reply_ends[0]
    whole = Rendered([1] * 19 + [end], [0] * 10 + [1] * 10, replies=1, reply_tokens=10)
    endless = Rendered([1] * 20, [0] * 10 + [1] * 10, replies=1, reply_tokens=10)
    half = Rendered([1] * 20, [0] * 15 + [1] * 5, cut=True, replies=1, reply_tokens=10)
    for rendered, learned, words in (
        ([whole] * 3, "100.0% of the replies and 100.0% of their tokens, in 3 conversations", []),
        ([half], "100.0% of the replies and 50.0% of their tokens", ["--max_seq_len"]),
        ([endless], "", ["learn to stop"]),
        ([Rendered([1], [0])], "", []),
    ):
        report_learned(rendered, tiny.tiny_tokenizer())
        shown = capsys.readouterr()
        assert learned in (shown.err if words else shown.out) and "template" not in shown.err
        assert all(word in shown.err for word in words) and bool(shown.err) == bool(words)


# How a template writes a message: its text is in several places, or in another turn, or depends on what marks change.
ODD = {
    "twice": "{{ m.role + ': ' + m.content + (m.content if m.role == 'assistant' else '') + '<e>' }}",
    "quoted": "{{ m.role + ': ' + ('' if loop.first else '(' + loop.previtem.content + ')') + m.content + '<e>' }}",
    "mixed": "{{ m.role + ': ' + m.content[:3] + messages[0].content + m.content[3:] + '<e>' }}",
    "length": "{{ m.role + ': ' + m.content + (m.content | length | string) + '<e>' }}",
    "hidden": "{{ m.role + ': ' + (m.content if m.role == 'user' else '') + '<e>' }}",
    "no end": "{{ m.role + ': ' + m.content + '\\n' }}",
    "one end": "{{ m.role + ': ' + m.content + '\\n' + ('<e>' if loop.last else '') }}",
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_not_the_assistants_is_never_learned(name):
    """The prompt always differs from what is written, so that places decide."""
    turns = "{% for m in messages %}" + ODD[name] + "{% endfor %}"
    source = "{{ '#' if add_generation_prompt else '' }}" + turns
    source += "{{ 'assistant: ' if add_generation_prompt else '<b>' }}"
    template = ChatTemplate({"default": source}, {}, ["<e>", "<b>"])
    texts = ("question one", "Reply One", "question two", "Reply Two")
    messages = [{**turn, "content": text} for turn, text in zip(TURNS, texts, strict=True)]
    whole = template.render(messages)
    conversation = Conversation(template, whole, messages, None, ["<e>"])
    found = [conversation.reply(number) for number in (1, 3)]
    expected: dict[str, list[str | None]] = {
        "twice": [None, None],
        "quoted": ["Reply One<e>", "Reply Two<e>"],
        "mixed": [None, None],
        "length": [None, None],  # the number would be another one
        "hidden": [None, None],
        "no end": ["Reply One", "Reply Two"],
        "one end": ["Reply One\n<e>", "Reply Two\n<e>"],
    }
    assert [one.rendered.text[slice(*one.spans[0])] if one else None for one in found] == expected[name]
    for number, one in zip((1, 3), found, strict=True):
        prompt = template.render(messages[:number], add_generation_prompt=True).text
        assert one is None or one.rendered.text[: one.spans[0][0]] == prompt


@pytest.mark.slow
def test_another_template_in_place_of_the_models_own(base_folder, tmp_path, capsys):
    folder = folder_of(tmp_path / "model", "empty thought", ("", ""))  # drops all thoughts
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape |= {"head_dim": 16, "intermediate_size": 64, "max_position_embeddings": 256}
    config = transformers.Qwen3Config(vocab_size=Tokenizer.load(folder).vocab_size, **shape)
    transformers.Qwen3ForCausalLM(config).float().save_pretrained(folder)
    messages = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nso"}]
    chats = tiny.write_rows(tmp_path / "chats.jsonl", [{"messages": messages}] * 12)
    marked = tmp_path / "marked.jinja"
    marked.write_text(FAMILIES["marked"])
    whole = "learned: 100.0% of the replies and 100.0% of their tokens"

    flags = (f"--source={folder}", f"--tasks={chats}")
    call("preview", *flags)
    assert "--chat_template FILE" in capsys.readouterr().err
    sft = ("--device=cpu", "--dtype=float32", "--num_iterations=1", "--target_examples_per_step=4", "--model_tag=t")
    call("chat_sft", *flags, *sft, f"--chat_template={marked}")
    assert whole in capsys.readouterr().out
    # The checkpoint has it, so later stages do not name it again.
    call("preview", "--source=sft", f"--tasks={chats}")
    assert whole in capsys.readouterr().out

    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for %}")
    for file, words in ((tmp_path / "none", "cannot be read"), (broken, "broken.jinja"), (folder, "cannot be read")):
        refused(capsys, ("preview", *flags, f"--chat_template={file}"), words)
    ours = tiny.tiny_tokenizer()
    model = tiny.lively_model(tiny.tiny_config(vocab_size=ours.vocab_size))
    tiny.save_checkpoint(base_folder / "checkpoints/base/ours", 1, model, ours, {"stage": "base", "tasks": []})
    refused(capsys, ("preview", "--source=base", f"--tasks={chats}", f"--chat_template={marked}"), "imported models")
