"""The CORE metric of a base model: 22 tasks by in-context learning, each one's accuracy centred on guessing.

A bundle of tasks comes in, from a folder or from its public address, and one number goes out: the mean over the tasks
of (accuracy - baseline) / (1 - baseline), so that 0 is guessing and 1 is perfect. A base model can't follow
instructions, so every example is text to continue, after a few solved examples of the same task. Three kinds of task:

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

import csv
import fcntl
import io
import json
import math
import random
import shutil
import time
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from nanochat.cross_entropy import IGNORE
from nanochat.data.hub import fetch_url, leaves_folder
from nanochat.device import Device
from nanochat.gpt import GPT
from nanochat.parallel.collectives import sum_over_ranks
from nanochat.shell.cli import UserError
from nanochat.shell.log import duration, print0
from nanochat.shell.paths import data_dir
from nanochat.tokenizer import Tokenizer

# The address is the one in nanochat's scripts/base_eval.py; four other public projects give this sha256 of the file.
BUNDLE_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
BUNDLE_SHA256 = "90a7c19e28ee7a52b4f6e1f87658deb9fde7f63deba2379045bdb1fe9ea5d200"
MAX_BUNDLE_BYTES = 4 << 30  # unpacked; a zip that claims more is no bundle

SHUFFLE_SEED = 1337  # of a task's examples, before the first so many are taken
FEW_SHOT_SEED = 1234  # plus the example's number: of the solved examples before it
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
class CoreResult:
    """`core` is the mean of the tasks' `centered`. Of each task: accuracy, its 95% interval from low to high,
    baseline, centered, examples, and how many of them were cut to fit the context."""

    core: float
    tasks: dict[str, dict[str, float]]


@dataclass(frozen=True)
class ScoredText:
    """One option of an example as tokens."""

    example: int
    option: int
    tokens: list[int]
    start: int  # tokens[start:] are scored


# ---------------------------------------------------------------------- the bundle


def open_bundle(source: str, max_per_task: int = 0) -> list[CoreTask]:
    """The tasks of the bundle, checked. `source` is a folder with it (or with its `eval_bundle/`), or `download`,
    which fetches it once and keeps it.

    `max_per_task` takes the first so many of each task's shuffled examples, 0 all.
    Raises UserError: when the bundle is damaged or out of reach, or has too few examples for the solved ones.
    """
    root = _downloaded() if source == "download" else Path(source).expanduser()
    if not (root / "core.yaml").exists() and (root / "eval_bundle" / "core.yaml").exists():
        root = root / "eval_bundle"
    config = root / "core.yaml"
    if not config.is_file():
        raise UserError(
            f"--core {root} holds no core.yaml: use --core download, or the folder unpacked from {BUNDLE_URL}"
        )
    baselines = _read_baselines(root / "eval_meta_data.csv")
    tasks: list[CoreTask] = []
    for entry in _read_entries(config):
        label = entry["label"]
        shots = entry["num_fewshot"][0]
        if label not in baselines or any(label == task.label for task in tasks):
            raise _damaged(config, f"task {label} is there twice, or has no baseline in eval_meta_data.csv")
        examples = _read_examples(root / "eval_data" / entry["dataset_uri"], entry["icl_task_type"])
        random.Random(SHUFFLE_SEED).shuffle(examples)
        if max_per_task:
            examples = examples[:max_per_task]
        if len(examples) <= shots:
            what = f"--core_examples {max_per_task}" if max_per_task else f"--core {root}"
            raise UserError(f"{what} leaves {len(examples)} examples of {label}: it needs at least {shots + 1}")
        delimiter = entry.get("continuation_delimiter", " ")
        tasks.append(CoreTask(label, entry["icl_task_type"], examples, shots, delimiter, baselines[label]))
    return tasks


def _downloaded() -> Path:
    """The unpacked public bundle. One process of a machine fetches it, the others wait and find it."""
    home = data_dir("core")
    folder = home / "eval_bundle"
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".unpack.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            try:
                archive = fetch_url(BUNDLE_URL, home / "eval_bundle.zip", BUNDLE_SHA256)
            except UserError as error:
                hint = f"fetch {BUNDLE_URL} where there is a network, unpack it, and name its folder: --core PATH"
                raise UserError(f"--core download: {error}; or {hint}") from error
            unpack(archive, folder)
            archive.unlink()
    return folder


def unpack(archive: Path, folder: Path) -> None:
    """Put what the zip has below `eval_bundle/` at `folder`, all of it or nothing.

    Raises UserError: when the zip is damaged or a bomb, or a name in it leads out of its folder."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        with zipfile.ZipFile(archive) as bundle:
            for name in bundle.namelist():
                if leaves_folder(name):
                    raise UserError(f"{archive}: {name!r} leads out of the folder; nothing was unpacked")
            if sum(entry.file_size for entry in bundle.infolist()) > MAX_BUNDLE_BYTES:
                raise UserError(f"{archive} claims more than {MAX_BUNDLE_BYTES >> 30} GiB; nothing was unpacked")
            bundle.extractall(unfinished)  # links come out as plain files, and no file larger than it claims
        if not (unfinished / "eval_bundle").is_dir():
            raise UserError(f"{archive} has no eval_bundle/: is it the bundle of {BUNDLE_URL}?")
        (unfinished / "eval_bundle").replace(folder)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise UserError(f"{archive}: {error}; delete it and run again") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _damaged(path: Path, problem: str) -> UserError:
    return UserError(f"--core: {path}: {problem}; unpack the bundle again ({BUNDLE_URL}), or correct it")


