"""Measure this machine: the speed of training next to a bare matrix product, or the speed of decoding.

python -m scripts.bench train

python -m scripts.bench train --depth 20 --steps 5

python -m scripts.bench serve --json serve.json

`train` times whole steps, optimizer included, on random tokens. `serve` times the engine that serves. Without flags the
model is small on a CPU, and on an accelerator large enough that the device is busy. docs/bench.md explains how to read
the output, and measures a server. `bench train --help` lists the flags of `train`.
"""

import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from nanochat.ground import provenance
from nanochat.ground.cli import Positive, Range, UserError, run
from nanochat.ground.log import counted, print0
from nanochat.serve.decoding_flags import DecodingFlags

DefaultSize = Annotated[int, Range(0, 10**7)]  # 0: the default for the device

PROMPT_TOKENS = 16  # of a request in `serve`
NEW_TOKENS = 128  # of a reply
PRODUCT = 1024  # width and height of the matrix in the bare product
PRODUCT_FLOPS = 1e11  # one measurement of the product computes at least this much
LEARNING_RATE = 1e-5  # for --source, a trained model
TRIALS = 5  # per batch size in `serve`, after one warm-up
# The defaults of sizes, on a CPU and on an accelerator. On a card a step at depth 4 with rows of 512 tokens takes as
# long as its launches from the host, so its time says nothing about the card.
CPU_SIZES = {"depth": 4, "vocab_size": 8192, "max_seq_len": 512, "device_batch_size": 8}
ACCELERATOR_SIZES = {"depth": 12, "vocab_size": 32768, "max_seq_len": 2048, "device_batch_size": 16}


@dataclass(frozen=True)
class ModelFlags:
    """What `train` and `serve` measure, and where."""

    # Layers; the width is 64 x depth, rounded up to whole heads. 0: 12, on a CPU 4.
    depth: Annotated[int, Range(0, 1000)] = 0
    head_dim: Annotated[int, Range(2, 4096)] = 128  # channels of an attention head
    vocab_size: DefaultSize = 0  # tokens that the model knows; 0: 32768, on a CPU 8192
    # Measure this model instead of a new one: a stage, a folder (ours, Hugging Face's or peft's) or hf:ORG/NAME.
    source: str | None = None
    max_seq_len: DefaultSize = 0  # tokens a row; 0: 2048, on a CPU 512
    device: str = "auto"  # auto, npu, cuda or cpu
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # the dtype of matrix products
    json: str | None = None  # also write the metrics to this file


@dataclass(frozen=True)
class Train(ModelFlags):
    """Time training steps."""

    device_batch_size: DefaultSize = 0  # rows; 0: 16, on a CPU 8
    optimizer: Literal["muon", "adamw"] = "muon"  # for the matrices; with --source it is fine-tuning's AdamW
    steps: Positive = 20  # steps to measure, each followed by a measurement of the bare product
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto: as in a long run


@dataclass(frozen=True)
class Serve(ModelFlags):
    """Time replies of the engine."""

    batches: tuple[int, ...] = (1, 4, 16, 64)  # requests at once
    decoding: Annotated[DecodingFlags, tyro.conf.arg(name="")] = DecodingFlags()


@dataclass(frozen=True)
class Config:
    what: tyro.conf.OmitArgPrefixes[
        Annotated[Train, tyro.conf.subcommand("train", prefix_name=False)]
        | Annotated[Serve, tyro.conf.subcommand("serve", prefix_name=False)]
    ]


def main(config: Config) -> None:
    measured = config.what
    if measured.source:
        for field in fields(ModelFlags):
            if field.name in ("depth", "head_dim", "vocab_size") and getattr(measured, field.name) != field.default:
                raise UserError(f"--{field.name} does not change the model of --source: leave it out")
    if measured.json is not None:  # before the measurement, not after
        try:
            Path(measured.json).open("ab").close()
        except OSError as error:
            raise UserError(f"--json {error.filename}: {error.strerror}: name a file that can be written") from error
    from nanochat import device as devices  # here: --help answers at once

    sizes = CPU_SIZES if devices.kind_of(measured.device) == "cpu" else ACCELERATOR_SIZES
    missing = {name: size for name, size in sizes.items() if getattr(measured, name, size) == 0}
    measured = replace(measured, **missing)
    what, metrics = ("train", train(measured)) if isinstance(measured, Train) else ("serve", serve(measured))
    if measured.json is not None:
        about = {"what": what, "commit": provenance.commit(), "config": asdict(measured)}
        Path(measured.json).write_text(json.dumps(about | metrics, indent=1))


