"""Measure this machine: the speed of training next to a bare matrix product, or of serving; compare measurements.

python -m scripts.bench train

python -m scripts.bench serve --json serve.json

python -m scripts.bench train --depth 12 --max_seq_len 2048 --vocab_size 32768 --device_batch_size 16

python -m scripts.bench train --source hf:Qwen/Qwen3-0.6B --against transformers

python -m scripts.bench compare before.json after.json

python -m scripts.bench sweep --sweep_rows 1 4 16 --sweep_tokens 128 512 --sweep_threads 1 2

`train` times whole steps, optimizer included, on random tokens. `serve` times the engine alone, then over HTTP with
clients that wait for their replies. With `--against transformers` both sides have the same weights, the same tokens
and AdamW or greedy decoding, and take turns in this process. `compare` reads two files of `--json`, and prints each
ratio with its noise. `sweep` is `train` for every combination of sizes and threads, with a plot. docs/bench.md explains
how to read them.
"""

import contextlib
import io
import itertools
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from nanochat import provenance
from nanochat.cli import Count, Depth, Positive, Range, Size, UserError, check_ranges, out_of_memory, run
from nanochat.flags import DecodingFlags
from nanochat.log import counted, print0, warn

Made = TypeVar("Made")

PRODUCT = 1024  # width and height of the matrix in the bare product
PRODUCT_FLOPS = 1e11  # at least, in one measurement of it
LEARNING_RATE = 1e-5  # of a model that has learned: the losses of both sides stay comparable
TRIALS = 5  # of each batch in `serve`, after one that warms up


@dataclass(frozen=True)
class Config:
    what: tyro.conf.Positional[Literal["train", "serve", "sweep", "compare"]]  # what to measure
    files: tyro.conf.Positional[tuple[str, ...]] = ()  # compare: two files of --json, the earlier one first
    depth: Depth = 4  # layers; the width is 64 x depth, rounded up to whole heads
    head_dim: Annotated[int, Range(2, 4096)] = 128  # channels of an attention head
    # Instead of a new model: a stage, a folder (ours, Hugging Face's or peft's) or hf:ORG/NAME.
    source: str | None = None
    # train, serve: also time the library with --source, a model of another family.
    against: Literal["transformers"] | None = None
    max_seq_len: Size = 512  # tokens a row
    vocab_size: Size = 8192  # tokens that the model knows
    device_batch_size: Size = 8  # train: rows
    document_tokens: Count = 0  # train: rows are packed with documents of so many tokens; 0: each is one
    optimizer: Literal["muon", "adamw"] = "muon"  # train: of the matrices; with --source fine-tuning's AdamW
    steps: Positive = 20  # train: measured, each before a measurement of the bare product
    device: str = "auto"  # auto, npu, cuda or cpu
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of matrix products
    fp8: bool = False  # train: the products of the blocks in 8 bits (FP8), where the device has it
    compile: Literal["auto", "on", "off"] = "auto"  # train: torch.compile; auto: as in a long run
    threads: Positive | None = None  # of the processor; default: as many as torch takes
    batches: tuple[int, ...] = (1, 4, 16, 64)  # serve: requests or clients at once
    prompt_tokens: Positive = 16  # serve: of each request
    new_tokens: Positive = 128  # serve: of each request
    decoding: Annotated[DecodingFlags, tyro.conf.arg(name="")] = DecodingFlags()  # serve
    sweep_rows: tuple[int, ...] = ()  # sweep: values of --device_batch_size
    sweep_tokens: tuple[int, ...] = ()  # sweep: values of --max_seq_len
    sweep_threads: tuple[int, ...] = ()  # sweep: values of --threads
    plot: str = "sweep.svg"  # sweep: the file of the plot, .svg, .png or .pdf
    json: str | None = None  # also write the metrics to this file; sweep: after each point


# What only some of the modes use: elsewhere such a flag is a mistake. `sweep` is `train` for several sizes.
TRAIN_FLAGS = {"device_batch_size", "document_tokens", "optimizer", "steps", "fp8", "compile"}
SERVE_FLAGS = {"batches", "prompt_tokens", "new_tokens", *(field.name for field in fields(DecodingFlags))}
SWEEP_FLAGS = {"sweep_rows", "sweep_tokens", "sweep_threads", "plot"}
UNUSED_FLAGS = {
    "train": SERVE_FLAGS | SWEEP_FLAGS,
    "serve": TRAIN_FLAGS | SWEEP_FLAGS,
    "sweep": SERVE_FLAGS | {"against"},
    "compare": {field.name for field in fields(Config)} - {"what", "files", "decoding"} | SERVE_FLAGS,
}
SHAPE_FLAGS = {"depth", "head_dim", "vocab_size"}
THREADS_A_CORE = 4  # with thousands of threads the machine stands still before anything is measured


