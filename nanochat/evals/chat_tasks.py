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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nanochat.chat import Chat
from nanochat.conversation import Message, Part, fit_prompt, parse_reply, parts_of, render_prompt
from nanochat.device import Device
from nanochat.engine import Ending, Engine, ending
from nanochat.evals.core import wilson_interval
from nanochat.gpt import GPT
from nanochat.ground.cli import Failed, UserError
from nanochat.ground.screen import track
from nanochat.ranks import gather_values, sum_over_ranks
from nanochat.rollout import EngineSampler, play
from nanochat.sampling import SamplingParams, seed_of
from nanochat.task import Example, Kind, Task
from nanochat.tasks.flag import TaskSpec, generated_tasks, parse_tasks, require_grades
from nanochat.tasks.messages import next_reply
from nanochat.tokenizer import Tokenizer

ORDER_SEED = 1337  # shuffles the examples: the first N are the same N for every model, and from every subject


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


@dataclass(frozen=True)
class Graded:
    """One question and a reply to it."""

    messages: list[Message]
    reply: list[Part]
    correct: bool
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
    began = time.monotonic()
    context = model.config.sequence_len
    if not len(task):
        raise UserError(f"--tasks {task.name}: it has no examples")
    count = len(task) if max_examples is None else min(max_examples, len(task))
    questions = draw_questions(task, engine.tokenizer, context, count)
    if task.kind == "choice":
        samples = 1
    if type(task).environment is not Task.environment:
        answers = play_episodes(task, questions, engine, batch_rows, sampling, samples, max_tokens, context)
    else:
        answers = answer_questions(task, questions, model, engine, batch_rows, sampling, samples, max_tokens)

    # Add up over the ranks. A question that does not fit counts as wrong.
    places = {question.number: question.place for question in questions}
    counts = [0] * 7  # replies by place, right ones by place, cut off
    for answer in answers:
        counts[places[answer.number]] += 1
        if answer.correct:
            counts[places[answer.number] + 3] += 1
        if answer.ending == "cut off":
            counts[-1] += 1
    counts_here = torch.tensor(counts, dtype=torch.float32, device=engine.device.torch_device)
    *counts, cut_off = map(int, sum_over_ranks(counts_here, engine.device).tolist())
    right = sum(counts[3:])
    total = count * samples
    low, high = wilson_interval(right / samples, count)  # counts questions: each is a mean over samples
    measures: dict[str, float] = {}
    if type(task).measures is not Task.measures:  # most tasks have none: their replies stay on their ranks
        examples = {question.number: question.example for question in questions}
        replies = [(answer.number, answer.reply) for answer in answers]
        everywhere = [reply for rank in gather_values(replies, engine.device) for reply in rank]
        everywhere.sort(key=lambda found: found[0])
        measures = with_intervals(task.measures([(examples[number], reply) for number, reply in everywhere]))
    result = Result(
        kind=task.kind, correct=right, total=total, questions=count, accuracy=right / total, low=low,
        high=high, baseline=task.baseline, too_long=count - len(questions), cut_off=cut_off,
        places=list(zip(counts[3:], counts[:3], strict=True)), seconds=time.monotonic() - began, measures=measures,
    )  # fmt: skip
    first_replies: dict[int, Graded] = {}
    for answer in sorted(answers, key=lambda answer: answer.number):
        first_replies.setdefault(answer.number, answer)
    return result, list(first_replies.values())[:keep]


def with_intervals(measures: Mapping[str, float | tuple[int, int]]) -> dict[str, float]:
    """Counts as shares with the ends of their 95% intervals, NAME_low and NAME_high; without what nothing was counted
    for."""
    found: dict[str, float] = {}
    for name, value in measures.items():
        if not isinstance(value, tuple):
            found[name] = value
        elif value[1]:
            found[name] = value[0] / value[1]
            found[f"{name}_low"], found[f"{name}_high"] = wilson_interval(*value)
    return found


@dataclass(frozen=True)
class Question:
    number: int  # among the task's examples in their order
    example: Example
    prompt: list[int]  # up to the first reply that the conversation lacks
    letters: list[int]  # the token of each of its letters
    place: int  # 0 for a first message, 1 for a second, 2 for any later one

    @property
    def lacks_reply(self) -> bool:
        """Whether a reply before the last one is missing: the model writes it first."""
        return next_reply(self.example.messages) < len(self.example.messages)


