"""The CORE metric of a base model: 22 tasks by in-context learning, each one's accuracy centred on guessing.

A bundle of tasks comes in, from a folder or from its public address, and one number goes out: the mean over the
tasks of (accuracy - baseline) / (1 - baseline), so that 0 is guessing and 1 is perfect.

Source: Li et al. 2024, DataComp-LM (the metric, the tasks, the baselines). The procedure is nanochat's
(karpathy/nanochat, nanochat/core_eval.py and scripts/base_eval.py), seeds included, so that figures compare:
GPT-2 XL (1.6B) has 0.2565 there. One thing differs: a prompt longer than the model's context loses its beginning,
as nanochat does it for GPT-2, while nanochat's own models read on past the length that they were trained on.
The bundle's baselines are DCLM's first ones, which its authors have since corrected (mlfoundations/dclm, issue 114);
nanochat keeps them, and so does this.

Legend: B rows, T tokens, C width, N scored tokens, V vocab.
"""

import csv
import fcntl
import json
import math
import random
import re
import shutil
import time
import urllib.parse
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nanochat.cross_entropy import IGNORE
from nanochat.data.hub import Client, Remote
from nanochat.device import Device
from nanochat.gpt import GPT
from nanochat.shell.cli import UserError
from nanochat.shell.log import duration, print0
from nanochat.shell.paths import data_dir
from nanochat.tokenizer import Tokenizer

# The address stands in nanochat's scripts/base_eval.py; four other public projects give this sha256 of the file.
BUNDLE_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
BUNDLE_SHA256 = "90a7c19e28ee7a52b4f6e1f87658deb9fde7f63deba2379045bdb1fe9ea5d200"

SHUFFLE_SEED = 1337  # of the examples, before the first so many are taken
FEW_SHOT_SEED = 1234  # plus the example's place: of the solved examples before it
HEAD_TOKENS = 256  # through the output head at once, so that its logits stay small and its shape is one

# The fields of an example: its texts, and the list that `gold` points into.
FIELDS = {
    "multiple_choice": (("query",), "choices"),
    "schema": (("continuation",), "context_options"),
    "language_modeling": (("context", "continuation"), ""),
}


@dataclass(frozen=True)
class CoreTask:
    """One task: its examples in their final order, and how they are put to the model."""

    label: str
    kind: str  # a key of FIELDS
    examples: list[dict[str, Any]]
    shots: int  # solved examples before each one
    delimiter: str  # between an example's context and its continuation
    baseline: float  # accuracy of guessing, from 0 to below 1


@dataclass(frozen=True)
class CoreResult:
    """`core` is the mean of the tasks' `centered`. Of each task: accuracy, its 95% interval from low to high,
    baseline, centered, examples, and how many of them were cut to fit the context."""

    core: float
    tasks: dict[str, dict[str, float]]


# ---------------------------------------------------------------------- the bundle


