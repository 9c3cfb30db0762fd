"""Chat evaluation: how many of a task's questions a model answers correctly.

A generative task: the engine generates replies, with the tool, and the task grades them. An environment: it plays an
episode, which is right from a reward of 1 on. A choice task takes one
forward pass: of the question's letters, the likeliest one as the first token of the reply is the answer. ChatCORE is
the mean over tasks of (accuracy - baseline) / (1 - baseline): 0 is guessing, 1 is perfect (source: nanochat).

Ranks take whole batches, so that a batch, and with it every reply, is the same at any number of ranks, sampled and in
bf16 too.

Legend: B rows, T tokens, C width, L letters, V vocab.
"""

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nanochat.cli import Failed, UserError
from nanochat.collectives import sum_over_ranks
from nanochat.conversation import Message, Part, fit_prompt, parse_reply, parts_of, render_prompt
from nanochat.device import Device
from nanochat.engine import Ending, Engine
from nanochat.evals.core import wilson_interval
from nanochat.gpt import GPT
from nanochat.rollout import engine_sampler, play
from nanochat.sampling import SamplingParams, seed_of
from nanochat.screen import track
from nanochat.task import Example, Kind, Task
from nanochat.task_flag import GENERATED, TaskSpec, parse_tasks, require_grades
from nanochat.tokenizer import Tokenizer

ORDER_SEED = 1337  # of the examples: the first N are the same N for every model, and of every subject


@dataclass(frozen=True)
class Result:
    """How a model did on one task."""

    kind: Kind
    correct: int  # replies
    total: int  # replies: of a generative task `samples` to each question
    questions: int
    accuracy: float
    low: float  # the 95% interval: over the questions, since replies to the same one are not independent
    high: float
    baseline: float
    too_long: int  # questions that do not fit the context; they count as wrong
    cut_off: int  # replies that max_tokens or the context ended; the task grades what is there
    seconds: float


@dataclass(frozen=True)
class Graded:
    """One question and a reply to it."""

    messages: list[Message]
    reply: list[Part]
    correct: bool


# ---------------------------------------------------------------------- which tasks


def graded_choices(text: str) -> list[TaskSpec]:
    """The entries of a --tasks flag; every built-in task that can be graded where it is empty.

    Raises UserError: for what has nothing to grade, or a weight, or a task named twice.
    """
    choices = parse_tasks(text or ",".join(GENERATED))
    require_grades(choices)
    names = [choice.name for choice in choices]
    for choice in choices:
        if choice.weight != 1:
            raise UserError(f"--tasks {choice.name}:{choice.weight:g}: a weight is for training; leave it out")
        if names.count(choice.name) > 1:
            raise UserError(f"--tasks names {choice.name} twice: leave one out")
    return choices


# ---------------------------------------------------------------------- one task


def evaluate(
    task: Task,
    model: GPT,
    engine: Engine,
    *,
    batch_rows: int,
    sampling: SamplingParams,
    max_examples: int | None = None,
    samples: int = 1,
    max_tokens: int = 512,
    keep: int = 0,
) -> tuple[Result, list[Graded]]:
    """Grade a model on the first `max_examples` of a task's shuffled examples, shared out over the ranks.

    `engine` generates with the model's weights, `batch_rows` prompts at once, `samples` replies to each question;
    the accuracy is the mean over all of them (pass@1). Also returned: the first replies to up to `keep` questions,
    in the order of the examples, of those that this rank graded. The result is the same on every rank.
    Raises UserError: when the task has no examples, or letters that are not one token each.
    """
    if not len(task):
        raise UserError(f"--tasks {task.name}: there are no examples in it")
    began = time.monotonic()
    device = engine.device
    is_choice = task.kind == "choice"
    order = list(range(len(task)))
    random.Random(ORDER_SEED).shuffle(order)
    examples = [task.example(index) for index in order[:max_examples]]
    is_played = type(task).environment is not Task.environment
    environments = [task.environment(example) for example in examples]
    prompts = [render_prompt(engine.tokenizer, one.start(), tools=one.tools) for one in environments]
    letters = [_letter_ids(task, example, engine.tokenizer) for example in examples] if is_choice else []

    # Batches of examples, by number, the longest prompts first: where memory runs out, it does so at once.
    replies_each = 1 if is_choice else samples
    room = model.config.sequence_len - (0 if is_choice else 1)  # a generated reply needs a token of its own
    fitting = [number for number, prompt in enumerate(prompts) if len(prompt) <= room]
    fitting.sort(key=lambda number: -len(prompts[number]))
    rows = [number for number in fitting for _ in range(replies_each)]
    batches = [rows[first : first + batch_rows] for first in range(0, len(rows), batch_rows)]

    # Reply and grade, every world_size-th batch.
    graded: list[tuple[int, Graded]] = []
    cut_off = 0
    if is_played:
        questions = [(task, examples[number]) for number in fitting]
        settings = {"samples": samples, "max_tokens": max_tokens, "context": model.config.sequence_len}
        sampler = engine_sampler(engine, batch_rows)
        try:
            played = play(sampler, engine.tokenizer, device, questions, **settings, **asdict(sampling))
        except Failed as failure:
            raise UserError(f"--tasks {task.name}: {failure}") from failure
        for live in played:
            episode = live.finished()
            *messages, last = episode.messages
            is_right = episode.ending != "broken" and episode.reward >= 1
            graded.append((fitting[live.numbers[0]], Graded(messages, parts_of(last["content"]), is_right)))
            cut_off += episode.ending == "cut off"
        batches = []
    for place in track(range(device.rank, len(batches), device.world_size), "batches"):
        batch = batches[place]
        batch_prompts = [prompts[number] for number in batch]
        replies: list[list[Part]] = []
        endings: list[Ending] = ["complete"] * len(batch)  # a letter
        if is_choice:
            preferred = preferred_letters(model, batch_prompts, [letters[number] for number in batch], device)
            for number, letter in zip(batch, preferred, strict=True):
                replies.append([{"type": "text", "text": examples[number].letters[letter]}])
        else:
            # A seed for each reply, by its place among all: whichever rank samples it, it draws the same.
            first = place * batch_rows
            settings = [replace(sampling, seed=seed_of(sampling.seed, first + row)) for row in range(len(batch))]
            sequences, masks = engine.generate(batch_prompts, max_tokens=max_tokens, sampling=settings, keep_stop=True)
            replies = [parse_reply(engine.tokenizer, ids) for ids in sequences]
            endings = [engine.ending(ids, mask) for ids, mask in zip(sequences, masks, strict=True)]
        for number, reply, ending in zip(batch, replies, endings, strict=True):
            example = examples[number]
            is_right = ending != "broken" and task.grade(example, reply)
            graded.append((number, Graded(example.question, reply, is_right)))
            cut_off += ending == "cut off"

    # Add up over the ranks. A question that does not fit counts as wrong.
    counts = [sum(one.correct for _, one in graded), cut_off]
    counts_here = torch.tensor(counts, dtype=torch.float32, device=device.torch_device)
    right, cut_off = map(int, sum_over_ranks(counts_here, device).tolist())
    total = len(examples) * replies_each
    low, high = wilson_interval(right / replies_each, len(examples))  # of the questions: a mean over samples
    result = Result(
        kind=task.kind, correct=right, total=total, questions=len(examples), accuracy=right / total, low=low, high=high,
        baseline=task.baseline, too_long=len(examples) - len(fitting), cut_off=cut_off,
        seconds=time.monotonic() - began,
    )  # fmt: skip
    first_replies: dict[int, Graded] = {}
    for number, one in sorted(graded, key=lambda pair: pair[0]):
        first_replies.setdefault(number, one)
    return result, list(first_replies.values())[:keep]


