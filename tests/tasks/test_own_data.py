"""Data as users of ms-swift, LLaMA-Factory and TRL have them, with their dirt: each is read as those tools read it.

What is not read is named: nothing is lost in silence.
"""

import dataclasses
import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from runs import call, mistake
from tiny import complaint, learned, lively_model, save_checkpoint, tiny_config, tiny_tokenizer, write_rows
from tiny_families import THINKING, published, save_family

from nanochat.conversation import render
from nanochat.ground import paths
from nanochat.task import Pair
from nanochat.tasks.conversations import Conversations, Prompts, messages_of
from nanochat.tasks.flag import Reading, TaskSpec, open_mixture, open_task
from nanochat.tasks.learned_share import report_learned
from nanochat.tasks.preferences import Preferences
from nanochat.tokenizer import Tokenizer


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def called(text: str, *cities: str) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": "weather", "arguments": {"city": city}}} for city in cities]
    return reply(text, tool_calls=calls)


def chats(path: str | Path, **settings: Any) -> list[list[dict[str, Any]]]:
    task = Conversations("train", str(path), reading=Reading(**settings))
    return [task.example(number).messages for number in range(len(task))]


SYSTEM = {"role": "system", "content": "Be kind."}
SUM = [user("2+3?"), reply("5")]
WEATHER = [user("Weather?"), called("", "Rome"), {"role": "tool", "content": "sun"}, reply("Sunny.")]
CODE = [{"type": "python", "text": "1+1"}, {"type": "python_output", "text": "2"}]
CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
THOUGHT = "<think>\nTwo and three.\n</think>\n\n5"


def turn(*replies: Any) -> dict[str, Any]:
    return {"messages": [SUM[0], *replies]}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


THOUGHTFUL = [SUM[0], reply(THOUGHT)]
THOUGHT_APART = {"prompt": [SUM[0]], "reasoning_content": "Two and three."}
WRAPPED = '{"type": "function", "function": {"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}}'

