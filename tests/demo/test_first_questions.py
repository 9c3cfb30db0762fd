"""The two lists of a hundred questions: how a reply is graded, and that training does not contain the lists."""

import json
import random
import re
from pathlib import Path

import pytest
from tiny import complaint

from nanochat.conversation import text_of
from nanochat.demo import writer
from nanochat.demo.first_questions import FirstQuestions
from nanochat.demo.plots import OPEN_ROLES, plots
from nanochat.demo.small_talk import SLOT, groups
from nanochat.demo.stories import orders
from nanochat.task import Example, turn
from nanochat.tasks.flag import TaskSpec, generated_tasks, open_task, parse_tasks

LIST = Path(__file__).resolve().parents[1] / "first_questions.jsonl"
SECOND = LIST.with_name("second_questions.jsonl")
# Openings that everybody types: the list and the train split both have them.
COMMON = {
    *("hi", "hello", "hey there", "good morning", "hi how are you", "how are you today", "thanks", "bye", "ok"),
    *("who are you", "whats your name", "what is your name", "what are you", "are you human", "how old are you"),
    *("what can you do", "help", "what do you know", "tell me about yourself", "nice to meet you", "tell me a story"),
    *("hello nanochat", "你好", "你是谁", "谢谢"),
}


def plain(text: str) -> str:
    """Without case and marks: two spellings of one question are equal."""
    return re.sub(r"[^\w ]", "", text.lower()).strip()


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# How many questions of each sort a list has at least.
SORTS = {
    LIST: {"number": 25, "honest": 35, "story": 4, "not ASCII": 6},
    SECOND: {"number": 25, "honest": 20, "story": 18, "not ASCII": 4, "before": 14, "not": 20, "json": 4},
}


@pytest.mark.parametrize("path", SORTS, ids=["first", "second"])
def test_there_are_a_hundred_different_questions_of_every_sort(path):
    rows = [row | ({} if row["question"].isascii() else {"not ASCII": True}) for row in rows_of(path)]
    assert len(rows) == len({plain(row["question"]) for row in rows}) == 100
    for sort, least in SORTS[path].items():
        assert sum(row.get(sort, False) is not False for row in rows) >= least, sort
    task = open_task(TaskSpec(path.stem, str(path), 1.0), "test")
    assert type(task) is FirstQuestions
    for number, row in enumerate(rows):  # each one is a conversation
        assert task.example(number).question[-1] == {"role": "user", "content": row["question"]}
        assert not task.grade(task.example(number), [])
        assert len(task.example(number).question) == len(row.get("before", [])) + 1


@pytest.mark.parametrize("path", sorted(LIST.parent.glob("held_out/*")), ids=lambda path: path.stem)
def test_an_empty_reply_to_a_held_out_list_is_wrong(path):
    task = open_task(TaskSpec(path.stem, str(path), 1.0), "test")
    assert len(task) >= 20 and not any(task.grade(task.example(number), []) for number in range(len(task)))


def test_each_requested_story_can_be_told():
    for row in rows_of(SECOND):
        if isinstance(row.get("story"), dict):
            assert any(tells_of(plot, row["story"]) for plot in plots().values()), row["question"]


def tells_of(plot, wanted: dict[str, str]) -> bool:
    """Whether stories of this plot have these roles, and may have these words in them."""
    words = {draw.role.rstrip("23"): draw.words for draw in plot.draws}
    words |= {role: [row[role] for row in plot.rows] for role in (plot.rows[0] if plot.rows else ())}
    return all(
        role in words and (role in OPEN_ROLES or any(word in choice for choice in words[role]))
        for role, word in wanted.items()
    )


def fixed_ways(*, held_out: bool) -> set[str]:
    """The ways to ask of stories and small talk that have no slots; the last way of each line is held out."""
    ways = {plain(order) for order in orders("usual")}
    for group in (*groups("identity"), *groups("unknown")):
        for line in group.lines:
            ways |= {plain(way) for way in (line if held_out else line[:-1]) if not SLOT.search(way)}
    return ways


def test_training_has_none_of_them_but_what_everybody_types():
    first, second = ({plain(row["question"]) for row in rows_of(path)} for path in (LIST, SECOND))
    assert not first & second
    assert first & fixed_ways(held_out=False) <= {plain(text) for text in COMMON}
    assert not second & fixed_ways(held_out=True)


