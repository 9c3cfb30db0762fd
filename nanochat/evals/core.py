"""The CORE metric of a base model: 22 tasks by in-context learning, each one's accuracy centred on guessing.

A folder with a bundle of tasks comes in, and one number goes out: the mean over the tasks of
(accuracy - baseline) / (1 - baseline), so that 0 is guessing and 1 is perfect. A base model can't follow instructions,
so every example is text to continue, after a few solved examples of the same task. Three kinds of task:

    multiple_choice     one context, several continuations: right if the right one has the lowest mean loss
    schema              several contexts, one continuation: the same, with the loss of the shared continuation
    language_modeling   one context, one continuation: right if greedy decoding writes exactly it

Source: Li et al. 2024, DataComp-LM (the metric, the tasks, the baselines). The procedure is nanochat's
(karpathy/nanochat, nanochat/core_eval.py and scripts/base_eval.py), seeds included, so that scores compare:
GPT-2 XL (1.6B) has 0.2565 there. One thing differs: a prompt longer than the model's context loses its beginning,
as nanochat does it for GPT-2, while nanochat's own models read on past the length that they were trained on.
The bundle's baselines are DCLM's first ones, which its authors have since corrected (mlfoundations/dclm, issue 114);
nanochat keeps them, and so does this.

Legend: B rows, T tokens, C width, N scored tokens, V vocab.
"""

import contextlib
import csv
import io
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os.path import commonprefix  # works on any lists
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml

from nanochat.cross_entropy import IGNORE
from nanochat.data.hub import leaves_folder
from nanochat.device import Device
from nanochat.evals.paired import wilson_interval
from nanochat.gpt import GPT
from nanochat.ground.cli import UserError
from nanochat.ground.log import print0
from nanochat.ground.screen import duration, track
from nanochat.ranks import sum_over_ranks
from nanochat.tokenizer import Tokenizer

# The address is the one in nanochat's scripts/base_eval.py. Four other public projects give the file this sha256:
# 90a7c19e28ee7a52b4f6e1f87658deb9fde7f63deba2379045bdb1fe9ea5d200
BUNDLE_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"

SHUFFLE_SEED = 1337  # shuffles a task's examples, before the first are taken
FEW_SHOT_SEED = 1234  # plus the example's number: draws the solved examples before it
HEAD_TOKENS = 256  # through the output head at once, so that its logits stay small and have one shape


@dataclass(frozen=True)
class CoreExample:
    """One example: the texts to choose from, and which of them is right."""

    options: list[tuple[str, str]]  # (context, continuation); language modelling has one
    gold: int = 0


@dataclass(frozen=True)
class CoreTask:
    """One task: its examples in their final order, and how they are put to the model."""

    label: str
    kind: str  # multiple_choice, schema or language_modeling
    examples: list[CoreExample]
    shots: int  # solved examples before each one
    delimiter: str  # between an example's context and its continuation
    baseline: float  # accuracy of guessing, from 0 to below 1


@dataclass(frozen=True)
class ScoredText:
    """One option of an example as tokens."""

    example: int
    option: int
    tokens: list[int]
    start: int  # tokens[start:] are scored


# ---------------------------------------------------------------------- the bundle


def open_bundle(source: str) -> list[CoreTask]:
    """The tasks of the bundle in the folder `source` (or in its `eval_bundle/`), checked.

    Raises UserError: when the bundle is missing or damaged, or has too few examples for the solved ones.
    """
    root = Path(source).expanduser()
    if (root / "eval_bundle").is_dir():
        root = root / "eval_bundle"
    config = root / "core.yaml"
    if not config.is_file():
        raise UserError(f"--core {root} holds no core.yaml: fetch {BUNDLE_URL}, unpack it, and name that folder")
    table = root / "eval_meta_data.csv"
    with _blaming(table):
        rows = csv.DictReader(io.StringIO(_read(table), newline=""))
        baselines = {row["Eval Task"].strip(): float(row["Random baseline"]) / 100 for row in rows}
    with _blaming(config):
        tasks = [_read_task(entry, root, baselines) for entry in yaml.safe_load(_read(config))["icl_tasks"]]
        labels = {task.label for task in tasks}
        if not tasks or len(labels) < len(tasks):
            raise ValueError("icl_tasks is empty, or two tasks have the same label")
    for task in tasks:
        random.Random(SHUFFLE_SEED).shuffle(task.examples)
        count = len(task.examples)
        if count <= task.shots:
            raise UserError(f"--core {root} has {count} examples of {task.label}: it needs at least {task.shots + 1}")
    return tasks