def open_bundle(source: str, max_per_task: int = 0, client: Client | None = None) -> list[CoreTask]:
    """The tasks of the bundle, checked. `source` is a folder with it (or with its `eval_bundle/`), or `download`,
    which fetches it once and keeps it.

    `max_per_task` takes the first so many of each task's shuffled examples, 0 all.
    Raises UserError: when the bundle is damaged or out of reach, or has too few examples for the solved ones.
    """
    root = _downloaded(client) if source == "download" else Path(source).expanduser()
    if not (root / "core.yaml").exists() and (root / "eval_bundle" / "core.yaml").exists():
        root = root / "eval_bundle"
    config = root / "core.yaml"
    if not config.is_file():
        raise UserError(
            f"--core {root} holds no core.yaml: use --core download, or the folder unpacked from {BUNDLE_URL}"
        )
    baselines = _read_baselines(root / "eval_meta_data.csv")
    tasks: list[CoreTask] = []
    for entry in _read_task_list(config):
        label = str(entry.get("label"))
        missing = [key for key in ("label", "dataset_uri", "num_fewshot", "icl_task_type") if key not in entry]
        if missing:
            raise _damaged(config, f"task {label} has no {missing[0]}")
        if any(label == task.label for task in tasks):
            raise _damaged(config, f"task {label} is there twice")
        kind, uri, delimiter = entry["icl_task_type"], entry["dataset_uri"], entry.get("continuation_delimiter", " ")
        shots = entry["num_fewshot"]  # a list of one
        shots = shots[0] if isinstance(shots, list) and len(shots) == 1 else shots
        if kind not in FIELDS:
            raise _damaged(config, f"task {label} has icl_task_type {kind!r}, not one of {', '.join(FIELDS)}")
        if not isinstance(shots, int) or shots < 0 or not isinstance(delimiter, str):
            raise _damaged(config, f"task {label} has num_fewshot {shots!r}, continuation_delimiter {delimiter!r}")
        if not isinstance(uri, str) or _leaves(uri):
            raise _damaged(config, f"task {label} has dataset_uri {uri!r}, which is no path below eval_data")
        if label not in baselines:
            raise _damaged(root / "eval_meta_data.csv", f"no baseline of task {label}")
        examples = _read_examples(root / "eval_data" / uri, kind)
        random.Random(SHUFFLE_SEED).shuffle(examples)
        examples = examples[: max_per_task or None]
        if len(examples) <= shots:
            what = f"--core_examples {max_per_task}" if max_per_task else f"--core {root}"
            raise UserError(f"{what} leaves {len(examples)} examples of {label}: it needs at least {shots + 1}")
        tasks.append(CoreTask(label, kind, examples, shots, delimiter, baselines[label]))
    if not tasks:
        raise _damaged(config, "no tasks below icl_tasks")
    return tasks


def _downloaded(client: Client | None) -> Path:
    """The unpacked public bundle. One process of a machine fetches it, the others wait and find it."""
    home = data_dir("core")
    folder = home / "eval_bundle"
    if folder.exists():
        return folder
    address = urllib.parse.urlsplit(BUNDLE_URL)
    # This hub's client sends no token, which is nobody's business at the bundle's address.
    client = client or Client("modelscope", endpoint=f"{address.scheme}://{address.netloc}")
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".unpack.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder
        try:
            archive = client.download(
                BUNDLE_URL, home / "eval_bundle.zip", Remote("eval_bundle.zip", sha256=BUNDLE_SHA256)
            )
        except UserError as error:
            cause = getattr(error.__cause__, "reason", error.__cause__)
            why = error if client.reached else f"cannot reach {address.netloc} ({cause})"
            mend = f"fetch {BUNDLE_URL} where there is a network, unpack it, and give its folder: --core PATH"
            raise UserError(f"--core download: {why}; or {mend}") from error
        unpack(archive, folder)
        archive.unlink()
    return folder


