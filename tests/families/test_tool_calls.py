"""nanochat.families.tool_calls: the thoughts and calls that a family's template writes are read back, whole or in
pieces."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny_families import FAMILIES, TOOL_FAMILIES, in_xml, published, random_string, save_family

from nanochat.families.chat_template import ChatTemplate
from nanochat.families.imported_tokenizer import ImportedTokenizer
from nanochat.families.tool_calls import (
    LLAMA,
    MISTRAL,
    QWEN,
    XML,
    CallForm,
    CallReader,
    FunctionCall,
    ThoughtReader,
    find_form,
    opens_thought,
    template_id,
)
from nanochat.tokenizer import Tokenizer

TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "x é": TEXT, "n": {"type": "integer", "description": "string"}, "id": {"$ref": "#/$defs/Id"},
        "endless": {"anyOf": [{"$ref": "#"}, {"$ref": "#/properties/endless"}]},
    },
    "$defs": {"Id": {"allOf": [{"type": ["string", {}]}]}},
}  # fmt: skip
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": f"of <{name}>", "parameters": SCHEMA}}
    for name in ("weather", "read_file", "a-1")
]
PARAMETERS = {tool["function"]["name"]: SCHEMA for tool in TOOLS}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tools")
    return {
        name: save_family(root / name.replace(" ", "_"), family, chat_template=template)
        for name, (family, template) in TOOL_FAMILIES.items()
    }


def load(folder: Path) -> ImportedTokenizer:
    tokenizer = Tokenizer.load(folder)
    assert isinstance(tokenizer, ImportedTokenizer)
    return tokenizer


def read(form: CallForm, pieces: list[str], is_single: bool = False) -> tuple[str, list[FunctionCall]]:
    """The text and the calls of a reply that arrives in pieces."""
    reader = CallReader(form, PARAMETERS, is_single)
    found = [one for piece in pieces for one in reader.add(piece)] + reader.add("", is_end=True)
    text = "".join(one for one in found if isinstance(one, str))
    return text, [one for one in found if isinstance(one, FunctionCall)]


def divided(pieces: list[str], in_thought: bool) -> tuple[str, list[str]]:
    """The thought of a reply that arrives in pieces, and the pieces of its text."""
    reader = ThoughtReader(in_thought)
    thoughts, texts = zip(*[reader.add(piece) for piece in pieces], reader.add("", is_end=True), strict=True)
    return "".join(thoughts), [text for text in texts if text]


def random_value(source: random.Random, depth: int = 0) -> Any:
    kind = source.randrange(8 if depth < 2 else 5)
    if kind < 5:
        marks = source.choice(["", "</tool_call>", '{"', "[TOOL_CALLS]", "\\", "<think>", "}]"])
        return [random_string(source) + marks, source.randrange(-9, 9), source.random(), None, True][kind]
    if kind == 5:
        return [random_value(source, depth + 1) for _ in range(source.randrange(3))]
    return {random_string(source)[:9] or "k": random_value(source, depth + 1) for _ in range(source.randrange(3))}


# The templates as their models' authors publish them; the package `trl` brings copies.
PUBLISHED = {"qwen2_5": QWEN, "qwen3": QWEN, "qwen3_instruct_2507": QWEN, "llama3_1": LLAMA, "llama3_2": LLAMA}
PUBLISHED |= dict.fromkeys(("qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8"), XML)
UNREAD = ("glm4moe", "gemma3", "llama3")  # other forms, or no tools
NAMES_OF_MARKS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
ENDS = ["<|im_end|>", "<|eot_id|>", "<|eom_id|>"]
QUESTION = [{"role": "user", "content": "Is it?"}]


def form_of(source: str) -> CallForm | None:
    specials = [*ENDS, "<|begin_of_text|>", "<|python_tag|>"]
    return find_form(ChatTemplate({"default": source}, NAMES_OF_MARKS, specials), ENDS)


@pytest.mark.parametrize("name", [*TOOL_FAMILIES, *PUBLISHED])
def test_the_calls_of_a_template_are_read_back(folders: dict[str, Path], name: str):
    """50 replies as transformers writes them: each whole, by character, and in random pieces."""
    transformers = pytest.importorskip("transformers")
    is_ours = name in TOOL_FAMILIES
    if is_ours:
        oracle = transformers.PreTrainedTokenizerFast.from_pretrained(folders[name])
        tokenizer = load(folders[name])
        form = tokenizer.chat_format.call_form
        ends = [tokenizer.decode([tokenizer.reply_ends[0]])]
    else:
        from transformers.utils.chat_template_utils import render_jinja_template

        template = published(name)
        form = form_of(template)
        ends = ENDS
        assert form is not None and (form.mark, form.is_xml) == (PUBLISHED[name].mark, PUBLISHED[name].is_xml)
    assert form is not None and form.is_single == name.startswith("llama")

    def written(messages: list[Any], **settings: Any) -> str:
        if is_ours:
            return oracle.apply_chat_template(messages, tools=TOOLS, tokenize=False, **settings)
        return render_jinja_template([messages], TOOLS, chat_template=template, **NAMES_OF_MARKS, **settings)[0][0]

    source = random.Random(5)
    prompt = written(QUESTION, add_generation_prompt=True)
    for _ in range(50):
        calls = []
        for _ in range(1 if form.is_single else source.randrange(1, 4)):
            arguments = {f"{key} é": random_value(source) for key in source.sample("xyz", source.randrange(3))}
            if form.is_xml:  # a text is one if its schema allows it
                arguments = {key: value for key, value in arguments.items() if isinstance(value, str) == (key == "x é")}
            own_id = f"{source.randrange(10**9):09}" if name == "mistral" else ""
            calls.append(FunctionCall(source.choice(list(PARAMETERS)), arguments, own_id))
        content = source.choice(["", "I look.", "So:\n\n1 < 2"]) if name == "qwen" else ""
        functions = [
            {"id": call.id or "012345678", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
        whole = written([*QUESTION, {"role": "assistant", "content": content, "tool_calls": functions}])
        assert whole.startswith(prompt)
        text = whole.removeprefix(prompt).rstrip("\n")
        text = next(text.removesuffix(end) for end in ends if text.endswith(end))
        cuts = sorted(source.randrange(len(text) + 1) for _ in range(9))
        pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        for arriving in ([text], list(text), pieces):
            thought, texts = divided(arriving, opens_thought(prompt))
            assert (thought, *read(form, texts)) == ("", content, calls)


@pytest.mark.parametrize("name", UNREAD)
def test_published_templates_with_another_form_have_none(name: str):
    assert form_of(published(name)) is None


def test_which_templates_have_a_form(family_tokenizers: dict[str, Any], tmp_path: Path):
    forms = {family: family_tokenizers[family].chat_format.call_form for family in FAMILIES}
    assert [family for family, form in forms.items() if form is not None] == ["qwen3"]
    assert forms["qwen3"].mark == "<tool_call>" and forms["qwen3"].opening == "<think>\n\n</think>\n\n\n<tool_call>\n"
    # Its prompt begins a thought, and its replies have none.
    opens = TOOL_FAMILIES["coder"][1].replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
    form = load(save_family(tmp_path / "opens", "qwen3", chat_template=opens)).chat_format.call_form
    assert form is not None and form.opening == "<tool_call>\n<function=look_up_weather>\n"
    # One that writes calls otherwise.
    source = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    source += (
        "<tool_call>\n<function={{ c.function.name }}>\n</function>\n</tool_call>{% endfor %}<|im_end|>{% endfor %}"
    )
    assert load(save_family(tmp_path / "coder", "qwen3", chat_template=source)).chat_format.call_form is None


WEATHER = '{"name": "weather", "arguments": {"city": "Paris"}}'
PARIS = FunctionCall("weather", {"city": "Paris"})
called = partial(in_xml, "weather")
REPLIES: list[tuple[CallForm, str, str, list[FunctionCall]]] = [
    (QWEN, f"<tool_call>\n{WEATHER}\n</tool_call>", "", [PARIS]),
    (QWEN, f"Let me see.\n\n<tool_call>{WEATHER}</tool_call>\n", "Let me see.", [PARIS]),
    (QWEN, f"<tool_call>\n{WEATHER}", "", [PARIS]),  # it ends its turn instead
    (QWEN, f"<tool_call>{WEATHER}</tool_call>\n<tool_call>\n{WEATHER}\n</tool_call> Ok", " Ok", [PARIS, PARIS]),
    (QWEN, '<tool_call>\n{"name": "weather"}\n</tool_call>', "", [FunctionCall("weather", {})]),
    # What is no whole call of one of the functions stays text.
    (QWEN, '<tool_call>\n{"name": "weather", "arguments": {"city": "Par', "ALL", []),
    (QWEN, '<tool_call>\n{"name": "weather", "arguments": "Paris"}\n</tool_call>', "ALL", []),
    (QWEN, '<tool_call>\n{"name": "delete", "arguments": {}}\n</tool_call>', "ALL", []),
    (QWEN, "<tool_call>\nweather(Paris)\n</tool_call> and <tool", "ALL", []),
    (QWEN, '<tool_call>{"name": "weather", "arguments": {"city": NaN}}</tool_call>', "ALL", []),
    (QWEN, '<tool_call>{"name": "weather", "arguments": {"city": 1e999}}</tool_call>', "ALL", []),
    (QWEN, '<tool_call>{"name": "weather", "arguments": ' + '{"a":' * 9_999, "ALL", []),
    # A mistake in one does not take the next one along.
    (QWEN, f'<tool_call>{{"name": "weather"</tool_call><tool_call>{WEATHER}</tool_call>', "FIRST", [PARIS]),
    (LLAMA, WEATHER.replace("arguments", "parameters"), "", [PARIS]),
    (LLAMA, f"<|python_tag|>{WEATHER}", "", [PARIS]),
    (LLAMA, f"{WEATHER}; {WEATHER}", "", [PARIS, PARIS]),
    (LLAMA, "<|python_tag|>import os", "ALL", []),
    (LLAMA, '{"city": "Paris"}', "ALL", []),
    (LLAMA, f"It is {WEATHER}", "ALL", []),
    (LLAMA, '{"name": "weather", "parameters": {', "ALL", []),
    (MISTRAL, f"[TOOL_CALLS] [{WEATHER}, {WEATHER}]", "", [PARIS, PARIS]),
    (MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}', "", [PARIS]),
    (MISTRAL, '[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Paris"}', "", [
        FunctionCall("weather", {"city": "Paris"}, "a1B2c3D4e")
    ]),
    (MISTRAL, f'Hm.[TOOL_CALLS][{WEATHER[:-1]}, "id": "a1B2c3D4e"}}]', "Hm.", [
        FunctionCall("weather", {"city": "Paris"}, "a1B2c3D4e")
    ]),
    (MISTRAL, "[TOOL_CALLS] [1]", "ALL", []),
    (MISTRAL, "[TOOL_CALLS]", "ALL", []),
    (XML, f"So.\n\n{called(city='Paris')}", "So.", [PARIS]),
    (XML, f"{called()}\n{called(city='Paris')} Ok", " Ok", [FunctionCall("weather", {}), PARIS]),
    (XML, called(city="Paris").removesuffix("\n</tool_call>"), "", [PARIS]),  # it ends its turn instead
    (XML, "<tool_call><function=weather><parameter=city>Paris</parameter></function></tool_call>", "", [PARIS]),
    # A text stays one, whatever it contains; other values are JSON, or what Jinja prints.
    (XML, called(**{"x é": "12", "n": "12"}), "", [FunctionCall("weather", {"x é": "12", "n": 12})]),
    (XML, called(**{"x é": "\n12\n</parameter>\n</tool_call>\n"}), "", [
        FunctionCall("weather", {"x é": "\n12\n</parameter>\n</tool_call>\n"})
    ]),
    (XML, called(**{"x é": "null", "n": "12", "a": '{"b": [1]}', "c": "None", "d": "True", "e": "so", "f": ""}), "", [
        FunctionCall("weather", {"x é": None, "n": 12, "a": {"b": [1]}, "c": None, "d": True, "e": "so", "f": ""})
    ]),
    (XML, called(**{"id": "12", "endless": "12", "x é": "None"}), "", [
        FunctionCall("weather", {"id": "12", "endless": 12, "x é": None})
    ]),
    (XML, called(city="Par").partition("\n</parameter>")[0], "ALL", []),
    (XML, called(city="Paris").partition("</function>")[0], "ALL", []),
    (XML, called(city="Paris").replace("weather", "delete"), "ALL", []),
    (XML, called(city="NaN"), "ALL", []),
    (XML, f"<tool_call>\n{WEATHER}\n</tool_call>", "ALL", []),
    (XML, f"<tool_call> is how, {called(city='Paris')}", "<tool_call> is how,", [PARIS]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "reply", "text", "calls"), REPLIES)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_what_is_a_call_and_what_stays_text(
    form: CallForm, reply: str, text: str, calls: list[FunctionCall], size: int
):
    expected = {"ALL": reply, "FIRST": reply.partition("<tool_call>" + WEATHER)[0]}.get(text, text)
    assert read(form, [reply[at : at + size] for at in range(0, len(reply), size)]) == (expected, calls)


def test_half_of_a_surrogate_pair_stays_an_escape():
    reply = '<tool_call>{"name": "weather", "arguments": {"city": "\\ud800é"}}</tool_call>'
    _, (call,) = read(QWEN, [reply])
    assert json.loads(call.arguments_json()) == {"city": "\ud800é"} and call.arguments_json().encode()
    assert PARIS.arguments_json() == '{"city": "Paris"}'


def test_text_is_handed_out_as_it_arrives():
    reader = CallReader(QWEN, PARAMETERS)
    assert reader.add("I look") == ["I look"]
    assert reader.add(" at it. <tool") == [" at it."]  # the rest may begin a call
    assert reader.add("s> are") == [" <tools> are"]
    assert reader.add(f"\n<tool_call>\n{WEATHER}\n</tool_") == []
    assert reader.add("call> Ok") == []  # what follows a mark waits for the end of the reply
    assert reader.add(".", is_end=True) == [PARIS, " Ok."]


CALLED = f"<tool_call>{WEATHER}</tool_call>"


@pytest.mark.parametrize(("in_thought", "reply", "thought", "text"), [
    (False, f"<think>\n{CALLED}\n</think>\n\n{CALLED}", CALLED, CALLED),  # a call in a thought is weighed
    (True, f"\n {CALLED}\n</think>\n\n{CALLED}", CALLED, CALLED),
    (False, " \n<think>a <b\n\n </thin> < </think>c </think>\n", "a <b\n\n </thin> <", "c </think>\n"),
    (False, "<think>\n\n</think>\n\n", "", ""),
    (False, "<think>a <</think>b", "a <", "b"),
    (False, "<think>\nso\n</th", "so", ""),  # cut off
    (True, "so \n", "so", ""),
    (False, "<thin", "", "<thin"),
    (False, "\n So <think>x</think>", "", "\n So <think>x</think>"),
    (False, " ", "", " "),
])  # fmt: skip
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_thought_of_a_reply(in_thought: bool, reply: str, thought: str, text: str, size: int):
    assert opens_thought("<|im_start|>assistant\n<think>\n") and not opens_thought("<think>\n\n</think>\n\n")
    found, texts = divided([reply[at : at + size] for at in range(0, len(reply), size)], in_thought)
    assert (found, "".join(texts)) == (thought, text)
    assert ThoughtReader().add(" So") == ("", " So")  # it cannot begin a thought any more


def test_one_call_where_the_client_or_the_template_takes_one():
    assert read(QWEN, [f"<tool_call>{WEATHER}</tool_call>" * 3], is_single=True) == ("", [PARIS])


def test_ids_of_other_servers_fit_mistrals_templates():
    assert template_id("a1B2c3D4e") == "a1B2c3D4e"
    ids = {template_id(f"call_{number}") for number in range(100)}
    assert len(ids) == 100 and all(len(one) == 9 and one.isalnum() for one in ids)