def main(config: Config) -> None:
    if len(config.files) != (2 if config.what == "compare" else 0):
        raise UserError("`compare` takes two files, such as `compare before.json after.json`; the others take none")
    refuse(config, UNUSED_FLAGS[config.what], f"is not used by `bench {config.what}`")
    if config.what == "compare":
        from nanochat.report import benchmark

        before, after = map(benchmark.load, config.files)
        benchmark.compare(before, after)
        return
    if config.against and (not config.source or config.document_tokens):
        raise UserError("--against transformers: with --source, a model of another family, and no --document_tokens")
    check_threads("--threads", config.threads)
    if config.source:
        refuse(config, SHAPE_FLAGS, "does not change the model of --source")
    if config.json is not None:
        check_writable("--json", config.json)
    if config.what == "sweep":
        sweep(config)
        return
    write_json(config, train(config) if config.what == "train" else serve(config))


def refuse(config: Config, flags: set[str], reason: str) -> None:
    """Raises UserError: when one of these flags is set."""
    for part in (config, config.decoding):
        for field in fields(part):
            if field.name in flags and getattr(part, field.name) != field.default:
                raise UserError(f"--{field.name} {reason}: leave it out")


def check_threads(flag: str, threads: int | None) -> None:
    """Raises UserError: when they are far more than this process may use cores."""
    most = THREADS_A_CORE * len(os.sched_getaffinity(0))
    if threads and threads > most:
        raise UserError(f"{flag} {threads}: at most {most} here, {THREADS_A_CORE} a core")


def check_writable(flag: str, path: str) -> None:
    """Raises UserError: when the file cannot be written. It is tried now, not after everything is measured."""
    try:
        for file in {Path(path), beside(Path(path))}:
            is_new = not file.exists()
            file.open("ab").close()
            if is_new:
                file.unlink()
    except OSError as error:
        raise UserError(f"{flag} {error.filename}: {error.strerror}: name a file that can be written") from error


def beside(path: Path) -> Path:
    """Where a file is written before it takes its place; what is no file, such as /dev/stdout, is written itself."""
    is_none = path.is_symlink() or (path.exists() and not path.is_file())
    return path if is_none else path.with_name(f"{path.name}.tmp")


def write_json(config: Config, metrics: dict[str, Any]) -> None:
    if config.json is None:
        return
    about = {"what": config.what, "commit": provenance.commit(), "config": asdict(config)}
    path = Path(config.json)
    # Beside the file first: on a full disk what was measured before stays whole.
    unfinished = beside(path)
    unfinished.write_text(json.dumps(about | metrics, indent=1))
    if unfinished != path:
        unfinished.replace(path)


