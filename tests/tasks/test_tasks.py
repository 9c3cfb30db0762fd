"""The tasks that come from datasets, from files of one's own, and the spelling ones: rendering, grading, damage.

Each grader is tried on replies that a model could write: every reference must pass, every corrupted one fail.
"""

import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiny import complaint, write_rows

from nanochat.calculator import calculate
from nanochat.conversation import Part, parts_of, text_of
from nanochat.data import catalog, hub
from nanochat.demo.writer import held_out
from nanochat.ground.cli import UserError
from nanochat.task import Example, Task
from nanochat.tasks import spelling
from nanochat.tasks.arc import ArcChallenge, ArcEasy
from nanochat.tasks.gsm8k import Gsm8k, final_number, with_calls
from nanochat.tasks.humaneval import HumanEval
from nanochat.tasks.messages import check_messages
from nanochat.tasks.mmlu import Mmlu
from nanochat.tasks.smoltalk import SmolTalk, SmolTalkChinese
from nanochat.tasks.spelling import LetterCount, Spelling

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
FROM_HUB = (Gsm8k, Mmlu, ArcEasy, ArcChallenge, HumanEval, SmolTalk, SmolTalkChinese)


def reference(example: Example) -> list[Part]:
    return parts_of(example.messages[-1]["content"])


def check(task: Task) -> list[Example]:
    """All examples: each a conversation that ends with the reference, the same at a second call, graded right."""
    examples = [task.example(index) for index in range(len(task))]
    for index, example in enumerate(examples):
        check_messages(example.messages)
        assert example.messages[-1]["role"] == "assistant" and example.question[-1]["role"] == "user"
        assert task.example(index) == example
        assert task.grade(example, reference(example)) and task.reward(example, reference(example)) == 1.0
    return examples


# ---- GSM8K -----------------------------------------------------------------------------------------------

CLIPS = {
    "question": "Natalia sold 48 clips, then half as many. How many?",
    "answer": "She sold 48/2 = <<48/2=24>>24 clips.\nThat is 48+24 = $<<48+24=72>>72.\n#### 72",
}


def calls(text: str) -> list[Part]:
    """Parts of a text in which `call|output` follows every other `§`."""
    parts: list[Part] = []
    for number, piece in enumerate(text.split("§")):
        if number % 2:
            call, output = piece.split("|")
            parts += [{"type": "python", "text": call}, {"type": "python_output", "text": output}]
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts


def test_gsm8k_marks_become_calls(tmp_path):
    task = Gsm8k("test", write_rows(tmp_path / "test.jsonl", [CLIPS]))
    reply = calls("She sold 48/2 = §48/2|24§24 clips.\nThat is 48+24 = $§48+24|72§72.\n#### 72")
    question = {"role": "user", "content": CLIPS["question"]}
    assert task.example(0).messages == [question, {"role": "assistant", "content": reply}]
    assert (task.name, task.kind, task.baseline, len(task)) == ("gsm8k", "generative", 0.0, 1)
    assert with_calls("<<1+1=2>><<2+2=4>>") == calls("§1+1|2§§2+2|4§")


NUMBERS: dict[str | None, list[str]] = {
    "72": ["#### 72", "####72.0", "#### 72 clips", "#### 72..."],
    "1080": ["#### $1,080.00."],
    "18000": ["#### 18,000/year"],
    "-5": ["#### -$5", "#### \u22125"],
    "-5.5": ["#### $ -5.50"],
    "0.5": ["#### .5"],
    "0": ["#### -0.0"],
    "2": ["#### 1\nNo:\n#### 2\n"],
    "100": ["#### 100"],
    None: ["#### 1/2", "#### 10/3", "#### 1,2/3", "#### 1.2.3", "#### seven", "#### .", "#### 72\n####", "72", ""],
}


@pytest.mark.parametrize("number", NUMBERS)
def test_gsm8k_reads_the_last_number(number):
    assert {final_number(reply) for reply in NUMBERS[number]} == {number}


