"""Measure this machine: the speed of training next to a bare matrix product, or the speed of serving.

python -m scripts.bench train

python -m scripts.bench serve --json serve.json

python -m scripts.bench train --depth 12 --max_seq_len 2048 --vocab_size 32768 --device_batch_size 16

`train` times whole steps, optimizer included, on random tokens. `serve` times the engine alone, then over HTTP with
clients that wait for their replies.
"""

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from nanochat.shell.cli import Count, Depth, Positive, Range, Size, UserError, run
from nanochat.shell.log import print0

Made = TypeVar("Made")

PRODUCT = 1024  # width and height of the matrix in the bare product


@dataclass(frozen=True)
class Config:
    what: tyro.conf.Positional[Literal["train", "serve"]]  # what to measure
    depth: Depth = 4  # layers; the width is 64 x depth, rounded up to whole heads
    head_dim: Annotated[int, Range(2, 4096)] = 128  # channels of an attention head
    max_seq_len: Size = 512  # tokens a row
    vocab_size: Size = 8192  # tokens that the model knows
    device_batch_size: Size = 8  # rows
    document_tokens: Count = 0  # train: rows are packed with documents of so many tokens; 0: each is one
    optimizer: Literal["muon", "adamw"] = "muon"  # of the matrices
    steps: Positive = 20  # measured, each between two measurements of the bare product
    device: str = "auto"  # auto, npu, cuda or cpu
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of matrix products
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto: as in a long run
    batches: tuple[int, ...] = (1, 4, 16, 64)  # serve: requests or clients at once
    prompt_tokens: Positive = 16  # serve: of each request
    new_tokens: Positive = 128  # serve: of each request
    json: str | None = None  # also write the metrics to this file


def main(config: Config) -> None:
    if config.json and not Path(config.json).parent.is_dir():
        raise UserError(f"--json {config.json}: there is no folder {Path(config.json).parent}")
    metrics = train(config) if config.what == "train" else serve(config)
    if config.json:
        Path(config.json).write_text(json.dumps(metrics, indent=1), encoding="utf-8")


