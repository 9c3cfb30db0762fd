"""Chat evaluation: how many of a task's questions a model answers correctly.

    a generative task     the engine writes replies, with the tool, and the task grades them       `write_replies`
                          first it replies to the earlier messages that have no reply              `with_own_replies`
    a choice task         one forward pass: the likeliest letter as the reply's first token        `choose_letters`
    an environment        the engine plays an episode, which is right from a reward of 1 on        `play_episodes`

ChatCORE is the mean over tasks of (accuracy - baseline) / (1 - baseline): 0 is guessing, 1 is perfect (source:
nanochat).

Ranks take whole batches, so that a batch, and with it every reply, is the same at any number of ranks, sampled and in
bf16 too.

Legend: B rows, T tokens, C width, L letters, V vocab.
"""

import random
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nanochat.chat import Chat
from nanochat.conversation import Message, Part, fit_prompt, parse_reply, parts_of, render_prompt
from nanochat.device import Device
from nanochat.engine import Ending, Engine, ending
from nanochat.evals.paired import wilson_interval
from nanochat.gpt import GPT
from nanochat.ground.cli import Failed, UserError
from nanochat.ground.screen import track
from nanochat.ranks import gather_values
from nanochat.rollout import EngineSampler, play
from nanochat.sampling import SamplingParams, seed_of
from nanochat.task import Example, Kind, Task
from nanochat.tasks.flag import TaskSpec, generated_tasks, parse_tasks, require_grades
from nanochat.tasks.messages import next_reply
from nanochat.tokenizer import Tokenizer

ORDER_SEED = 1337  # shuffles the examples: the first N are the same N for every model, and from every subject


@dataclass(frozen=True)
class Settings:
    """How the questions are asked."""

    sampling: SamplingParams
    batch_rows: int  # prompts at once
    max_examples: int | None = None
    samples: int = 1  # replies to each question
    max_tokens: int = 512  # the longest reply


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
    cut_off: int  # replies that max_tokens or the context ended; the task grades their text so far
    places: list[tuple[int, int]]  # right replies, of all to a first, to a second, and to a later message of a chat
    seconds: float
    measures: dict[str, float] = field(default_factory=dict)  # what else the task says about the replies
    scores: dict[str, dict[str, float]] = field(default_factory=dict)  # the accuracy and measures by `Question.key`


@dataclass(frozen=True)
class Graded:
    """One question and a reply to it."""

    messages: list[Message]
    reply: list[Part]
    correct: bool
    reward: float
    number: int  # the question's number among the task's examples in their order
    ending: Ending


# ---------------------------------------------------------------------- which tasks


def graded_choices(text: str) -> list[TaskSpec]:
    """The entries of a --tasks flag; every built-in task that can be graded where it is empty.

    A weight has no effect here, so the flag of a training stage can be repeated. Raises UserError: for a task without
    grades.
    """
    choices = parse_tasks(text or ",".join(generated_tasks()))
    require_grades(choices)
    return choices


# ---------------------------------------------------------------------- one task


def evaluate(task: Task, model: GPT, engine: Engine, settings: Settings, keep: int) -> tuple[Result, list[Graded]]:
    """Grade a model on the first `max_examples` of a task's shuffled examples, shared out over the ranks.

    `engine` generates with the model's weights; the accuracy is the mean over all replies (pass@1). Also returned: the
    first replies to up to `keep` questions, in the order of the examples, of those that this rank graded. The result is
    the same on every rank. Raises UserError: when the task has no examples, or letters that are not one token each.
    """
    began = time.monotonic()
    context = model.config.sequence_len
    if not len(task):
        raise UserError(f"--tasks {task.name}: it has no examples")
    count = len(task) if settings.max_examples is None else min(settings.max_examples, len(task))
    questions = draw_questions(task, engine.tokenizer, context, count)
    if task.kind == "choice":
        settings = replace(settings, samples=1)
    if type(task).environment is not Task.environment:
        answers = play_episodes(task, questions, engine, settings, context)
    else:
        answers = answer_questions(task, questions, model, engine, settings)

    # All ranks get all replies with their grades.
    here = [asdict(replace(answer, messages=[])) for answer in answers]
    graded = [Graded(**answer) for rank in gather_values(here, engine.device) for answer in rank]
    graded.sort(key=lambda answer: answer.number)
    asked = {question.number: question for question in questions}
    keys = [asked[answer.number].key for answer in graded]
    right = [answer.correct for answer in graded]
    measured = {"accuracy": right, **task.measures([(asked[one.number].example, one.reply) for one in graded])}
    if (rewards := [answer.reward for answer in graded]) != right:
        measured["reward"] = rewards
    scores = {name: by_question(keys, values) for name, values in measured.items() if isinstance(values, Sequence)}
    del measured["accuracy"]
    places = []
    for place in range(3):
        found = [answer.correct for answer in graded if asked[answer.number].place == place]
        places.append((sum(found), len(found)))
    # A question that does not fit counts as wrong. The interval is over questions: each is a mean over samples.
    total = count * settings.samples
    accuracy = sum(right) / total
    low, high = wilson_interval(count * accuracy, count)
    result = Result(
        kind=task.kind, correct=sum(right), total=total, questions=count, accuracy=accuracy, low=low,
        high=high, baseline=task.baseline, too_long=count - len(questions), places=places,
        cut_off=sum(answer.ending == "cut off" for answer in graded), seconds=time.monotonic() - began,
        measures=with_intervals(measured, settings.samples), scores=scores,
    )  # fmt: skip
    first_replies: dict[int, Graded] = {}
    for answer in sorted(answers, key=lambda answer: answer.number):
        first_replies.setdefault(answer.number, answer)
    return result, list(first_replies.values())[:keep]


