"""Continue text with a model in the terminal, streamed as it is made.

python -m scripts.chat_cli --prompt "Once upon a time"
"""

import codecs
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from nanochat.cli import UserError, require, run


@dataclass(frozen=True)
class Config:
    source: str = "base"  # a stage, or a checkpoint's folder
    model_tag: str | None = None  # default: the tag written last
    step: int | None = None  # default: the newest
    prompt: Annotated[str | None, tyro.conf.arg(aliases=["-p"])] = None  # continue this and leave; default: ask
    max_tokens: int = 256  # of an answer
    temperature: float = 0.7  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    seed: int = 0  # of the first answer; each further one takes the next
    device: str = "auto"  # auto, npu, cuda or cpu
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of matrix products


def main(config: Config) -> None:
    # The heavy imports stand here so that --help answers at once.
    from nanochat import device as devices
    from nanochat.checkpoint_manager import load_model
    from nanochat.engine import Engine, check_sampling

    # ------------------------------------------------------------------ load
    require(config, "max_tokens", 1)
    require(config, "seed", 0, 2**62)
    check_sampling(config.temperature, config.top_k, config.top_p)
    device = devices.init(config.device, config.dtype)
    model, tokenizer, meta = load_model(config.source, device, model_tag=config.model_tag, step=config.step)
    engine = Engine(model, tokenizer, device)

    def answer(prompt: str, seed: int) -> None:
        """Print the prompt's continuation token by token; Ctrl-C ends it, not the program."""
        ids = tokenizer.encode(prompt, prepend=tokenizer.get_bos_token_id())
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a token may end within a character
        try:
            for column in engine.stream(
                [ids], max_tokens=config.max_tokens, temperature=config.temperature,
                top_k=config.top_k, top_p=config.top_p, seed=seed,
            ):  # fmt: skip
                token = column[0]
                assert token is not None
                print(decoder.decode(tokenizer.decode_bytes([token])), end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        print(flush=True)

    # ------------------------------------------------------------------ one shot: a flag or a pipe
    if config.prompt is not None or sys.stdin is None or not sys.stdin.isatty():
        prompt = config.prompt if config.prompt is not None else sys.stdin.read() if sys.stdin else ""
        prompt = prompt.rstrip("\n")
        print(prompt, end="", flush=True)
        answer(prompt, config.seed)
        return

    # ------------------------------------------------------------------ ask again and again
    print(f"{meta['folder']}: type the beginning of a text; an empty line or Ctrl-D leaves, Ctrl-C stops an answer")
    turn = 0
    while True:
        try:
            prompt = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not prompt:
            return
        try:
            print(prompt, end="", flush=True)
            answer(prompt, config.seed + turn)
        except UserError as error:  # too long a prompt: the next one may fit
            print(f"\nerror: {error}")
        turn += 1


if __name__ == "__main__":
    run(main, Config)