def _letter_ids(task: Task, example: Example, tokenizer: Tokenizer) -> list[int]:
    """The token that each letter is, written by itself."""
    ids = [tokenizer.encode(letter) for letter in example.letters]
    for letter, tokens in zip(example.letters, ids, strict=True):
        if len(tokens) != 1:
            problem = f"the letter {letter!r} is {len(tokens)} tokens of this tokenizer, where one is needed"
            raise UserError(f"--tasks {task.name}: {problem}; leave the task out")
    return [tokens[0] for tokens in ids]


@torch.inference_mode()
def preferred_letters(
    model: GPT, prompts: Sequence[Sequence[int]], letters: Sequence[Sequence[int]], device: Device
) -> list[int]:
    """The index of the likeliest of each prompt's letters (token ids) as the next token."""
    lengths = device.to_device(torch.tensor([len(prompt) for prompt in prompts]))
    tokens = device.to_device(_padded(prompts, 0))  # (B, T)
    choices = device.to_device(_padded(letters, -1))  # (B, L)
    hidden = model.hidden(tokens)  # (B, T, C); no token attends to the padding after it
    logits = model.logits(hidden[torch.arange(len(prompts), device=hidden.device), lengths - 1])  # (B, V)
    scores = logits.gather(1, choices.clamp(min=0)).masked_fill(choices < 0, -torch.inf)  # (B, L)
    return scores.argmax(dim=-1).tolist()


def _padded(rows: Sequence[Sequence[int]], filling: int) -> Tensor:
    return pad_sequence([torch.tensor(ids) for ids in rows], batch_first=True, padding_value=filling)


# ---------------------------------------------------------------------- a chat

CHAT = ("Hello!", "What is 47 + 38?", "Tell me a story about a small fox.")  # what any chat model may be asked


def converse(
    engine: Engine, questions: Sequence[str], sampling: SamplingParams, max_tokens: int = 256
) -> list[Message]:
    """One conversation, as chat_cli would have it: each question with the model's reply, both read at the next one."""
    turns: list[Message] = []
    for number, question in enumerate(questions):
        turns.append({"role": "user", "content": question})
        prompt = fit_prompt(engine.tokenizer, turns, engine.model.config.sequence_len, max_tokens)
        settings = replace(sampling, seed=sampling.seed + number)
        (reply,), _ = engine.generate([prompt.ids], max_tokens=max_tokens, sampling=settings)
        turns.append({"role": "assistant", "content": parse_reply(engine.tokenizer, reply)})
    return turns


# ---------------------------------------------------------------------- reports


def chat_core(scores: Iterable[tuple[float, float]]) -> float:
    """The mean over tasks, each given as (accuracy, baseline), of what is above guessing."""
    centered = [(accuracy - baseline) / (1 - baseline) for accuracy, baseline in scores]
    return sum(centered) / len(centered)


def readable(reply: Sequence[Part]) -> str:
    """A reply in one text, its calls and their answers as `[2+3] [-> 5]`."""
    forms = {"text": "{}", "python": "[{}]", "python_output": "[-> {}]"}
    return " ".join(forms[part["type"]].format(part["text"].strip()) for part in reply)