# What a file holds, the flags, the messages, and what is said not to be read.
FORMS: dict[str, tuple[dict[str, Any], str, list[dict[str, Any]], str]] = {
    "blossom-math-v2": (
        {"id": "1", "input": "2+3?", "output": "Add.", "answer": "5"}, "",
        [user("2+3?"), reply("Add.\n\nAnswer: 5")], "not id",
    ),
    "firefly": ({"kind": "sum", "input": "2+3?", "target": "5"}, "", SUM, "not kind"),
    "NuminaMath": ({"problem": "2+3?", "solution": "5", "source": "x"}, "", SUM, "not source"),
    "DeepSeek-R1, 110k": (
        {"input": "2+3?", "reasoning_content": "Two and three.", "content": "5", "score": 9}, "",
        [user("2+3?"), reply(THOUGHT)], "not score",
    ),
    "a column that says whether to think": (
        {"prompt": "2+3?", "thinking": True, "response": "5"}, "", SUM, "not thinking",
    ),
    "medical-o1": (
        {"Question": "2+3?", "Complex_CoT": "Two and three.", "Response": "5"}, "thought=Complex_CoT",
        [user("2+3?"), reply(THOUGHT)], "",
    ),
    "heads with spaces": ({" Question ": "2+3?", "ANSWER": "5"}, "", SUM, ""),
    "Chinese heads": ({"问题": "2+3?", "答案": "5", "编号": 7}, "", SUM, "not 编号"),
    "own columns": (
        {"ask": "2+3?", "say": "5", "tone": "Be kind.", "answer": "no"}, "question=ask, answer=say, system=Tone",
        [SYSTEM, *SUM], "not answer",
    ),
    "own messages": ({"dialog": SUM, "prompt": "2+3?"}, "messages=dialog", SUM, "not prompt"),
    "old ms-swift": (
        {"conversation": [{"human": "Hi", "assistant": "Hello"}, {"human": "2+3?", "assistant": "5"}]}, "",
        [user("Hi"), reply("Hello"), *SUM], "",
    ),
    "xtuner": ({"conversation": [{"system": "Be kind.", "input": "2+3?", "output": "5"}]}, "", [SYSTEM, *SUM], ""),
    "roles in another case": (
        {"messages": [user("2+3?") | {"role": "User"}, reply("5") | {"role": " Assistant"}]}, "", SUM, "",
    ),
    "LLaMA-Factory's observations, and turns in two messages": (
        {
            "messages": [
                user("Weather?"), user("In Rome."), {"role": "function_call", "content": CALL},
                {"role": "observations", "content": "sun"}, reply("Sunny."), reply("Enjoy."),
            ]
        }, "", [user("Weather?\n\nIn Rome."), *WEATHER[1:3], reply("Sunny.\n\nEnjoy.")], "",
    ),
    "ms-swift's tools": (
        {
            "messages": [
                user("Weather?"), reply("Let me see."), {"role": "tool_call", "content": CALL},
                {"role": "tool_call", "content": CALL.replace("Rome", "Oslo")},
                {"role": "tool_response", "content": "sun"}, {"role": "tool", "content": "rain"}, reply("Sun, rain."),
            ]
        }, "",
        [
            user("Weather?"), called("Let me see.", "Rome", "Oslo"), {"role": "tool", "content": "sun"},
            {"role": "tool", "content": "rain"}, reply("Sun, rain."),
        ], "",
    ),
    "ms-swift's query": (
        {"system": "Be kind.", "query": "2+3?", "response": "5", "history": [["Hi", "Hello"]]}, "",
        [SYSTEM, user("Hi"), reply("Hello"), *SUM], "",
    ),
    "ms-swift's names beside others": (
        {"prompt": "no", "query": "2+3?", "question": "no", "output": "no", "response": "5"}, "", SUM,
        "not prompt, question, output",
    ),
    "Alpaca's names beside others": (
        {"query": "no", "instruction": "2+3?", "input": "", "output": "5", "response": "no"}, "", SUM,
        "not query, response",
    ),
    "nothing, as a list": ({"instruction": "2+3?", "input": [], "output": "5"}, "", SUM, "not input"),
    "nothing, as pandas writes it": (
        {"instruction": "2+3?", "input": float("nan"), "output": "5", "system": None}, "", SUM, "",
    ),
    "one system message in two places": ({"system": "Be kind.", "messages": [SYSTEM, *SUM]}, "", [SYSTEM, *SUM], ""),
    "messages as JSON, for a .csv": ({"messages": json.dumps(SUM), "lang": "en"}, "", SUM, "not lang"),
    "nobody answers the last message": ({"messages": [*SUM, user("Are you there?")]}, "", SUM, ""),
    "keys of messages that are null": (
        {"messages": [SUM[0] | {"name": None, "train": None}, SUM[1]]}, "", SUM, "",
    ),
    "a conversation, and the number of its turns": ({"conversation": SUM, "turn": 1}, "", SUM, "not turn"),
    "messages that are null beside others": (
        {"messages": None, "prompt": "2+3?", "completion": "5"}, "", SUM, "",
    ),
    "an empty column of system prompts": ({"system": "", "messages": [SYSTEM, *SUM]}, "", [SYSTEM, *SUM], ""),
    "an empty system prompt": ({"question": "2+3?", "response": "5", "system_prompt": ""}, "", SUM, ""),
    "a reply that is a message": ({"query": "2+3?", "response": SUM[1]}, "", SUM, ""),
    "Alpaca without an instruction": ({"instruction": "", "input": "2+3?", "output": "5", "history": []}, "", SUM, ""),
    "Alpaca without an input": ({"instruction": "2+3?", "output": "5"}, "", SUM, ""),
    "dolly": (
        {"instruction": "Add.", "context": "1 and 2", "response": "3", "history": [["2+3?", "5"]]}, "",
        [*SUM, user("Add.\n1 and 2"), reply("3")], "",
    ),
    "a system message among the conversations": (
        {"conversations": [{"from": "system", "value": "Be kind."}, {"from": "human", "value": "2+3?"},
                           {"from": "gpt", "value": "5"}]}, "", [SYSTEM, *SUM], "",
    ),
    "a system message before them": ({"system": "Be kind.", "conversations": SUM}, "", [SYSTEM, *SUM], ""),
    "parts, learned or not": (
        {"messages": [SUM[0], reply("", weight=0) | {"content": CODE}, SUM[0], reply("5", weight=1)]}, "",
        [SUM[0], reply("", train=False) | {"content": CODE}, *SUM], "",
    ),
    # Texts that are there twice, in parts, or as JSON.
    "content and value": ({"messages": [SUM[0], {"from": "gpt", "content": "5", "value": "5"}]}, "", SUM, ""),
    "only value": ({"messages": [SUM[0], {"from": "gpt", "content": None, "value": "5"}]}, "", SUM, ""),
    "a question in parts": ({"messages": [reply("") | user("") | {"content": parts("2+", "3?")}, SUM[1]]}, "", SUM, ""),
    "a completion as JSON": (
        {"prompt": json.dumps(SUM[:1]), "completion": json.dumps([reply("5")])}, "", SUM, "",
    ),
    "a text about JSON": ({"prompt": '[{"sum": 5}]', "completion": "5"}, "", [user('[{"sum": 5}]'), reply("5")], ""),
    "a mention of a mark": (turn(reply("Use `<think>` there.")), "", [SUM[0], reply("Use `<think>` there.")], ""),
    # Thoughts: only the end of one, as DeepSeek-R1 writes it; with marks in its field; in a column of any form.
    "a thought without its first mark": (turn(reply("Two and three.\n</think>\n\n5")), "", THOUGHTFUL, ""),
    "such a thought in parts": (
        turn(reply("") | {"content": parts("Two and three.\n</think>", "\n\n5")}), "", THOUGHTFUL, "",
    ),
    "a thought with its marks": (
        turn(reply("5", reasoning_content="<think>\nTwo and three.\n</think>\n", reasoning="Two and three.")), "",
        THOUGHTFUL, "",
    ),
    "a thought with one mark": ({"prompt": "2+3?", "reasoning": "<think>Two and three.", "response": "5"}, "",
                                THOUGHTFUL, ""),
    "a thought twice": (
        turn(reply("<think>Two and three.</think>5", reasoning_content=" Two and three.\n")), "", THOUGHTFUL, "",
    ),
    **{
        f"a thought in a column beside {type(answer).__name__}": (
            {**THOUGHT_APART, "completion": answer}, "", THOUGHTFUL, "",
        )
        for answer in ([reply("5")], reply("5"), "5")
    },
    "a list of tools as JSON": (
        turn({"role": "function_call", "content": f"[{CALL}]"}, {"role": "observation", "content": "sun"}, WEATHER[3]),
        "", [SUM[0], *WEATHER[1:]], "",
    ),
    "a call with parameters": (
        turn({"role": "function_call", "content": CALL.replace("arguments", "parameters")}, *WEATHER[2:]), "",
        [SUM[0], *WEATHER[1:]], "",
    ),
    "a null that a call has as text": (
        turn(
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": null}'}}]}, *WEATHER[2:]
        ), "", [SUM[0], {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"a": None}}}
        ]}, *WEATHER[2:]], "",
    ),
    "a call in its wrapper": (
        turn({"role": "function_call", "content": WRAPPED}, *WEATHER[2:]), "", [SUM[0], *WEATHER[1:]], "",
    ),
    "a thought before a call": (
        turn({"role": "function_call", "content": f"<think>\nI look.\n</think>\n\n{CALL}"}, *WEATHER[2:]), "",
        [SUM[0], WEATHER[1] | {"content": "<think>\nI look.\n</think>\n\n"}, *WEATHER[2:]], "",
    ),
    # What other tools write where a text or a list is expected.
    "several replies": ({"query": "2+3?", "response": ["5", "five"]}, "", SUM, "not response[1:]"),
    "a number as the answer": ({"question": "2+3?", "answer": 5}, "", SUM, ""),
    "a number in a message": (turn(reply("") | {"content": 5}), "", SUM, ""),
    "a history as Python writes it": (
        {"query": "2+3?", "response": "5", "history": "[['Hi', 'Hello'], ('Well?', None)]"}, "",
        [user("Hi"), reply("Hello"), user("Well?\n\n2+3?"), SUM[1]], "",
    ),
    "a history of messages": (
        {"query": "2+3?", "response": "5", "history": [user("Hi"), reply("Hello")]}, "",
        [user("Hi"), reply("Hello"), *SUM], "",
    ),
    "messages as pandas writes them": ({"messages": repr([user("it's?"), SUM[1]])}, "", [user("it's?"), SUM[1]], ""),
    "messages as numpy writes them": (
        {"messages": f"[{user('a} {b')}\n {reply('5')}]"}, "", [user("a} {b"), SUM[1]], "",
    ),
    "a prompt as pandas writes it": ({"prompt": repr(SUM[:1]), "completion": repr(SUM[1:])}, "", SUM, ""),
    "a text about Python": ({"prompt": "[{'sum': 5}]", "completion": "5"}, "", [user("[{'sum': 5}]"), reply("5")], ""),
    "a system message that is not first": ({"messages": [SUM[0], SYSTEM, SUM[1]]}, "", [SYSTEM, *SUM], ""),
    "two system messages": (
        {"conversations": [SYSTEM, {"from": "system", "value": "Be brief."}, *SUM]}, "",
        [{"role": "system", "content": "Be kind.\nBe brief."}, *SUM], "",
    ),
    "another system message in the messages": (
        {"system": "Be brief.", "messages": [SYSTEM, *SUM]}, "", [SYSTEM, *SUM], "not system (in 2)",
    ),
    "LangChain's and Llama's roles": (
        {
            "conversations": [
                {"from": "human", "value": "Weather?"},
                {"from": "ai", "value": "", "tool_calls": [json.loads(WRAPPED)]},
                {"from": "ipython", "value": "sun"}, {"from": "AI", "value": "Sunny."},
            ]
        }, "", WEATHER, "",
    ),
    # The completion is learned, and a reply in the prompt is not.
    "a reply in the prompt": (
        {"prompt": [user("Hi"), reply("Hello"), SUM[0]], "completion": [reply("5")]}, "",
        [user("Hi"), reply("Hello", train=False), *SUM], "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_a_form_of_other_tools(tmp_path, capsys, name):
    row, columns, messages, unread = FORMS[name]
    path = write_rows(tmp_path / "mine.jsonl", [row] * 2)
    assert chats(path, columns=columns) == [messages] * 2
    (line, *_) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{path} reads ")
    assert line.partition("; ")[2] == unread


def test_a_parquet_is_read_by_the_same_names(tmp_path, capsys):
    path = write_rows(tmp_path / "mine.parquet", [{"Ask": "2+3?", "答案": "5", "image": b"", "note": "x"}] * 2)
    assert chats(path, columns="question=ask") == [SUM] * 2
    shown = capsys.readouterr()
    assert f"{path} reads question from Ask, answer from 答案; not image, note" in shown.out
    assert "image" in shown.err
    assert "(with Ask, 答案, image, note)" in complaint(lambda: chats(path))
    path = write_rows(tmp_path / "known.parquet", [{"prompt": "2+3?", "completion": "5", "embedding": [0.5] * 9}])
    assert sorted(Conversations("train", path).records[0]) == ["completion", "prompt"]  # the others are not read
    assert "(with prompt, completion, embedding)" in complaint(lambda: Preferences("train", path))


def test_a_column_that_is_passed_over_is_named(tmp_path, capsys):
    """Of a pair with whole conversations the prompt is not read, and nothing is read in its place."""
    rows = [
        {"prompt": "a", "response": "b", "answer": "no"},
        {"prompt": "a", "output": "b", "answer": "no"},
        {"question": "a", "answer": "b"},
        {"prompt": "no", "messages": SUM},
        {"messages": user("no")},
    ]
    path = write_rows(tmp_path / "mine.jsonl", rows)
    chats(path, val_share=0.0)
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0].endswith("; not answer (in 2), prompt (in 1), messages (in 1)")
    bad, warning = shown.err.splitlines()
    assert "1 of 5 records left out" in bad
    assert "response or output" in warning
    assert "--columns answer=answer" in warning
    path = write_rows(tmp_path / "chosen.jsonl", [{"question": "2+3?", "response": "5", "answer": "five"}] * 3)
    assert chats(path, columns="answer=answer")[0][1]["content"] == "five"
    assert not capsys.readouterr().err
    pair = {"prompt": "Hello", "chosen": "Hi!", "rejected": "Go away."}
    whole = {"prompt": "Hello", "chosen": [user("Hello"), GOOD], "rejected": [user("Hello"), BAD]}
    Preferences("train", write_rows(tmp_path / "pairs.jsonl", [pair, whole] * 2), reading=Reading(val_share=0.0))
    shown = capsys.readouterr()
    assert "question from prompt, chosen, rejected; not prompt (in 2)" in shown.out
    assert not shown.err


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ("question", "--columns question: "),
        ("qestion=ask", "did you mean question?"),
        ("question=ask,question=q", "once"),
        ("question=ask,answer=ask", "once"),
        ("text=ask", "--data"),
        ("question=asked,answer=say", "no column asked"),
        ("question=ask,answer=say,system=tone", "has tone: its columns are ask, say"),
    ],
)
def test_mistakes_in_columns(tmp_path, columns, words):
    path = write_rows(tmp_path / "mine.jsonl", [{"ask": "2+3?", "say": "5"}] * 3)
    assert words in complaint(lambda: chats(path, columns=columns))
    reading = Reading(columns="answer=x")
    assert "--tasks arithmetic has no file" in complaint(lambda: open_mixture("arithmetic", "train", reading))