def unpack(archive: Path, folder: Path) -> None:
    """Put what the zip has below `eval_bundle/` at `folder`, all of it or nothing.

    Raises UserError: when the zip is damaged, or a name in it leads out of its folder."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        with zipfile.ZipFile(archive) as bundle:
            for name in bundle.namelist():
                if _leaves(name):
                    raise UserError(f"{archive}: {name!r} leads out of the folder; nothing was unpacked")
            bundle.extractall(unfinished)  # links come out as plain files
        if not (unfinished / "eval_bundle").is_dir():
            raise UserError(f"{archive} has no eval_bundle/: is it the bundle of {BUNDLE_URL}?")
        (unfinished / "eval_bundle").replace(folder)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise UserError(f"{archive}: {error}; delete it and run again") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _leaves(path: str) -> bool:
    """Whether a relative path could lead out of its folder, here or on a system with other separators."""
    return bool(re.search(r"\\|^\w:", path)) or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts


def _damaged(path: Path, problem: str) -> UserError:
    return UserError(f"--core: {path}: {problem}; unpack the bundle again ({BUNDLE_URL}), or mend it")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a text file, without the blank ones."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
    except FileNotFoundError as error:
        raise _damaged(path, "the file is missing") from error
    except UnicodeDecodeError as error:
        raise _damaged(path, f"it is not UTF-8 ({error.reason})") from error


def _read_baselines(path: Path) -> dict[str, float]:
    """Accuracy of guessing by task, from a table that gives it in percent."""
    baselines = {}
    try:
        rows = list(csv.DictReader(line for _, line in _lines(path)))
    except csv.Error as error:
        raise _damaged(path, f"it is not CSV ({error})") from error
    for row in rows:
        label, text = (str(row.get(column) or "").strip() for column in ("Eval Task", "Random baseline"))
        try:
            baselines[label] = float(text) / 100
        except ValueError as error:
            raise _damaged(path, f"task {label!r} has the random baseline {text!r}") from error
        if not 0 <= baselines[label] < 1:
            raise _damaged(path, f"task {label!r} has the random baseline {text}, not from 0 to below 100")
    return baselines


def _read_examples(path: Path, kind: str) -> list[dict[str, Any]]:
    examples = []
    for number, line in _lines(path):
        try:
            example = json.loads(line)
        except json.JSONDecodeError as error:
            raise _damaged(path, f"line {number} is not JSON ({error.msg})") from error
        problem = _problem(example, kind)
        if problem:
            raise _damaged(path, f"line {number} {problem}")
        examples.append(example)
    return examples


def _problem(example: Any, kind: str) -> str | None:
    """What is wrong with a line of a task's file."""
    if not isinstance(example, dict):
        return "is not an object"
    texts, options = FIELDS[kind]
    for key in texts:
        if not isinstance(example.get(key), str):
            return f'has no text in "{key}"'
    if not options:
        return None if example["continuation"].strip() else 'has an empty "continuation"'
    several, gold = example.get(options), example.get("gold")
    if not isinstance(several, list) or len(several) < 2 or not all(isinstance(one, str) for one in several):
        return f'has no list of texts in "{options}"'
    if type(gold) is not int or not 0 <= gold < len(several):
        return f'has "gold" {gold!r}, with {len(several)} in "{options}"'
    return None


# ---------------------------------------------------------------------- core.yaml
# The file is a list of flat mappings with texts, whole numbers and lists of them. A YAML library would be a
# dependency of the core for this file alone.

_QUOTED = r"""("(?:[^"\\]|\\.)*"|'(?:[^']|'')*')\s*(?:#.*)?"""


def _read_task_list(path: Path) -> list[dict[str, Any]]:
    """The mappings below `icl_tasks:`; a form that is not expected is an error."""
    tasks: list[dict[str, Any]] = []
    inside, margin, open_key = False, None, ""  # margin: of the tasks' dashes; open_key: its value is still to come
    for number, line in _lines(path):
        text, indent = line.strip(), len(line) - len(line.lstrip())
        if text.startswith("#") or text == "---":
            continue
        if indent == 0 and not text.startswith("-"):  # a key of the file
            inside = re.fullmatch(r"icl_tasks:\s*(#.*)?", text) is not None
            continue
        if not inside:
            continue
        if text == "-" or text.startswith("- "):
            margin = indent if margin is None else margin
            text = text[1:].strip()
            if indent > margin and tasks and open_key:  # a list laid out line by line
                tasks[-1].setdefault(open_key, []).append(_value(path, number, text))
                continue
            if indent != margin:
                raise _damaged(path, f"line {number}: a list where none is expected")
            tasks.append({})
            open_key = ""
            if not text or text.startswith("#"):
                continue
        entry = re.fullmatch(r"([\w-]+):(?:\s+(.*))?", text)
        if not entry or not tasks:
            raise _damaged(path, f"line {number} is not `key: value`")
        open_key = "" if entry[2] and not entry[2].startswith("#") else entry[1]
        if not open_key:
            tasks[-1][entry[1]] = _value(path, number, entry[2])
    return tasks


def _value(path: Path, number: int, text: str) -> Any:
    """A text in quotes or without, a whole number, or a list of them in brackets."""
    quoted, listed = re.fullmatch(_QUOTED, text), re.fullmatch(r"\[([^\]]*)\]\s*(?:#.*)?", text)
    if listed:
        return [_value(path, number, part.strip()) for part in listed[1].split(",") if part.strip()]
    if quoted and quoted[1][0] == "'":
        return quoted[1][1:-1].replace("''", "'")
    if quoted:
        try:
            return json.loads(quoted[1])
        except json.JSONDecodeError as error:
            raise _damaged(path, f"line {number} has the text {quoted[1]}, which cannot be read") from error
    if not text or text[0] in "\"'[{&*!|>%@`":
        raise _damaged(path, f"line {number} has the value {text!r}, which cannot be read")
    plain = re.sub(r"\s+#.*", "", text)
    return int(plain) if re.fullmatch(r"\d+", plain) else plain