@contextlib.contextmanager
def _blaming(place: object) -> Iterator[None]:
    """Every error about a file of the bundle becomes one line that names the file."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # hostile YAML, CSV and JSON cause many kinds
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"--core: {place}: {problem}; unpack the bundle again ({BUNDLE_URL}), or correct it") from error


def _read(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError("the file is missing")
    return path.read_text(encoding="utf-8-sig")


def _read_task(entry: dict[str, Any], root: Path, baselines: dict[str, float]) -> CoreTask:
    """The task of an entry below `icl_tasks` of core.yaml, with its examples in the order of its file."""
    label = entry["label"]
    kind = entry["icl_task_type"]
    shots = entry["num_fewshot"]
    delimiter = entry.get("continuation_delimiter", " ")
    if label not in baselines or not 0 <= baselines[label] < 1:
        raise ValueError(f"{label} has no Random baseline from 0 to below 100 in eval_meta_data.csv")
    if [type(count) for count in shots] != [int] or shots[0] < 0 or not isinstance(delimiter, str):
        raise ValueError(f"num_fewshot of {label} is not [a count], or its continuation_delimiter not a text")
    if leaves_folder(entry["dataset_uri"]):
        raise ValueError(f"dataset_uri {entry['dataset_uri']!r} leads out of eval_data")
    path = root / "eval_data" / entry["dataset_uri"]
    with _blaming(path):
        lines = _read(path).split("\n")
    examples = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            with _blaming(f"{path}, line {number}"):
                examples.append(core_example(json.loads(line), kind))
    return CoreTask(label, kind, examples, shots[0], delimiter, baselines[label])


def core_example(fields: dict[str, Any], kind: str) -> CoreExample:
    """One line of a task's file. Raises KeyError, TypeError, AttributeError or ValueError: when it is malformed."""
    gold = fields.get("gold")
    if kind == "multiple_choice":
        options = [(fields["query"], choice) for choice in fields["choices"]]
    elif kind == "schema":
        options = [(context, fields["continuation"]) for context in fields["context_options"]]
    elif kind == "language_modeling":
        options = [(fields["context"].strip(), fields["continuation"])]
        gold = 0
        if not fields["continuation"].strip():
            raise ValueError("the continuation is empty")
    else:
        raise ValueError("icl_task_type is multiple_choice, schema or language_modeling")
    if not all(isinstance(text, str) for option in options for text in option):
        raise ValueError("a context or a continuation is not a text")
    if type(gold) is not int or not 0 <= gold < len(options):
        raise ValueError(f"gold is {gold!r}, with {len(options)} options")
    return CoreExample(options, gold)


# ---------------------------------------------------------------------- prompts


def prompts(task: CoreTask, index: int) -> list[str]:
    """The texts of one example, each after the same solved examples: one per option; for language modelling one
    without the continuation and one with it."""
    others = task.examples[:index] + task.examples[index + 1 :]
    solved = ""
    for other in random.Random(FEW_SHOT_SEED + index).sample(others, task.shots):
        solved += task.delimiter.join(other.options[other.gold]) + "\n\n"
    options = task.examples[index].options
    texts = [solved + task.delimiter.join(option) for option in options]
    if task.kind == "language_modeling":
        context, _ = options[0]
        # Stripped: a space at the end would be a separate token, not the beginning of the next word.
        texts.insert(0, (solved + context + task.delimiter).strip())
    return texts


def scored_texts(task: CoreTask, index: int, tokenizer: Tokenizer, context: int) -> list[ScoredText]:
    """The options of an example as tokens, each cut to its last `context` tokens.

    The scored tokens are those after the beginning that all texts share; for schemas the end that all texts share.
    """
    texts = tokenizer.encode_batch(prompts(task, index), prepend=tokenizer.get_bos_token_id())
    if task.kind == "schema":
        shared = len(commonprefix([tokens[::-1] for tokens in texts]))
    else:
        shared = len(commonprefix(texts))
    if task.kind == "language_modeling":
        del texts[0]  # only the text with its continuation is scored
    scored = []
    for option, tokens in enumerate(texts):
        start = len(tokens) - shared if task.kind == "schema" else shared
        cut = max(len(tokens) - context, 0)
        start = max(start - cut, 1)  # nothing predicts the first token that is left
        scored.append(ScoredText(index, option, tokens[cut:], start))
    return scored


# ---------------------------------------------------------------------- scores


def evaluate(
    model: GPT, tokenizer: Tokenizer, tasks: Sequence[CoreTask], device: Device, batch_rows: int
) -> tuple[float, dict[str, dict[str, float]]]:
    """Put every example of every task to the model, shared out over the ranks: CORE, the mean of the tasks' `centered`,
    and the numbers of each task. `cut` counts examples cut to the context. The result is the same on every rank.

    `batch_rows` texts, which may fill the context, go through the model at once. Prints a line per task."""
    results: dict[str, dict[str, float]] = {}
    for place, task in enumerate(tasks, 1):
        began = time.monotonic()
        total = len(task.examples)
        counts = torch.tensor(_count_correct(model, tokenizer, task, device, batch_rows), dtype=torch.float32)
        counts = sum_over_ranks(counts.to(device.torch_device), device)
        correct, cut = (int(count) for count in counts.tolist())
        low, high = wilson_interval(correct, total)
        accuracy = correct / total
        centered = (accuracy - task.baseline) / (1 - task.baseline)
        results[task.label] = {
            "accuracy": accuracy, "low": low, "high": high, "baseline": task.baseline, "centered": centered,
            "examples": total, "cut": cut,
        }  # fmt: skip
        shortened = f", {cut:,} cut to the context" if cut else ""
        print0(
            f"core {place}/{len(tasks)} {task.label}: accuracy {accuracy:.4f}, centered {centered:.4f} "
            f"({task.shots}-shot, {total:,} examples{shortened}, {duration(time.monotonic() - began)})"
        )
    return sum(result["centered"] for result in results.values()) / len(results), results