def train(config: Config) -> dict[str, Any]:
    # The heavy imports are here so that --help answers at once.
    import torch

    from nanochat import device as devices
    from nanochat import scaling
    from nanochat.attention import Segments
    from nanochat.gpt import GPT
    from nanochat.run.compiling import compile_blocks
    from nanochat.train import make_adamw, make_optimizer, next_token_loss, train_step

    # ------------------------------------------------------------------ a model and a batch
    device = devices.init(config.device, config.dtype)
    torch.set_num_threads(config.threads or torch.get_num_threads())
    rows = config.device_batch_size
    tokens = config.max_seq_len
    batch_tokens = rows * tokens
    folder = Path()
    if config.source:
        model, _, folder = imported_model(config, device)
        model.train()
        model_config = model.config
        optimizer = make_adamw(model, LEARNING_RATE, device)
    else:
        model_config = scaling.model_config(config.depth, config.vocab_size, tokens, head_dim=config.head_dim)
        model = GPT(model_config, device.kernels).to(device.torch_device)
        model.init_weights()
        learning_rates = scaling.rates(model_config, batch_tokens, 1000 * batch_tokens)
        optimizer = make_optimizer(model, learning_rates, device, config.optimizer)
    if config.fp8:
        print0(f"products: {device.use_fp8(model)}")
    compiled, how = compile_blocks(device, model, config.compile, float("inf"))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model_config.vocab_size, (rows, tokens + 1), generator=generator)
    batch: list[Any] = [device.to_device(ids[:, :-1].contiguous()), device.to_device(ids[:, 1:].contiguous())]
    if config.document_tokens:
        numbers = (torch.arange(tokens) // config.document_tokens).expand(rows, tokens)
        batch.append(Segments.from_numbers(numbers).to(device.to_device))

    # ------------------------------------------------------------------ what is timed
    losses: dict[str, Any] = {}  # of the last step of each side

    def step() -> None:
        stats = train_step(compiled, optimizer, [batch], next_token_loss, device=device)
        losses["nanochat"] = stats.loss  # on the device: reading it would wait

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
    if config.against:
        train_theirs = their_training(folder, device, batch)

        def their_step() -> None:
            losses["transformers"] = train_theirs()

        works["transformers"] = their_step

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
    # Of each round by itself: a machine that is busy for a while slows the step and the product of a round down.
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
    # The share of the nominal peak in bf16, also of a step with products in FP8: the two compare by it.
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
    ratio = None
    if config.against:
        their_seconds = statistics.median(seconds["transformers"])
        ratio = median_ratio(seconds["transformers"], seconds["step"])
        losses = {name: float(loss) for name, loss in losses.items()}
        print0(
            f"transformers: {their_seconds * 1e3:.1f} ms, {batch_tokens / their_seconds:,.0f} tokens/s; nanochat makes "
            f"{ratio:.2f} times as many; losses {losses['nanochat']:.4f} and {losses['transformers']:.4f}"
        )
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
        "losses": losses if config.against else None,
        "times_transformers": ratio,
        "peak_memory_bytes": device.peak_memory(),
    }


def serve(config: Config) -> dict[str, Any]:
    import torch

    from nanochat import device as devices
    from nanochat.engine import SamplingParams
    from nanochat.serve.load import LoadStats, closed_loop

    if not config.batches or min(config.batches) < 1:
        raise UserError("--batches: at least 1 each, such as --batches 1 16")
    if config.prompt_tokens + config.new_tokens > config.max_seq_len:
        raise UserError("--prompt_tokens and --new_tokens are more than --max_seq_len: lower them, or raise it")
    device = devices.init(config.device, config.dtype)
    torch.set_num_threads(config.threads or torch.get_num_threads())
    engine, their_generate = on_a_thread(partial(engines, config, device))
    prompt = list(range(300, 300 + config.prompt_tokens))
    needed = 300 + config.prompt_tokens + max(config.batches)
    if engine.tokenizer.vocab_size < needed:
        raise UserError(f"the prompts have {needed} different tokens: raise --vocab_size, or lower --prompt_tokens")
    measurements: dict[str, Any] = {}
    best_rates: dict[int, float] = {}  # of the engine, tokens/s by batch
    threads = torch.get_num_threads()
    took = counted(threads, "thread")
    depth = engine.model.config.n_layer
    print0(f"{device}, {took}, depth {depth}, {config.prompt_tokens} tokens in, {config.new_tokens} out")

    # ------------------------------------------------------------------ the engine alone
    def ours(prompts: list[list[int]]) -> list[list[int]]:
        return engine.generate(prompts, max_tokens=config.new_tokens, sampling=SamplingParams(temperature=0.0))[0]

    def take_turns(batch: int) -> dict[str, list[float]]:
        """The seconds of each side, in turn."""
        # No two prompts are equal: the engine would read them once for all.
        prompts = [[token + row for token in prompt] for row in range(batch)]
        sides = {"engine": ours} | ({"transformers": their_generate} if their_generate else {})
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(1 + TRIALS):  # the first warms up
            replies = []
            for name, generate in sides.items():
                began = time.perf_counter()
                replies.append(generate(prompts))
                seconds[name].append(time.perf_counter() - began)
            if any(reply != replies[0] for reply in replies):
                print0(f"batch {batch}: the replies of the two sides differ")
        return {name: values[1:] for name, values in seconds.items()}

    for batch in config.batches:
        seconds = on_a_thread(partial(take_turns, batch))
        rate = best_rates[batch] = batch * config.new_tokens / min(seconds["engine"])
        for name, values in seconds.items():
            rates = [batch * config.new_tokens / one for one in values]
            measurements[f"{name}, batch {batch}"] = in_unit("tokens/s", rates)
        line = f"engine, batch {batch:>3}: {rate:>8,.0f} tokens/s"
        if config.against:
            theirs = batch * config.new_tokens / min(seconds["transformers"])
            ratio = median_ratio(seconds["transformers"], seconds["engine"])
            line += f", transformers {theirs:,.0f}; nanochat makes {ratio:.2f} times as many"
        print0(line)

    # ------------------------------------------------------------------ over HTTP, the clients in another process
    body = {"model": "bench", "prompt": prompt, "max_tokens": config.new_tokens, "temperature": 0.0}
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as clients, serving(engine, max(config.batches)) as port:
        for batch in config.batches:
            clients.apply(closed_loop, ("127.0.0.1", port, body, batch, batch))  # warm up
            trials = []
            for _ in range(TRIALS):
                trials.append(clients.apply(closed_loop, ("127.0.0.1", port, body, batch, 3 * batch)))
            best = max(trials, key=LoadStats.tokens_per_second)
            lost = sum(one.refused + one.failed for one in trials)
            if lost:
                requests = sum(one.requests for one in trials)
                raise UserError(f"--batches {batch}: {lost} of {requests} requests got no reply; lower --batches")
            measurements[f"HTTP, {batch} clients"] = in_unit("tokens/s", [one.tokens_per_second() for one in trials])
            for name in ("first_token", "between_tokens"):
                times = [getattr(one, name) for one in trials]
                if all(times):  # a reply of one token has no gap between two
                    medians = [1e3 * statistics.median(of_trial) for of_trial in times]
                    measurements[f"{name.replace('_', ' ')}, {batch} clients"] = in_unit("ms", medians)
            share = best.tokens_per_second() / best_rates[batch]
            print0(f"HTTP, {batch:>3} clients: {best}, {share:.0%} of what the engine makes alone")
    return {
        "device": str(device), "versions": device.versions(), "kernels": str(device.kernels), "threads": threads,
        "measurements": measurements,
    }  # fmt: skip