def test_no_generated_task_draws_a_question_of_the_second_list():
    questions = {chat(row.get("before", []), row["question"]) for row in rows_of(SECOND)}
    for name in set(generated_tasks()) - {"new_stories"}:  # which is for evaluation only
        task = open_task(TaskSpec(name, None, 1.0), "train")
        for number in range(150):
            asked = [message for message in task.example(number).question if message["role"] != "system"]
            assert chat(asked[:-1], text_of(asked[-1]["content"])) not in questions, (name, number)


def chat(before: list[dict], question: str) -> tuple[str, ...]:
    """The texts of a chat up to its question, without the marks and the case in which somebody types."""
    texts = [text_of(message["content"]) for message in before]
    return tuple(text.lower().strip(" .!?") for text in [*texts, question])


GRADES = [
    ({"number": "4"}, "2+2 = 4.", True),
    ({"number": "4"}, "4", True),
    ({"number": "4"}, "2+2 = 14.", False),
    ({"number": "4"}, "4+862 = 866.", False),
    ({"number": "-5"}, "3-8 = -5.", True),
    ({"number": "4"}, "I do not know that.", False),
    ({"number": "7000"}, "5,000+2,000 = 7,000.", True),
    ({"number": "3"}, "1,2,3", True),
    ({"untold": True}, "The story does not say.", True),
    ({"untold": True}, "I do not know that.", True),
    ({"untold": True}, "The story is about Mei the fox.", False),
    ({"number": "4", "group": "sum"}, "4", True),
    ({"recalls": "hero"}, "The story does not say.", False),  # no story came before
    ({"honest": True}, "I do not know that. I only know little stories and sums.", True),
    ({"honest": True}, "这个我不知道。", True),
    ({"honest": True}, "The capital is Tom.", False),
    ({"honest": True, "says": ["Paris"]}, "It is Paris.", True),
    ({"says": ["nanochat"]}, "My name is Nanochat.", True),
    ({"story": "cat"}, "Once upon a time there was a cat.", False),  # it is no whole story
    ({"says": ["hello"], "not": ["Once upon a time"]}, "Hello! I am nanochat.", True),
    ({"says": ["hello"], "not": ["Once upon a time"]}, "Hello! once upon a time there was a fox.", False),
    ({"number": "4", "not": ["5"]}, "2+2 is 5, or 4.", False),
    ({"json": {"name": "Ulrich", "age": 9}}, '{"age": 9, "name": "Ulrich"}\n', True),
    ({"json": {"name": "Ulrich", "age": 9}}, '{"age": "9", "name": "Ulrich"}', False),
    ({"json": {"name": "Ulrich"}}, '{"name": "Ulrich", "age": 9}', False),
    ({"json": {"name": "Ulrich"}}, 'Here it is: {"name": "Ulrich"}', False),
    ({"json": {"name": "Ulrich"}}, "[" * 100_000, False),
]


@pytest.mark.parametrize(("rules", "reply", "is_right"), GRADES)
def test_a_reply_is_right_or_honest(tmp_path, rules, reply, is_right):
    path = tmp_path / "list.jsonl"
    path.write_text(json.dumps({"question": "?", **rules}), encoding="utf-8")
    task = FirstQuestions("test", str(path))
    assert task.grade(task.example(0), [{"type": "text", "text": reply}]) == is_right


MIA = (
    "Once upon a time there was a brave {kind} named Mia who lived in a teapot. The thing she loved best was a red "
    "ball. One morning the red ball was gone. First she looked under the bed, where there was only some dust. A wise "
    'owl heard her and came to see what was wrong. "Have you looked behind the door?" asked the wise owl. And there it '
    "was, the red ball, behind the door. Mia hugged the wise owl and said thank you. Mia smiled about it for a whole "
    "week."
)
STORIES = [
    ({"kind": "fox", "hero": "Mia"}, "fox", True),
    ({"kind": "FOX", "hero": "Mia", "trait": "brave", "object": "ball", "colour": "red", "spot": "door"}, "fox", True),
    ({"kind": "fox", "hero": "Mi"}, "fox", False),  # words are whole words
    ({"kind": "fox", "hero": "Tom"}, "fox", False),
    ({"kind": "wolf", "hero": "Mia"}, "fox", False),
    ({"kind": "fox", "weather": "rainy"}, "fox", False),  # the story does not mention the weather
    ({"kind": "zorilla", "hero": "Mia"}, "zorilla", True),  # a kind that the grammar does not have, as requested
    ("zorilla", "zorilla", True),
    ({"hero": "Mia"}, "zorilla", False),
    ("Mia", "zorilla", False),
    ("zebra", "fox", False),
]