# ---------------------------------------------------------------------- prompts


def prompts(task: CoreTask, index: int) -> list[str]:
    """The texts of one example, behind its solved ones: an option each; for language modelling one without the
    continuation and one with it."""
    places = random.Random(FEW_SHOT_SEED + index).sample(range(len(task.examples) - 1), task.shots)
    solved = (task.examples[place + (place >= index)] for place in places)  # any but the example itself
    head = "".join(f"{task.delimiter.join(_sides(task.kind, one, one.get('gold', 0)))}\n\n" for one in solved)
    example = task.examples[index]
    options = len(example[FIELDS[task.kind][1]]) if FIELDS[task.kind][1] else 1
    texts = [head + task.delimiter.join(_sides(task.kind, example, option)) for option in range(options)]
    if task.kind != "language_modeling":
        return texts
    # Stripped, because a space at the end would be a token of its own and not the beginning of the next word.
    return [(head + _sides(task.kind, example, 0)[0] + task.delimiter).strip(), *texts]


def _sides(kind: str, example: dict[str, Any], option: int) -> tuple[str, str]:
    """Context and continuation."""
    if kind == "multiple_choice":
        return example["query"], example["choices"][option]
    if kind == "schema":
        return example["context_options"][option], example["continuation"]
    return example["context"].strip(), example["continuation"]


def token_rows(task: CoreTask, index: int, tokenizer: Tokenizer, context: int) -> list[tuple[list[int], int]]:
    """An option of an example each: its last `context` tokens, and where those begin that are scored.

    They are those behind the beginning that all texts share, for schemas those of the end that all share.
    """
    rows = tokenizer.encode_batch(prompts(task, index), prepend=tokenizer.get_bos_token_id())
    if task.kind == "schema":
        shared = _shared([row[::-1] for row in rows])
        starts = [len(row) - shared for row in rows]
    else:
        starts = [_shared(rows)] * len(rows)
    if task.kind == "language_modeling":
        rows, starts = rows[1:], starts[1:]
    # The first token that is left is predicted by nothing.
    return [
        (row[-context:], max(start - max(len(row) - context, 0), 1)) for row, start in zip(rows, starts, strict=True)
    ]


def _shared(rows: Sequence[Sequence[int]]) -> int:
    """How many tokens all rows begin with."""
    for length, column in enumerate(zip(*rows, strict=False)):
        if any(token != column[0] for token in column):
            return length
    return min(len(row) for row in rows)


# ---------------------------------------------------------------------- scores


def evaluate(
    model: GPT, tokenizer: Tokenizer, tasks: Sequence[CoreTask], device: Device, batch_rows: int
) -> CoreResult:
    """Put every example of every task to the model, shared out over the ranks; the same on every rank.

    `batch_rows` texts, which may fill the context, go through the model at once. Prints a line a task."""
    results: dict[str, dict[str, float]] = {}
    for place, task in enumerate(tasks, 1):
        begin, total = time.monotonic(), len(task.examples)
        counts = torch.tensor(_count_correct(model, tokenizer, task, device, batch_rows), dtype=torch.float32)
        if device.world_size > 1:
            counts = counts.to(device.torch_device)
            dist.all_reduce(counts)
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
            f"({task.shots}-shot, {total:,} examples{shortened}, {duration(time.monotonic() - begin)})"
        )
    return CoreResult(sum(result["centered"] for result in results.values()) / len(results), results)


def wilson_interval(correct: float, total: int) -> tuple[float, float]:
    """Where the accuracy on ever more such examples would lie, with 95% confidence (source: Wilson 1927)."""
    z, share = 1.96, correct / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    reach = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(middle - reach, 0.0), min(middle + reach, 1.0)