def test_gsm8k_grades_the_text_not_the_calls(tmp_path):
    task = Gsm8k("test", write_rows(tmp_path / "test.jsonl", [CLIPS]))
    example = task.example(0)
    assert task.grade(example, [{"type": "text", "text": "#### "}, {"type": "text", "text": "72.0"}])
    assert not task.grade(example, [{"type": "text", "text": "#### "}, {"type": "python_output", "text": "72"}])
    assert not task.grade(example, [{"type": "python", "text": "#### 72"}])
    assert not task.grade(example, [])


@pytest.mark.skipif(not (DATA / "gsm8k").is_dir(), reason="the real GSM8K is not next to this checkout")
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.soak)])
def test_gsm8k_of_the_hub(every):
    rng = random.Random(0)
    task = Gsm8k("test", str(DATA / "gsm8k"))
    assert len(task) == 1319 and len(Gsm8k("train", str(DATA / "gsm8k"))) == 7473
    for index in range(0, 1319, every):
        example = task.example(index)
        reply = reference(example)
        spell = {"text": "{}", "python": "<<{}=", "python_output": "{}>>"}
        source = "".join(spell[part["type"]].format(part["text"]) for part in reply)
        assert source == task.records[index]["answer"]  # nothing is lost
        assert task.grade(example, reply)
        body, _, number = reply[-1]["text"].rpartition("#### ")
        wrong = int(number.replace(",", "")) + rng.choice((-10, -1, 1, 10, 1000))
        assert not task.grade(example, [*reply[:-1], {"type": "text", "text": f"{body}#### {wrong}"}])
        assert not task.grade(example, parts_of(text_of(reply).rpartition("####")[0]))  # cut off before the end
        assert not task.grade(example, parts_of(text_of(reply).replace("####", "=")))
        for call, output in zip(reply, reply[1:], strict=False):
            if call["type"] == "python" and output["text"] != "3/4":
                assert float(calculate(call["text"]) or "nan") == pytest.approx(float(output["text"]), rel=1e-9)


# ---- Multiple choice -------------------------------------------------------------------------------------

SKY = {"question": "What colour is the sky?", "subject": "physics", "choices": ["red", "blue", "green", "grey"]}
SKY_TEXT = """Multiple choice: What colour is the sky?
- A: red
- B: blue
- C: green
- D: grey
Answer with the letter alone."""


def spoiled_letters(task: Task, example: Example) -> None:
    """All letters but the right one are wrong, and so is what is no letter."""
    for letter in {*example.letters, "A", "E", "1", "9", "a", "", " ", "The answer is " + example.answer}:
        if letter != example.answer:
            assert not task.grade(example, parts_of(letter))
    assert task.grade(example, parts_of(f" {example.answer}. Because."))


def test_mmlu(tmp_path):
    write_rows(tmp_path / "test.jsonl", [SKY | {"answer": answer} for answer in range(4)])
    task = Mmlu("test", str(tmp_path))
    examples = check(task)
    assert [example.answer for example in examples] == ["A", "B", "C", "D"]
    assert examples[1].messages == [{"role": "user", "content": SKY_TEXT}, {"role": "assistant", "content": "B"}]
    assert examples[1].letters == ("A", "B", "C", "D") and (task.kind, task.baseline) == ("choice", 0.25)
    for example in examples:
        spoiled_letters(task, example)
    for name in ("auxiliary_train.jsonl", "auxiliary_train-00000-of-00001.parquet", "train.jsonl"):
        (tmp_path / name).with_suffix("").mkdir()
        write_rows((tmp_path / name).with_suffix("") / name, [SKY | {"answer": 3}])
        assert Mmlu("train", str((tmp_path / name).with_suffix(""))).example(0).answer == "D"


def arc_row(labels: str, answer: str) -> dict:
    texts = [f"choice {label}" for label in labels]
    return {"id": "1", "question": "Which?", "choices": {"text": texts, "label": list(labels)}, "answerKey": answer}