@pytest.mark.parametrize(("wanted", "kind", "is_right"), STORIES)
def test_a_story_has_the_roles_that_were_requested(tmp_path, wanted, kind, is_right):
    path = tmp_path / "list.jsonl"
    for question, is_told in ({"question": "?", "story": wanted}, is_right), ({"question": kind, "story": {}}, True):
        path.write_text(json.dumps(question))
        task = FirstQuestions("test", str(path))
        assert task.grade(task.example(0), [{"type": "text", "text": MIA.format(kind=kind)}]) == is_told


RECALLED = [
    ("hero", "Her name was Mia.", True),
    ("hero", "Her name was Tom.", False),
    ("kind", "Mia is a fox.", True),
    ("kind", "Mei is a fox.", False),
    ("kind", "Glooba, a fox.", False),  # a name that no table has, either
    ("helper", "An owl helped her.", True),
    ("helper", "The story does not say.", False),
    ("object", "It was the red ball.", True),
    ("want", "Mia wanted to find her ball.", True),
    ("want", "Mia wanted to swim.", False),
    ("end", "She hugged the wise owl.", True),
    ("end", "Mia found it.", False),
]


@pytest.mark.parametrize(("role", "reply", "is_right"), RECALLED)
def test_what_the_chats_last_story_says_is_recalled(role, reply, is_right):
    assert recalls(role, MIA.format(kind="fox"), reply) == is_right


def recalls(role: str, story: str, reply: str) -> bool:
    said = [MIA.format(kind="cat"), story, "That was the whole story."]
    chat = [message for text in said for message in turn("Go on.", text)]
    example = Example([*chat, *turn("?", "")], {"recalls": role, "not": []})
    return FirstQuestions("test", str(LIST)).grade(example, [{"type": "text", "text": reply}])


ASKED = {"Who helped": "helper", "What kind": "kind", " live?": "home", "they find?": "object", "named?": "hero",
         "to learn?": "want", "in the end?": "end"}  # fmt: skip


def test_the_answers_of_the_grammar_are_right_for_their_story_only():
    stories = [writer.story(random.Random(number), "val") for number in range(90)]
    right, wrong = set(), 0
    for story, other in zip(stories, stories[1:], strict=False):
        for question, answer in writer.questions(story):
            for role in (role for words, role in ASKED.items() if words in question):
                assert recalls(role, story.text, answer), (story.text, question, answer)
                right.add(role)
                wrong += recalls(role, other.text, answer)
    assert right == {*ASKED.values()} and wrong < 30


def test_the_earlier_turns_of_the_chat_come_before_the_question(tmp_path):
    sum_reply = [
        {"type": "text", "text": "1+2 = "},
        {"type": "python", "text": "1+2"},
        {"type": "python_output", "text": "3"},
        {"type": "text", "text": "3."},
    ]
    before = [{"role": "user", "content": "Hi"}, *turn("1+2", sum_reply)]  # the model replies to the first
    path = tmp_path / "list.jsonl"
    path.write_text(json.dumps({"before": before, "question": "plus 5?", "number": "8"}))
    task = FirstQuestions("test", str(path))
    assert task.example(0).question == [*before, {"role": "user", "content": "plus 5?"}]
    assert task.grade(task.example(0), [{"type": "text", "text": "3+5 = 8."}])
    assert not task.grade(task.example(0), sum_reply)


def test_it_is_named_with_its_path_and_never_trained_on(tmp_path):
    assert parse_tasks(f"first_questions={LIST}") == [TaskSpec("first_questions", str(LIST), 1.0)]
    line = complaint(lambda: open_task(TaskSpec("first_questions", str(LIST), 1.0), "train"))
    assert f"{LIST} is for chat_eval" in line


RULES: list[dict] = [
    {},
    {"not": ["4"]},  # nothing says what is right
    {"number": "4", "before": [{"role": "assistant", "content": "hello"}]},
    {"recalls": "colour"},
    {"right": "4"},
    {"number": 4},
    {"says": "hello"},
    {"says": [1]},
    {"honest": False},
    {"story": 5},
    {"story": {"speices": "fox"}},
    {"number": "4", "not": "x"},
    {"number": "4", "before": None},
]


def test_a_row_that_is_no_question_is_named(tmp_path):
    for row in (*({"question": "?"} | rules for rules in RULES), {"answer": "4"}, ["?"]):
        damaged = tmp_path / "damaged.jsonl"
        damaged.write_text(json.dumps(row))
        task = open_task(TaskSpec("first_questions", str(damaged), 1.0), "test")
        assert str(damaged) in complaint(lambda task=task: task.example(0))