def train(config: Train) -> dict[str, Any]:
    # The heavy imports are here so that --help answers at once.
    import torch

    from nanochat import device as devices
    from nanochat import scaling
    from nanochat.kernels.run_flags import eager_reason
    from nanochat.train import make_adamw, make_optimizer, next_token_loss, train_step

    # ------------------------------------------------------------------ a model and a batch
    device = devices.init(config.device, config.dtype)
    rows = config.device_batch_size
    tokens = config.max_seq_len
    batch_tokens = rows * tokens
    if config.source:
        model, _ = loaded_model(config, device)
        model.train()
        optimizer = make_adamw(model, LEARNING_RATE, device)
    else:
        model = random_model(config, device)
        learning_rates = scaling.rates(model.config, batch_tokens, 1000 * batch_tokens)
        optimizer = make_optimizer(model, learning_rates, device, config.optimizer)
    model_config = model.config
    reason = eager_reason(device, model_config, config.compile, math.inf)
    compiled: Any = model
    how = f"eager ({reason})"
    if reason is None:
        from nanochat.kernels.compiling import compile_blocks

        compiled, how = compile_blocks(device, model, config.compile)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model_config.vocab_size, (rows, tokens + 1), generator=generator)
    batch: list[Any] = [device.to_device(ids[:, :-1].contiguous()), device.to_device(ids[:, 1:].contiguous())]

    # ------------------------------------------------------------------ what is timed
    def step() -> None:
        train_step(compiled, optimizer, [batch], next_token_loss, device=device)

    # A bare (tokens x 1024) @ (1024 x 1024) in the dtype of training, often enough to be measured.
    a = torch.randn(batch_tokens, PRODUCT, device=device.torch_device, dtype=device.dtype)
    b = torch.randn(PRODUCT, PRODUCT, device=device.torch_device, dtype=device.dtype)
    out = torch.empty_like(a)
    repeats = max(1, int(PRODUCT_FLOPS / (2 * batch_tokens * PRODUCT**2)))
    product_flops = 2 * batch_tokens * PRODUCT**2 * repeats

    def product() -> None:
        for _ in range(repeats):
            torch.mm(a, b, out=out)

    def seconds_of(work: Callable[[], None]) -> float:
        device.synchronize()
        began = time.perf_counter()
        work()
        device.synchronize()
        return time.perf_counter() - began

    works = {"step": step, "product": product}

    # ------------------------------------------------------------------ measure in turn
    warm_up = sum(seconds_of(work) for work in (*works.values(), *works.values()))
    print0(f"warm-up ({how}): {warm_up:.1f} s")
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(config.steps):
        for name, work in works.items():
            seconds[name].append(seconds_of(work))

    # ------------------------------------------------------------------ report
    step_seconds = statistics.median(seconds["step"])
    step_rate = scaling.flops_per_token(model_config) * batch_tokens / step_seconds
    product_rate = product_flops / statistics.median(seconds["product"])
    # The share is computed per round: a machine that is busy for a while slows the step and the product of one round.
    shares = [
        100 * step_rate * step_seconds / step / (product_flops / product)
        for step, product in zip(seconds["step"], seconds["product"], strict=True)
    ]
    dtype = str(device.dtype).removeprefix("torch.")
    threads = torch.get_num_threads()
    print0(f"device: {device.name} ({device.kind}, {dtype}), torch {torch.__version__}, {counted(threads, 'thread')}")
    print0(
        f"model: depth {model_config.n_layer}, width {model_config.width}, vocabulary {model_config.vocab_size}, "
        f"{rows} rows of {tokens} tokens, {'adamw' if config.source else config.optimizer}"
    )
    mfu = step_rate / device.peak_flops if device.peak_flops else None
    peak = "" if mfu is None else f", {mfu:.1%} of the device's nominal peak"
    print0(
        f"step: {step_seconds * 1e3:.1f} ms, {batch_tokens / step_seconds:,.0f} tokens/s, "
        f"{step_rate / 1e9:,.0f} GFLOP/s{peak}"
    )
    print0(
        f"product ({batch_tokens} x {PRODUCT} x {PRODUCT}): {product_rate / 1e9:,.0f} GFLOP/s; "
        f"the step reaches {statistics.median(shares):.0f}% of it"
    )
    print0(f"peak memory: {device.peak_memory() / 2**20:,.0f} MiB")
    return {
        "device": str(device),
        "versions": device.versions(),
        "kernels": str(device.kernels),
        "threads": threads,
        "measurements": {
            "step": in_unit("tokens/s", [batch_tokens / one for one in seconds["step"]]),
            "share of the bare product": in_unit("%", shares),
            "bare product": in_unit("GFLOP/s", [product_flops / one / 1e9 for one in seconds["product"]]),
            "warm-up": in_unit("s", [warm_up]),
            "peak memory": in_unit("MiB", [device.peak_memory() / 2**20]),
        },
        "tokens_per_second": batch_tokens / step_seconds,
        "flops_per_second": {"step": step_rate, "product": product_rate},
        "mfu": mfu,
        "peak_memory_bytes": device.peak_memory(),
    }