def _read(path: Path) -> str:
    if not path.is_file():
        raise _damaged(path, "the file is missing")
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(path, f"it cannot be read as UTF-8 text ({error})") from error


def _read_entries(path: Path) -> list[dict[str, Any]]:
    """The entries below `icl_tasks` of core.yaml, checked."""
    import yaml

    try:
        content = yaml.safe_load(_read(path))
    except (yaml.YAMLError, RecursionError) as error:
        raise _damaged(path, f"it is not YAML ({' '.join(str(error).split())})") from error
    entries = content.get("icl_tasks") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise _damaged(path, "no list of tasks below icl_tasks")
    for entry in entries:
        fields = entry if isinstance(entry, dict) else {}
        texts = [fields.get(key) for key in ("label", "dataset_uri", "icl_task_type")]
        texts.append(fields.get("continuation_delimiter", " "))
        shots = fields.get("num_fewshot")
        is_count = isinstance(shots, list) and len(shots) == 1 and type(shots[0]) is int and shots[0] >= 0
        if not all(isinstance(text, str) for text in texts) or not is_count:
            form = "label, dataset_uri, icl_task_type, num_fewshot: [0 or more], continuation_delimiter if not a space"
            raise _damaged(path, f"a task is {str(entry)[:200]!r}, not {form}")
        if leaves_folder(fields["dataset_uri"]):
            raise _damaged(path, f"dataset_uri {fields['dataset_uri']!r} leads out of eval_data")
    return entries


def _read_baselines(path: Path) -> dict[str, float]:
    """Accuracy of guessing by task, from a table that has it in percent."""
    baselines = {}
    try:
        table = list(csv.DictReader(io.StringIO(_read(path), newline="")))
    except csv.Error as error:
        raise _damaged(path, f"it is not CSV ({error})") from error
    for row in table:
        try:
            label = row["Eval Task"].strip()
            baselines[label] = float(row["Random baseline"]) / 100
        except (KeyError, ValueError, AttributeError, TypeError) as error:
            raise _damaged(path, f"{row} has no Eval Task, or no number as Random baseline") from error
        if not 0 <= baselines[label] < 1:
            raise _damaged(path, f"the Random baseline of {label} is not from 0 to below 100")
    return baselines


def _read_examples(path: Path, kind: str) -> list[CoreExample]:
    examples = []
    for number, line in enumerate(_read(path).split("\n"), 1):
        if line.strip():
            try:
                examples.append(core_example(json.loads(line), kind))
            except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
                problem = f"line {number} is not an example of {kind} ({type(error).__name__}: {error})"
                raise _damaged(path, problem) from error
    return examples


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
    for context, continuation in options:
        if not isinstance(context, str) or not isinstance(continuation, str):
            raise ValueError("a context or a continuation is not a text")
    if type(gold) is not int or not 0 <= gold < len(options):
        raise ValueError(f"gold is {gold!r}, with {len(options)} options")
    return CoreExample(options, gold)


# ---------------------------------------------------------------------- prompts


def prompts(task: CoreTask, index: int) -> list[str]:
    """The texts of one example, each after the same solved examples: one per option; for language modelling one
    without the continuation and one with it."""
    # Draw from the other examples: numbers from `index` on move up by one.
    drawn = random.Random(FEW_SHOT_SEED + index).sample(range(len(task.examples) - 1), task.shots)
    solved = ""
    for number in drawn:
        other = task.examples[number if number < index else number + 1]
        solved += task.delimiter.join(other.options[other.gold]) + "\n\n"
    options = task.examples[index].options
    texts = [solved + task.delimiter.join(option) for option in options]
    if task.kind == "language_modeling":
        context, _ = options[0]
        # Stripped: a space at the end would be a token of its own, not the beginning of the next word.
        texts.insert(0, (solved + context + task.delimiter).strip())
    return texts


