"""A mixture: weights kept, every example once an epoch, the same at every call; the flag that describes it."""

import itertools
from collections import Counter

import pytest
import torch
from tiny import complaint, tiny_tokenizer

from nanochat.conversation import parts_of, render, text_of
from nanochat.data.catalog import TASKS
from nanochat.loader import segments_of
from nanochat.mixture import Mixture, MixtureCorpus
from nanochat.task import Example, Task
from nanochat.tasks.defaults import BUILT_IN_RL_TASKS, BUILT_IN_TASKS, CHINESE_TASKS, HUB_TASKS, PAIRS, default_tasks
from nanochat.tasks.flag import (
    EpochMixture,
    TaskSpec,
    generated_tasks,
    open_mixture,
    open_task,
    parse_tasks,
    require_pairs,
    task_class,
    task_names,
)
from nanochat.tasks.learned_share import report_learned
from nanochat.tasks.messages import check_messages


class Numbers(Task):
    kind = "dialogue"

    def __init__(self, name: str, count: int):
        self.name, self.count = name, count

    def __len__(self) -> int:
        return self.count

    def example(self, index: int) -> Example:
        assert 0 <= index < self.count
        turns = [{"role": "user", "content": self.name}, {"role": "assistant", "content": str(index)}]
        return Example(turns)


