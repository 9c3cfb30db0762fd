"""Measure this machine with this code: training speed against the bare matrix product it is made of; or serving, by the
engine alone and over HTTP, with as many clients as wait for each other and with requests that do not.

python -m scripts.bench train
python -m scripts.bench serve --json serve.json
python -m scripts.bench train --depth 12 --max_seq_len 2048 --vocab_size 32768 --device_batch_size 16
"""

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from nanochat.shell.cli import Positive, Range, UserError, run


@dataclass(frozen=True)
class Config:
    what: tyro.conf.Positional[Literal["train", "serve"]]  # train: whole steps, optimizer included, on random tokens
    depth: Positive = 4  # layers; the width is 64 x depth, rounded up to whole heads
    head_dim: Annotated[int, Range(2)] = 128  # channels of an attention head
    max_seq_len: Positive = 512  # tokens a row
    vocab_size: Positive = 8192
    device_batch_size: Positive = 8  # rows
    optimizer: Literal["muon", "adamw"] = "muon"  # of the matrices
    steps: Positive = 20  # measured, each between two measurements of the bare product
    device: str = "auto"  # auto, npu, cuda or cpu
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of matrix products
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto: as in a long run
    batches: tuple[int, ...] = (1, 4, 16, 64)  # serve: requests or clients at once
    prompt_tokens: Positive = 16  # serve: of each request
    new_tokens: Positive = 128  # serve: of each request
    json: str | None = None  # also write the figures to this file; serve: and a plot beside it


def main(config: Config) -> None:
    if config.json and not Path(config.json).parent.is_dir():
        raise UserError(f"--json {config.json}: there is no folder {Path(config.json).parent}")
    train(config) if config.what == "train" else serve(config)