def scored_texts(task: CoreTask, index: int, tokenizer: Tokenizer, context: int) -> list[ScoredText]:
    """The options of an example as tokens, each cut to its last `context` tokens.

    The scored tokens are those after the beginning that all texts share; for schemas the end that all texts share.
    """
    texts = tokenizer.encode_batch(prompts(task, index), prepend=tokenizer.get_bos_token_id())
    if task.kind == "schema":
        shared = _shared_tokens([tokens[::-1] for tokens in texts])
        starts = [len(tokens) - shared for tokens in texts]
    else:
        starts = [_shared_tokens(texts)] * len(texts)
    if task.kind == "language_modeling":  # only the text with its continuation is scored
        texts, starts = texts[1:], starts[1:]
    scored = []
    for option, (tokens, start) in enumerate(zip(texts, starts, strict=True)):
        cut = max(len(tokens) - context, 0)
        start = max(start - cut, 1)  # nothing predicts the first token that is left
        scored.append(ScoredText(index, option, tokens[cut:], start))
    return scored


def _shared_tokens(texts: Sequence[Sequence[int]]) -> int:
    """How many tokens all texts begin with."""
    for length, column in enumerate(zip(*texts, strict=False)):
        if any(token != column[0] for token in column):
            return length
    return min(len(tokens) for tokens in texts)


# ---------------------------------------------------------------------- scores


def evaluate(
    model: GPT, tokenizer: Tokenizer, tasks: Sequence[CoreTask], device: Device, batch_rows: int
) -> CoreResult:
    """Put every example of every task to the model, shared out over the ranks; the same on every rank.

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
    core = sum(result["centered"] for result in results.values()) / len(results)
    return CoreResult(core, results)


def wilson_interval(correct: float, total: int) -> tuple[float, float]:
    """The 95% confidence interval of an accuracy. Source: Wilson 1927."""
    z = 1.96
    share = correct / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    reach = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(middle - reach, 0.0), min(middle + reach, 1.0)


def _count_correct(
    model: GPT, tokenizer: Tokenizer, task: CoreTask, device: Device, batch_rows: int
) -> tuple[int, int]:
    """How many of this rank's share of the examples the model gets right, and how many were cut to the context.

    Texts wait for others of their padded length, so that shapes repeat, and are the same at any number of ranks."""
    context = model.config.sequence_len
    cut = 0
    scores: dict[int, list[tuple[float, bool]]] = {}  # of each example: its options' (mean loss, greedy match)
    waiting: dict[int, list[ScoredText]] = defaultdict(list)  # by padded length

    def score(length: int) -> None:
        texts = waiting.pop(length)
        for text, result in zip(texts, score_texts(model, texts, length, batch_rows, device), strict=True):
            scores[text.example][text.option] = result

    for index in range(device.rank, len(task.examples), device.world_size):
        texts = scored_texts(task, index, tokenizer, context)
        scores[index] = [(math.nan, False)] * len(texts)
        if any(text.tokens[0] != tokenizer.get_bos_token_id() for text in texts):
            cut += 1
        for text in texts:
            length = padded_length(len(text.tokens) - 1, context)
            waiting[length].append(text)
            if len(waiting[length]) == batch_rows:
                score(length)
    for length in list(waiting):
        score(length)
    correct = [index for index, of_options in scores.items() if _is_right(task, index, of_options)]
    return len(correct), cut


def _is_right(task: CoreTask, index: int, scores: Sequence[tuple[float, bool]]) -> bool:
    if task.kind == "language_modeling":
        return scores[0][1]
    # If one option's text is the beginning of all the others, it has no tokens of its own, and its loss is NaN. As in
    # nanochat it is chosen if it comes first, never elsewhere.
    best = min(range(len(scores)), key=lambda option: scores[option][0])
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
    """Of each text the mean loss of its scored tokens in nats (NaN without any), and whether each of them is the
    model's first choice."""
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
    with device.autocast():
        hidden = model.hidden(device.to_device(tokens)).flatten(0, 1)  # (B x T, C)
        for places in pieces:
            logits = model.logits(hidden[device.to_device(places)])  # (HEAD_TOKENS, V)
            wanted = device.to_device(targets[places])
            losses.append(F.cross_entropy(logits, wanted, ignore_index=IGNORE, reduction="none"))
            hits.append(logits.argmax(dim=-1) == wanted)
    # Sum by row.
    rows = scored // length
    counts = torch.bincount(rows, minlength=batch_rows)
    loss_sums = torch.zeros(batch_rows, dtype=torch.float64)
    hit_sums = torch.zeros(batch_rows, dtype=torch.float64)
    loss_sums.index_add_(0, rows, torch.cat(losses)[: len(scored)].cpu().double())
    hit_sums.index_add_(0, rows, torch.cat(hits)[: len(scored)].cpu().double())
    mean_losses = (loss_sums / counts).tolist()
    all_hit = (hit_sums == counts).tolist()
    return list(zip(mean_losses, all_hit, strict=True))[: len(texts)]