# ---- What is learned -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", [{"weight": 0.0}, {"loss_weight": 0}, {"train": False}, {"Weight": "0"}])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_row_of_weight_0_is_read_and_not_learned(tmp_path, capsys, mark, suffix):
    rows = [{"prompt": "2+3?", "completion": "5", **mark}] * 3
    assert (
        chats(write_rows(tmp_path / f"mine.{suffix}", rows), val_share=0.0) == [[SUM[0], reply("5", train=False)]] * 3
    )
    assert "3 of 3 replies are read and not learned" in capsys.readouterr().out
    for other in ({"weight": 70}, {"weight": 0.5}, {"loss": None}, {"train": True}, {"mass": 0}):
        rows = [{"messages": SUM, **other}] * 2
        assert chats(write_rows(tmp_path / f"other.{suffix}", rows), val_share=0.0) == [SUM] * 2


def test_words_of_html_and_of_templates_are_texts(tmp_path):
    """A model that writes code must learn what looks like a placeholder there."""
    for text in (
        "Is <image> a tag of SVG?",
        "<video>\n<source>\n</video>\nWhy?",
        "```\n<b>{{name}}\n```",
        "{{ name }}",
    ):
        path = write_rows(tmp_path / "mine.jsonl", [{"messages": [user(text), reply("Use <image>.")]}])
        assert chats(path)[0] == [user(text), reply("Use <image>.")]
    assert messages_of(turn(reply("{{name}}")))  # a row of a task that is not checked when it is opened ends no run
    rows = [
        {"messages": [user("Is <image> a cat?"), reply("Yes.")], "images": [b""]},
        {"messages": SUM, "images": None},
    ]
    path = write_rows(tmp_path / "mine.parquet", rows)  # of which the column is not read
    assert chats(path, val_share=0.0) == [SUM]


