"""Show what a stage would train on: three examples with the tokens to learn marked, and a summary of the rest.

python -m scripts.preview --source sft --tasks chats.jsonl

python -m scripts.preview --stage dpo --tasks ORG/NAME@train_prefs

A terminal shows the tokens to learn in green. Elsewhere they are between [[ and ]].
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nanochat.ground import cli
from nanochat.ground.cli import Count, Positive, Seed
from nanochat.run.flags import HeldOut

if TYPE_CHECKING:
    from nanochat.conversation import Rendered
    from nanochat.tokenizer import Tokenizer

COLUMNS = ("task", "examples", "mean tokens", "longest", "too long", "nothing to learn", "learned")


@dataclass(frozen=True)
class Config:
    source: str = "auto"  # a stage, a folder (ours, Hugging Face's or peft's) or hf:ORG/NAME; auto: the furthest stage
    source_tag: str | None = None  # tag of the source; default: the tag written last
    max_seq_len: Count = 0  # tokens of a row, as in the stage; 0: the model's context
    rope_scaling: Literal["auto", "yarn"] = "auto"  # as in the stage
    chat_template: str | None = None  # a Jinja file, as in the stage
    stage: Literal["sft", "dpo"] = "sft"  # chat_sft learns conversations, chat_dpo preference pairs
    tasks: str = ""  # as in the stage; default: the stage's default
    hub: Literal["hf", "modelscope"] = "hf"  # where tasks with data are downloaded from
    strict_data: bool = False  # as in the stage
    columns: str = ""  # columns of the files, as in the stage: question=COLUMN,answer=COLUMN
    thoughts: Literal["keep", "drop"] = "keep"  # thoughts in the files' replies, as in the stage
    learn: Literal["all", "last"] = "all"  # as in chat_sft
    too_long: Literal["drop", "cut"] = "drop"  # as in chat_sft
    val_share: HeldOut | None = None  # rows of a file that are held out, as in the stage
    seed: Seed = 0  # as in the stage
    examples: Count = 3  # examples to print
    count: Positive = 1000  # examples that the table covers


def main(config: Config) -> None:
    # The heavy imports are here so that --help answers at once.
    from nanochat.checkpoint_manager import load_config
    from nanochat.cross_entropy import IGNORE
    from nanochat.ground.log import counted, print0, print_table
    from nanochat.ground.screen import track
    from nanochat.mixture import is_learned
    from nanochat.model_folder import find_source
    from nanochat.packing import pack_sequences
    from nanochat.run.long_context import NewContext
    from nanochat.run.stage import chosen_template
    from nanochat.task import Task
    from nanochat.tasks.flag import open_tasks
    from nanochat.tasks.learned_share import report_learned

    # ------------------------------------------------------------------ tokenizer and data, opened as in the stage
    folder = find_source(config.source, config.source_tag)
    model_config, tokenizer, meta = load_config(folder)
    tokenizer = chosen_template(tokenizer, config.chat_template)
    model_config, meta = NewContext(config.max_seq_len, config.rope_scaling).configure(model_config, meta)
    row_tokens = model_config.sequence_len
    pretraining = {"data": "", **meta.get("pretraining", {})}
    is_sft = config.stage == "sft"
    tasks, mixture, _ = open_tasks(config, pretraining["data"], config.stage)
    # SFT continues in the mixture where mid-training stopped.
    first = pretraining.get("conversations", 0) if is_sft else 0
    print0(f"source: {folder}, context of {row_tokens:,} tokens; tasks: {tasks}")

    def texts_of(number: int) -> list[tuple[str, "Rendered"]]:
        """The texts of an example, each with its name: a conversation's, or the two replies of a pair."""
        if is_sft:
            return [("", text) for text in mixture.rendered_chat(tokenizer, number, row_tokens + 1)]
        chosen, rejected = mixture.rendered_pair(tokenizer, number, row_tokens + 1)
        return [("chosen: ", chosen), ("rejected: ", rejected)]

    # ------------------------------------------------------------------ examples
    shown: set[tuple[Task, int]] = set()
    all_examples = sum(map(len, mixture.tasks))
    for number in itertools.count(first):
        if len(shown) == min(config.examples, all_examples):
            break
        task, place = mixture.draw(number)
        if (task, place) in shown:  # a small file comes again, as in training
            continue
        shown.add((task, place))
        print0(f"\n--- example {number + 1:,}, of {task.name}")
        for name, text in texts_of(number):
            what = f"cut at {len(text.ids):,}" if text.ids else "longer than a row: left out"
            cut = f", {what}" if text.cut else ""
            print0(f"{name}{len(text.ids):,} tokens, {text.target_count:,} of them learned{cut}")
            print(marked(text, tokenizer))

    # ------------------------------------------------------------------ a summary of the rest
    examples: dict[str, list[Sequence[Rendered]]] = {}  # by task
    for number in track(range(first, first + config.count), "examples"):
        task, _ = mixture.draw(number)
        examples.setdefault(task.name, []).append([text for _, text in texts_of(number)])
    print_table(COLUMNS, [table_row(name, examples[name]) for name in sorted(examples)])
    for task in mixture.tasks:
        if len(task) < (drawn := len(examples.get(task.name, ()))):
            kind = "example" if is_sft else "pair"
            print0(
                f"{task.name} has {counted(len(task), kind)}: the {drawn:,} of the table repeat them, as training does"
            )
    if is_sft:
        every_example = itertools.chain.from_iterable(examples.values())
        rendered = list(itertools.chain.from_iterable(every_example))
        report_learned(rendered, tokenizer, config.strict_data)
        learned = [text for text in rendered if is_learned(text)]
        packed = pack_sequences([text.ids for text in learned], [text.mask for text in learned], row_tokens)
        targets = int((packed.targets != IGNORE).sum())
        share = sum(len(text.ids) - 1 for text in learned) / packed.inputs.numel()
        print0(f"{len(learned):,} conversations fill {len(packed):,} rows to {share:.1%} and have {targets:,} targets")


def marked(text: "Rendered", tokenizer: "Tokenizer") -> str:
    """The tokens as text, with the tokens to learn marked."""
    from nanochat.ground.screen import is_terminal
    from nanochat.ground.untrusted import printable

    before, after = ("\x1b[32m", "\x1b[0m") if is_terminal() else ("[[", "]]")
    parts = []
    for learned, pairs in itertools.groupby(zip(text.ids, text.mask, strict=True), key=lambda pair: pair[1]):
        part = tokenizer.decode_bytes(token for token, _ in pairs).decode(errors="replace")
        part = printable(part)  # data could contain control sequences for the terminal
        parts.append(f"{before}{part}{after}" if learned else part)
    return "".join(parts)


def table_row(name: str, examples: Sequence[Sequence["Rendered"]]) -> list[str]:
    """The COLUMNS of a task."""
    from nanochat.mixture import is_learned

    texts = [text for example in examples for text in example]
    learned = [example for example in examples if is_learned(*example)]
    tokens = sum(len(text.ids) for text in texts)
    targets = sum(text.target_count for example in learned for text in example)
    return [
        name,
        f"{len(examples):,}",
        f"{tokens / len(texts):.0f}",
        f"{max(len(text.ids) for text in texts):,}",
        f"{sum(text.cut for text in texts):,}",
        f"{len(examples) - len(learned):,}",
        f"{targets / max(tokens, 1):.1%}",
    ]


if __name__ == "__main__":
    cli.run(main, Config, shows_progress=True)