def with_intervals(measures: Mapping[str, float | Sequence[float | None]], samples: int) -> dict[str, float]:
    """The mean of each measure and, of values from 0 to 1, the ends of its 95% interval, NAME_low and NAME_high. Like
    the accuracy's it is over questions, of which each has several replies."""
    found: dict[str, float] = {}
    for name, value in measures.items():
        if not isinstance(value, Sequence):
            found[name] = value
        elif values := [one for one in value if one is not None]:
            found[name] = fmean(values)
            if 0 <= min(values) <= max(values) <= 1:
                low, high = wilson_interval(sum(values) / samples, len(values) / samples)
                found |= {f"{name}_low": low, f"{name}_high": high}
    return found


def by_question(keys: Sequence[str], values: Sequence[float | None]) -> dict[str, float]:
    """The mean of each question's replies, of those that count."""
    found: dict[str, list[float]] = defaultdict(list)
    for key, value in zip(keys, values, strict=True):
        if value is not None:
            found[key].append(value)
    return {key: fmean(of_key) for key, of_key in found.items()}


@dataclass(frozen=True)
class Question:
    number: int  # among the task's examples in their order
    key: str  # its index in the task and a checksum of its text: the same question for every model
    example: Example
    prompt: list[int]  # up to the first reply that the conversation lacks
    letters: list[int]  # the token of each of its letters
    place: int  # 0 for a first message, 1 for a second, 2 for any later one


def draw_questions(task: Task, tokenizer: Tokenizer, context: int, count: int) -> list[Question]:
    """The first `count` of a task's shuffled examples, without those that do not fit the context.

    The longest is first: where memory runs out, it does so at once.
    Raises UserError: when a letter is not one token.
    """
    order = list(range(len(task)))
    random.Random(ORDER_SEED).shuffle(order)
    # A generated reply needs a token in the context; a letter is read off the prompt.
    room = context if task.kind == "choice" else context - 1
    fitting = []
    for number, index in enumerate(order[:count]):
        example = task.example(index)
        environment = task.environment(example)
        messages = environment.start()
        asked = messages[: next_reply(messages)]
        prompt = render_prompt(tokenizer, asked, tools=environment.tools)
        if task.kind == "generative":  # a long conversation loses its oldest turns, as in a chat
            prompt = fit_prompt(tokenizer, asked, context, tools=environment.tools).ids
        if len(prompt) <= room:
            said = [message for message in messages if message["role"] == "user"]
            letters = _letter_ids(task, example, tokenizer)
            key = f"{index}:{zlib.crc32(repr(example.question).encode()):08x}"
            fitting.append(Question(number, key, example, prompt, letters, place=min(len(said), 3) - 1))
    fitting.sort(key=lambda question: -len(question.prompt))
    return fitting


def answer_questions(
    task: Task, questions: Sequence[Question], model: GPT, engine: Engine, settings: Settings
) -> list[Graded]:
    """This rank's share of the replies to all questions, graded by the task."""
    device = engine.device
    rows = [question for question in questions for _ in range(settings.samples)]
    answers = []
    # Every world_size-th batch, so that a batch is the same at any number of ranks.
    firsts = range(0, len(rows), settings.batch_rows)
    for first in track(firsts[device.rank :: device.world_size], "batches"):
        batch = rows[first : first + settings.batch_rows]
        if task.kind == "choice":
            replies = choose_letters(batch, model, device)
        else:
            # A seed for each reply, by its place among all: whichever rank samples it, it draws the same.
            seeds = [seed_of(settings.sampling.seed, first + row) for row in range(len(batch))]
            sampling = [replace(settings.sampling, seed=seed) for seed in seeds]
            batch = with_own_replies(batch, engine, sampling, settings.max_tokens, model.config.sequence_len)
            replies = write_replies(batch, engine, sampling, settings.max_tokens)
        for question, (reply, ended) in zip(batch, replies, strict=True):
            is_right = ended != "broken" and task.grade(question.example, reply)
            reward = float(is_right)
            if ended != "broken" and type(task).reward is not Task.reward:
                reward = task.reward(question.example, reply)
            answers.append(Graded(question.example.question, reply, is_right, reward, question.number, ended))
    return answers


