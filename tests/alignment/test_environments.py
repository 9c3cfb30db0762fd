"""Environments: tools, the environments in a user's file, and the tokens of their episodes by any chat template."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny
from tiny import complaint, cpu_device, learned, tiny_tokenizer

from nanochat import rollout
from nanochat.conversation import Message, Part, parts_of, render, render_prompt, text_of
from nanochat.families.imported_tokenizer import ImportedTokenizer
from nanochat.rollout import Samples
from nanochat.task import Environment, Example, Step, Task
from nanochat.tasks.flag import EnvironmentTask, TaskSpec, open_mixture, open_task, parse_tasks, require_pairs
from nanochat.tasks.tool_use import call_in, run_tool
from nanochat.tokenizer import Tokenizer


def said(step: Step) -> str:
    (message,) = step.messages
    return message["content"]


# ---------------------------------------------------------------------- tools


@pytest.mark.parametrize(
    ("reply", "call"),
    [
        ("calculator: 2+3", ("calculator", "2+3")),
        ("Let me see.\ncalculator: 2+3\nThat is 5.", ("calculator", "2+3")),
        ("python: a = 1\nprint(a)", ("python", "a = 1\nprint(a)")),
        (
            '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+3"}}\n</tool_call>',
            ("calculator", "2+3"),
        ),
        ('{"name": "python", "parameters": {"code": "print(1)"}}', ("python", "print(1)")),
        ('[{"name": "calculator", "arguments": {"expression": "1"}}]', ("calculator", "1")),
        ('{"name": "rm", "arguments": {"path": "x"}} {"name": "calculator", "arguments": "1"} {"a": {"b": 1}} {', None),
        ("It is 5.", None),
    ],
)
def test_a_call_is_found_in_whatever_form(reply, call):
    assert call_in(reply) == call


def test_tools_answer_and_the_final_number_is_rewarded():
    assert run_tool("calculator", "2*(3+4)") == "14" and "error" in run_tool("calculator", "import os")
    assert run_tool("python", "print(6 * 7)") == "42" and "(line 1)" in run_tool("python", "1/0")
    assert "1" not in run_tool("python", "print(open('/etc/hostname').read())")[:5]
    task = open_task(TaskSpec("tool_use", None, 1.0), "train")
    kinds = set()
    for index in range(12):
        example = task.example(index)
        roles = [message["role"] for message in example.messages]
        assert roles == ["user", "assistant", "tool", "assistant"]
        question, call, result, answer = (message["content"] for message in example.messages)
        kinds.add(call.partition(":")[0])
        assert result in answer and example.tools
        game = task.environment(example)
        assert game.start()[0]["content"] == question and said(game.step(parts_of(call))) == result
        assert game.step(parts_of(f"So it is {int(result):,}.")) == Step(reward=1.0)
        assert task.environment(example).step(parts_of(f"{result}1")).reward == 0.0
    assert kinds == {"calculator", "python"}
    endless = task.environment(task.example(0))
    assert [bool(endless.step(parts_of("calculator: 1")).messages) for _ in range(5)] == [True] * 4 + [False]


# ---------------------------------------------------------------------- as tasks

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rl.md").read_text(encoding="utf-8")
(GUESS,) = re.findall(r"```python\n# guess.py\n(.*?)```", PAGE, re.DOTALL)


def test_a_file_of_ones_own_is_a_task(tmp_path):
    file = tmp_path / "guess.py"
    file.write_text(f"{GUESS}\nnot_a_class = 3\n")
    first, second = parse_tasks(f"{file}:Guess:0.5,tool_use")
    assert first == TaskSpec(f"{file}:Guess", None, 0.5) and second == TaskSpec("tool_use", None, 1.0)
    task = open_task(first, "train")
    assert isinstance(task, EnvironmentTask) and task.name == "guess"
    example = task.example(3)
    assert example == task.example(3) and example.question == [{"role": "user", "content": "Guess my number, 1 to 9."}]
    environments = [task.environment(example) for _ in range(2)]
    numbers = {next(n for n in range(1, 10) if game.step(parts_of(str(n))).reward == 1.0) for game in environments}
    assert len(numbers) == 1, "all samples of a question play the same game"
    print_before = open_mixture(f"{file}:Guess", "train").fingerprint()
    file.write_text(GUESS + "\n# changed\n")
    assert open_mixture(f"{file}:Guess", "train").fingerprint() != print_before
    for entry, word in {
        f"{file}:Gues": "Guess", f"{file}:not_a_class": "neither", f"{tmp_path}/gone.py:Guess": "no file",
        "tool_use=x": "path",
    }.items():  # fmt: skip
        assert word in complaint(lambda entry=entry: open_mixture(entry, "train"))
    assert "tool_use" in complaint(lambda: require_pairs(parse_tasks("tool_use")))


def test_reference_replies_are_learned_and_nothing_else():
    tokenizer = tiny_tokenizer()
    task = open_task(TaskSpec("tool_use", None, 1.0), "train")
    for index in range(4):
        messages = task.example(index).messages
        rendered = render(tokenizer, messages)
        replies = [message["content"] for message in messages if message["role"] == "assistant"]
        assert learned(tokenizer, rendered) == "".join(f"{reply}<|assistant_end|>" for reply in replies)


# ---------------------------------------------------------------------- tokens of an episode

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


class Talk(Environment):
    """Answers two replies by one role."""

    def __init__(self, role: str):
        self.role = role
        self.turns = 0
        self.tools = [TOOL] if role == "tool" else None

    def start(self) -> list[Message]:
        return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, a boat?"}]

    def step(self, reply: Sequence[Part]) -> Step:
        self.turns += 1
        if self.turns == 3:
            return Step(reward=1.0)
        return Step([{"role": self.role, "content": f"you said {text_of(reply)}"}])


class Talking(Task):
    name = "talk"

    def __init__(self, role: str):
        self.role = role

    def environment(self, example: Example) -> Environment:
        return Talk(self.role)


def episode(tokenizer: Tokenizer, role: str, replies: Sequence[tuple[Sequence[int], bool]]) -> Samples:
    """One with these replies (tokens, whether they end by themselves)."""
    turns = iter(replies)

    def sampler(prompts, settings, max_tokens):
        tokens, is_complete = next(turns)
        ending = "complete" if is_complete else "cut off"
        return [rollout.Reply(list(tokens), [1] * len(tokens), [-1.0] * len(tokens), ending) for _ in prompts]

    example = Example([{"role": "user", "content": ""}, {"role": "assistant", "content": ""}])
    return tiny.sample_episodes(
        sampler, tokenizer, cpu_device(), [(Talking(role), example)], samples=1, max_tokens=99, context=999, seed=0
    )


@pytest.mark.parametrize("is_complete", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "llama3", "mistral", "metaspace", "marked"])
def test_an_episode_by_a_template_is_its_text(family_tokenizers, family, is_complete):
    """It begins with the prompt, holds what was sampled, and is what the template writes of the whole conversation."""
    tokenizer: ImportedTokenizer = family_tokenizers[family]
    role = "user"
    end = tokenizer.reply_ends[0]
    said = ["the red sail", "a small boat", "three patches"]
    # A reply begins with a new token: as the template has it, and as it is sampled.
    space = " " if family in ("mistral", "metaspace") else ""
    sampled = [tokenizer.encode_continuation(space + words) for words in said]
    tokens = [[*ids, end] if is_complete else ids for ids in sampled]
    drawn = episode(tokenizer, role, [(ids, is_complete) for ids in tokens])
    ids, mask = drawn.groups[0][0].tokens, drawn.groups[0][0].mask
    opening = Talk(role).start()
    prompt = render_prompt(tokenizer, opening, tools=Talk(role).tools)
    assert ids[: len(prompt)] == prompt
    assert [token for token, m in zip(ids, mask, strict=True) if m] == [token for one in tokens for token in one]
    messages = list(opening)
    for number, words in enumerate(said):
        messages.append({"role": "assistant", "content": words})
        if number < 2:
            messages.append({"role": role, "content": f"you said {words}"})
    assert tokenizer.chat_template is not None
    whole = tokenizer.chat_template.render(messages, Talk(role).tools)
    expected = tokenizer.encode_rendered(whole)[0]
    assert ids == expected[: len(ids)]
    # SentencePiece decodes a space after each special token.
    assert whole.text.replace(" ", "").startswith(tokenizer.decode(ids).replace(" ", ""))
    assert drawn.rewards.tolist() == [[1.0]]


def test_sampled_tokens_stay_as_they_were(family_tokenizers):
    tokenizer = family_tokenizers["qwen2"]
    odd = [token for letter in "the boat" for token in tokenizer.encode(letter)]
    assert odd != tokenizer.encode("the boat")
    drawn = episode(tokenizer, "user", [([*odd, tokenizer.reply_ends[0]], True)] * 3)
    sample = drawn.groups[0][0]
    assert [t for t, m in zip(sample.tokens, sample.mask, strict=True) if m] == [*odd, tokenizer.reply_ends[0]] * 3


def test_tools_by_a_template(family_tokenizers):
    """Qwen3's keeps thoughts before a tool's result, and drops them before the next user's message."""
    tokenizer = family_tokenizers["qwen3"]
    thought = [*tokenizer.encode("<think>\n\n</think>\n\nA boat."), tokenizer.reply_ends[0]]
    drawn = episode(tokenizer, "tool", [(thought, True)] * 3)
    decoded = tokenizer.decode(drawn.groups[0][0].tokens)
    assert '"name": "weather"' in decoded.partition("Hello")[0], "the template has described the tools"
    between = "<|im_end|>\n<|im_start|>user\n<tool_response>\nyou said <think>\n\n</think>\n\nA boat.\n</tool_response>"
    assert decoded.count(f"A boat.{between}<|im_end|>\n<|im_start|>assistant\n<think>") == 2
    with pytest.raises(Exception, match="<think>.* by user follows"):
        episode(tokenizer, "user", [(thought, True)] * 3)


def test_own_format_reads_a_tool_as_a_user():
    tokenizer = tiny_tokenizer()
    end = tokenizer.encode_special("<|assistant_end|>")
    drawn = episode(tokenizer, "tool", [([*tokenizer.encode("ab"), end], True)] * 3)
    text = tokenizer.decode(drawn.groups[0][0].tokens)
    assert text.count("<|user_start|>you said ab<|user_end|><|assistant_start|>ab") == 2