def test_nulls_of_a_table_are_left_out_of_functions_at_every_depth(tmp_path):
    """A .jsonl that was once a .parquet is learned as the .parquet is: Arrow gives each object the names of all."""
    filled = {"city": "Rome", "at": {"hour": 9, "day": None}, "days": [{"on": 1, "off": None}], "unit": None}
    whole = {"city": "Rome", "at": {"hour": 9}, "days": [{"on": 1}]}
    shape = {"type": "object", "properties": {"city": {"type": "string", "enum": None}, "unit": None}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": shape}}]
    call = {"id": None, "type": "function", "function": {"name": "weather", "arguments": filled}}
    messages = [user("Weather?"), reply("", tool_calls=[call]), {"role": "tool", "content": "sun"}, reply("Sunny.")]
    called_by_text = {"role": "function_call", "content": json.dumps(call["function"])}
    for suffix, row in (
        ("jsonl", {"messages": messages, "tools": tools}),
        ("parquet", {"messages": messages, "tools": tools}),
        ("jsonl", {"messages": [messages[0], called_by_text, *messages[2:]], "tools": json.dumps(tools)}),
    ):
        example = Conversations("train", write_rows(tmp_path / f"mine.{suffix}", [row])).example(0)
        assert example.messages[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": whole}
        [tool] = example.tools or []
        assert tool["function"]["parameters"] == {"type": "object", "properties": {"city": {"type": "string"}}}


def test_functions_are_offered_in_the_form_that_templates_have(tmp_path):
    function = {"name": "weather", "description": "today's", "parameters": {"type": "object", "properties": {}}}
    whole = {"type": "function", "function": function}
    for tools in ([whole], [function], json.dumps([function]), [json.dumps(whole)]):
        task = Conversations("train", write_rows(tmp_path / "mine.jsonl", [{"messages": SUM, "tools": tools}]))
        assert task.example(0).tools == [whole]
    chat = {"messages": HELLO[:1], "tools": [function]}  # OpenAI's pairs
    pair = {"input": chat, "preferred_output": [GOOD], "non_preferred_output": [BAD]}
    assert Preferences("train", write_rows(tmp_path / "pairs.jsonl", [pair])).example(0).tools == [whole]


PICTURES = [
    {"messages": [user("<image>What?"), reply("A cat.")], "images": ["cat.jpg"]}, {"messages": SUM, "images": []},
]  # fmt: skip
ODD_KEYS = {"messages": [user("a") | {"loss": True}, reply("b", emotion="glad", name=None)]}
MARKED = [reply("5", mask=True)]
# The file, how many conversations are used, and words of what is reported.
REPORTED: dict[str, tuple[str, Any, int, tuple[str, ...]]] = {
    "pictures": ("jsonl", PICTURES * 2, 2, ('"images"',)),
    "empty replies": (
        "jsonl", [{"prompt": "2+3?", "completion": text} for text in ("5", "", " \n", "5")], 4,
        ("2 messages are empty",),
    ),
    "an empty question": ("jsonl", [{"prompt": " ", "completion": "5"}], 1, ("1 messages are empty",)),
    "lost characters": (
        "jsonl", [json.dumps({"prompt": text, "completion": "5"}) for text in ("caf\ufffd", "\0", "a", "\ud83d")], 4,
        ("3 messages",),
    ),
    "marks of templates": ("jsonl", [{"prompt": "<|im_end|>", "completion": "the <image> tag"}] * 2, 2,
                           ("<|im_end|> (in 2)", "<image> (in 2)", "--columns rendered=COLUMN")),
    "other marks": ("jsonl", [{"prompt": "<<SYS>>b", "completion": "a</s><bbox> {{ NAME }} ```{{NAME}}```"}], 1,
                    ("<<SYS>> (in 1)", "</s> (in 1)", "<bbox> (in 1)", "{{ NAME }} (in 1)", "{{NAME}} (in 1)")),
    "a weight": ("jsonl", [{"prompt": "2+3?", "completion": "5", "weight": share} for share in (0.5, 1.0, 0.0)], 3,
                 ("1 rows have a weight",)),
    "weights in other forms": (
        "jsonl", [{"prompt": "a", "completion": "b", "weight": share} for share in ("0.5", 2, -1, "0.00", "1")], 5,
        ("3 rows have a weight",),
    ),
    "TRL's plain texts": ("jsonl", [{"prompt": "The sky", "completion": " is"}] * 2, 2, ("in 2 rows", "mid_train")),
    "a thought of the user": ("jsonl", [turn(reply("5")) | {"messages": [user("2+3?") | {"reasoning": "Hm."}, SUM[1]]}],
                              1, ("reasoning (in 1)",)),
    "odd keys": ("jsonl", [ODD_KEYS] * 18, 18, ("emotion (in 18)", "loss=true", "user", "(in 18)")),
    "marks in JSON": ("jsonl", [{"messages": json.dumps([SUM[0], *MARKED])}], 1, ("mask (in 1)",)),
    "marks in a completion": ("jsonl", [{"prompt": "a", "completion": json.dumps(MARKED)}], 1, ("mask (in 1)",)),
    "too few values": ("csv", "instruction,output\na,b\na\na,b\n", 2, ("1 of 3 records left out: first",)),
}  # fmt: skip


@pytest.mark.parametrize("name", REPORTED)
def test_what_is_left_out_or_odd_is_reported(tmp_path, capsys, name):
    suffix, content, count, words = REPORTED[name]
    path = tmp_path / f"mine.{suffix}"
    path.write_text(content) if suffix == "csv" else write_rows(path, content)
    assert len(open_mixture(str(path), "train").tasks[0]) == count
    open_mixture(str(path), "test")
    err = capsys.readouterr().err
    assert all(word in err for word in words)
    if err:
        complaint(lambda: open_mixture(str(path), "train", Reading(strict_data=True)))
    assert err.count("nothing reads") <= 1


# ---- Rows that cannot be used ----------------------------------------------------------------------------

CALLED = [SUM[0], {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": "{}"}}]}]
BAD_ROWS = [
    (turn({"role": "tool", "content": "3"}), "message 1 is by tool, where assistant is expected"),
    (turn(SUM[0]), "the assistant has no message"),
    ({"prompt": [user("Hi"), reply("Hello", train=True)], "completion": "5"}, "words of the assistant"),
    ({"messages": [{"content": "Hello"}] * 2}, "message 0 has the role None"),
    ({"messages": ["Hello", "Hi!"]}, "message 0 is not an object with role and content"),
    ({"conversations": [{"from": ["x"], "value": "Hello"}]}, "message 0 has the role ['x']"),
    ({"conversations": [{"from": "tool", "value": "Hello"}]}, "message 0 is by tool, where user"),
    ({"instruction": "Add.", "output": None}, "message 1 (assistant) has no content"),
    ({"instruction": "Add.", "output": "3", "history": ["Hello"]}, 'its "history" is not a list of'),
    *(
        (turn({"role": "assistant", **call}), problem)
        for call, problem in (
            ({"function_call": {"name": "weather"}}, "a message calls a function by function_call"),
            ({"tool_calls": {"id": "a"}}, "tool_calls is not a list"),
            ({"tool_calls": "[" * 100_000}, "tool_calls is a text that is not JSON"),
            ({"tool_calls": [{"id": "a"}]}, "a call in tool_calls has no function"),
            ({"tool_calls": [{"function": {"name": "weather", "arguments": [1]}}]}, "a call in tool_calls has no"),
            ({"tool_calls": [{"function": {"name": "weather", "arguments": "Rome"}}]}, "the arguments of a function"),
        )
    ),
    ({"messages": [*CALLED, SUM[1]]}, "message 2 is by assistant, where tool is expected"),
    ({"messages": [{**SUM[0], **CALLED[1], "role": "user"}]}, "message 0 (user) has tool_calls"),
    ({"messages": SUM, "tools": ["weather"]}, 'its "tools" are not a list of objects'),
    ({"text": "Hello"}, "unknown form (with text); known forms:"),
    ({"messages": None}, "its messages are null"),
    ({"question": "2+3?", "choices": ["4", "5"], "answer": 1}, "its answer is the number of a choice"),
    ({"question": {"0": "2+3?", "1": "4+5?"}, "answer": {"0": "5", "1": "9"}}, "it holds whole columns"),
    ({"question": ["2+3?", "4+5?"], "answer": ["5", "9"]}, "it holds whole columns"),
    ('{"prompt": "1/0?", "completion": Infinity}', "has inf as its content"),
    ({}, "unknown form (with nothing)"),
    ('"Hello"', "unknown form (but str)"),
    ([SUM[0]], "the assistant has no message"),
    # Marks of what is learned.
    *(
        (turn(mark), f"a message has {problem}: only true, false, 1 and 0 are known")
        for mark, problem in ((reply("b", loss="no"), '"loss": "no"'), (reply("b", weight=0.5), '"weight": 0.5'))
    ),
    (turn(reply("5", loss=True, weight=0)), "the marks loss and weight of a message contradict each other"),
    (turn(reply("b", loss=False), reply("c")), "message 2 is by assistant, where user is expected"),
    (turn(reply("Hm.", loss=False), {"role": "tool_call", "content": CALL}), "mark both as learned, or none"),
    # Calls that are a message.
    (turn({"role": "function_call", "content": CALL.replace("arguments", "args")}), "has args, and not only name"),
    (turn({"role": "function_call", "content": "weather(Rome)"}), "a call of a function is a text that is not JSON"),
    # Thoughts that would be lost, or never end.
    (turn(reply("Sure. <think>Two and three.</think>5")), "stands within a reply"),
    (turn(reply("<think>One.</think>4<think>Two.</think>5")), "stands within a reply"),
    (turn(reply("<think>\nTwo and three, which makes")), "does not end"),
    (turn(reply("<think>One.</think>5", reasoning_content="Two and three.")), "two thoughts"),
    (turn(reply("5", reasoning_content="Two.", thinking="Five.")), "two thoughts, under reasoning_content and"),
    (turn(reply("5", reasoning_content="One.</think>Two.")), "has a mark of a thought inside"),
    (turn(reply("5", reasoning=["Two"])), "(reasoning) is not a text"),
    (turn(reply("") | {"content": parts("Sure. ", "<think>Two and three.</think>5")}), "stands within a reply"),
    (turn(reply("") | {"content": parts("<think>\nTwo and three, which makes")}), "does not end"),
    (THOUGHT_APART | {"completion": [reply("5", thinking="Five.")]}, "two thoughts"),
    (THOUGHT_APART | {"completion": [reply("4"), user("No."), reply("5")]}, "not one reply that it is for"),
    # Texts that are not one, and what belongs elsewhere.
    (turn({"from": "gpt", "content": "5", "value": "6"}), 'both "content" and "value", and they differ'),
    *(
        ({"instruction": "Add.", "input": value, "output": "5"}, '"input" is not a text')
        for value in (7, 0, ["2+3?"], {"sum": "2+3?"})
    ),
    ({"prompt": "2+3?", "completion": True}, "has True as its content: write a text"),
    ({"query": "2+3?", "response": "5", "history": "Hello"}, 'its "history" is a text that is not JSON'),
    ({"messages": "[" * 100_000}, "the list of messages is a text that is not JSON"),
    ({"messages": "[" + "-" * 100_000 + "1]"}, "the list of messages is a text that is not JSON"),
    ({"messages": SUM[1:]}, "texts to pretrain on are for mid_train --data"),
    # What other tools replace before a model reads it.
    (turn(reply("I am {{NAME}}.")), "it has {{NAME}}, which other tools replace by a name"),
    ({"messages": [user("Who?") | {"role": "system", "content": "By {{author}}."}, *SUM]}, "it has {{author}}"),
    *(
        ({"messages": [user(text), reply("A cat.")], **files}, "the place of an image, video or sound")
        for files, text in (
            ({"images": []}, "What is <image> this?"),
            ({"videos": None}, "<video>What?"),
            ({}, "<image>What is this?"),
            ({}, "Listen:\n<audio>\nWhat is it?"),
            ({}, "Picture 1: <img>/data/1.jpg</img>\nWhat is this?"),
            ({}, "What is <image_1>, what <image_2>?"),
            ({}, "Is <|vision_start|><|image_pad|><|vision_end|> a cat?"),
        )
    ),
    ([{"instruction": "2+3?", "output": "5"}], "a list of rows: such a file has a name that ends in .json"),
    ({"prompt": "2+3?", "chosen": "5", "rejected": "6"}, "pairs of replies are for chat_dpo"),
    ({"messages": [user("2+3?") | {"images": ["a.png"]}, reply("5")]}, 'a message has "images": models here read'),
]


HELLO = [user("Hello"), reply("Hi!")]
GOOD, BAD = reply("Hi!"), reply("Go away.")
STRANGE = [user("Bye"), BAD]
BAD_PAIRS: list[tuple[Any, str]] = [
    (HELLO, "unknown form (but list); known forms:"),
    ({"messages": HELLO}, "unknown form (with messages)"),
    ({"prompt": "Hello", "chosen": "Hi!", "rejected": None}, "of rejected, message 1 (assistant) has no content"),
    ({"chosen": HELLO[1:], "rejected": [BAD]}, "chosen is only a reply, and the prompt"),
    ({"chosen": "Hi!", "rejected": "Go."}, "chosen is only a reply, and the prompt"),
    ({"prompt": 3, "chosen": "Hi!", "rejected": "Go."}, "chosen is only a reply, and the prompt"),
    ({"prompt": "Hello", "chosen": "Hi!", "rejected": False}, "of rejected, message 1 (assistant) has False as its"),
    ({"prompt": "Hello", "chosen": "Hi!", "rejected": "I am {{NAME}}."}, "it has {{NAME}}"),
    ({"prompt": "Hello", "chosen": "Hi!", "rejected": "Hi!"}, "chosen and rejected are the same"),
    ({"prompt": "Hello", "chosen": "Hi!", "rejected": " "}, "one of its replies is empty"),
    ({"prompt": "Hello", "chosen": "Hi!", "rejected": "Go.", "weight": 0}, "it has the weight 0"),
    ({"instruction": "Hello", "output": ["Hi!", "Go.", "Well."]}, "unknown form (with instruction, output)"),
    ({"prompt": "Hello", "chosen": [], "rejected": []}, "of chosen, a conversation is a non-empty list"),
    ({"prompt": "Hello", "chosen": [1], "rejected": [2]}, "of chosen, message 0 is not an object"),
    ({"chosen": HELLO[:1], "rejected": HELLO[:1]}, "chosen does not end with the assistant's reply"),
    ({"chosen": HELLO, "rejected": STRANGE}, "do not answer the same messages"),
    ({"prompt": HELLO, "chosen": "Hi!", "rejected": "Go."}, "begin chosen with them"),
    ({"prompt": "Hello", "chosen": user("x"), "rejected": "y"}, "chosen does not end with"),
]


@pytest.mark.parametrize(
    ("kind", "row", "problem"),
    [*((Conversations, *case) for case in BAD_ROWS), *((Preferences, *case) for case in BAD_PAIRS)],
)
def test_a_row_that_cannot_be_used_is_named_when_the_file_is_opened(tmp_path, kind, row, problem):
    good = SUM if kind is Conversations else {"prompt": "Hello", "chosen": "Hi!", "rejected": "Go away."}
    path = write_rows(tmp_path / "mine.jsonl", [good, good, row, good])
    line = complaint(lambda: kind("train", path, reading=Reading(strict_data=True)))
    assert f"1 of 4 records left out: first {path} line 3: " in line and problem in line


# ---- Thoughts --------------------------------------------------------------------------------------------

# As Qwen3's own template: it takes the thought from a field, or else from the content.
FIELD = THINKING.replace(
    "{%- if '</think>' in content %}",
    "{%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}\n"
    "{%- elif '</think>' in content %}",
)
ONLY_FIELD = FIELD.replace("{%- elif '</think>' in content %}", "{%- elif false %}")
THINKER = [user("2+3?"), reply("5", reasoning_content="Two and three.")]


def qwen3(folder: Path, template: str) -> Tokenizer:
    return Tokenizer.load(save_family(folder / "model", "qwen3", chat_template=template))


@pytest.mark.parametrize("template", [FIELD, ONLY_FIELD, THINKING, "qwen3_5_think"])
def test_a_thought_is_learned_where_the_template_writes_it(tmp_path, capsys, template):
    is_opened = template == "qwen3_5_think"  # its prompts have the first mark
    tokenizer = qwen3(tmp_path, published(template) if is_opened else template)
    inline = [user("2+3?"), reply(THOUGHT)]
    fields = [[user("2+3?"), reply("5", **{key: "Two and three."})] for key in ("reasoning", "thinking")]
    path = write_rows(tmp_path / "mine.jsonl", [{"messages": chat} for chat in (THINKER, *fields, inline, SUM)])
    rendered = [render(tokenizer, chat) for chat in chats(path)]
    wanted = "<think>\nTwo and three.\n</think>\n\n5<|im_end|>"
    empty = "<think>\n\n</think>\n\n5<|im_end|>"
    wanted, empty = (text.removeprefix("<think>\n" * is_opened) for text in (wanted, empty))
    assert [learned(tokenizer, one) for one in rendered] == [wanted] * 4 + [empty]
    report_learned(rendered, tokenizer)
    assert "1 of 5 replies have no thought" in capsys.readouterr().out
    dropped = [render(tokenizer, chat) for chat in chats(path, thoughts="drop")]
    assert [learned(tokenizer, one) for one in dropped] == [empty] * 5


def test_a_thought_before_a_call_and_one_without_a_reply_are_learned(tmp_path):
    tokenizer = qwen3(tmp_path, FIELD)
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    asked = {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": [call]}
    answers = [{"role": "tool", "content": "sun", "tool_call_id": "1"}, reply("Sun.")]
    path = write_rows(tmp_path / "mine.jsonl", [turn(asked, *answers)])
    text = learned(tokenizer, render(tokenizer, chats(path)[0]))
    assert text.startswith("<think>\nI look.\n</think>\n\n")
    assert '<tool_call>\n{"name": "weather"' in text
    rendered = render(tokenizer, [user("2+3?"), reply("<think>\nTwo and three.\n</think>\n\n")])
    assert rendered.replies == 1
    assert rendered.target_count


def test_a_reply_whose_call_the_template_drops_is_not_learned(family_tokenizers):
    """It would be learned to end the turn at once."""
    rendered = render(family_tokenizers["llama3"], WEATHER)
    assert (rendered.replies, rendered.unlearned) == (2, 1)
    assert learned(family_tokenizers["llama3"], rendered) == "Sunny.<|eot_id|>"


# ---- Pairs -----------------------------------------------------------------------------------------------

PAIR_FORMS: list[dict[str, Any]] = [
    {"chosen": HELLO, "rejected": [HELLO[0], BAD]},
    {"prompt": "Hello", "chosen": HELLO, "rejected": [HELLO[0], BAD], "score_chosen": 9.0},  # UltraFeedback's
    {"prompt": "Hello", "chosen": "Hi!", "rejected": "Go away."},
    {"prompt": "Hello", "chosen": [GOOD], "rejected": [BAD]},
    {"prompt": [HELLO[0]], "chosen": GOOD, "rejected": "Go away."},
    {
        "conversations": [{"from": "human", "value": "Hello"}], "chosen": {"from": "gpt", "value": "Hi!"},
        "rejected": {"from": "gpt", "value": "Go away."},
    },
    {"instruction": "Hello", "input": "", "chosen": "Hi!", "rejected": "Go away."},
    {"prompt": "Hello", "instruction": None, "chosen": "Hi!", "rejected": "Go away."},
    {"Prompt": "Hello", "Chosen": "Hi!", "Rejected": "Go away."},
    {"input": "Hello", "chosen": "Hi!", "rejected": "Go away."},
    {"messages": HELLO, "rejected_response": "Go away."},  # ms-swift's
    {"messages": HELLO, "rejected_messages": [HELLO[0], BAD]},
    {"query": "Hello", "response": "Hi!", "rejected_response": "Go away."},
    {"system": "", "question": "Hello", "chosen": "Hi!", "rejected": "Go away."},
    {"input": {"messages": HELLO[:1], "tools": []}, "preferred_output": [GOOD], "non_preferred_output": [BAD]},
    {"instruction": "Hello", "input": "", "output": ["Hi!", "Go away."]},  # LLaMA-Factory's, of 2023
    {"prompt": "Hello", "chosen": ["Hi!", "Hey!"], "rejected": ["Go away.", "Go."]},
    {"prompt": "\n\nHuman: Hello\n\nAssistant:", "chosen": "Hi!", "rejected": "Go away."},
    {"chosen": "\n\nHuman: Hello\n\nAssistant: Hi!", "rejected": "\n\nHuman: Hello\n\nAssistant: Go away."},
    {"system": "Be kind.", "question": "Hello", "chosen": "Hi!", "rejected": "Go away."},
    {"system": "Be kind.", "chosen": HELLO, "rejected": [HELLO[0], BAD]},
]  # fmt: skip


@pytest.mark.parametrize("row", PAIR_FORMS)
def test_every_form_is_the_same_pair(tmp_path, row):
    pair = Pair([*([SYSTEM] if row.get("system") else []), HELLO[0]], GOOD, BAD)
    task = Preferences("train", write_rows(tmp_path / "mine.jsonl", [row] * 2))
    assert [task.pair(number) for number in range(len(task))] == [pair] * 2
    assert task.example(0).messages == [*pair.question, GOOD]


def way(city: str, result: str, end: str) -> list[dict[str, Any]]:
    return [user("Weather?"), called("", city), {"role": "tool", "content": result}, reply(end)]


def test_a_pair_of_trajectories_is_compared_from_where_they_part(tmp_path, capsys):
    tokenizer = qwen3(tmp_path, FIELD)
    good, bad = way("Rome", "sun", "Sunny."), way("Oslo", "rain", "Wet.")
    rows: list[dict[str, Any]] = [
        {"messages": [SYSTEM, *good], "rejected_messages": [SYSTEM, *bad]},
        {"system": "Be kind.", "chosen": good, "rejected": bad},
        {"system": "Be kind.", "prompt": "Weather?", "chosen": good[1:], "rejected": bad[1:]},
    ]
    for row in rows:
        mixture = open_mixture(write_rows(tmp_path / "mine.jsonl", [row] * 2), "train", Reading(files="pairs"))
        sides = mixture.rendered_pair(tokenizer, 0, 1000)
        for side, city, result, end in zip(sides, ("Rome", "Oslo"), ("sun", "rain"), ("Sunny.", "Wet."), strict=True):
            text = learned(tokenizer, side)
            assert city in text and end in text and result not in text and side.replies == 2
    # The end of the second trajectory is in the fingerprint, and so are its calls.
    other = [{**rows[0], "rejected_messages": [SYSTEM, *way("Bern", "rain", "Wet.")]}] * 2
    first = open_mixture(write_rows(tmp_path / "mine.jsonl", [rows[0]] * 2), "train", Reading(files="pairs"))
    second = open_mixture(write_rows(tmp_path / "other.jsonl", other), "train", Reading(files="pairs"))
    assert first.fingerprint() != second.fingerprint()
    # Of a chat whose earlier turns the template rewrites, the sides cannot be read at once.
    turns = [user("Next."), reply("5", reasoning_content="Hm.")]
    row = {"chosen": [SUM[0], reply("4"), *turns], "rejected": [SUM[0], reply("6"), *turns]}
    mixture = open_mixture(write_rows(tmp_path / "chats.jsonl", [row] * 2), "train", Reading(files="pairs"))
    assert mixture.rendered_pair(tokenizer, 0, 1000)[0].ids == []
    assert "before its last reply in another way; it is left out" in capsys.readouterr().err


def test_thoughts_of_pairs_are_kept_or_dropped_on_both_sides(tmp_path):
    row = {"messages": THINKER, "rejected_response": reply("6", reasoning_content="Two and four.")}
    path = write_rows(tmp_path / "mine.jsonl", [row])
    pair = Preferences("train", path).pair(0)
    assert pair == Pair([user("2+3?")], reply(THOUGHT), reply("<think>\nTwo and four.\n</think>\n\n6"))
    dropped = Preferences("train", path, reading=Reading(thoughts="drop")).pair(0)
    assert dropped == Pair([user("2+3?")], reply("5"), reply("6"))


@pytest.mark.parametrize(("name", "label"), [("label", True), ("kto_tag", False), ("Label", "false")])
def test_a_file_of_labelled_replies_is_refused(tmp_path, name, label):
    """Files for KTO: a bad reply must not be learned as a good one. Only the questions are learned for rewards."""
    rows = [{"messages": [user("a"), GOOD], name: label}] * 3
    for suffix, place in (("jsonl", "line 1"), ("parquet", "row 1")):
        path = write_rows(tmp_path / f"mine.{suffix}", rows)
        for kind in (Conversations, Preferences):
            line = complaint(lambda kind=kind, path=path: kind("train", path))
            assert line.startswith(f"{path} {place} ")
            assert f"({str(label).lower()}), as for KTO" in line
        assert len(Prompts("train", path, reading=Reading(val_share=0.0))) == 3


def test_a_pair_may_have_a_label_and_a_number_may_be_a_class(tmp_path, capsys):
    pair = {"prompt": "a", "chosen": "b", "rejected": "c", "label": True}
    reading = Reading(val_share=0.0)
    assert len(Preferences("train", write_rows(tmp_path / "pairs.jsonl", [pair] * 3), reading=reading)) == 3
    capsys.readouterr()
    rows = [{"messages": [user("a"), GOOD], "label": number} for number in range(4)]
    assert len(chats(write_rows(tmp_path / "class.jsonl", rows), val_share=0.0)) == 4
    shown = capsys.readouterr()
    assert "; not label" in shown.out
    assert "1 rows have the label 0" in shown.err


def test_questions_for_rewards_in_own_columns(tmp_path, capsys):
    path = write_rows(tmp_path / "mine.jsonl", [{"题目": "2+3?", "key": "5", "level": 1}])
    example = Prompts("train", path, reading=Reading(columns="answer=key")).example(0)
    assert (example.messages, example.answer) == (SUM, "5")
    assert example.fields == {"题目": "2+3?", "key": "5", "level": 1}
    assert "answer from key; and, for rewards, level" in capsys.readouterr().out
    alone = Prompts("train", write_rows(tmp_path / "alone.jsonl", [{"input": "2+3?"}]))
    assert alone.example(0).messages[0] == user("2+3?")


BEGUN = [user("2+3?"), {"role": "assistant", "content": "<think>\nLet me"}]
WITHOUT_REPLY = [*BEGUN, {"role": "assistant", "content": ""}]
SHAREGPT = [{"from": "human", "value": "2+3?"}, {"from": "gpt", "value": "<think>\nLet me"}]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": BEGUN, "solution": "5"}, WITHOUT_REPLY),
        ({"prompt": json.dumps(BEGUN)}, WITHOUT_REPLY),
        ({"prompt": SHAREGPT}, WITHOUT_REPLY),
        ({"prompt": BEGUN, "answer": "5"}, [*BEGUN, {"role": "assistant", "content": "5"}]),
        ({"prompt": BEGUN, "system": "S"}, [{"role": "system", "content": "S"}, *WITHOUT_REPLY]),
        ({"messages": [user("2+3?"), GOOD]}, [user("2+3?"), GOOD]),  # a conversation ends with its reference reply
        ({"prompt": [user("2+3?"), CALL]}, "ends with a call"),
    ],
)
def test_a_prompt_for_rewards_may_end_with_the_assistants_words(tmp_path, row, expected):
    """As in TRL's prompts, which the reply continues."""
    path = write_rows(tmp_path / "mine.jsonl", [row] * 2)
    for thoughts in ("keep", "drop"):
        reading = Reading(val_share=0.0, thoughts=thoughts)
        if isinstance(expected, str):
            assert expected in complaint(lambda reading=reading: Prompts("train", path, reading=reading))
        else:
            assert Prompts("train", path, reading=reading).example(0).messages == expected


# ---- Splits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.jsonl.gz", "mine.parquet"])
def test_a_share_drawn_by_the_rows_is_held_out(tmp_path, name):
    """Two in a hundred by default, at most 200, and none of few; where a row is says nothing about it."""
    held: dict[int, set[str]] = {}
    for count, share, wanted in (
        *((1, 0.1, 0), (2, 0.1, 1), (25, 0.1, 3), (30, 0.0, 0), (30, 0.01, 1), (30, 0.9, 27)),
        *((99, None, 0), (100, None, 2), (1000, None, 20)),
        *([(10_200, None, 200)] if name == "mine.jsonl" else []),
    ):
        path = tmp_path / name.removesuffix(".gz")
        rows = [{"messages": [user(str(number)), GOOD]} for number in range(count)]
        random.Random(count).shuffle(rows)
        write_rows(path, rows)
        if name.endswith(".gz"):
            path = tmp_path / name
            path.write_bytes(gzip.compress((tmp_path / "mine.jsonl").read_bytes()))
        spec, reading = TaskSpec("conversations", str(path), 1.0), Reading(val_share=share)
        tasks = [open_task(spec, split, reading) for split in ("train", "test")]
        found = [[task.example(n).messages[0]["content"] for n in range(len(task))] for task in tasks]
        assert found[0] == [one for one in (row["messages"][0]["content"] for row in rows) if one not in found[1]]
        assert len(found[1]) == wanted and sum(map(len, found)) == count
        assert len(open_mixture(str(path), "test", reading).tasks) == (wanted > 0)
        held[count] = set(found[1])
    assert any(int(row) < 500 for row in held[1000]) and any(int(row) >= 500 for row in held[1000])


def test_equal_rows_are_held_out_together(tmp_path):
    path = write_rows(tmp_path / "mine.jsonl", [{"messages": [user(str(n % 50)), GOOD]} for n in range(150)])
    tasks = [Conversations(split, path, reading=Reading(val_share=0.2)) for split in ("train", "test")]
    found = [{task.example(n).messages[0]["content"] for n in range(len(task))} for task in tasks]
    assert len(tasks[1]) == 30 and found[1] and not found[0] & found[1]


def test_splits_of_a_folder(tmp_path):
    for name, count in (("train_sft", 4), ("test_sft", 2), ("train_gen", 3)):
        write_rows(tmp_path / f"{name}.jsonl", [SUM] * count)
    assert [len(Conversations(part, f"{tmp_path}@train_sft")) for part in ("train", "test")] == [4, 2]
    (tmp_path / "other").mkdir()
    for name in ("first", "second"):  # without splits: some of all rows
        write_rows(tmp_path / f"other/{name}.jsonl", [[user(f"{name} {n}"), GOOD] for n in range(100)])
    assert [len(Conversations(split, f"{tmp_path}/other")) for split in ("train", "test")] == [196, 4]
    for path, words in ((str(tmp_path), "by @"), (f"{tmp_path}/test_sft.jsonl@x", "@x"), (None, ".jsonl")):
        assert words in complaint(lambda path=path: Conversations("train", path))


# ---- Dirt ------------------------------------------------------------------------------------------------

CUT = '{"messages": [{"role": "user", "cont'
ROBOT = {"messages": [{"role": "robot", "content": "x"}]}
GOOD_ROW = {"messages": SUM}


@pytest.mark.parametrize(("name", "where"), [("mine.jsonl", "line 3"), ("mine.parquet", "row 3")])
def test_what_is_no_conversation_is_left_out_and_counted(tmp_path, capsys, name, where):
    rows = [{"messages": [user(str(n)), GOOD], "id": n} for n in range(20)]
    for place in (2, 3, 7):
        rows[place]["messages"].append({"role": "tool", "content": "42"})
    rows[5]["messages"].append(user("Are you there?"))
    path = write_rows(tmp_path / name, rows)
    found = [chat[0]["content"] for chat in chats(path)]
    assert found == [str(n) for n in range(20) if n not in (2, 3, 7)]
    left_out, dropped = capsys.readouterr().err.splitlines()
    assert f"{path} (train): 3 of 20 records left out: first {path} {where}: message 2" in left_out
    assert "--strict_data" in left_out
    assert f"{path}: the last message of 1 chats" in dropped
    refused = complaint(lambda: chats(path, strict_data=True))
    assert f"3 of 20 records left out: first {path} {where}: " in refused
    write_rows(tmp_path / name, [{"messages": SUM[1:]}] * 4)
    assert "4 of 4 records left out" in complaint(lambda: chats(path))


@pytest.mark.parametrize("last", [CUT, {"messages": SUM[1:]}, turn(reply("5", weight="x"))])
def test_a_row_that_is_damaged_is_not_held_out(tmp_path, capsys, last):
    path = write_rows(tmp_path / "end.jsonl", [*[{"messages": [user(str(n)), GOOD]} for n in range(3)], last])
    for share, sizes in ((0.4, [1, 2]), (0.0, [3, 0])):
        parts = [open_mixture(path, split, Reading(val_share=share)) for split in ("train", "test")]
        assert [sum(map(len, part.tasks)) for part in parts] == sizes
        err = capsys.readouterr().err
        assert f"(train): 1 of {sizes[0] + 1} records left out: first {path} line 4" in err and "(test)" not in err


@pytest.mark.parametrize(
    ("kind", "row", "place"),
    [
        *((Conversations, row, place) for place in (0, 5) for row in ({"ask": "2+3?"}, {"id": 0}, {}, "null", "7")),
        *((Prompts, row, 0) for row in ({"reply": "5"}, "7")),
        *((Preferences, row, 5) for row in ({"ask": "2+3?"}, "null")),
    ],
)
def test_a_row_in_an_unknown_form_is_left_out_and_counted(tmp_path, capsys, kind, row, place):
    columns = "question=ask,chosen=a,rejected=b" if kind is Preferences else "question=ask,answer=reply"
    rows: list[Any] = [{"ask": "2+3?", "reply": "5", "a": "5", "b": "6"}] * 11
    rows.insert(place, row)
    path = write_rows(tmp_path / "mine.jsonl", rows)
    assert [len(kind(split, path, reading=Reading(columns=columns))) for split in ("train", "test")] == [11, 0]
    problem = f"{path} line {place + 1}: unknown form ("
    assert f"(train): 1 of 12 records left out: first {problem}" in capsys.readouterr().err
    refused = complaint(lambda: kind("train", path, reading=Reading(columns=columns, strict_data=True)))
    assert problem in refused and "--strict_data" in refused


def test_a_file_without_a_row_in_a_known_form_is_an_error(tmp_path):
    damaged = write_rows(tmp_path / "damaged.jsonl", [CUT])
    assert f"{damaged} line 1 is not JSON" in complaint(lambda: chats(damaged))
    Path(damaged).unlink()
    write_rows(tmp_path / "a.jsonl", [GOOD_ROW] * 9)
    path = write_rows(tmp_path / "b.jsonl", ["{", *[{"text": "x"}] * 3])
    write_rows(tmp_path / "c.jsonl", [GOOD_ROW] * 9)
    for place in (path, str(tmp_path)):
        problem = complaint(lambda place=place: Conversations("train", place))
        assert problem.startswith(f"{path} line 2 cannot be used: unknown form (with text)")


def test_up_to_three_causes_of_left_out_rows_are_named(tmp_path, capsys):
    late = {"messages": [*SUM, *ROBOT["messages"]]}
    bad: list[Any] = [ROBOT, "{", late, {"id": 1}, "[", ROBOT]
    path = write_rows(tmp_path / "mine.jsonl", [*bad, *[GOOD_ROW] * 14])
    chats(path)
    [warning] = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert f"6 of 20 records left out: first {path} line 1: message 0 " in warning
    named = warning.split("; ")
    assert [part.rpartition(" (")[2] for part in named if part.endswith(" such)")] == ["3 such)", "2 such)"]
    assert f"; {path} line 2 is not JSON" in warning and f"; {path} line 4: unknown form (with id)" in warning
    assert "(1 such)" in warning and "other causes" not in warning
    chats(write_rows(tmp_path / "more.jsonl", [*bad, {"messages": []}, *[GOOD_ROW] * 13]))
    assert "other causes" in capsys.readouterr().err


CSVS = {
    "pandas": b",instruction,output\n0,2+3?,5\n1,2+3?,5\n",
    "Excel, UTF-16 and tabs": "instruction\toutput\r\n2+3?\t5\r\n2+3?\t5\r\n".encode("utf-16"),
    "UTF-16, the other order": "\ufeffinstruction,output\n2+3?,5\n2+3?,5\n".encode("utf-16-be"),
    "Excel in Germany": b"\xef\xbb\xbfinstruction;output\r\n2+3?;5\r\n2+3?;5\r\n",
    "Excel's line about the mark": b"sep=;\r\ninstruction;output\r\n2+3?;5\r\n2+3?;5\r\n",
    "such a line after a mark": b'\xef\xbb\xbf"sep=|"\ninstruction|output\n2+3?|5\n2+3?|5\n',
    "columns without a name": b"instruction,output,,\n2+3?,5,,\n2+3?,5,,\n",
    "Chinese heads": "\ufeff 问题 , 答案\n2+3?,5\n2+3?,5\n".encode(),
}


@pytest.mark.parametrize("name", CSVS)
def test_a_csv_of_pandas_and_of_excel(tmp_path, name):
    path = tmp_path / "mine.csv"
    path.write_bytes(CSVS[name])
    assert chats(path) == [SUM] * 2


# ---- The commands ----------------------------------------------------------------------------------------


@pytest.fixture
def models(base_folder) -> None:
    tokenizer = tiny_tokenizer()
    model = lively_model(tiny_config(vocab_size=tokenizer.vocab_size, n_layer=2))
    for stage in ("base", "mid", "sft"):
        facts = {"stage": stage, "pretraining": {"data": "", "tokens": 4096, "batch_tokens": 256}}
        save_checkpoint(paths.checkpoint_dir(stage, "d1"), 1, model, tokenizer, facts)


REWARD = "def short(episodes):\n    return [1 / (1 + len(episode.reply)) for episode in episodes]\n"
STEP = ("--num_iterations=1", "--device_batch_size=2")
COMMANDS = {
    "preview": ["--examples=1", "--count=2", "--max_seq_len=64", "--rope_scaling=yarn"],
    "chat_sft": [*STEP, "--target_examples_per_step=1"],
    "chat_dpo": [*STEP, "--target_examples_per_step=1"],
    "chat_rl": [*STEP, "--examples_per_step=1", "--num_samples=2", "--max_tokens=4", "--reward=REWARD"],
    "mid_train": [*STEP, "--gradient_accumulation_steps=1", "--eval_tokens=64"],
    "fetch": [],
}


@pytest.mark.parametrize("script", COMMANDS)
def test_commands_read_own_columns(models, tmp_path, capsys, script):
    """Every command that reads files of one's own has --columns, and says what it reads."""
    (tmp_path / "reward.py").write_text(REWARD)
    is_dpo = script == "chat_dpo"
    row = {"q": "2+3?", "win": "5", "lose": "6"} if is_dpo else {"q": "2+3?", "a": "5", "extra": "x"}
    columns = "question=q,chosen=win,rejected=lose" if is_dpo else "question=q,answer=a"
    path = write_rows(tmp_path / "mine.jsonl", [row] * 4)
    flags = [flag.replace("REWARD", f"{tmp_path / 'reward.py'}:short") for flag in COMMANDS[script]]
    call(script, f"--tasks={path}", f"--columns={columns}", *flags)
    assert f"{path} reads question from q" in capsys.readouterr().out
    code, err = mistake(capsys, script, f"--tasks={path}", *flags)
    assert code == 1 and "unknown form (with q, " in err


@pytest.mark.parametrize(("thoughts", "shown"), [("keep", "[[<think>"), ("drop", "[[5")])
def test_the_preview_says_what_becomes_of_thoughts(models, tmp_path, capsys, thoughts, shown):
    path = write_rows(tmp_path / "mine.jsonl", [{"messages": THINKER}] * 3)
    call("preview", f"--tasks={path}", f"--thoughts={thoughts}", *COMMANDS["preview"])
    out = capsys.readouterr().out
    assert "3 of 3 replies have a thought" in out
    assert shown in out
    assert ("<think>" in out) == (thoughts == "keep")


def test_mid_training_warns_that_it_learns_masked_replies(models, tmp_path, capsys):
    path = write_rows(tmp_path / "mine.jsonl", [{"messages": [*SUM, user("b"), reply("c", loss=False)]}] * 4)
    call("mid_train", f"--tasks={path}", *COMMANDS["mid_train"])
    assert "4 replies are marked as not learned" in capsys.readouterr().err


def test_a_rendered_chat_obeys_the_marks_of_its_row_and_only_sft_reads_it(tmp_path):
    text = "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n"
    path = write_rows(tmp_path / "texts.jsonl", [{"text": text, "weight": 0}, {"text": text}])
    reading = Reading(columns="rendered=text", val_share=0.0)
    assert list(Conversations("train", path, reading=reading).numbers) == [1]
    for kind in (Prompts, Preferences):
        assert "have the roles messages" in complaint(lambda kind=kind: kind("train", path, reading=reading))
    for setting in ({"thoughts": "drop"}, {"learn": "last"}):
        assert "need messages" in complaint(
            lambda setting=setting: Conversations("train", path, reading=dataclasses.replace(reading, **setting))
        )
    path = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "a", "weight": 0}, {"prompt": "b"}])
    assert list(Prompts("train", path, reading=Reading(val_share=0.0)).numbers) == [1]
    begun = [user("a"), reply("x"), reply("y")]
    path = write_rows(tmp_path / "begun.jsonl", [{"prompt": begun}, {"prompt": begun[:2]}])
    assert list(Prompts("train", path, reading=Reading(val_share=0.0)).numbers) == [1]
