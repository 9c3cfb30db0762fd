"""Show what SFT or DPO would train on: three examples with the tokens to learn marked, and what the others are like.

python -m scripts.preview --source sft --tasks chats.jsonl

python -m scripts.preview --stage dpo --tasks ORG/NAME@train_prefs

In a terminal what is learned is green. Elsewhere it stands between [[ and ]].
"""

from dataclasses import dataclass
from typing import Literal

from nanochat.shell import cli
from nanochat.shell.cli import Count, Positive, Seed


@dataclass(frozen=True)
class Config:
    source: str = "auto"  # the model to train: a stage, a checkpoint's folder or hf:ORG/NAME; auto: the furthest stage
    source_tag: str | None = None  # tag of the source; default: the tag written last
    source_step: int | None = None  # step of the source; default: the newest
    max_seq_len: Count = 0  # as of that stage: tokens of a row; 0: the model's context
    stage: Literal["sft", "dpo"] = "sft"  # chat_sft learns conversations, chat_dpo preference pairs
    tasks: str = ""  # as of that stage; default: as its own
    hub: Literal["hf", "modelscope"] = "hf"  # where tasks with data are downloaded from
    bad_records: Literal["skip", "fail"] = "skip"  # what of a PATH or ORG/NAME is no chat: left out and counted, or not
    split: Literal["train", "test"] = "train"  # test: what is held out
    seed: Seed = 0  # as of that stage
    examples: Count = 3  # to print
    count: Positive = 1000  # examples that the table is about


def main(config: Config) -> None:
    # The heavy imports are here so that --help answers at once.
    from nanochat.checkpoint_manager import load_model
    from nanochat.conversation import Rendered
    from nanochat.cross_entropy import IGNORE
    from nanochat.data.packing import pack_sequences
    from nanochat.shell.log import print0, print_table
    from nanochat.shell.screen import is_terminal, track
    from nanochat.shell.untrusted import printable
    from nanochat.tasks.mixture import default_dpo_tasks, default_tasks, is_learned, open_mixture
    from nanochat.tasks.registry import parse_tasks, require_pairs

    # ------------------------------------------------------------------ model, data, as the stage opens them
    model, tokenizer, meta = load_model(
        config.source, "cpu", model_tag=config.source_tag, step=config.source_step, max_seq_len=config.max_seq_len
    )
    row_tokens = model.config.sequence_len
    pretraining = {"data": "", **meta.get("pretraining", {})}
    is_dpo = config.stage == "dpo"
    tasks = config.tasks
    if not tasks:
        tasks = default_dpo_tasks(pretraining["data"]) if is_dpo else default_tasks(pretraining["data"], config.hub)
    if is_dpo:
        require_pairs(parse_tasks(tasks))
    mixture = open_mixture(tasks, config.split, config.hub, config.seed, pairs=is_dpo, bad_records=config.bad_records)
    # SFT goes on in the mixture where mid-training stopped.
    first = pretraining.get("conversations", 0) if config.split == "train" and not is_dpo else 0
    print0(f"source: {meta['folder']}, context of {row_tokens:,} tokens; tasks: {tasks}")

    # ------------------------------------------------------------------ examples
    def marked(text: Rendered) -> str:
        """The tokens as text, those to learn marked."""
        before, after = ("\x1b[32m", "\x1b[0m") if is_terminal() else ("[[", "]]")
        parts = []
        begin = 0
        for end in range(1, len(text.ids) + 1):
            if end == len(text.ids) or text.mask[end] != text.mask[begin]:
                part = printable(tokenizer.decode(text.ids[begin:end]))  # data could command the terminal
                parts.append(f"{before}{part}{after}" if text.mask[begin] else part)
                begin = end
        return "".join(parts)

    def facts(text: Rendered) -> str:
        cut = f", cut at {len(text.ids):,}" if text.cut else ""
        return f"{len(text.ids):,} tokens, {text.target_count:,} of them learned{cut}"

    for number in range(first, first + config.examples):
        task, _ = mixture.draw(number)
        print0(f"\n--- example {number + 1:,}, of {task.name}")
        if is_dpo:
            for name, text in zip(
                ("chosen", "rejected"), mixture.rendered_pair(tokenizer, number, row_tokens + 1), strict=True
            ):
                print0(f"{name}: {facts(text)}")
                print(marked(text))
        else:
            text = mixture.rendered(tokenizer, number, row_tokens + 1)
            print0(facts(text))
            print(marked(text))

    # ------------------------------------------------------------------ what the others are like
    columns = ("task", "examples", "mean tokens", "longest", "cut", "nothing to learn", "learned")
    found: dict[str, list[list[Rendered]]] = {}
    for number in track(range(first, first + config.count), "examples"):
        task, _ = mixture.draw(number)
        if is_dpo:
            texts = list(mixture.rendered_pair(tokenizer, number, row_tokens + 1))
        else:
            texts = [mixture.rendered(tokenizer, number, row_tokens + 1)]
        found.setdefault(task.name, []).append(texts)
    rows = []
    for name, examples in sorted(found.items()):
        texts = [text for example in examples for text in example]
        tokens = sum(len(text.ids) for text in texts)
        learned = [example for example in examples if is_learned(*example)]
        targets = sum(text.target_count for example in learned for text in example)
        rows.append(
            [
                name,
                f"{len(examples):,}",
                f"{tokens / len(texts):.0f}",
                f"{max(len(text.ids) for text in texts):,}",
                f"{sum(text.cut for text in texts):,}",
                f"{len(examples) - len(learned):,}",
                f"{targets / tokens:.1%}",
            ]
        )
    print_table(columns, rows)
    if not is_dpo:
        learned = [text for examples in found.values() for [text] in examples if is_learned(text)]
        packed = pack_sequences([text.ids for text in learned], [text.mask for text in learned], row_tokens)
        targets = int((packed.targets != IGNORE).sum())
        share = sum(len(text.ids) - 1 for text in learned) / packed.inputs.numel()
        print0(f"{len(learned):,} conversations fill {len(packed):,} rows to {share:.1%} and have {targets:,} targets")


if __name__ == "__main__":
    cli.run(main, Config, shows_progress=True)
