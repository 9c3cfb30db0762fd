"""CORE on a bundle of our own: prompts letter by letter, scores against a plain computation, damage in one line."""

import json
import math
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import complaint, cpu_device, lively_model, run_ranks, save_checkpoint, tiny_config, tiny_tokenizer
from torch import Tensor

from nanochat.device import Device
from nanochat.evals import core
from nanochat.evals.core import CoreTask, ScoredText, core_example, evaluate, open_bundle, prompts, scored_texts
from nanochat.ground import paths
from nanochat.ground.cli import UserError
from nanochat.tokenizer import Tokenizer
from scripts import base_eval

HERE = Path(__file__).parent


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / f"{name}.jsonl").read_text().splitlines() if line]


ANIMALS, PRONOUNS, ENDINGS = (
    rows_of(f"eval_bundle/eval_data/{name}") for name in ("language/animals", "language/pronouns", "endings")
)


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path / "base"


@pytest.fixture
def bundle(tmp_path) -> Path:
    """A whole bundle, as it lies unpacked."""
    return shutil.copytree(HERE / "eval_bundle", tmp_path / "eval_bundle")


def task(kind: str, examples: list[dict[str, Any]], shots: int = 0, **changes: Any) -> CoreTask:
    checked = [core_example(fields, kind) for fields in examples]
    fields = {"label": "t", "kind": kind, "examples": checked, "shots": shots, "delimiter": " ", "baseline": 0.0}
    return CoreTask(**{**fields, **changes})


# ---------------------------------------------------------------------- the bundle


def test_the_bundle_is_read(bundle):
    for source in (bundle, bundle.parent):
        animals, pronouns, endings = open_bundle(str(source))
        assert (animals.label, animals.kind, animals.shots) == ("animals", "multiple_choice", 1)
        assert (animals.delimiter, animals.baseline) == ("\nAnswer: ", 0.25)
        assert (pronouns.kind, pronouns.shots, pronouns.delimiter, pronouns.baseline) == ("schema", 0, " ", 0.5)
        assert (endings.kind, endings.shots, endings.delimiter, endings.baseline) == ("language_modeling", 2, " ", 0)
        assert sorted(endings.examples, key=str) == sorted(task("language_modeling", ENDINGS).examples, key=str)