def serve(config: Serve) -> dict[str, Any]:
    import torch

    from nanochat import device as devices
    from nanochat.engine import SamplingParams

    if not config.batches or min(config.batches) < 1:
        raise UserError("--batches: at least 1 each, such as --batches 1 16")
    if config.max_seq_len < PROMPT_TOKENS + NEW_TOKENS:
        raise UserError(f"--max_seq_len {config.max_seq_len}: a request takes {PROMPT_TOKENS + NEW_TOKENS} tokens")
    device = devices.init(config.device, config.dtype)
    engine = open_engine(config, device)
    prompt = list(range(300, 300 + PROMPT_TOKENS))
    needed = 300 + PROMPT_TOKENS + max(config.batches)
    if engine.tokenizer.vocab_size < needed:
        raise UserError(f"the prompts have {needed} different tokens: raise --vocab_size")
    measurements: dict[str, Any] = {}
    threads = torch.get_num_threads()
    depth = engine.model.config.n_layer
    print0(f"{device}, {counted(threads, 'thread')}, depth {depth}, {PROMPT_TOKENS} tokens in, {NEW_TOKENS} out")

    def time_trials(batch: int) -> list[float]:
        """The seconds of each trial."""
        # All prompts differ: the engine would read equal ones only once.
        prompts = [[token + row for token in prompt] for row in range(batch)]
        seconds = []
        for _ in range(1 + TRIALS):  # the first warms up
            began = time.perf_counter()
            engine.generate(prompts, max_tokens=NEW_TOKENS, sampling=SamplingParams(temperature=0.0))
            seconds.append(time.perf_counter() - began)
        return seconds[1:]

    for batch in config.batches:
        seconds = time_trials(batch)
        rates = [batch * NEW_TOKENS / one for one in seconds]
        measurements[f"engine, batch {batch}"] = in_unit("tokens/s", rates)
        print0(f"engine, batch {batch:>3}: {max(rates):>8,.0f} tokens/s")
    return {
        "device": str(device), "versions": device.versions(), "kernels": str(device.kernels), "threads": threads,
        "measurements": measurements,
    }  # fmt: skip


def in_unit(unit: str, values: list[float]) -> dict[str, Any]:
    """A measurement for --json."""
    return {"unit": unit, "values": values}


def open_engine(config: Serve, device: Any) -> Any:
    """An engine whose replies end only at their maximum length."""
    from nanochat.engine import Engine

    if config.source:
        model, tokenizer = loaded_model(config, device)
    else:
        tokenizer = random_tokenizer(config.vocab_size)
        model = random_model(config, device)
    engine = Engine(model, tokenizer, device, **asdict(config.decoding))
    engine.stop_ids = set()
    engine.call_start = engine.call_end = -1
    return engine


def loaded_model(config: ModelFlags, device: Any) -> tuple[Any, Any]:
    from nanochat.checkpoint_manager import load_model
    from nanochat.run.long_context import NewContext

    model, tokenizer, _ = load_model(str(config.source), device, prepare=[NewContext(config.max_seq_len)])
    return model, tokenizer


def random_tokenizer(vocab_size: int) -> Any:
    """A tokenizer of `vocab_size` tokens: the bytes, then numbers as words, then the special tokens.

    Raises UserError: when bytes and special tokens are more than that.
    """
    from nanochat.tokenizer import Tokenizer

    words = [bytes([value]) for value in range(256)]
    least = 256 + len(Tokenizer(words).special_ids)
    if vocab_size < least:
        raise UserError(f"--vocab_size {vocab_size}: at least {least}, for bytes and special tokens")
    words += [b"%d " % number for number in range(vocab_size - least)]
    return Tokenizer(words)


def random_model(config: ModelFlags, device: Any) -> Any:
    from nanochat import scaling
    from nanochat.gpt import GPT

    shape = scaling.model_config(config.depth, config.vocab_size, config.max_seq_len, head_dim=config.head_dim)
    model = GPT(shape, device.kernels).to(device.torch_device)
    model.init_weights()
    return model


if __name__ == "__main__":
    run(main, Config)