def test_arc_takes_the_letters_of_the_row(tmp_path):
    rows = [arc_row("ABCD", "C"), arc_row("1234", "4"), arc_row("ABC", "A"), arc_row("ABCDE", "E"), arc_row("123", "1")]
    write_rows(tmp_path / "test.jsonl", rows)
    task = ArcEasy("test", str(tmp_path))
    examples = check(task)
    assert ["".join(example.letters) for example in examples[:2]] == ["ABCD", "1234"]
    assert [example.answer for example in examples[:2]] == ["C", "4"]
    question = "Multiple choice: Which?\n- 1: choice 1\n- 2: choice 2\n- 3: choice 3\nAnswer with the letter alone."
    assert examples[4].messages == [{"role": "user", "content": question}, {"role": "assistant", "content": "1"}]
    for example in examples:
        spoiled_letters(task, example)
    assert (task.baseline, task.name, ArcChallenge.name) == (0.25, "arc_easy", "arc_challenge")
    for name, answer in (("ARC-Easy", "A"), ("ARC-Challenge", "B")):  # a copy of the whole repository
        (tmp_path / "all" / name).mkdir(parents=True)
        write_rows(tmp_path / "all" / name / "test-00000-of-00001.parquet", [arc_row("ABCD", answer)])
    assert [kind("test", str(tmp_path / "all")).example(0).answer for kind in (ArcEasy, ArcChallenge)] == ["A", "B"]


NOT_AS_MANY = "line 1 cannot be used: its choices"
DAMAGE = [
    (Gsm8k, {"question": "?", "answer": "It is 72."}, "line 1 cannot be used: its answer has no line `#### NUMBER`"),
    (Gsm8k, {"question": "?"}, 'line 1 has no "answer"'),
    (Mmlu, SKY | {"answer": 4}, "line 1 cannot be used: its answer is 4"),
    (Mmlu, SKY | {"answer": -1}, "line 1 cannot be used: its answer is -1"),
    (Mmlu, SKY | {"answer": 0, "choices": ["red", "blue"]}, NOT_AS_MANY),
    (Mmlu, SKY | {"answer": 0, "choices": ["red", "blue", "green", 4]}, NOT_AS_MANY),
    (Mmlu, ["a", "list"], "line 1 is not an object with question, choices, answer"),
    (ArcEasy, arc_row("ABCD", "E"), "line 1 cannot be used: its answer 'E'"),
    (ArcEasy, arc_row("ABCD", "C") | {"choices": {"text": ["a"], "label": ["A", "B"]}}, NOT_AS_MANY),
    (ArcEasy, arc_row("ABCD", "C") | {"choices": {"label": ["A", "B"]}}, NOT_AS_MANY),
    (SmolTalk, {"messages": [{"role": "assistant", "content": "Hi!"}]}, "line 1 cannot be used: it has only words"),
    (SmolTalk, {"conversations": []}, 'line 1 has no "messages"'),
]


@pytest.mark.parametrize(("kind", "row", "problem"), DAMAGE)
def test_a_damaged_row_is_named_when_it_is_read(tmp_path, kind, row, problem):
    path = write_rows(tmp_path / "test.jsonl", [row])
    assert complaint(lambda: kind("test", str(path)).example(0)).startswith(f"{path} {problem}")


# ---- HumanEval -------------------------------------------------------------------------------------------

HALF = {
    "task_id": "HumanEval/0",
    "prompt": 'import math\n\n\ndef half(x: int) -> int:\n    """Half of x, rounded down."""\n',
    "canonical_solution": "    return math.floor(x / 2)\n\n",
    "test": "def check(candidate):\n    assert candidate(4) == 2\n    assert candidate(5) == 2\n",
    "entry_point": "half",
}
WHOLE = 'import math\n\n\ndef half(x: int) -> int:\n    """Half of x, rounded down."""\n    return math.floor(x / 2)'


@pytest.fixture
def half(tmp_path) -> HumanEval:
    write_rows(tmp_path / "HumanEval.jsonl", [HALF])
    return HumanEval("test", str(tmp_path))


def test_humaneval_rendering(half):
    example = half.example(0)
    assert example.messages == [
        {
            "role": "user",
            "content": "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n"
            'import math\n\n\ndef half(x: int) -> int:\n    """Half of x, rounded down."""\n```',
        },
        {"role": "assistant", "content": f"```python\n{WHOLE}\n```"},
    ]
    assert (half.name, half.kind, half.baseline) == ("humaneval", "generative", 0.0)