def train(config: Config) -> None:
    # The heavy imports stand here so that --help answers at once.
    import torch

    from nanochat import device as devices
    from nanochat import scaling
    from nanochat.gpt import GPT
    from nanochat.shell.log import print0
    from nanochat.train import make_optimizer, next_token_loss, train_step

    # ------------------------------------------------------------------ a model and a batch
    device = devices.init(config.device, config.dtype)
    model_config = scaling.model_config(config.depth, config.vocab_size, config.max_seq_len, head_dim=config.head_dim)
    model = GPT(model_config, device.kernels).to(device.torch_device)
    model.init_weights()
    rows, tokens, width = config.device_batch_size, config.max_seq_len, model_config.width
    batch_tokens = rows * tokens
    rates = scaling.rates(model_config, batch_tokens, 1000 * batch_tokens)
    optimizer = make_optimizer(model, rates, device, config.optimizer)
    compiled, how = device.compile(model, config.compile, float("inf"))
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(config.vocab_size, (rows, tokens + 1), generator=generator)
    batch = (device.to_device(batch[:, :-1].contiguous()), device.to_device(batch[:, 1:].contiguous()))

    def step() -> None:
        train_step(compiled, optimizer, [batch], next_token_loss, device=device)

    # ------------------------------------------------------------------ the yardsticks
    def product(inner: int, outer: int):
        """A bare (tokens x inner) @ (inner x outer) in the dtype of training, and its FLOPs."""
        a = torch.randn(batch_tokens, inner, device=device.torch_device, dtype=device.dtype)
        b = torch.randn(inner, outer, device=device.torch_device, dtype=device.dtype)
        flops = 2 * batch_tokens * inner * outer
        out = torch.empty(batch_tokens, outer, device=device.torch_device, dtype=device.dtype)
        repeats = max(1, int(1e11 / flops))
        return (lambda: [torch.mm(a, b, out=out) for _ in range(repeats)]), flops * repeats

    measured = {
        "step": (step, scaling.flops_per_token(model_config) * batch_tokens),
        "own product": product(width, 4 * width),  # the MLP's first matrix
        "square product": product(1024, 1024),
    }

    # ------------------------------------------------------------------ measure in turn
    begin = time.perf_counter()
    for function, _ in measured.values():
        function()
        function()
    device.synchronize()
    print0(f"warm-up ({how}): {time.perf_counter() - begin:.1f} s")
    seconds: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(config.steps):
        for name, (function, _) in measured.items():
            device.synchronize()
            begin = time.perf_counter()
            function()
            device.synchronize()
            seconds[name].append(time.perf_counter() - begin)

    # ------------------------------------------------------------------ tell
    rate = {name: flops / statistics.median(seconds[name]) for name, (_, flops) in measured.items()}
    ratios = {
        name: statistics.median(
            measured["step"][1] / a / (measured[name][1] / b)
            for a, b in zip(seconds["step"], seconds[name], strict=True)
        )
        for name in ("own product", "square product")
    }
    step_seconds = statistics.median(seconds["step"])
    dtype = str(device.dtype).removeprefix("torch.")
    print0(
        f"device: {device.name} ({device.kind}, {dtype}), torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
    print0(
        f"model: depth {config.depth}, width {width}, vocabulary {config.vocab_size}, {rows} rows of {tokens} tokens, "
        f"{config.optimizer}"
    )
    print0(
        f"step: {step_seconds * 1e3:.1f} ms, {batch_tokens / step_seconds:,.0f} tokens/s, "
        f"{rate['step'] / 1e9:,.0f} GFLOP/s"
    )
    for name, shape in (
        ("own product", f"{batch_tokens} x {width} x {4 * width}"),
        ("square product", f"{batch_tokens} x 1024 x 1024"),
    ):
        print0(f"{name} ({shape}): {rate[name] / 1e9:,.0f} GFLOP/s; the step reaches {ratios[name]:.0%} of it")
    print0(f"peak memory: {device.peak_memory() / 2**20:,.0f} MiB")
    if config.json:
        figures = {"tokens_per_second": batch_tokens / step_seconds, "flops_per_second": rate, "ratio": ratios}
        Path(config.json).write_text(json.dumps(figures, indent=1), encoding="utf-8")


def serve(config: Config) -> None:
    import multiprocessing
    from concurrent.futures import ThreadPoolExecutor
    from functools import partial

    from nanochat import device as devices
    from nanochat import scaling
    from nanochat.engine import Engine, SamplingParams
    from nanochat.gpt import GPT
    from nanochat.serve.load import closed_loop, open_loop
    from nanochat.serve.scheduler import Request, Scheduler
    from nanochat.shell.log import print0
    from nanochat.tokenizer import Tokenizer

    # ------------------------------------------------------------------ a model of random weights that never ends
    if not config.batches or min(config.batches) < 1:
        raise UserError("--batches: at least 1 each, such as --batches 1 16")
    if config.prompt_tokens + config.new_tokens > config.max_seq_len:
        raise UserError("--prompt_tokens and --new_tokens are more than --max_seq_len")
    device = devices.init(config.device, config.dtype)

    def make_engine() -> Engine:
        words = [bytes([value]) for value in range(256)]
        words += [b"%d " % number for number in range(config.vocab_size)]
        specials = len(Tokenizer(words).special_ids)
        tokenizer = Tokenizer(words[: config.vocab_size - specials])
        shape = scaling.model_config(config.depth, tokenizer.vocab_size, config.max_seq_len, head_dim=config.head_dim)
        model = GPT(shape, device.kernels).to(device.torch_device)
        model.init_weights()
        return Engine(model, tokenizer, device)

    def elsewhere(work: Callable[[], Any]) -> Any:
        """Run on a thread that ends, as the server loads: with OpenMP's workers of two threads, more than there are
        cores, they fall asleep between the products, and decoding takes twice as long."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()

    engine = elsewhere(make_engine)
    engine.stop_ids = set()
    prompt = tuple(range(300, 300 + config.prompt_tokens))
    figures: dict[str, Any] = {"device": str(device), "engine": {}, "closed": {}, "open": {}}

    # ------------------------------------------------------------------ the engine alone
    print0(f"{device}, depth {config.depth}, {config.prompt_tokens} tokens in, {config.new_tokens} out")
    for batch in config.batches:
        scheduler = elsewhere(partial(Scheduler, engine, slots=batch))
        scheduler.start()
        request = Request(prompt, config.new_tokens, SamplingParams(temperature=0.0))
        rates = []
        for _ in range(4):  # the first warms up
            began = time.perf_counter()
            streams = scheduler.submit_all([request] * batch)  # they share a prompt, which is read once
            made = sum(len(chunk.token_ids) for stream in streams for chunk in stream)
            rates.append(made / (time.perf_counter() - began))
        scheduler.close()
        figures["engine"][batch] = {"tokens_per_second": max(rates[1:])}
        print0(f"engine, batch {batch:>3}: {max(rates[1:]):>8,.0f} tokens/s")

    # ------------------------------------------------------------------ over HTTP, the clients in another process
    body = {
        "model": "bench", "prompt": list(prompt), "max_tokens": config.new_tokens, "temperature": 0.0,
    }  # fmt: skip
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as clients, serving(engine, max(config.batches)) as port:
        for batch in config.batches:
            clients.apply(closed_loop, ("127.0.0.1", port, body, batch, batch))
            runs = [clients.apply(closed_loop, ("127.0.0.1", port, body, batch, 3 * batch)).summary() for _ in range(3)]
            seen = max(runs, key=lambda run: run["tokens_per_second"])
            figures["closed"][batch] = seen
            print0(f"HTTP, {batch:>3} clients: {tell(seen)}")
        best = max(seen["tokens_per_second"] for seen in figures["closed"].values()) / config.new_tokens
        for share in (0.5, 0.8, 1.2):
            requests = max(8, round(10 * best * share))
            seen = clients.apply(open_loop, ("127.0.0.1", port, body, best * share, requests)).summary()
            figures["open"][share] = seen
            print0(f"HTTP, {best * share:.1f} requests/s ({share:.0%} of the most): {tell(seen)}")

    # ------------------------------------------------------------------ tell
    for batch in config.batches:
        share = figures["closed"][batch]["tokens_per_second"] / figures["engine"][batch]["tokens_per_second"]
        print0(f"{batch:>3} clients over HTTP have {share:.0%} of what the engine makes alone")
    if config.json:
        Path(config.json).write_text(json.dumps(figures, indent=1), encoding="utf-8")
        plot(figures, Path(config.json).with_suffix(".png"))


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
        server = uvicorn.Server(uvicorn.Config(create_app(load), log_level="error"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.05)
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join(20)


def tell(seen: dict[str, Any]) -> str:
    times = [
        f"{what} {1e3 * seen[key].get('p50', 0):,.0f} ms (95%: {1e3 * seen[key].get('p95', 0):,.0f})"
        for what, key in (("first token", "first_token_seconds"), ("between tokens", "between_tokens_seconds"))
    ]
    lost = f", {seen['refused']} refused, {seen['failed']} failed" if seen["refused"] or seen["failed"] else ""
    return f"{seen['tokens_per_second']:>8,.0f} tokens/s, {', '.join(times)}{lost}"


def plot(figures: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    rates, times = figure.subplots(1, 2)
    for name, label in (("engine", "engine alone"), ("closed", "over HTTP")):
        points = figures[name]
        rates.plot(list(points), [point["tokens_per_second"] for point in points.values()], marker="o", label=label)
    rates.set(xlabel="requests at once", ylabel="tokens/s", xscale="log", ylim=(0, None))
    rates.legend()
    for key, label in (("first_token_seconds", "first token"), ("between_tokens_seconds", "between tokens")):
        points = figures["closed"]
        times.plot(list(points), [1e3 * point[key].get("p50", 0) for point in points.values()], marker="o", label=label)
    times.set(xlabel="clients", ylabel="ms (median)", xscale="log", yscale="log")
    times.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    run(main, Config)
