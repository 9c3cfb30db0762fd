"""Chat evaluation: exact counts from known replies, letters by their logits, the same at any number of ranks."""

import dataclasses
import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from tiny import complaint, cpu_device, lively_model, run_ranks, save_checkpoint, tiny_config, tiny_tokenizer

from nanochat.conversation import Part, render, render_prompt, text_of
from nanochat.device import Device
from nanochat.engine import Engine, SamplingParams
from nanochat.evals import chat_tasks
from nanochat.evals.chat_tasks import Graded, Result, Settings, evaluate, graded_choices, preferred_letters, readable
from nanochat.evals.paired import wilson_interval
from nanochat.ground import paths
from nanochat.ground.cli import UserError
from nanochat.rollout import Reply
from nanochat.sampling import seed_of
from nanochat.task import Environment, Example, Step, Task
from nanochat.tasks.flag import EnvironmentTask, generated_tasks, task_class
from nanochat.tasks.recorded import choice_example

CONTEXT = 64
GREEDY = SamplingParams(temperature=0)


class Echo(Task):
    """Say a number after me; questions differ in length, and every tenth one is far too long."""

    name, kind, baseline = "echo", "generative", 0.2

    def __init__(self, count: int = 20, too_long: bool = False):
        self.count, self.too_long = count, too_long

    def __len__(self) -> int:
        return self.count

    def example(self, index: int) -> Example:
        words = "now " * (CONTEXT if self.too_long and index % 10 == 0 else index * 7 % 5)
        question = [{"role": "user", "content": f"Say {words}{index}"}]
        return Example([*question, {"role": "assistant", "content": str(index)}], index)

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        return text_of(reply) == str(example.answer)


class Letters(Task):
    """Two to four letters to choose from; the last one is right."""

    name, kind, baseline = "choose", "choice", 0.25

    def __init__(self, count: int = 12, alphabet: str = "ABCD"):
        self.count, self.alphabet = count, alphabet

    def __len__(self) -> int:
        return self.count

    def example(self, index: int) -> Example:
        letters = tuple(self.alphabet[: 2 + index % 3])
        return choice_example("?" * (index + 1), letters, letters, letters[-1])

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        return text_of(reply)[:1] == example.answer


class Known:
    """An engine whose replies a function gives, from the question's text; it remembers what it was asked."""

    def __init__(self, reply: Callable[[str], str | list[int]], device: Device | None = None):
        self.reply, self.device, self.tokenizer = reply, device or cpu_device(), tiny_tokenizer()
        self.calls: list[tuple[list[str], dict[str, Any]]] = []
        self.reply_end = self.tokenizer.encode_special("<|assistant_end|>")
        self.stop_ids = {self.reply_end, self.tokenizer.get_bos_token_id()}

    def generate(self, prompts: Sequence[list[int]], **settings: Any) -> tuple[list[list[int]], list[list[int]]]:
        start, end = (self.tokenizer.encode_special(f"<|user_{edge}|>") for edge in ("start", "end"))
        questions = [
            self.tokenizer.decode(ids[len(ids) - ids[::-1].index(start) : len(ids) - 1 - ids[::-1].index(end)])
            for ids in prompts
        ]
        self.calls.append((questions, settings))
        replies = [self.reply(question) for question in questions]
        new = [self.tokenizer.encode(reply) if isinstance(reply, str) else reply for reply in replies]
        return new, [[1] * len(ids) for ids in new]


def number_in(question: str) -> int:
    return int(question.rpartition(" ")[2])


def tiny_model(context: int = CONTEXT) -> Any:
    return lively_model(tiny_config(vocab_size=tiny_tokenizer().vocab_size, sequence_len=context))


def grade(
    task: Task, engine: Any, sampling: SamplingParams = GREEDY, model: Any = None, keep: int = 10**6, **settings: Any
) -> tuple[Result, list[Graded]]:
    return evaluate(task, model or tiny_model(), engine, Settings(sampling, **{"batch_rows": 4, **settings}), keep)


# ---------------------------------------------------------------------- generative tasks