GRADED = {
    True: [
        f"```python\n{WHOLE}\n```",
        f"Here it is:\n\n```py\n{WHOLE}\n```\nIt rounds down.",
        f"```\n{WHOLE}",  # cut off after the code
        WHOLE,
        "```python\ndef half(x):\n    return math.floor(x / 2)\n```",  # without the import
        "```python\n    return math.floor(x / 2)\n```",  # a body alone
        "    return math.floor(x / 2)\n",
        "return math.floor(x / 2)",
        "```python\nprint(half(3))\n```\nThe function:\n```python\ndef half(x):\n    return x // 2\n```",
        "half = lambda x: x // 2",
        "if x:\n    return x // 2\nreturn 0",
        "def half_of(y):\n    return y // 2\nreturn half_of(x)",  # a body: half_of is another function
    ],
    False: [
        "```python\ndef half(x):\n    return math.ceil(x / 2)\n```",
        "```python\ndef half(x)\n    return x // 2\n```",
        "```python\ndef halve(x):\n    return x // 2\n```",
        "```python\n    return\n```",
        "```python\nimport os\nos._exit(0)\n```",  # other ways to leave are in tools/test_sandbox.py
        "Half of x.",
        "",
    ],
}


@pytest.mark.parametrize(("right", "reply"), [(right, reply) for right in GRADED for reply in GRADED[right]])
def test_humaneval_grades_what_the_function_does(half, right, reply):
    assert half.grade(half.example(0), parts_of(reply)) == right


# Rows as HumanEval/32, whose check uses a function of the prompt, and HumanEval/33, whose check calls the function.
DOUBLE = {
    "prompt": "def double(x):\n    return 2 * x\n\n\ndef half(x):\n    pass\n",
    "test": "def check(candidate):\n    assert double(candidate(4)) == 4\n",
}
ITSELF = {"test": "def check(candidate):\n    assert candidate(4) == half(4)\n    assert candidate(5) == half(5)\n"}
RIGHT = "def half(x):\n    return x // 2"
CHECKED = [
    (DOUBLE, RIGHT, True),
    (DOUBLE, "def double(x):\n    return 4\n\n\ndef half(x):\n    return 0\n", False),
    (ITSELF, RIGHT, True),
    (ITSELF, "def half(x):\n    return 7", False),
    (ITSELF, "candidate = lambda x: x // 2\ndef half(x):\n    return 7", False),
]


@pytest.mark.parametrize(("row", "reply", "is_right"), CHECKED)
def test_humaneval_checks_with_its_own_functions(tmp_path, row, reply, is_right):
    task = HumanEval("test", write_rows(tmp_path / "HumanEval.jsonl", [HALF | row]))
    assert task.grade(task.example(0), parts_of(f"```python\n{reply}\n```")) == is_right


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "humaneval").is_dir(), reason="the real HumanEval is not next to this checkout")
@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.soak)])
def test_humaneval_of_the_hub(every):
    task = HumanEval("test", str(DATA / "humaneval"))
    assert len(task) == 164
    examples = [task.example(index) for index in range(0, 164, every)]
    some = examples[::6]
    nothing = [parts_of(f"```python\ndef {e.answer['entry_point']}(*_):\n    return None\n```") for e in some]
    with ThreadPoolExecutor(2) as threads:
        right = list(threads.map(task.grade, examples, map(reference, examples)))
        wrong = list(threads.map(task.grade, some, nothing))
    assert all(right)
    assert not any(wrong)


# ---- Letters ---------------------------------------------------------------------------------------------


def test_spelling_rendering():
    task = Spelling("train")
    example = next(e for e in map(task.example, range(1000)) if e.answer == "bell")
    assert "bell" in example.messages[0]["content"]
    assert example.messages[1] == {"role": "assistant", "content": "The word bell is spelled b-e-l-l."}
    assert (task.name, task.kind, task.baseline, len(task)) == ("spelling", "generative", 0.0, 100_000)


def test_letter_count_rendering():
    task = LetterCount("train")
    examples = [task.example(index) for index in range(4000)]
    example = next(e for e in map(task.example, range(100_000)) if '"balloon".count("l")' in str(e.messages))
    assert example.messages[1]["content"] == calls(
        'The word balloon is spelled b-a-l-l-o-o-n. §"balloon".count("l")|2§The letter l is in it 2 times.'
    )
    shares = [sum(e.answer == count for e in examples) / 4000 for count in ("0", "1")]
    assert shares[0] < 0.3 and shares[1] < 0.6  # no answer is nearly always right
    assert all(calculate(e.messages[1]["content"][1]["text"]) == e.answer for e in examples)
    assert (task.name, task.kind, task.baseline, len(LetterCount("test"))) == ("letters", "generative", 0.0, 1_000)