def sweep(config: Config) -> None:
    from nanochat.report import benchmark

    if Path(config.plot).suffix not in benchmark.PLOT_SUFFIXES:
        raise UserError(f"--plot {config.plot}: name a {', '.join(benchmark.PLOT_SUFFIXES)}")
    check_writable("--plot", config.plot)
    axes = {
        "device_batch_size": config.sweep_rows,
        "max_seq_len": config.sweep_tokens,
        "threads": config.sweep_threads,
    }
    used = {name: values for name, values in axes.items() if values}
    if config.json is not None and os.path.realpath(config.json) == os.path.realpath(config.plot):
        raise UserError(f"--json and --plot are both {config.plot}: name two files")
    if not used:
        raise UserError("name what to vary: --sweep_rows 1 4 16, --sweep_tokens 128 512 or --sweep_threads 1 2")

    # ------------------------------------------------------------------ measure each combination
    different = [dict.fromkeys(values) for values in used.values()]
    combinations = [dict(zip(used, values, strict=True)) for values in itertools.product(*different)]
    configs = [replace(config, what="train", **combination) for combination in combinations]
    for point in configs:
        try:
            check_ranges(point)
        except UserError as error:
            raise UserError(f"--sweep_rows, --sweep_tokens or --sweep_threads: {error}") from error
        check_threads("--sweep_threads", point.threads)
    points: list[benchmark.Point] = []
    measurements: dict[str, Any] = {}
    for point in configs:
        # Each in a process of its own: peak memory, compiled code and threads belong to a process.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            try:
                metrics = process.submit(quietly_train, point).result()
            except (RuntimeError, MemoryError) as error:  # one that the system killed raises BrokenProcessPool
                if isinstance(error, BrokenProcessPool):
                    reason = "their process was killed, as a system without free memory does"
                elif out_of_memory(error):
                    reason = "they do not fit in memory"
                else:
                    raise
                warn(f"{point.device_batch_size} rows of {point.max_seq_len} tokens are left out: {reason}")
                continue
        measured = metrics["measurements"]
        points.append(
            benchmark.Point(
                point.device_batch_size, point.max_seq_len, metrics["threads"], measured["step"]["values"],
                measured["share of the bare product"]["values"], metrics["peak_memory_bytes"],
            )
        )  # fmt: skip
        print0(f"{points[-1]}: {statistics.median(points[-1].rates):,.0f} tokens/s")
        # Whatever ends the sweep, the points until then are on the disk.
        measurements |= {f"{name}, {points[-1]}": values for name, values in measured.items()}
        shared = {name: metrics[name] for name in ("device", "versions", "kernels")}
        threads = sorted({one.threads for one in points})
        write_json(config, shared | {"threads": threads, "measurements": measurements})
        benchmark.draw_sweep(points, config.plot)
    if not points:
        raise UserError("no point could be measured: lower --sweep_rows, --sweep_tokens or --depth")
    benchmark.print_sweep(points)
    print0(f"wrote {config.plot}")