def choose_letters(batch: Sequence[Question], model: GPT, device: Device) -> list[tuple[list[Part], Ending]]:
    """The most likely letter as the first token of the reply to each multiple-choice question."""
    preferred = preferred_letters(model, [one.prompt for one in batch], [one.letters for one in batch], device)
    texts = [question.example.letters[place] for question, place in zip(batch, preferred, strict=True)]
    return [([{"type": "text", "text": text}], "complete") for text in texts]


def with_own_replies(
    batch: Sequence[Question], engine: Engine, settings: Sequence[SamplingParams], max_tokens: int, context: int
) -> list[Question]:
    """The questions with the model's own replies to earlier messages that have no reply, sampled one turn at a time.

    Each reply has a seed under its row's. As in a chat, a prompt that grows too long loses its oldest turns.
    """
    answered = list(batch)
    for turn in range(max(len(question.example.messages) for question in batch)):
        talks = [question.example.messages for question in answered]
        waiting = [row for row, messages in enumerate(talks) if next_reply(messages) < len(messages)]
        if not waiting:
            break
        sampling = [replace(settings[row], seed=seed_of(settings[row].seed, turn)) for row in waiting]
        replies = write_replies([answered[row] for row in waiting], engine, sampling, max_tokens)
        for row, (reply, _) in zip(waiting, replies, strict=True):
            example = answered[row].example
            messages = list(example.messages)
            messages.insert(next_reply(messages), {"role": "assistant", "content": reply})
            said = messages[: next_reply(messages[:-1])]
            prompt = fit_prompt(engine.tokenizer, said, context, max_tokens, tools=example.tools).ids
            answered[row] = replace(answered[row], example=replace(example, messages=messages), prompt=prompt)
    return answered


def write_replies(
    batch: Sequence[Question], engine: Engine, settings: Sequence[SamplingParams], max_tokens: int
) -> list[tuple[list[Part], Ending]]:
    """A reply to each question, and how it ended."""
    prompts = [question.prompt for question in batch]
    sequences, masks = engine.generate(prompts, max_tokens=max_tokens, sampling=settings, keep_stop=True)
    replies = zip(sequences, masks, strict=True)
    return [(parse_reply(engine.tokenizer, ids), ending(ids, mask, engine.tokenizer)) for ids, mask in replies]


def play_episodes(
    task: Task, questions: Sequence[Question], engine: Engine, settings: Settings, context: int
) -> list[Graded]:
    """This rank's share of the episodes of all questions; one is right from a reward of 1 on.

    Raises UserError: when the environment fails.
    """
    asked = [(task, question.example) for question in questions]
    try:
        played = play(
            EngineSampler(engine, settings.batch_rows), engine.tokenizer, engine.device, asked,
            samples=settings.samples, max_tokens=settings.max_tokens, context=context, **asdict(settings.sampling),
        )  # fmt: skip
    except Failed as failure:
        raise UserError(f"--tasks {task.name}: {failure}") from failure
    answers = []
    for episode in played:
        *messages, last = episode.messages
        ended = episode.sample.ending
        is_right = ended != "broken" and episode.reward >= 1
        number = questions[episode.sample.question].number
        answers.append(Graded(messages, parts_of(last["content"]), is_right, episode.reward, number, ended))
    return answers


def _letter_ids(task: Task, example: Example, tokenizer: Tokenizer) -> list[int]:
    """The token of each letter."""
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
    """For each prompt, the index of the letter (token ids) that is most likely as the next token."""
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

CHAT = ("Hello!", "What is 47 + 38?", "Tell me a story about a fox named Ravi.")


def short_chat(engine: Engine, sampling: SamplingParams, max_tokens: int = 256) -> list[Message]:
    """A conversation of three questions that any chat model can be asked, as it comes."""
    chat = Chat(engine, max_tokens=max_tokens, **asdict(sampling))
    for question in CHAT:
        chat.say(question)
    return chat.messages


# ---------------------------------------------------------------------- reports


def chat_core(scores: Iterable[tuple[float, float]]) -> float:
    """The mean over tasks, given as (accuracy, baseline), of the accuracy above guessing."""
    centered = [(accuracy - baseline) / (1 - baseline) for accuracy, baseline in scores]
    return sum(centered) / len(centered)


def readable(content: str | Sequence[Part]) -> str:
    """A message in one text, its calls and their answers as `[2+3] [-> 5]`."""
    forms = {"text": "{}", "python": "[{}]", "python_output": "[-> {}]"}
    return " ".join(forms[part["type"]].format(part["text"].strip()) for part in parts_of(content))