def test_examples_are_shuffled_with_a_fixed_seed(bundle):
    """What random.Random(1337).shuffle makes of ten lines."""
    rows = [{"context": str(n), "continuation": "x"} for n in range(10)]
    (bundle / "eval_data" / "endings.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [example.options[0][0] for example in open_bundle(str(bundle))[2].examples]
    assert words == list("0372164589")


def edited(name: str, old: str, new: str | None):
    """A damage: a file of the bundle with other text in it, or (None) gone."""

    def damage(folder: Path) -> None:
        path = folder / name
        assert old in path.read_text()
        path.unlink() if new is None else path.write_text(path.read_text().replace(old, new, 1))

    return damage


ROWS = "eval_data/language/animals.jsonl"
DAMAGES: list[tuple[Any, str]] = [
    *((edited(row["file"], row["text"], row["becomes"]), row["message"]) for row in rows_of("damaged_bundles")),
    (edited(ROWS, '{"query": "What barks?"', "[" * 100_000 + '\n{"query": "?"'), "line 1: "),
    (edited("core.yaml", "icl_tasks:", "icl_tasks: " + "[" * 5000), r"core\.yaml: "),
    (lambda folder: (folder / ROWS).write_bytes(b'{"query": "\xff"}'), r"animals\.jsonl.*utf-8"),
    (shutil.rmtree, "--core .*eval_bundle"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_damaged_bundle_is_one_line(bundle, damage, words):
    damage(bundle)
    line = complaint(lambda: open_bundle(str(bundle)))
    assert line.startswith("--core") and re.search(words, line)


# ---------------------------------------------------------------------- prompts


def test_prompts_letter_by_letter():
    two = task("multiple_choice", ANIMALS[:2], shots=1, delimiter="\nAnswer: ")
    solved = "What purrs?\nAnswer: the cat\n\n"
    assert prompts(two, 0) == [f"{solved}What barks?\nAnswer: the dog", f"{solved}What barks?\nAnswer: the cat"]
    solved = "What barks?\nAnswer: the dog\n\n"
    assert prompts(two, 1) == [f"{solved}What purrs?\nAnswer: {it}" for it in ("the dog", "the cat", "the owl")]
    solved = "Ann saw Tom and Ann waved.\n\nThe cup fell on the plate and the"
    assert prompts(task("schema", PRONOUNS, shots=1), 0) == [f"{solved} cup broke.", f"{solved} plate broke."]
    assert prompts(task("schema", PRONOUNS), 1) == ["Ann saw Tom and Ann waved.", "Ann saw Tom and Tom waved."]
    # Contexts are stripped everywhere, the prompt without its continuation also after the delimiter.
    two = task("language_modeling", ENDINGS[:2], shots=1, delimiter="\nEnd: ")
    solved = "run and then\nEnd: run again\n\nhop and then\nEnd:"
    assert prompts(two, 0) == [solved, f"{solved} hop again"]
    assert prompts(task("language_modeling", ENDINGS), 3) == ["从 and then", "从 and then 从 again"]


def test_solved_examples_come_by_a_fixed_seed_and_never_the_example_itself():
    """The same as nanochat's: random.Random(1234 + place).sample over all the others."""
    many = task("language_modeling", [{"context": f"c{n}", "continuation": f"e{n}"} for n in range(40)], shots=10)
    for index in range(40):
        others = [place for place in range(40) if place != index]
        places = random.Random(1234 + index).sample(others, 10)
        expected = "".join(f"c{place} e{place}\n\n" for place in places)
        assert prompts(many, index) == [f"{expected}c{index}", f"{expected}c{index} e{index}"]
    assert prompts(many, 0)[0].split("\n\n")[:3] == ["c29 e29", "c8 e8", "c1 e1"]


# ---------------------------------------------------------------------- tokens


def pieces(tokenizer: Tokenizer, texts: list[ScoredText]) -> list[tuple[str, str]]:
    """What is not scored, and what is."""
    return [
        (tokenizer.decode(text.tokens[: text.start]), tokenizer.decode(text.tokens[text.start :])) for text in texts
    ]


def test_what_is_scored(tiny_tokenizer):
    """The rest after a common beginning, however early options differ; for schemas a common end."""
    rows = scored_texts(task("multiple_choice", ANIMALS), 1, tiny_tokenizer, 100)
    expected = [("<|bos|>What purrs? the ", animal) for animal in ("dog", "cat", "owl")]
    assert pieces(tiny_tokenizer, rows) == expected
    rows = scored_texts(task("multiple_choice", ANIMALS), 2, tiny_tokenizer, 100)
    assert pieces(tiny_tokenizer, rows) == [("<|bos|>What hoots? an o", "x"), ("<|bos|>What hoots? an o", "wl")]
    rows = scored_texts(task("schema", PRONOUNS), 1, tiny_tokenizer, 100)
    assert pieces(tiny_tokenizer, rows) == [(f"<|bos|>Ann saw Tom and {name}", " waved.") for name in ("Ann", "Tom")]
    (row,) = scored_texts(task("language_modeling", ENDINGS), 2, tiny_tokenizer, 100)
    assert pieces(tiny_tokenizer, [row]) == [("<|bos|>the and then", " the again")]


def test_a_token_across_the_border_belongs_to_the_continuation(tiny_tokenizer):
    """ "t" and "he" without a delimiter make one token "the", so that the prompt's own last token is not there."""
    across = task("language_modeling", [{"context": "a t", "continuation": "he"}], delimiter="")
    assert pieces(tiny_tokenizer, scored_texts(across, 0, tiny_tokenizer, 100)) == [("<|bos|>a", " the")]


@pytest.mark.parametrize("kind", ["multiple_choice", "schema", "language_modeling"])
def test_long_prompts_lose_their_beginning(tiny_tokenizer, kind):
    examples = {"multiple_choice": ANIMALS, "schema": PRONOUNS, "language_modeling": ENDINGS}[kind]
    whole = scored_texts(task(kind, examples, 1), 0, tiny_tokenizer, 10**6)
    for context in (1000, 40, 12, 3, 2):
        cut = scored_texts(task(kind, examples, 1), 0, tiny_tokenizer, context)
        for short, long in zip(cut, whole, strict=True):
            assert short.tokens == long.tokens[-context:]
            scored = min(len(long.tokens) - long.start, len(short.tokens) - 1)  # nothing predicts the first token
            assert len(short.tokens) - short.start == scored


def test_few_lengths_and_little_padding():
    lengths = {tokens: core.padded_length(tokens, 2048) for tokens in range(1, 2049)}
    assert len(set(lengths.values())) == 16
    assert all(tokens <= length <= max(64, -(-tokens // 64) * 64, 1.25 * tokens) for tokens, length in lengths.items())
    assert core.padded_length(600, 610) == 610 and core.padded_length(0, 32) == 32


# ---------------------------------------------------------------------- scores


class Bigram:
    """A model whose logits the token before decides."""

    def __init__(self, table: Tensor, context: int = 64):
        self.table, self.config = table, SimpleNamespace(sequence_len=context)
        self.shapes: set[tuple[int, ...]] = set()
        self.rows = 0  # that held text

    def hidden(self, tokens: Tensor) -> Tensor:
        self.shapes.add(tuple(tokens.shape))
        self.rows += int((tokens != 0).any(dim=1).sum())
        return tokens[..., None].float()

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table[hidden[..., 0].long()]


def follows(tokenizer: Tokenizer, *pairs: str) -> Tensor:
    """Logits that put the second letter of each pair right after the first one; of later pairs less."""
    table = torch.zeros(tokenizer.vocab_size, tokenizer.vocab_size)
    for rank, pair in enumerate(pairs):
        first, second = (tokenizer.encode(letter)[0] for letter in pair)
        table[first, second] = 5.0 - rank / 10
    return table


def test_accuracy_and_centering_by_hand(tiny_tokenizer, capsys):
    """Three of four, one of two, two of four: (3/4 - 1/4)/(3/4) = 2/3, (1/2 - 1/2)/(1/2) = 0, (1/2 - 0)/1 = 1/2."""
    model = Bigram(follows(tiny_tokenizer, " x", "b ", "zx"))
    choices = [{"query": "q", "choices": ["y", "x"], "gold": gold} for gold in (1, 0, 1, 1)]
    schemas = [{"context_options": ["ac", "ab"], "continuation": "x", "gold": gold} for gold in (1, 0)]
    endings = [("b", "x"), ("b", "y"), ("zb", "x"), ("b", "xx")]  # the last begins right and ends wrong
    tasks = [
        task("multiple_choice", choices, label="choices", baseline=0.25),
        task("schema", schemas, label="schemas", baseline=0.5),
        task("language_modeling", [{"context": a, "continuation": b} for a, b in endings], label="endings", shots=1),
    ]
    mean, results = evaluate(model, tiny_tokenizer, tasks, cpu_device(), 3)  # type: ignore[arg-type]
    measured = {label: (one["accuracy"], one["centered"], one["examples"]) for label, one in results.items()}
    assert measured == {"choices": (0.75, pytest.approx(2 / 3), 4), "schemas": (0.5, 0.0, 2), "endings": (0.5, 0.5, 4)}
    assert mean == pytest.approx((2 / 3 + 0 + 1 / 2) / 3)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("core 1/3 choices: accuracy 0.7500, centered 0.6667 (0-shot, 4 examples, ")
    assert len(lines) == 3 and all(one["cut"] == 0 for one in results.values())
    assert model.shapes == {(3, 64)}  # whole batches only


@pytest.mark.parametrize(("choices", "chosen"), [(["x", "xy"], 0), (["xy", "x"], 0), (["y", "x", "xy"], 1)])
def test_an_option_that_others_only_add_to(tiny_tokenizer, choices, chosen):
    """It has no token of its own, so no loss: chosen where it comes first, never elsewhere. With a third that differs
    it has one."""
    model = Bigram(follows(tiny_tokenizer, " x"))
    for gold in range(len(choices)):
        one = task("multiple_choice", [{"query": "q", "choices": choices, "gold": gold}])
        mean, _ = evaluate(model, tiny_tokenizer, [one], cpu_device(), 2)  # type: ignore[arg-type]
        assert mean == float(gold == chosen)


def plain(model: Any, tokens: list[int], start: int) -> tuple[float, bool]:
    """Mean loss and greedy hits of one row, from all its logits, in fp64."""
    with torch.no_grad():
        chances = model.logits(model.hidden(torch.tensor([tokens])))[0].double().log_softmax(dim=-1)
    losses = [-chances[place - 1, tokens[place]].item() for place in range(start, len(tokens))]
    hits = [chances[place - 1].argmax().item() == tokens[place] for place in range(start, len(tokens))]
    return sum(losses) / len(losses), all(hits)


def varied_tasks() -> list[CoreTask]:
    """Tasks whose rows fall into several lengths, some beyond the context."""
    rng = random.Random(0)

    def text(most: int) -> str:
        return " ".join(rng.choice(("the", "an", "owl", "从", "x")) for _ in range(rng.randint(1, most)))

    choices = [{"query": text(60), "choices": [text(9) + c for c in "abcd"], "gold": n % 4} for n in range(8)]
    schemas = [
        {"context_options": [text(60) + "a", text(60) + "b"], "continuation": text(9), "gold": n % 2} for n in range(5)
    ]
    endings = [{"context": text(60), "continuation": rng.choice("abc")} for _ in range(8)]
    return [
        task("multiple_choice", choices, 2, label="choices", baseline=0.25),
        task("schema", schemas, 0, label="schemas", baseline=0.5),
        task("language_modeling", endings, 1, label="endings"),
    ]


def test_the_head_sees_only_what_is_scored_and_in_pieces_of_one_shape(tiny_tokenizer, monkeypatch):
    model = lively_model(tiny_config(vocab_size=tiny_tokenizer.vocab_size, sequence_len=192))
    monkeypatch.setattr(core, "HEAD_TOKENS", 8)
    shapes, logits = [], model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: shapes.append(tuple(hidden.shape)) or logits(hidden))
    tokens = list(range(100, 230))
    rows = [ScoredText(0, 0, tokens, start) for start in (110, 125, 129)]  # 20 + 5 + 1 are scored
    scores = core.score_texts(model, rows, 192, 4, cpu_device())
    assert shapes == [(8, 32)] * 4
    assert [loss for loss, _ in scores] == pytest.approx([plain(model, tokens, row.start)[0] for row in rows], rel=1e-5)


# ---------------------------------------------------------------------- ranks, and the command


def measure_on_a_rank(device: Device) -> tuple[float, dict[str, dict[str, float]], int]:
    tokenizer, tasks = tiny_tokenizer(), varied_tasks()
    model = lively_model(tiny_config(vocab_size=tokenizer.vocab_size, sequence_len=192))
    mean, results = evaluate(model, tokenizer, tasks, device, 4)
    bigram = Bigram(torch.rand(tokenizer.vocab_size, tokenizer.vocab_size), 192)
    evaluate(bigram, tokenizer, tasks[:1], device, 4)  # type: ignore[arg-type]
    return mean, results, bigram.rows


@pytest.mark.slow
def test_two_ranks_measure_as_one_and_share_the_work():
    core_alone, tasks_alone, rows = measure_on_a_rank(cpu_device())
    assert tasks_alone["choices"]["cut"] > 0
    for core_here, tasks_here, rows_here in run_ranks(measure_on_a_rank):
        assert (core_here, tasks_here) == (core_alone, tasks_alone)
        assert rows_here == rows // 2 == 8 * 4 // 2


def save_base(tokenizer: Tokenizer, context: int) -> None:
    config = tiny_config(vocab_size=tokenizer.vocab_size, sequence_len=context)
    folder = paths.checkpoint_dir("base", "tiny")
    save_checkpoint(folder, 1, lively_model(config), tokenizer, {"stage": "base"})


COMMAND = {"eval_tokens": 64, "device_batch_size": 2, "max_tokens": 4, "device": "cpu", "dtype": "float32"}


def test_the_command_writes_core_with_the_rest(bundle, base, tiny_tokenizer, capsys):
    save_base(tiny_tokenizer, 128)
    base_eval.main(base_eval.Config(**COMMAND, core=str(bundle), samples=1, stories=1))
    written = json.loads((base / "runs" / "base" / "tiny" / "eval.json").read_text())
    out = capsys.readouterr().out
    assert list(written["core_tasks"]) == ["animals", "pronouns", "endings"]
    assert written["core_tasks"]["endings"]["examples"] == 4
    centered = [one["centered"] for one in written["core_tasks"].values()]
    assert written["core"] == pytest.approx(sum(centered) / 3) and not math.isnan(written["core"])
    table = out[out.index("measure ") :]  # all numbers in one place, after the samples
    assert f"{written['core']:.4f}" in table and f"{written['val_bpb']:.4f}" in table
    assert re.search(r"^stories .* (0|100)\.0%  [01] of 1", table, re.M)
    assert len(written["samples"]) == 1 and written["stories"] == 1 and "skipped" not in out


def test_a_context_shorter_than_an_opening_leaves_stories_out_and_the_rest_in(base, tiny_tokenizer, capsys):
    save_base(tiny_tokenizer, 16)
    base_eval.main(base_eval.Config(**COMMAND, samples=2, stories=2))
    written = json.loads((base / "runs" / "base" / "tiny" / "eval.json").read_text())
    assert written["val_bpb"] > 0 and len(written["samples"]) == 2 and "stories" not in written
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if "skipped" in line]
    assert line.endswith("the context 16: stories and openings are skipped") and line in out.splitlines()[:2]
    base_eval.main(base_eval.Config(**COMMAND, samples=1, prompt="The"))
    assert "skipped" not in capsys.readouterr().out
    with pytest.raises(UserError, match="--prompt .*16 "):
        base_eval.main(base_eval.Config(**COMMAND, samples=1, prompt="word " * 9))