def train(config: Config) -> dict[str, Any]:
    # The heavy imports are here so that --help answers at once.
    import torch

    from nanochat import device as devices
    from nanochat import scaling
    from nanochat.attention import Segments
    from nanochat.gpt import GPT
    from nanochat.train import make_optimizer, next_token_loss, train_step

    # ------------------------------------------------------------------ a model and a batch
    device = devices.init(config.device, config.dtype)
    model_config = scaling.model_config(config.depth, config.vocab_size, config.max_seq_len, head_dim=config.head_dim)
    model = GPT(model_config, device.kernels).to(device.torch_device)
    model.init_weights()
    rows = config.device_batch_size
    tokens = config.max_seq_len
    batch_tokens = rows * tokens
    learning_rates = scaling.rates(model_config, batch_tokens, 1000 * batch_tokens)
    optimizer = make_optimizer(model, learning_rates, device, config.optimizer)
    compiled, how = device.compile(model, config.compile, float("inf"))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (rows, tokens + 1), generator=generator)
    batch: list[Any] = [device.to_device(ids[:, :-1].contiguous()), device.to_device(ids[:, 1:].contiguous())]
    if config.document_tokens:
        numbers = (torch.arange(tokens) // config.document_tokens).expand(rows, tokens)
        batch.append(Segments.from_numbers(numbers).to(device.to_device))

    # ------------------------------------------------------------------ what is timed
    def step() -> None:
        train_step(compiled, optimizer, [batch], next_token_loss, device=device)

    # A bare (tokens x 1024) @ (1024 x 1024) in the dtype of training, often enough to be measured.
    a = torch.randn(batch_tokens, PRODUCT, device=device.torch_device, dtype=device.dtype)
    b = torch.randn(PRODUCT, PRODUCT, device=device.torch_device, dtype=device.dtype)
    out = torch.empty_like(a)
    repeats = max(1, int(1e11 / (2 * batch_tokens * PRODUCT**2)))
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

    # ------------------------------------------------------------------ measure in turn
    warm_up = sum(seconds_of(work) for work in (step, step, product, product))
    print0(f"warm-up ({how}): {warm_up:.1f} s")
    steps = []
    products = []
    for _ in range(config.steps):
        steps.append(seconds_of(step))
        products.append(seconds_of(product))

    # ------------------------------------------------------------------ report
    step_seconds = statistics.median(steps)
    step_rate = scaling.flops_per_token(model_config) * batch_tokens / step_seconds
    product_rate = product_flops / statistics.median(products)
    dtype = str(device.dtype).removeprefix("torch.")
    threads = torch.get_num_threads()
    print0(f"device: {device.name} ({device.kind}, {dtype}), torch {torch.__version__}, {threads} threads")
    print0(
        f"model: depth {config.depth}, width {model_config.width}, vocabulary {config.vocab_size}, {rows} rows of "
        f"{tokens} tokens, {config.optimizer}"
    )
    print0(
        f"step: {step_seconds * 1e3:.1f} ms, {batch_tokens / step_seconds:,.0f} tokens/s, "
        f"{step_rate / 1e9:,.0f} GFLOP/s"
    )
    print0(
        f"product ({batch_tokens} x {PRODUCT} x {PRODUCT}): {product_rate / 1e9:,.0f} GFLOP/s; "
        f"the step reaches {step_rate / product_rate:.0%} of it"
    )
    print0(f"peak memory: {device.peak_memory() / 2**20:,.0f} MiB")
    return {
        "device": str(device),
        "versions": device.versions(),
        "kernels": str(device.kernels),
        "config": asdict(config),
        "tokens_per_second": batch_tokens / step_seconds,
        "flops_per_second": {"step": step_rate, "product": product_rate},
        "peak_memory_bytes": device.peak_memory(),
    }


def serve(config: Config) -> dict[str, Any]:
    import multiprocessing

    from nanochat import device as devices
    from nanochat.engine import SamplingParams
    from nanochat.serve.load import LoadStats, closed_loop

    if not config.batches or min(config.batches) < 1:
        raise UserError("--batches: at least 1 each, such as --batches 1 16")
    if config.prompt_tokens + config.new_tokens > config.max_seq_len:
        raise UserError("--prompt_tokens and --new_tokens are more than --max_seq_len")
    device = devices.init(config.device, config.dtype)
    engine = on_a_thread(partial(random_engine, config, device))
    prompt = list(range(300, 300 + config.prompt_tokens))
    metrics: dict[str, Any] = {"device": str(device), "versions": device.versions(), "engine": {}, "http": {}}
    print0(f"{device}, depth {config.depth}, {config.prompt_tokens} tokens in, {config.new_tokens} out")

    # ------------------------------------------------------------------ the engine alone
    def tokens_per_second(batch: int) -> float:
        rates = []
        for _ in range(4):  # the first warms up
            began = time.perf_counter()
            engine.generate([prompt] * batch, max_tokens=config.new_tokens, sampling=SamplingParams(temperature=0.0))
            rates.append(batch * config.new_tokens / (time.perf_counter() - began))
        return max(rates[1:])

    for batch in config.batches:
        rate = on_a_thread(partial(tokens_per_second, batch))
        metrics["engine"][batch] = {"tokens_per_second": rate}
        print0(f"engine, batch {batch:>3}: {rate:>8,.0f} tokens/s")

    # ------------------------------------------------------------------ over HTTP, the clients in another process
    body = {"model": "bench", "prompt": prompt, "max_tokens": config.new_tokens, "temperature": 0.0}
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as clients, serving(engine, max(config.batches)) as port:
        for batch in config.batches:
            clients.apply(closed_loop, ("127.0.0.1", port, body, batch, batch))  # warm up
            trials = []
            for _ in range(3):
                trials.append(clients.apply(closed_loop, ("127.0.0.1", port, body, batch, 3 * batch)))
            best = max(trials, key=LoadStats.tokens_per_second)
            metrics["http"][batch] = {"tokens_per_second": best.tokens_per_second(), **asdict(best)}
            share = best.tokens_per_second() / metrics["engine"][batch]["tokens_per_second"]
            print0(f"HTTP, {batch:>3} clients: {best}, {share:.0%} of what the engine makes alone")
    return metrics


def random_engine(config: Config, device: Any) -> Any:
    """An engine with random weights whose replies end by their length only."""
    from nanochat import scaling
    from nanochat.engine import Engine
    from nanochat.gpt import GPT
    from nanochat.tokenizer import Tokenizer

    words = [bytes([value]) for value in range(256)]
    words += [b"%d " % number for number in range(config.vocab_size)]
    specials = len(Tokenizer(words).special_ids)
    tokenizer = Tokenizer(words[: config.vocab_size - specials])
    shape = scaling.model_config(config.depth, tokenizer.vocab_size, config.max_seq_len, head_dim=config.head_dim)
    model = GPT(shape, device.kernels).to(device.torch_device)
    model.init_weights()
    engine = Engine(model, tokenizer, device)
    engine.stop_ids = set()
    return engine


def on_a_thread(work: Callable[[], Made]) -> Made:
    """Run on a thread that ends, and its OpenMP workers with it, as the server loads its model.

    With the workers of two threads, more than there are cores, they sleep between the products, and decoding takes
    twice as long.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@contextlib.contextmanager
def serving(engine: Any, slots: int) -> Iterator[int]:
    """The app on a free port of this machine, in a thread of this process."""
    import socket
    import threading

    import uvicorn

    from nanochat.serve.app import create_app
    from nanochat.serve.scheduler import Scheduler
    from nanochat.serve.state import LoadedModel

    def load() -> LoadedModel:
        scheduler = Scheduler(engine, slots=slots)
        scheduler.start()
        return LoadedModel(scheduler, engine.tokenizer, "bench", engine.model.config.sequence_len, chats=False)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        app = create_app(load)
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        # The app loads on another thread; until it is done, requests are refused with 503.
        while thread.is_alive() and not (server.started and app.state.nanochat.model):
            time.sleep(0.05)
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join(20)


if __name__ == "__main__":
    run(main, Config)