def test_weights_are_kept_and_every_example_comes_once_before_any_comes_again():
    mixture = Mixture([Numbers("a", 7), Numbers("b", 500)], [1, 3])
    drawn = [mixture.draw(i) for i in range(2000)]
    names = Counter(task.name for task, _ in drawn)
    assert names == {"a": 500, "b": 1500}
    for name, count in (("a", 7), ("b", 500)):
        numbers = [number for task, number in drawn if task.name == name]
        for epoch in range(len(numbers) // count):
            assert sorted(numbers[epoch * count : (epoch + 1) * count]) == list(range(count))
    of_a = [number for task, number in drawn if task.name == "a"]
    assert of_a[:7] != of_a[7:14]  # shuffled anew
    near = Counter(task.name for task, _ in drawn[:100])
    assert 10 < near["a"] < 40


def test_an_epoch_has_every_example_of_every_task_once():
    tasks = [Numbers("a", 5), Numbers("b", 3)]
    mixture = EpochMixture(tasks, [1.0, 1.0], seed=3)
    assert len(mixture) == 8
    epochs = [[mixture.draw(8 * epoch + place) for place in range(8)] for epoch in range(3)]
    everything = [(task.name, number) for task in tasks for number in range(len(task))]
    assert all(sorted((task.name, number) for task, number in epoch) == everything for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_an_example_is_a_function_of_seed_and_index():
    def drawn(seed: int, indices) -> list:
        mixture = Mixture([Numbers("a", 50), Numbers("b", 90), Numbers("c", 5)], [2, 1, 1e-2], seed)
        return [(task.name, number) for task, number in map(mixture.draw, indices)]

    there = drawn(3, range(400))
    assert drawn(3, reversed(range(400))) == there[::-1]
    assert drawn(4, range(400)) != there
    assert any(name == "c" for name, _ in there)  # a small weight is still drawn


def test_one_in_three_generated_examples_comes_after_another():
    mixture = open_mixture("addition,identity", "train")
    for index in range(60):
        task, number = mixture.draw(index)
        example = task.example(number)
        before = mixture.before(index, task, example)
        assert before == mixture.before(index, task, example)
        check_messages([*before, *example.messages])  # a system message is at the beginning or nowhere
        assert bool(before) == (index % 3 == 0 and example.messages[0]["role"] != "system")
    records = Mixture([Numbers("a", 9)], [1])  # somebody's conversations are theirs: nothing is added
    assert not any(records.before(index, records.tasks[0], records.tasks[0].example(index)) for index in range(9))


def test_the_corpus_is_the_mixture_as_tokens():
    mixture, tokenizer = Mixture([Numbers("a", 50)], [1]), tiny_tokenizer()
    documents = MixtureCorpus(mixture, tokenizer).read_block(1)
    assert [d.tolist() for d in documents] == [
        render(tokenizer, task.example(number).messages).ids
        for task, number in map(mixture.draw, range(len(documents), 2 * len(documents)))
    ]


TOOL_USE = [
    *(
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "two"},
    ),
    *({"role": "assistant", "content": "second"}, {"role": "tool", "content": "no"}),
    {"role": "assistant", "content": "third"},
]


class Chats(Numbers):
    def example(self, index: int) -> Example:
        return Example(TOOL_USE)


@pytest.mark.parametrize(
    ("learn", "too_long", "room", "learned"),
    [
        ("all", "drop", 99, "first second third"),
        ("last", "drop", 99, "second third"),  # all that answers the user's last message, as ms-swift's last_round
        ("all", "cut", 18, "first"),
        ("all", "drop", 18, ""),
    ],
)
def test_what_sft_learns_of_a_long_chat(capsys, learn, too_long, room, learned):
    tokenizer = tiny_tokenizer()
    mixture = Mixture([Chats("a", 1)], [1], learn=learn, too_long=too_long)
    (one,) = mixture.rendered_chat(tokenizer, 1, room)
    marks = {tokenizer.encode_special("<|assistant_end|>"): [*b" "]}
    kept = [token for token, is_target in zip(one.ids, one.mask, strict=True) if is_target]
    text = tokenizer.decode(id for token in kept for id in marks.get(token, [token]))
    assert text.strip() == learned and one.cut == (room < 99) and bool(one.ids) == bool(learned)
    report_learned([one], tokenizer)
    shown = "".join(capsys.readouterr())
    assert ("learned: 0.0% of the replies" in shown) == ("--too_long cut" in shown) == (not learned) and (
        "1 text cut at" in shown
    ) == (one.cut and bool(learned))


@pytest.mark.parametrize("family", ["qwen2", "llama3"])
def test_conversations_of_every_family_are_documents_of_their_own(family_tokenizers, family):
    """The document mask of mid-training finds them by their begin token, which Qwen's chats have not."""
    mixture, tokenizer = Mixture([Numbers("a", 50)], [1]), family_tokenizers[family]
    documents = MixtureCorpus(mixture, tokenizer).read_block(0)[:6]
    row = torch.tensor([[token for document in documents for token in document.tolist()]])
    segments = segments_of(row, tokenizer.get_bos_token_id())
    assert segments.ends == list(itertools.accumulate(map(len, documents)))


def test_a_flag_names_tasks_paths_and_weights(tmp_path):
    file = tmp_path / "chat:s.jsonl"
    file.write_text("")
    assert parse_tasks(f"stories:2, gsm8k={tmp_path}:0.5,{file}:3,addition") == [
        TaskSpec("stories", None, 2.0),
        TaskSpec("gsm8k", str(tmp_path), 0.5),
        TaskSpec("conversations", str(file), 3.0),
        TaskSpec("addition", None, 1.0),
    ]
    names = f"mine={file}:2,org/name={tmp_path}@train_sft,org/name,a-b/c.d/en@train_sft:0.5,{tmp_path}@test"
    assert parse_tasks(names) == [
        TaskSpec("conversations", str(file), 2.0, "mine"),
        TaskSpec("conversations", f"{tmp_path}@train_sft", 1.0, "org/name"),
        TaskSpec("conversations", "org/name", 1.0, "org/name"),
        TaskSpec("conversations", "a-b/c.d/en@train_sft", 0.5, "a-b/c.d/en@train_sft"),
        TaskSpec("conversations", f"{tmp_path}@test", 1.0),
    ]


WRONG_FLAGS = {
    "": "empty",
    " , ": "empty",
    "storys": "did you mean stories",
    "stories:x": "'x'",
    "stories:0": "above 0",
    "stories:-1": "above 0",
    "stories:nan": "above 0",
    "stories:1e400": "a finite number above 0",
    "stories=/tmp": "no path",
    "gsm8k=": "no path",
    "first_questions": "first_questions=PATH",
    "/nowhere.jsonl": "no such task or file",
    "org/chats.jsonl": "no such task or file",
    "mine=/nowhere": "no such task or file",
    "storys=/tmp": "did you mean stories",
    "../no_such_folder@train": "no such task or file",
    "org/name/a/b": "no such task or file",
}


@pytest.mark.parametrize("flag", WRONG_FLAGS)
def test_a_wrong_flag_is_one_line(flag):
    line = complaint(lambda: parse_tasks(flag))
    assert line.startswith("--tasks")
    assert WRONG_FLAGS[flag] in line


def test_the_defaults_follow_the_pretraining_text(tmp_path):
    assert default_tasks("demo") == default_tasks("") == default_tasks(str(tmp_path)) == BUILT_IN_TASKS
    assert default_tasks("climbmix") == default_tasks("some-org/some-text") == HUB_TASKS
    assert default_tasks(f"{tmp_path}:0.9,climbmix:0.1") == HUB_TASKS
    assert default_tasks(f"{tmp_path}:0.9,demo:0.1") == BUILT_IN_TASKS
    assert (default_tasks("demo", stage="rl"), default_tasks("climbmix", stage="rl")) == (BUILT_IN_RL_TASKS, "gsm8k")
    assert (default_tasks("demo", stage="dpo"), default_tasks("climbmix", stage="dpo")) == ("stories", PAIRS)
    # A Chinese chat set for a Chinese corpus, and no task that the hub does not have.
    assert default_tasks("fineweb-edu-chinese") == default_tasks("fineweb-edu-chinese", "modelscope") == CHINESE_TASKS
    here = {spec.name for spec in parse_tasks(default_tasks("fineweb-edu", "modelscope"))}
    assert {spec.name for spec in parse_tasks(HUB_TASKS)} - here == {"smoltalk"}
    for hub, tasks in (("hf", HUB_TASKS), ("hf", CHINESE_TASKS), ("modelscope", CHINESE_TASKS)):
        assert all(hub in TASKS[spec.name].sources for spec in parse_tasks(tasks) if spec.name in TASKS)
    assert "modelscope" in TASKS[default_tasks("fineweb-edu-chinese", stage="rl")].sources
    for data in ("demo", "climbmix"):
        require_pairs(parse_tasks(default_tasks(data, stage="dpo")))
    assert "--tasks smoltalk: " in complaint(lambda: require_pairs(parse_tasks("stories,smoltalk")))
    for names in (BUILT_IN_TASKS, HUB_TASKS, CHINESE_TASKS):
        assert all(spec.name in task_names() for spec in parse_tasks(names))


TRAINED = [name for name in generated_tasks() if name != "new_stories"]
SPLITS = [*((name, "train") for name in TRAINED), *((name, "test") for name in generated_tasks())]


@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_a_built_in_example_and_its_pair_have_a_right_reply_and_wrong_ones(name, split):
    task = open_task(TaskSpec(name, None, 1.0), split)
    assert task.name == name and task.kind == "generative"
    for index in (*range(15), len(task) - 1):
        pair, example = task.pair(index), task.example(index)
        assert example == task.example(index) and pair == task.pair(index)
        assert [*pair.question, pair.chosen] == example.messages and pair.chosen["role"] == "assistant"
        assert pair.question[-1]["role"] == "user"
        check_messages(example.messages)
        check_messages([*pair.question, pair.rejected])
        reply = parts_of(pair.chosen["content"])
        assert task.grade(example, reply)
        for wrong in (pair.rejected["content"], f"{text_of(reply)[:-4]}zq 7.", []):
            assert not task.grade(example, parts_of(wrong))


def test_only_a_reply_that_is_compared_is_learned():
    task = open_task(TaskSpec("identity", None, 1.0), "train")
    pair = next(pair for pair in map(task.pair, range(100)) if len(pair.question) > 1)
    for conversation, reply in zip(pair.conversations, (pair.chosen, pair.rejected), strict=True):
        rendered = render(tiny_tokenizer(), conversation)
        alone = render(tiny_tokenizer(), [pair.question[-1], reply])
        assert rendered.target_count == alone.target_count > 0


def test_a_sum_is_graded_by_its_call_and_by_what_it_states():
    task = open_task(TaskSpec("addition", None, 1.0), "test")
    example = next(e for e in map(task.example, range(100)) if e.messages[-1]["content"][0]["text"])
    call, output, stated = example.messages[-1]["content"]
    assert task.grade(example, [call, output, stated])
    assert not task.grade(example, [stated])  # without the tool
    a, b = call["text"].split("+")
    for text in (f"{a}-{b} = {example.answer}.", f"{example.answer}.", f"1*1 = 7, {stated['text']}x", f"{a}+{b} = 7."):
        assert not task.grade(example, [call, output, {"type": "text", "text": text}])
    swapped = {"type": "text", "text": f"{b}+{a} = {example.answer}."}
    assert task.grade(example, [call, output, swapped])


def test_the_built_in_mixture_opens_offline():
    mixture = open_mixture(BUILT_IN_TASKS, "train")
    assert {mixture.draw(i)[0].name for i in range(600)} == {spec.name for spec in parse_tasks(BUILT_IN_TASKS)}
    for name in task_names():
        assert task_class(name).name in (name, "first_questions")  # several lists are tasks of one class
        assert task_class(name).kind in ("generative", "choice", "dialogue")