@pytest.mark.parametrize("batch_rows", [3, 100])
def test_each_question_is_asked_once_and_counted(batch_rows: int) -> None:
    engine = Known(lambda question: str(min(number_in(question), 12)))  # right up to 12
    result, replies = grade(Echo(), engine, SamplingParams(temperature=0, seed=7), batch_rows=batch_rows, max_tokens=9)
    expected = {"kind": "generative", "correct": 13, "total": 20, "questions": 20, "accuracy": 0.65, "baseline": 0.2}
    assert dataclasses.asdict(result).items() >= {**expected, "too_long": 0}.items()
    asked = [question for questions, _ in engine.calls for question in questions]
    assert sorted(map(number_in, asked)) == list(range(20))
    lengths = [*map(len, asked)]  # the longest first, so that a batch has questions of a length
    assert lengths == sorted(lengths, reverse=True) and len(set(lengths)) > 4
    assert [len(questions) for questions, _ in engine.calls[:-1]] == [batch_rows] * (len(engine.calls) - 1)
    assert len(engine.calls) == -(-20 // batch_rows)
    sampling = [one for _, settings in engine.calls for one in settings.pop("sampling")]
    assert sampling == [SamplingParams(temperature=0, seed=seed_of(7, row)) for row in range(20)]
    for _, settings in engine.calls:
        assert settings == {"max_tokens": 9, "keep_stop": True}
    for reply in replies:
        number = number_in(reply.messages[-1]["content"])
        assert reply.reply == [{"type": "text", "text": str(min(number, 12))}]
        assert reply.correct == (number <= 12)
        assert [message["role"] for message in reply.messages] == ["user"]  # without the answer


def test_only_the_assistants_end_is_an_end() -> None:
    """A right text that goes on as a document of its own is wrong; one that is cut off is counted, and graded."""
    engine = Known(lambda question: [])

    def reply(question: str) -> list[int]:
        number = number_in(question)
        last = ([engine.reply_end], [engine.tokenizer.get_bos_token_id()], [])[number % 3]
        return [*engine.tokenizer.encode(str(number)), *last]

    engine.reply = reply
    result, replies = grade(Echo(12), engine)
    assert (result.correct, result.total, result.cut_off) == (8, 12, 4)
    assert (result.low, result.high) == wilson_interval(8, 12)
    numbers = [number_in(one.messages[-1]["content"]) for one in replies if not one.correct]
    assert sorted(numbers) == [1, 4, 7, 10]


class Judged(Echo):
    def measures(self, replies: Any) -> dict[str, Any]:
        return {"even": [one.answer % 2 == 0 if one.answer else None for one, _ in replies], "variety": 0.25}

    def reward(self, example: Example, reply: Any) -> float:
        return 0.5 + self.grade(example, reply) / 2


def test_scores_are_kept_by_question() -> None:
    """Of question 0, whose replies do not count as even or odd, only the accuracy and the reward are kept."""
    turn = iter(range(99))
    result, _ = grade(Judged(), Known(lambda q: q[-1] if next(turn) % 2 else "no"), SamplingParams(), samples=2)
    assert result.measures.items() >= {"even": 9 / 19, "variety": 0.25, "reward": 0.625}.items()
    assert {name: len(scores) for name, scores in result.scores.items()} == {"accuracy": 20, "even": 19, "reward": 20}
    assert result.measures["reward_low"] < 0.625 < result.measures["reward_high"]
    assert list(result.scores["accuracy"].values()).count(0.5) == 10 and sum(result.scores["reward"].values()) == 12.5
    few, _ = grade(Judged(), Known(str), max_examples=5)
    assert few.scores["accuracy"].keys() < result.scores["accuracy"].keys()
    other, _ = grade(Talk(20), Known(str), model=tiny_model(200))
    assert not other.scores["accuracy"].keys() & result.scores["accuracy"].keys()  # other words, the same numbers


def test_fewer_examples_are_the_first_of_one_shuffled_order() -> None:
    def asked(count: int | None) -> list[int]:
        result, replies = grade(Echo(1000), Known(lambda question: ""), max_examples=count)
        assert result.questions == result.total == (count or 1000)
        return [number_in(reply.messages[-1]["content"]) for reply in replies]

    everything = asked(None)
    assert sorted(everything) == list(range(1000))
    assert asked(5) == everything[:5] and asked(40) == everything[:40]
    assert max(everything[:40]) > 500 > min(everything[:40])


def test_several_samples_are_averaged() -> None:
    turn = {"count": 0}

    def reply(question: str) -> str:  # 3 of 4 replies to an even number are right, none to an odd one
        turn["count"] += 1
        number = number_in(question)
        return str(number) if number % 2 == 0 and turn["count"] % 4 else "no"

    engine = Known(reply)
    result, replies = grade(Echo(), engine, SamplingParams(temperature=0.7), samples=4)
    assert (result.correct, result.total, result.questions, result.accuracy) == (30, 80, 20, 0.375)
    alone, _ = grade(Echo(40), Known(lambda q: str(number_in(q)) if number_in(q) < 15 else ""))
    assert alone.accuracy == 0.375 and alone.high - alone.low < result.high - result.low  # of 20 questions, not of 80
    assert len(replies) == 20
    assert all(len(set(questions)) == 1 for questions, _ in engine.calls)  # the four go together


def test_a_question_that_does_not_fit_is_wrong_and_counted() -> None:
    engine = Known(lambda question: str(number_in(question)))
    result, replies = grade(Echo(too_long=True), engine, SamplingParams(), samples=3)
    assert (result.correct, result.total, result.questions, result.too_long) == (54, 60, 20, 2)
    assert result.accuracy == 0.9
    assert len(replies) == 18
    nothing, replies = grade(Echo(1, too_long=True), Known(lambda question: "0"))
    assert (nothing.correct, nothing.total, nothing.too_long, replies) == (0, 1, 1, [])


@pytest.mark.parametrize("room", [-1, 0, 1])
def test_a_prompt_may_fill_all_but_one_token_of_the_context(room: int) -> None:
    class One(Echo):
        def example(self, index: int) -> Example:
            return Example([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "y")

    length = len(render_prompt(tiny_tokenizer(), One().example(0).question))
    engine = Engine(tiny_model(length + room), tiny_tokenizer(), cpu_device())
    generative, _ = grade(One(1), engine, model=engine.model)
    assert generative.too_long == (room < 1)

    class OneLetter(Letters):
        def example(self, index: int) -> Example:
            return dataclasses.replace(One().example(0), answer="b", letters=("a", "b"))

    choice, _ = grade(OneLetter(1), engine, model=engine.model)
    assert choice.too_long == (room < 0)  # nothing is written: the prompt may fill it all


class Talk(Echo):
    """One to three messages in a row; right where each reply is its number, which the message says, too."""

    def example(self, index: int) -> Example:
        asked = [{"role": "user", "content": f"Say it for {turn}"} for turn in range(1 + index % 3)]
        return Example([*asked, {"role": "assistant", "content": ""}], 1 + index % 3)

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        said = [text_of(message["content"]) for message in example.question if message["role"] == "assistant"]
        return [*said, text_of(reply)] == [str(turn) for turn in range(example.answer)]


@pytest.mark.parametrize(("context", "right"), [(200, 9), (72, 6)])
def test_the_model_itself_replies_where_a_chat_lacks_a_reply(context: int, right: int) -> None:
    class Counting(Known):
        def generate(self, prompts: Sequence[list[int]], **settings: Any) -> Any:
            assert max(map(len, prompts)) < context
            start = self.tokenizer.encode_special("<|assistant_start|>")
            new, masks = super().generate(prompts, **settings)  # the number in the message
            counted = [self.tokenizer.encode(str(ids.count(start) - 1)) for ids in prompts]
            return [said if said == turn else [] for said, turn in zip(new, counted, strict=True)], masks

    engine = Counting(lambda question: str(number_in(question)))
    result, replies = grade(Talk(9), engine, SamplingParams(seed=7), tiny_model(context))
    assert (result.correct, result.total, result.too_long) == (right, 9, 0)
    assert result.places == [(3, 3), (3, 3), (right - 6, 3)]
    for one in replies:
        assert [message["role"] for message in one.messages] == (["user", "assistant"] * 3)[: len(one.messages)]
    assert [len(settings["sampling"]) for _, settings in engine.calls] == [2, 1, 4, 3, 1, 4, 1, 1, 1]
    seeds = [sampling.seed for _, settings in engine.calls for sampling in settings["sampling"]]
    assert len(set(seeds)) == len(seeds) == 18  # each reply is drawn separately


# ---------------------------------------------------------------------- reference answers fed back


@pytest.mark.parametrize("name", generated_tasks())
def test_chosen_replies_score_all_and_rejected_ones_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second one is cut off before its end."""
    monkeypatch.setattr(task_class(name), "__len__", lambda task: 50)
    tokenizer, task = tiny_tokenizer(), task_class(name)("test")
    right: dict[tuple[int, ...], list[int]] = {}
    wrong: dict[tuple[int, ...], list[int]] = {}
    for number, pair in enumerate(map(task.pair, range(len(task)))):
        prompt = render_prompt(tokenizer, pair.question)
        for replies, reply in ((right, pair.chosen), (wrong, pair.rejected)):
            ids = render(tokenizer, [*pair.question, reply]).ids
            assert ids[: len(prompt)] == prompt and ids[-1] == tokenizer.encode_special("<|assistant_end|>")
            replies[tuple(prompt)] = ids[len(prompt) : len(ids) - number % 2]

    class Table(Known):
        def __init__(self, table: dict[tuple[int, ...], list[int]]):
            super().__init__(lambda question: "")
            self.table = table

        def generate(self, prompts: Sequence[list[int]], **settings: Any) -> Any:
            new = [self.table[tuple(prompt)] for prompt in prompts]
            return new, [[1] * len(ids) for ids in new]

    settings = {"batch_rows": 32, "model": tiny_model(4096)}
    result, replies = grade(task, Table(right), **settings)
    assert (result.correct, result.total, result.too_long) == (50, 50, 0)
    assert any("->" in readable(one.reply) for one in replies) == (
        name in ("addition", "arithmetic", "letters", "memory")
    )
    assert grade(task, Table(wrong), **settings)[0].correct == 0


class Countdown(Environment):
    """Each reply is one less than the number before."""

    def __init__(self, rng: random.Random):
        self.left = rng.randint(1, 5)

    def start(self) -> list[Any]:
        return [{"role": "user", "content": f"{self.left} left"}]

    def step(self, reply: Any) -> Step:
        self.left -= 1
        if text_of(reply) != str(self.left):
            return Step()
        return Step(self.start()) if self.left else Step(reward=1.0)


class Countdowns(EnvironmentTask):
    name = "countdown"
    environment_class = Countdown


@pytest.mark.parametrize("is_best", [True, False])
def test_the_episodes_of_an_environment_are_played(is_best: bool, monkeypatch) -> None:
    tokenizer = tiny_tokenizer()

    def sampler(prompts: Sequence[Sequence[int]], settings: Any, max_tokens: int) -> list[Reply]:
        replies = []
        for prompt in prompts:
            left = int(re.findall(r"(\d+) left", tokenizer.decode(prompt))[-1])
            move = str(left - 1) if is_best else "none"
            ids = [*tokenizer.encode(move), tokenizer.encode_special("<|assistant_end|>")]
            replies.append(Reply(ids, [1] * len(ids), [0.0] * len(ids), "complete"))
        return replies

    monkeypatch.setattr("nanochat.evals.chat_tasks.EngineSampler", lambda *_: sampler)
    result, replies = grade(Countdowns("test"), Known(str), max_examples=60, model=tiny_model(300))
    assert (result.questions, result.accuracy) == (60, float(is_best))
    assert (max(len(reply.messages) for reply in replies) > 3) == is_best


# ---------------------------------------------------------------------- choice tasks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_answer_is_the_letter_that_the_model_prefers_alone(dtype: torch.dtype) -> None:
    """Of the question's own letters; nothing is sampled. In bf16 the logits are computed in bf16."""
    tokenizer = tiny_tokenizer()
    device = cpu_device(dtype=dtype)
    exact = tiny_model()
    model = lively_model(exact.config, kernels=device.kernels)
    letters = [tokenizer.encode(text)[0] for text in "ABCDEFGH"]
    prompts = [torch.randint(0, 256, (length,)).tolist() for length in (5, 60, 23, 64, 9, 31, 12, 40)]
    rows = [letters[: 2 + i % 7] for i in range(8)]
    preferred = preferred_letters(model, prompts, rows, device)
    compared = []
    for prompt, row, chosen in zip(prompts, rows, preferred, strict=True):
        logits = exact(torch.tensor([prompt]))[0, -1][row]
        if dtype == torch.float32 or logits.topk(2).values.diff().abs() > 0.3:
            compared.append(chosen)
            assert chosen == int(logits.argmax())
    assert len(compared) > 3 and len(set(compared)) > 1

    task, engine = Letters(12), Known(lambda question: "", device)
    result, replies = grade(task, engine, model=model, batch_rows=5, samples=3)
    assert engine.calls == [] and (result.kind, result.total, result.baseline) == ("choice", 12, 0.25)
    examples = {example.question[0]["content"]: example for example in map(task.example, range(12))}
    right = 0
    for reply in replies:
        example = examples[reply.messages[-1]["content"]]
        ids = [[tokenizer.encode(letter)[0] for letter in example.letters]]
        (chosen,) = preferred_letters(model, [render_prompt(tokenizer, example.question)], ids, device)
        assert text_of(reply.reply) == example.letters[chosen]
        assert reply.correct == (example.letters[chosen] == example.answer)
        right += reply.correct
    assert result.correct == right and result.accuracy == right / 12


def test_a_letter_that_is_no_single_token_is_told() -> None:
    with pytest.raises(UserError, match="--tasks choose: .*'É' is 2 "):
        grade(Letters(alphabet="AÉCD"), Known(lambda question: ""))


# ---------------------------------------------------------------------- ranks


class Odd(Echo):
    """Half of all replies are right, whatever they say."""

    def grade(self, example: Example, reply: Sequence[Part]) -> bool:
        return sum(text_of(reply).encode()) % 2 == 0


def grade_on_a_rank(device: Device, kind: str, count: int) -> tuple[dict[str, Any], list[tuple[Any, Any, bool]]]:
    model = tiny_model(160)
    engine = Engine(model, tiny_tokenizer(), device)
    task = Odd(count, too_long=True) if kind == "generative" else Letters(count)
    result, replies = grade(task, engine, SamplingParams(), model, batch_rows=4, max_tokens=6, samples=2)
    figures = {key: value for key, value in dataclasses.asdict(result).items() if key != "seconds"}
    return figures, [(reply.messages, reply.reply, reply.correct) for reply in replies]


def grade_all_on_a_rank(device: Device) -> list[tuple[dict[str, Any], list[tuple[Any, Any, bool]]]]:
    return [grade_on_a_rank(device, *case) for case in (("generative", 9), ("choice", 9), ("generative", 1))]


@pytest.mark.slow
def test_two_ranks_find_the_same_and_share_the_work() -> None:
    ranks = run_ranks(grade_all_on_a_rank)
    for (alone, replies), (one, first), (two, second) in zip(grade_all_on_a_rank(cpu_device()), *ranks, strict=True):
        assert one == two == alone
        if alone["total"] > 2:
            assert 0 < alone["correct"] < alone["total"]
            assert first and second
        assert sorted([*first, *second], key=repr) == sorted(replies, key=repr)  # sampled, and yet the same


# ---------------------------------------------------------------------- figures


def test_chat_core_is_the_mean_above_guessing() -> None:
    assert chat_tasks.chat_core([(0.25, 0.25), (1.0, 0.25), (0.4, 0.0)]) == pytest.approx((0 + 1 + 0.4) / 3)
    assert chat_tasks.chat_core([(0.1, 0.25)]) == pytest.approx(-0.2)  # worse than guessing


# ---------------------------------------------------------------------- mistakes


def test_without_names_every_built_in_task_with_an_answer_is_graded() -> None:
    names = [choice.name for choice in graded_choices("")]
    assert names == generated_tasks() and {"stories", "new_stories", "questions", "memory", "repeat"} <= set(names)
    assert [(c.name, c.path) for c in graded_choices("addition:2,gsm8k=some/folder")] == [
        ("addition", None), ("gsm8k", "some/folder"),
    ]  # fmt: skip


def test_tasks_that_cannot_be_graded_are_told(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text("")
    for text, words in (
        ("smoltalk", "--tasks smoltalk: .* those with one are stories, .*mmlu"),
        (str(own), f"--tasks {own}: "),
        ("adition", "did you mean addition"),
        (" ", "--tasks is empty"),
    ):
        line = complaint(lambda text=text: graded_choices(text))
        assert re.search(words, line) and "smoltalk" not in line.partition("those with one")[2]
    assert "--tasks echo: " in complaint(lambda: grade(Echo(0), Known(lambda question: "")))


# ---------------------------------------------------------------------- the command


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An SFT checkpoint at step 5, whose model was never trained."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NANOCHAT_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    return save_step(5)


def save_step(step: int) -> Path:
    folder = paths.checkpoint_dir("sft", "tiny")
    return save_checkpoint(folder, step, tiny_model(2048), tiny_tokenizer(), {})


def call(*argv: str) -> None:
    runs.call("chat_eval", "--device=cpu", "--dtype=float32", "--max_tokens=6", *argv)


def written() -> dict[str, Any]:
    return json.loads((paths.run_dir("sft", "tiny") / "chat_eval.json").read_text(encoding="utf-8"))


def always_right(*args: Any, **settings: Any) -> bool:
    return True


def test_results_are_written_and_those_of_a_step_add_up(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call("--tasks=addition,spelling", "--max_examples=5", "--show=1")
    first, out = written(), capsys.readouterr().out
    assert first["step"] == 5
    assert list(first["tasks"]) == ["addition", "spelling"]
    fields = {field.name for field in dataclasses.fields(Result)} - {"measures"}  # addition has none
    assert fields | {"settings"} == set(first["tasks"]["addition"])
    settings = first["tasks"]["addition"]["settings"]
    assert (settings["temperature"], settings["min_p"], settings["max_examples"]) == (0.8, 0.2, 5)  # the checkpoint's
    assert first["tasks"]["addition"]["questions"] == 5
    assert first["chatcore"] == 0.0 and [message["content"] for message in first["chat"][::2]] == [*chat_tasks.CHAT]
    assert [sample["task"] for sample in first["samples"]] == ["addition", "spelling"]
    assert set(first["samples"][0]) == {"task", "messages", "reply", "correct"}
    assert re.search(r"^addition +0\.0% +0\.0% - 43\.4% +0% / - / - +5 ", out, re.M) and "too long" not in out
    assert "ChatCORE: 0.0000" in out and re.search(r"^addition, wrong\n  user: .*\S.*\n  assistant: ", out, re.M)

    monkeypatch.setattr(task_class("spelling"), "grade", always_right)
    monkeypatch.setattr("nanochat.evals.chat_tasks.ending", lambda *reply: "complete")
    call("--tasks=letters,spelling", "--max_examples=5", "--show=2")
    both, out = written(), capsys.readouterr().out
    assert list(both["tasks"]) == ["addition", "spelling", "letters"]
    assert both["tasks"]["addition"] == first["tasks"]["addition"]
    assert both["tasks"]["spelling"]["accuracy"] == 1.0 and both["tasks"]["letters"]["questions"] == 5
    assert both["chatcore"] == pytest.approx((0 + 1 + both["tasks"]["letters"]["accuracy"]) / 3)
    assert [sample["task"] for sample in both["samples"]] == ["addition", "letters", "letters", "spelling", "spelling"]
    assert "3 tasks, 1 of them evaluated before" in out

    call("--tasks=addition", "--max_examples=3", "--show=1")  # a quick look does not cost the figures
    assert written() == both
    assert "max_examples 5, not 3" in capsys.readouterr().out

    # As after the speedrun, which samples its stories: one task has other settings in the file, another is new.
    call("--tasks=letters,identity", "--max_examples=4", "--show=1")
    mixed = written()
    assert mixed["tasks"]["letters"] == both["tasks"]["letters"] and mixed["tasks"]["identity"]["questions"] == 4
    assert mixed["samples"][:-1] == both["samples"] and mixed["samples"][-1]["task"] == "identity"
    assert "4 tasks, 3 of them evaluated before" in capsys.readouterr().out

    save_step(6)
    call("--tasks=addition", "--max_examples=3", "--show=0")
    newer = written()
    assert (newer["step"], list(newer["tasks"]), newer["samples"]) == (6, ["addition"], [])


@pytest.mark.parametrize("text", ["{", "[]", '{"step": 5, "tasks": {"a": {}}, "samples": []}'])
def test_a_damaged_file_is_written_anew(checkpoint: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    path = paths.run_dir("sft", "tiny") / "chat_eval.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    call("--tasks=addition", "--max_examples=2")
    assert list(written()["tasks"]) == ["addition"]
    assert "chat_eval.json" in capsys.readouterr().err


def test_what_the_engine_is_told(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def recorded(engine: Engine, prompts: Any, **settings: Any) -> Any:
        seen.append({"rows": len(prompts), **settings})
        return [[] for _ in prompts], [[] for _ in prompts]

    monkeypatch.setattr(Engine, "generate", recorded)
    flags = ("--temperature=0.5", "--top_k=7", "--top_p=0.9", "--seed=11", "--device_batch_size=4")
    call("--tasks=addition", "--max_examples=3", "--samples=2", f"--source={checkpoint}", *flags)
    sampling = [SamplingParams(0.5, 7, 0.9, min_p=0.2, seed=seed_of(11, row)) for row in range(6)]
    assert [one["rows"] for one in seen] == [4, 2]
    assert seen[0]["sampling"] + seen[1]["sampling"] == sampling and seen[0]["max_tokens"] == 6
    assert not (paths.base_dir() / "runs").exists()  # a checkpoint that is given by its folder


USERS = """
from nanochat.task import Environment, Example, GeneratedTask, Task, turn
class Sum(GeneratedTask):
    def example(self, index): return Example(turn("1+1?", "2"))
class Lost(Sum):
    def example(self, index): return {}[index]
class Odd(Sum):
    def grade(self, example, reply): return 1 / 0
class Endless(Task):
    def example(self, index): ...
class Plain(Sum):
    def example(self, index): return turn("1+1?", "2")
class Guess(Environment):
    def strat(self): ...
"""


@pytest.mark.parametrize(
    ("argv", "words", "code"),
    [
        (["--tasks=mine.py:Sum"], "--tasks sum: ", 1),
        (["--tasks=mine.py:Lost"], "mine.py:6 `def example(self, index): return {}[index]`: KeyError", 1),
        (["--tasks=mine.py:Odd"], "mine.py:8 `def grade(self, example, reply): return 1 / 0`: ZeroDivisionError", 1),
        (["--tasks=mine.py:Endless"], "mine.py:Endless: ", 1),
        (["--tasks=mine.py:Plain"], "mine.py:Plain: example(", 1),
        (["--tasks=mine.py:Guess"], "mine.py:Guess: ", 1),
        (["--tasks=mine.py"], "mine.py:CLASS", 1),
        (["--samples=4", "--temperature=0"], "--samples 4: ", 1),
        (["--temperature=-1"], "--temperature -1.0", 2),
        (["--source=rl"], "no rl checkpoint", 1),
        (["--model_tag=other"], "that is whole", 1),
    ],
)
def test_mistakes_cost_a_line(
    checkpoint: Path, capsys: Any, tmp_path: Path, monkeypatch: Any, argv: list[str], words: str, code: int
) -> None:
    (tmp_path / "mine.py").write_text(USERS)
    monkeypatch.chdir(tmp_path)
    runs.refused(capsys, ("chat_eval", "--device=cpu", *argv), words, code=code)
