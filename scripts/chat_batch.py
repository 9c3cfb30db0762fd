"""Reply to each line of a file, many lines at once, and write the replies to another file.

python -m scripts.chat_batch --in prompts.jsonl --out replies.jsonl

A line is a prompt, a conversation, or a request in OpenAI's batch form (nanochat/serve/batch.py). Run the same command
again to continue after an interruption.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from nanochat.ground.cli import Positive, UserError, run
from nanochat.ground.screen import phase
from nanochat.ground.untrusted import printable
from nanochat.serve.decoding_flags import DecodingFlags, SamplingFlags
from nanochat.tokenizer import replace_surrogates


@dataclass(frozen=True)
class Config:
    # Reply to each line of this file: a request in OpenAI's batch form, {"messages"}, {"prompt"}, or plain text.
    input: Annotated[str, tyro.conf.arg(name="in")]
    out: str  # the file for the replies, in the order of the lines; lines that it already has are kept
    source: str = "auto"  # a stage, a folder (ours, Hugging Face's or peft's) or hf:ORG/NAME; auto: the furthest stage
    model_tag: str | None = None  # default: the tag written last
    slots: Positive = 16  # replies generated at once; each holds a whole context in memory
    system: str = ""  # system message for each conversation without one
    max_tokens: Positive = 256  # tokens of a reply
    sampling: Annotated[SamplingFlags, tyro.conf.arg(name="")] = SamplingFlags()
    device: str = "auto"  # auto, npu, cuda or cpu
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # the dtype of matrix products
    decoding: Annotated[DecodingFlags, tyro.conf.arg(name="")] = DecodingFlags()


def main(config: Config) -> None:
    phase("loading torch")
    # The heavy imports are here so that --help answers at once.
    from nanochat.serve.batch import Batch, read_lines

    lines = read_lines(Path(config.input).expanduser())
    # Load on a thread that ends: the workers of two threads would wait for each other's cores (serve/state.py).
    with ThreadPoolExecutor(max_workers=1) as loader:
        model = loader.submit(load, config).result()
    batch = Batch(model, config.max_tokens, replace_surrogates(config.system))
    try:
        batch.answer(lines, Path(config.out).expanduser())
    finally:
        model.scheduler.close(grace=0.0)
    print(f"{len(lines):,} lines in {printable(config.out)}, {batch.failed} of those written now without a reply")
    if batch.failed == len(lines):
        raise UserError(f"--in {printable(config.input)}: no line of it got a reply; each line of --out says why")


def load(config: Config) -> Any:
    """The model, with a scheduler that generates many replies at once."""
    from nanochat import device as devices
    from nanochat.checkpoint_manager import load_model
    from nanochat.engine import Engine
    from nanochat.model_folder import tag_of
    from nanochat.serve.scheduler import Scheduler, fitting_context
    from nanochat.serve.state import LoadedModel

    device = devices.init(config.device, config.dtype)
    model, tokenizer, meta = load_model(config.source, device, model_tag=config.model_tag)
    engine = Engine(model, tokenizer, device, **asdict(config.decoding))
    context = fitting_context(engine, config.slots)
    scheduler = Scheduler(engine, slots=config.slots, queue=2 * config.slots, context=context)
    scheduler.start()
    return LoadedModel(
        scheduler,
        tokenizer,
        name=f"nanochat-{tag_of(Path(meta['folder']))}-{meta['stage']}",
        context=scheduler.context,
        chats=meta["stage"] != "base" and tokenizer.can_chat,
        sampling=config.sampling.over(meta["sampling"]),
    )


if __name__ == "__main__":
    run(main, Config, shows_progress=True)