@pytest.mark.parametrize("kind", [Spelling, LetterCount])
def test_held_out_words_are_in_the_test_split_only(kind):
    requested = {}
    for split in ("train", "test"):
        task = kind(split)
        examples = check(task) if split == "test" else [task.example(index) for index in range(2500)]
        requested[split] = set()
        for example in examples:
            found = re.search(r"The word ([a-z]+) is spelled", text_of(example.messages[1]["content"]))
            assert found and re.search(rf"\b{found[1]}\b", example.messages[0]["content"])
            requested[split].add(found[1])
    assert requested["train"] == set(spelling.words("train")) and requested["test"] == set(spelling.words("test"))
    assert all(held_out("word", word) for word in requested["test"]) and len(requested["test"]) > 40
    assert not any(held_out("word", word) for word in requested["train"]) and len(requested["train"]) > 600


def test_spelling_grades():
    task = Spelling("train")
    example = Example([], "bell")
    for reply in ("b-e-l-l", "It is B-E-L-L!", "b, e, l, l.", "b e l l", "Not b-e-l but b-e-l-l."):
        assert task.grade(example, parts_of(reply)), reply
    for reply in ("bell", "b-e-l", "b-e-l-l-s", "l-l-e-b", "b-e-l-l or b-a-l-l", "b", ""):
        assert not task.grade(example, parts_of(reply)), reply
    for word in map(lambda index: task.example(index).answer, range(200)):
        for wrong in (word[:-1], word + "e", word[1:], word[1] + word[0] + word[2:]):
            assert wrong == word or not task.grade(Example([], word), parts_of("-".join(wrong)))


def test_letter_count_grades():
    task = LetterCount("test")
    for index in range(200):
        example = task.example(index)
        reply = reference(example)
        wrong = str(int(example.answer) + 1)
        assert not task.grade(example, [*reply[:-1], {"type": "text", "text": f"There are {wrong}."}])
        assert not task.grade(example, reply[:-1])  # the tool's output is not yet an answer
        assert task.grade(example, parts_of(f"At first {wrong}, no: {example.answer}"))


# ---- Dialogues -------------------------------------------------------------------------------------------

HELLO = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]


def test_dialogues(tmp_path):
    write_rows(tmp_path / "train.jsonl", [{"messages": HELLO * turns, "source": "made up"} for turns in range(1, 4)])
    task = SmolTalk("train", str(tmp_path))
    assert [task.example(n).messages for n in range(len(task))] == [HELLO, HELLO * 2, HELLO * 3]
    assert (task.name, task.kind) == ("smoltalk", "dialogue")
    with pytest.raises(NotImplementedError, match="smoltalk"):
        task.grade(task.example(0), parts_of("Hi!"))
    (tmp_path / "train.jsonl").unlink()
    write_rows(tmp_path / "train.parquet", [{"conversations": HELLO * n, "score": 5} for n in (1, 3)])
    task = SmolTalkChinese("train", str(tmp_path))
    assert [task.example(n).messages for n in range(2)] == [HELLO, HELLO * 3]
    categories = {split: set(files) for split, files in catalog.TASKS["smoltalk_zh"].splits.items()}
    assert not categories["train"] & categories["test"]


# ---- All that come from a hub ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FROM_HUB)
def test_the_right_split_is_requested_of_the_hub(kind, monkeypatch):
    requested = []

    def fetch_split(*arguments):
        requested.append(arguments)
        raise UserError("enough")

    monkeypatch.setattr(hub, "fetch_split", fetch_split)
    splits = ("test",) if kind is HumanEval else ("train", "test")
    for split in splits:
        with pytest.raises(UserError, match="enough"):
            kind(split, None, "modelscope")
    others = {Mmlu: {"train": "auxiliary_train"}}
    wanted = [(kind.name, others.get(kind, {}).get(split, split), "modelscope") for split in splits]
    assert requested == wanted and all(split in catalog.TASKS[name].splits for name, split, _ in requested)