def _count_correct(
    model: GPT, tokenizer: Tokenizer, task: CoreTask, device: Device, batch_rows: int
) -> tuple[int, int]:
    """The numbers of right examples and of examples cut to the context, in this rank's share."""
    context = model.config.sequence_len
    mine = range(device.rank, len(task.examples), device.world_size)
    texts = (text for index in track(mine, "examples") for text in scored_texts(task, index, tokenizer, context))
    scores: dict[int, dict[int, tuple[float, bool]]] = defaultdict(dict)  # example -> option -> score
    cut: set[int] = set()
    for length, batch in batches(texts, context, batch_rows):
        for text, score in zip(batch, score_texts(model, batch, length, batch_rows, device), strict=True):
            scores[text.example][text.option] = score
            if text.tokens[0] != tokenizer.get_bos_token_id():
                cut.add(text.example)
    correct = sum(_is_right(task, index, scores[index]) for index in mine)
    return correct, len(cut)


def batches(texts: Iterable[ScoredText], context: int, batch_rows: int) -> Iterator[tuple[int, list[ScoredText]]]:
    """Texts wait for others of their padded length, so that shapes repeat, and are the same at any number of ranks."""
    waiting: dict[int, list[ScoredText]] = defaultdict(list)  # by padded length
    for text in texts:
        length = padded_length(len(text.tokens) - 1, context)
        waiting[length].append(text)
        if len(waiting[length]) == batch_rows:
            yield length, waiting.pop(length)
    yield from waiting.items()


def _is_right(task: CoreTask, index: int, scores: dict[int, tuple[float, bool]]) -> bool:
    if task.kind == "language_modeling":
        return scores[0][1]
    # If one option's text is the beginning of all the others, none of its tokens is scored, and its loss is NaN. As in
    # nanochat it is chosen if it comes first, never elsewhere.
    best = min(sorted(scores), key=lambda option: scores[option][0])
    return best == task.examples[index].gold


def padded_length(tokens: int, context: int) -> int:
    """The next of a few lengths: multiples of 64, then steps that leave at most a fifth of a row as padding."""
    step = max(64, 1 << max(tokens - 1, 1).bit_length() >> 3)
    steps = max(math.ceil(tokens / step), 1)
    return min(steps * step, context)


@torch.inference_mode()
def score_texts(
    model: GPT, texts: Sequence[ScoredText], length: int, batch_rows: int, device: Device
) -> list[tuple[float, bool]]:
    """For each text the mean loss of its scored tokens in nats (NaN without any), and whether each of these tokens is
    the model's first choice."""
    tokens = torch.zeros(batch_rows, length, dtype=torch.long)  # (B, T)
    targets = torch.full((batch_rows, length), IGNORE)  # (B, T)
    for row, text in enumerate(texts):
        end = len(text.tokens) - 1
        tokens[row, :end] = torch.tensor(text.tokens[:-1])
        targets[row, text.start - 1 : end] = torch.tensor(text.tokens[text.start :])
    # Only the scored tokens go through the head: a few of the B x T. They are padded to whole pieces of one shape.
    targets = targets.flatten()
    scored = (targets != IGNORE).nonzero()[:, 0]  # (N,)
    pieces = F.pad(scored, (0, -len(scored) % HEAD_TOKENS)).split(HEAD_TOKENS)
    losses = []
    hits = []
    hidden = model.hidden(device.to_device(tokens)).flatten(0, 1)  # (B x T, C)
    for places in pieces:
        logits = model.logits(hidden[device.to_device(places)])  # (HEAD_TOKENS, V)
        wanted = device.to_device(targets[places])
        losses.append(F.cross_entropy(logits, wanted, ignore_index=IGNORE, reduction="none"))
        hits.append(logits.argmax(dim=-1) == wanted)
    # Sum by row.
    rows = scored // length
    counts = torch.bincount(rows, minlength=batch_rows)
    loss_sums = torch.bincount(rows, torch.cat(losses)[: len(scored)].cpu().double(), minlength=batch_rows)
    hit_sums = torch.bincount(rows, torch.cat(hits)[: len(scored)].cpu(), minlength=batch_rows)
    mean_losses = (loss_sums / counts).tolist()
    all_hit = (hit_sums == counts).tolist()
    return list(zip(mean_losses, all_hit, strict=True))[: len(texts)]