def draw_questions(task: Task, tokenizer: Tokenizer, context: int, count: int) -> list[Question]:
    """The first `count` of a task's shuffled examples, without those that do not fit the context.

    The longest is first: where memory runs out, it does so at once.
    Raises UserError: when a letter is not one token.
    """
    order = list(range(len(task)))
    random.Random(ORDER_SEED).shuffle(order)
    examples = [task.example(index) for index in order[:count]]
    # A generated reply needs a token in the context; a letter is read off the prompt.
    room = context if task.kind == "choice" else context - 1
    fitting = []
    for number, example in enumerate(examples):
        environment = task.environment(example)
        messages = environment.start()
        asked = messages[: next_reply(messages)]
        prompt = render_prompt(tokenizer, asked, tools=environment.tools)
        if task.kind == "generative":  # a long conversation loses its oldest turns, as in a chat
            prompt = fit_prompt(tokenizer, asked, context, tools=environment.tools).ids
        if len(prompt) <= room:
            said = [message for message in messages if message["role"] == "user"]
            letters = _letter_ids(task, example, tokenizer)
            fitting.append(Question(number, example, prompt, letters, place=min(len(said), 3) - 1))
    fitting.sort(key=lambda question: -len(question.prompt))
    return fitting


def answer_questions(
    task: Task,
    questions: Sequence[Question],
    model: GPT,
    engine: Engine,
    batch_rows: int,
    sampling: SamplingParams,
    samples: int,
    max_tokens: int,
) -> list[Graded]:
    """This rank's share of `samples` replies to each question, graded by the task."""
    device = engine.device
    rows = [question for question in questions for _ in range(samples)]
    answers = []
    # Every world_size-th batch, so that a batch is the same at any number of ranks.
    firsts = range(0, len(rows), batch_rows)
    for first in track(firsts[device.rank :: device.world_size], "batches"):
        batch = rows[first : first + batch_rows]
        if task.kind == "choice":
            replies = choose_letters(batch, model, device)
        else:
            # A seed for each reply, by its place among all: whichever rank samples it, it draws the same.
            settings = [replace(sampling, seed=seed_of(sampling.seed, first + row)) for row in range(len(batch))]
            batch = with_own_replies(batch, engine, settings, max_tokens, model.config.sequence_len)
            replies = write_replies(batch, engine, settings, max_tokens)
        for question, (reply, ended) in zip(batch, replies, strict=True):
            is_right = ended != "broken" and task.grade(question.example, reply)
            answers.append(Graded(question.example.question, reply, is_right, question.number, ended))
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
        waiting = [row for row, question in enumerate(answered) if question.lacks_reply]
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
    task: Task,
    questions: Sequence[Question],
    engine: Engine,
    batch_rows: int,
    sampling: SamplingParams,
    samples: int,
    max_tokens: int,
    context: int,
) -> list[Graded]:
    """This rank's share of `samples` episodes of each question; one is right from a reward of 1 on.

    Raises UserError: when the environment fails.
    """
    asked = [(task, question.example) for question in questions]
    try:
        played = play(
            EngineSampler(engine, batch_rows), engine.tokenizer, engine.device, asked, samples=samples,
            max_tokens=max_tokens, context=context, **asdict(sampling),
        )  # fmt: skip
    except Failed as failure:
        raise UserError(f"--tasks {task.name}: {failure}") from failure
    answers = []
    for episode in played:
        *messages, last = episode.messages
        ended = episode.sample.ending
        is_right = ended != "broken" and episode.reward >= 1
        number = questions[episode.sample.question].number
        answers.append(Graded(messages, parts_of(last["content"]), is_right, number, ended))
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


def readable(reply: Sequence[Part]) -> str:
    """A reply in one text, its calls and their answers as `[2+3] [-> 5]`."""
    forms = {"text": "{}", "python": "[{}]", "python_output": "[-> {}]"}
    return " ".join(forms[part["type"]].format(part["text"].strip()) for part in reply)