@dataclass(frozen=True)
class _Row:
    """One option's text on its way through the model."""

    example: int
    option: int
    tokens: list[int]
    start: int  # of the tokens that are scored


def _count_correct(
    model: GPT, tokenizer: Tokenizer, task: CoreTask, device: Device, batch_rows: int
) -> tuple[int, int]:
    """How many of this rank's share of the examples the model gets right, and how many were cut to the context.

    Rows wait for others of their padded length, so that shapes repeat, and are the same at any number of ranks."""
    context, cut = model.config.sequence_len, 0
    scores: dict[int, list[tuple[float, bool]]] = {}
    waiting: dict[int, list[_Row]] = defaultdict(list)

    def flush(length: int) -> None:
        rows = waiting.pop(length)
        for row, score in zip(rows, score_rows(model, rows, length, batch_rows, device), strict=True):
            scores[row.example][row.option] = score

    for index in range(device.rank, len(task.examples), device.world_size):
        options = token_rows(task, index, tokenizer, context)
        cut += any(tokens[0] != tokenizer.get_bos_token_id() for tokens, _ in options)
        scores[index] = [(math.nan, False)] * len(options)
        for option, (tokens, start) in enumerate(options):
            length = padded_length(len(tokens) - 1, context)
            waiting[length].append(_Row(index, option, tokens, start))
            if len(waiting[length]) == batch_rows:
                flush(length)
    for length in list(waiting):
        flush(length)
    return sum(_is_right(task, index, of_options) for index, of_options in scores.items()), cut


def _is_right(task: CoreTask, index: int, scores: Sequence[tuple[float, bool]]) -> bool:
    if task.kind == "language_modeling":
        return scores[0][1]
    # An option that the others only add to has no tokens of its own and NaN for a loss. As in nanochat it is
    # chosen where it comes first, never elsewhere.
    return min(range(len(scores)), key=lambda option: scores[option][0]) == task.examples[index]["gold"]


def padded_length(tokens: int, context: int) -> int:
    """The next of a few lengths: multiples of 64, then such steps that at most a fifth of a row is padding."""
    step = max(64, 1 << max(tokens - 1, 1).bit_length() >> 3)
    return min(max(-(-tokens // step), 1) * step, context)


@torch.inference_mode()
def score_rows(
    model: GPT, rows: Sequence[_Row], length: int, batch_rows: int, device: Device
) -> list[tuple[float, bool]]:
    """Of each row the mean loss of its scored tokens in nats (NaN without any), and whether each of them is the
    model's first choice."""
    tokens = torch.zeros(batch_rows, length, dtype=torch.long)  # (B, T)
    targets = torch.full((batch_rows, length), IGNORE)  # (B, T)
    for place, row in enumerate(rows):
        tokens[place, : len(row.tokens) - 1] = torch.tensor(row.tokens[:-1])
        targets[place, row.start - 1 : len(row.tokens) - 1] = torch.tensor(row.tokens[row.start :])
    targets = targets.flatten()
    scored = (targets != IGNORE).nonzero()[:, 0]  # (N,): a few of the B x T, and only they go through the head
    losses, hits = [], []
    with device.autocast():
        hidden = model.hidden(device.to_device(tokens)).flatten(0, 1)  # (B x T, C)
        for places in F.pad(scored, (0, -len(scored) % HEAD_TOKENS)).split(HEAD_TOKENS):
            logits = model.logits(hidden[device.to_device(places)])  # (HEAD_TOKENS, V)
            wanted = device.to_device(targets[places])
            losses.append(F.cross_entropy(logits, wanted, ignore_index=IGNORE, reduction="none"))
            hits.append(logits.argmax(dim=-1) == wanted)
    owners = scored // length
    sums = torch.zeros(2, batch_rows, dtype=torch.float64)  # of losses, of first choices
    for total, values in zip(sums, (losses, hits), strict=True):
        total.index_add_(0, owners, torch.cat(values)[: len(scored)].cpu().double())
    counts = torch.bincount(owners, minlength=batch_rows)
    return list(zip((sums[0] / counts).tolist(), (sums[1] == counts).tolist(), strict=True))[: len(rows)]