def quietly_train(config: Config) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()):
        return train(config)


def in_unit(unit: str, values: list[float]) -> dict[str, Any]:
    """A measurement as `compare` reads it (report/benchmark.py)."""
    return {"unit": unit, "values": values}


def engines(config: Config, device: Any) -> tuple[Any, Any]:
    """An engine whose replies end by their length only, and with --against transformers' decoding of the same model."""
    from nanochat.engine import Engine

    theirs = None
    if config.source:
        model, tokenizer, folder = imported_model(config, device)
        if config.against:
            theirs = their_decoding(folder, device, config.new_tokens)
    else:
        model, tokenizer = random_model(config, device)
    engine = Engine(model, tokenizer, device, **asdict(config.decoding))
    engine.stop_ids = set()
    engine.call_start = engine.call_end = -1
    return engine, theirs


def random_model(config: Config, device: Any) -> tuple[Any, Any]:
    """A model with random weights, and a tokenizer that fits it."""
    from nanochat import scaling
    from nanochat.gpt import GPT
    from nanochat.tokenizer import Tokenizer

    words = [bytes([value]) for value in range(256)]
    words += [b"%d " % number for number in range(config.vocab_size)]
    specials = len(Tokenizer(words).special_ids)
    if config.vocab_size < 256 + specials:
        raise UserError(f"--vocab_size {config.vocab_size}: at least {256 + specials}, for bytes and special tokens")
    tokenizer = Tokenizer(words[: config.vocab_size - specials])
    shape = scaling.model_config(config.depth, tokenizer.vocab_size, config.max_seq_len, head_dim=config.head_dim)
    model = GPT(shape, device.kernels).to(device.torch_device)
    model.init_weights()
    return model, tokenizer


# ---------------------------------------------------------------------- the other side


def imported_model(config: Config, device: Any) -> tuple[Any, Any, Path]:
    """The model of --source, its tokenizer and its folder."""
    from nanochat.checkpoint_manager import load_model
    from nanochat.families import hf

    model, tokenizer, meta = load_model(str(config.source), device, max_seq_len=config.max_seq_len)
    folder = Path(meta["folder"])
    if config.against and not hf.is_folder(folder):
        raise UserError(f"--against transformers reads no {folder}: name an imported model, or an export --to hf")
    return model, tokenizer, folder


def their_model(folder: Path, device: Any, dtype: Any) -> Any:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise UserError("--against transformers: the library is missing, run `pip install transformers`") from None
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device.torch_device)


def their_training(folder: Path, device: Any, batch: Any) -> Callable[[], Any]:
    """A step as transformers' Trainer makes it, which returns its loss: weights in fp32, autocast, fused AdamW."""
    import torch

    model = their_model(folder, device, torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.999), weight_decay=0, fused=True)
    inputs, targets = batch

    def step() -> Any:
        with torch.autocast(device.kind, device.dtype, enabled=device.dtype != torch.float32):
            loss = model(inputs, labels=targets, shift_labels=targets, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def their_decoding(folder: Path, device: Any, new_tokens: int) -> Callable[[list[list[int]]], list[list[int]]]:
    """transformers' greedy `generate`: the new tokens after prompts of one length."""
    import torch

    model = their_model(folder, device, device.dtype).eval()
    # Replies end by their length only.
    model.generation_config = type(model.generation_config)(max_new_tokens=new_tokens, do_sample=False)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        ids = torch.tensor(prompts, device=device.torch_device)
        return model.generate(ids, attention_mask=torch.ones_like(ids))[:, ids.size(1) :].tolist()

    return generate


def median_ratio(theirs: list[float], ours: list[float]) -> float:
    """The median over the rounds: a machine that is busy for a while slows both sides of a round down."""
    return statistics.median(their / our for their, our in zip(theirs, ours, strict=True))


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
