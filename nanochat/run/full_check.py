"""The parts of `check_npu.py --full` that compute: one part in each process, which run/full_report.py starts.

    python -m nanochat.run.full_check decode --device cpu --record lines.jsonl

Every check runs on the device and, where it has a result, on this machine's CPU. It passes if the two agree, and it
reports how long the device took. On an accelerator the sizes match a depth-12 model. On a CPU they are small, and a
part only shows that it works.

Legend: B rows, T tokens, H heads, D head dim, C width, V vocab.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nanochat import collectives, scaling
from nanochat import device as devices
from nanochat.adapters import nf4
from nanochat.attention import KVCache, Segments
from nanochat.cli import UserError
from nanochat.device import Device
from nanochat.engine import Engine, SamplingParams
from nanochat.experts.layer import grouped_product
from nanochat.families.hf import to_config
from nanochat.gpt import GPT, GPTConfig
from nanochat.kernels.grouped import Groups
from nanochat.run import memory
from nanochat.run.full_report import ROOT, TAIL, Line, add_line
from nanochat.run.probe import first_difference, record_steps
from nanochat.run.profiling import Recorder
from nanochat.run.random_model import add_noise, random_tokenizer
from nanochat.train import make_optimizer, next_token_loss, train_step

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class Sizes:
    """How much the checks compute."""

    depth: int
    rows: int
    tokens: int  # of a row
    vocab_size: int
    matrix: tuple[int, int]  # outputs and inputs of a matrix in 4 bits
    documents: tuple[int, ...]  # in all rows together
    steps: int  # of training
    judges_speed: bool  # at small sizes the host's launches take the time


# The matrix is one of a 7B model. The vendor's page names two limits of documents in a call, 1,024 and 2,048.
CARD = Sizes(12, 16, 2048, 32768, matrix=(4096, 11008), documents=(256, 1024, 2048), steps=5, judges_speed=True)
SMALL = Sizes(4, 2, 256, 4096, matrix=(512, 1376), documents=(16, 64, 128), steps=2, judges_speed=False)


class Skip(Exception):
    """A check that is left out, and why."""


class Wrong(Exception):
    """A check whose result is wrong: what was found, and the figures. Any other error is a FAIL with its traceback."""

    def __init__(self, detail: str, figures: dict[str, float] | None = None):
        super().__init__(detail)
        self.figures = figures or {}


@dataclass
class Found:
    """The result of a check that passed."""

    detail: str
    figures: dict[str, float] = field(default_factory=dict)
    table: str = ""


def check(record: Path, name: str, function: Callable[..., Found], *arguments: Any) -> bool:
    """Run one check and append its line to the file `record`; returns whether it passed."""
    began = time.perf_counter()
    line = Line(name, "FAIL", "")
    try:
        found = function(*arguments)
        line = Line(name, "PASS", found.detail, figures=found.figures, table=found.table)
    except Skip as skip:
        line = Line(name, "SKIP", str(skip))
    except Wrong as wrong:
        line = Line(name, "FAIL", str(wrong), figures=wrong.figures)
    except Exception as error:
        first = next((text.strip() for text in str(error).splitlines() if text.strip()), "no message")
        line = Line(name, "FAIL", f"{type(error).__name__}: {first[:300]}", traceback=traceback.format_exc()[-TAIL:])
    line.figures["check_seconds"] = round(time.perf_counter() - began, 2)
    add_line(record, line)
    return line.outcome == "PASS"


# ---------------------------------------------------------------------- probe: a training step, module by module

# Qwen3's settings at a small size: grouped heads, norms with a gain before the rotation, a gated MLP, a tied head.
QWEN3 = {
    "model_type": "qwen3", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 256,
    "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
DOCUMENT = 100  # tokens of a document in packed rows: more than a window, and a row ends within one
# Of a tensor's norm. In bf16 the gradient of a single number, such as a scale, is off by up to 5% on a simulated NPU; a
# wrong operator changes a signature by its whole norm.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.15}


def shapes() -> dict[str, GPTConfig]:
    return {"preset": scaling.model_config(4, 1024, 256, window_pattern="SSSL"), "Qwen3": to_config(QWEN3)}


def probe(kind: str, sizes: Sizes, record: Path) -> None:
    for dtype, tolerance in TOLERANCES.items():
        for shape, config in shapes().items():
            if dtype == "bfloat16":  # a CPU without bf16 instructions emulates it, slowly
                config = replace(config, n_layer=2)
            for rows, tokens in (("whole rows", 0), ("packed rows", DOCUMENT)):
                check(record, f"probe {dtype}, {shape}, {rows}", compare_steps, kind, dtype, config, tokens, tolerance)


def compare_steps(kind: str, dtype: str, config: GPTConfig, document_tokens: int, tolerance: float) -> Found:
    """One training step here and on the CPU: the first module, kernel or gradient that differs."""
    recordings = []
    for name in (kind, "cpu"):
        device = init(name, dtype)
        trains(device)
        recordings.append(record_steps(device, config, rows=2, document_tokens=document_tokens)[1])
    ours, theirs = recordings
    difference = first_difference(ours, theirs, tolerance)
    if difference is not None:
        raise Wrong(f"first difference above {tolerance:g} of the norm: {difference}")
    largest = 0.0
    for one, other in zip(ours, theirs, strict=True):
        scale = max(one["norm"], other["norm"]) or 1.0
        largest = max(largest, abs(one["signature"] - other["signature"]) / scale)
    return Found(f"{len(ours)} readings within {largest:.1e} of their norms", {"largest_difference": largest})


def init(kind: str, dtype: str) -> Device:
    """The device, with matrix products in `dtype`. Raises Skip: when it has no bf16."""
    plain = devices.init(kind, "float32")  # a device that cannot start fails here, with a UserError
    if dtype == "float32":
        return plain
    try:
        return devices.init(kind, dtype)
    except UserError as error:
        raise Skip(str(error)) from None


def trains(device: Device) -> None:
    if not device.can_train:
        raise Skip(f"{device.name} is made for inference")


# ---------------------------------------------------------------------- decode: recorded, and launched one by one

NEW_TOKENS = 32
PROMPT_LENGTHS = (5, 9, 17, 33)
# At this temperature one token in ten or so is not the likeliest. A higher one would draw another token at every
# difference in rounding.
SAMPLINGS = {"greedy": SamplingParams(temperature=0.0), "sampled": SamplingParams(temperature=0.3, top_k=50, seed=1)}
# In bf16 two tokens that are about equally likely may change places, and then the rest of a row differs. A wrong kernel
# leaves next to none of them.
AGREEING_SHARE = 0.125
HEAD_GAIN = 6  # on the head's weights: a new model's tokens would all be about equally likely


@dataclass(frozen=True)
class TimedDevice(Device):
    """A device that notes how long each recording takes."""

    captures: list[float] = field(default_factory=list, compare=False)  # seconds
    failures: list[str] = field(default_factory=list, compare=False)

    def capture(self, *inputs: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            result = super().capture(*inputs, **options)
        except Exception as error:
            self.failures.append(f"{type(error).__name__}: {error}")
            raise
        self.captures.append(time.perf_counter() - began)
        return result


def decode(kind: str, sizes: Sizes, record: Path) -> None:
    expected: dict[str, list[list[int]]] = {}
    for dtype in ("float32", "bfloat16"):
        for how, graphs in (("eager", "off"), ("recorded", "on")):
            check(record, f"{how} {dtype}", compare_tokens, kind, sizes.depth, dtype, graphs, expected)
    check(record, "decoding memory", memory_of_decoding, kind, sizes.depth)


def decoder(kind: str, depth: int, dtype: str, graphs: Literal["auto", "on", "off"]) -> Engine:
    """An engine whose replies end only at their maximum length, with the same weights on every device."""
    device = init(kind, dtype)
    tokenizer = random_tokenizer(1024)
    model = GPT(scaling.model_config(depth, tokenizer.vocab_size, 256), device.kernels)
    model.init_weights(0)
    add_noise(model, 1)
    with torch.no_grad():
        for _, weight in model.parameter_groups()["head"]:
            weight.mul_(HEAD_GAIN)
    timed = TimedDevice(**{item.name: getattr(device, item.name) for item in fields(Device)})
    engine = Engine(model.to(device.torch_device), tokenizer, timed, graphs)
    engine.stop_ids = set()
    engine.call_start = engine.call_end = -1
    return engine


def timed_tokens(engine: Engine, sampling: SamplingParams) -> tuple[list[list[int]], list[float]]:
    """The new tokens of each prompt, and the seconds of each step; the first step reads the prompts."""
    prompts = [list(range(300, 300 + length)) for length in PROMPT_LENGTHS]
    tokens: list[list[int]] = [[] for _ in prompts]
    seconds = []
    began = time.perf_counter()
    for new in engine.stream(prompts, max_tokens=NEW_TOKENS, sampling=sampling):
        tokens[new.row.number].append(new.id)
        if sum(map(len, tokens)) % len(prompts) == 0:  # all rows advance together
            now = time.perf_counter()
            seconds.append(now - began)
            began = now
    return tokens, seconds


def compare_tokens(
    kind: str, depth: int, dtype: str, graphs: Literal["on", "off"], expected: dict[str, list[list[int]]]
) -> Found:
    """Decode here, and in fp32 on the CPU. `expected` keeps the CPU's tokens for the next call."""
    try:
        devices.records(kind, graphs)
    except UserError as error:  # a CPU records nothing, and some runtimes cannot under an exported variable
        raise Skip(str(error)) from None
    engine = decoder(kind, depth, dtype, graphs)
    if graphs == "on" and not engine.graphs:
        raise Skip("launches are not recorded here")
    agreed = []
    is_wrong = False
    steps: list[float] = []
    for how, sampling in SAMPLINGS.items():
        tokens, seconds = timed_tokens(engine, sampling)
        if how not in expected:  # not in bf16: many servers' CPUs emulate it, which takes minutes
            expected[how] = timed_tokens(decoder("cpu", depth, "float32", "off"), sampling)[0]
        agreeing = sum(map(leading, tokens, expected[how]))
        total = NEW_TOKENS * len(PROMPT_LENGTHS)
        is_wrong = is_wrong or agreeing < (total if dtype == "float32" else AGREEING_SHARE * total)
        agreed.append(f"{how} {agreeing} of {total}")
        steps += seconds[NEW_TOKENS // 2 :]  # the recording is over
    timed = engine.device
    assert isinstance(timed, TimedDevice)
    milliseconds = statistics.median(steps) * 1e3
    detail = f"tokens as on the CPU: {', '.join(agreed)}; {milliseconds:.2f} ms a token of {len(PROMPT_LENGTHS)} rows"
    figures = {"token_ms": milliseconds}
    if timed.failures:
        raise Wrong(f"the recording failed: {timed.failures[0][:300]}; {detail}", figures)
    if graphs == "on" and not timed.captures:
        raise Wrong(f"nothing was recorded; {detail}", figures)
    if graphs == "on":
        count = len(timed.captures)
        detail += f", {count} recording{'' if count == 1 else 's'} in {sum(timed.captures):.2f} s"
        figures |= {"recordings": len(timed.captures), "recording_seconds": sum(timed.captures)}
    if is_wrong:
        raise Wrong(detail, figures)
    return Found(detail, figures)


def leading(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """How many tokens agree before the first one that does not."""
    for place, (one, other) in enumerate(zip(tokens, expected, strict=True)):
        if one != other:
            return place
    return len(tokens)


def memory_of_decoding(kind: str, depth: int) -> Found:
    """Generate five times: from the second time on, the device's memory must stay as it is."""
    if kind == "cpu":
        raise Skip("a CPU records nothing")
    engine = decoder(kind, depth, "auto", "auto")
    held = []
    for _ in range(5):
        timed_tokens(engine, SAMPLINGS["sampled"])
        held.append(engine.device.module.memory_allocated())
    grown = (held[-1] - held[1]) / MIB
    detail = f"{held[1] / MIB:.1f} MiB after two calls, {held[-1] / MIB:.1f} after five"
    figures = {"grown_mib": grown}
    if grown > 1:
        raise Wrong(detail, figures)
    return Found(detail, figures)


# ---------------------------------------------------------------------- operators: a few whose speed nobody knows

REPEATS = 7
# A slower operator is not limited by its bytes: its algorithm is wrong for the card, or it runs on a slow AI CPU. Those
# that sort, add in order or scatter may take twice as many times as on an NVIDIA H200 (2026-11-27).
TIMES_COPY = 3.0


@dataclass(frozen=True)
class Operator:
    """An operator to time: `prepare` makes its inputs on a device and returns the call."""

    name: str
    prepare: Callable[[Device], Callable[[], Tensor]]
    tolerance: float  # of the result's norm
    bytes: float  # that its launches must read and write at least
    launches: int = 1
    is_bound_by_bytes: bool = True  # else by its products: then a copy of as many bytes says nothing about it
    times_copy: float = TIMES_COPY  # how many times as long as copies of its bytes it may take


def operators(kind: str, sizes: Sizes, record: Path) -> None:
    rows = sizes.rows
    tokens = sizes.tokens
    outputs, inputs = sizes.matrix
    V = 151_936  # Qwen3's vocabulary
    C = 768
    listed = [
        Operator("cache write", lambda device: write_cache(device, rows, tokens), 0.0, 4 * rows * C * 2, 4),
        Operator(f"top 50 of {V:,}", lambda device: top_of(device, rows, V), 0.0, 4 * rows * V, times_copy=16),
        Operator(
            f"cumulative sum of {V:,}",
            lambda device: cumulative_sum(device, rows, V),
            1e-4,
            8 * rows * V,
            times_copy=25,
        ),
        Operator(
            f"NF4 read-back of {outputs:,} x {inputs:,}",
            lambda device: read_back(device, outputs, inputs),
            0.01,
            # For each byte, which is two weights: 1 to 4 bytes, a look-up of 8, a product in place, a copy in bf16.
            (1 + 4 + 4 + 8 + 8 + 8 + 8 + 4) / 2 * outputs * inputs,
            4 * math.ceil(outputs * inputs / nf4.BLOCK / nf4.PIECE),
        ),
        Operator(
            "embedding backward",
            lambda device: embedding_backward(device, rows * tokens, 32768, C),
            1e-3,
            4 * C * (32768 + 3 * rows * tokens),
            2,  # zeros, and the sums: a gradient is added to what is read
            times_copy=12,
        ),
    ]
    for operator in listed:
        check(record, operator.name, time_operator, kind, operator, sizes.judges_speed)
    # Rows and their gradient, and each matrix three times.
    listed.append(
        Operator(
            "products of 8 experts, one without rows",
            lambda device: expert_products(device, rows * tokens),
            0.02,
            3 * 2 * (2 * rows * tokens * C + 8 * C * C),
            is_bound_by_bytes=False,
        )
    )
    for documents in sizes.documents:
        # q, k, v and the output, forward once and backward twice.
        operator = Operator(
            f"documents: {documents:,} in {rows * tokens:,} tokens",
            lambda device, documents=documents: packed_attention(device, rows, tokens, documents),
            0.03,
            3 * 4 * 2 * rows * tokens * C,
            is_bound_by_bytes=False,
        )
        check(record, operator.name, time_operator, kind, operator, sizes.judges_speed)


def time_operator(kind: str, operator: Operator, judges_speed: bool) -> Found:
    """Compare the result with the CPU's, and the time with that of copies: as many bytes in as many launches."""
    device = devices.init(kind)
    work = operator.prepare(device)
    result = work()
    milliseconds = median_ms(device, work)
    gigabytes = operator.bytes / 1e9 / (milliseconds / 1e3)
    expected = operator.prepare(devices.init("cpu"))()
    error = relative_error(result, expected)
    figures = {"ms": milliseconds, "gigabytes_per_second": gigabytes, "relative_error": error}
    detail = f"{milliseconds:.3f} ms, at least {gigabytes:.1f} GB/s; {error:.1e} of the norm from the CPU"
    if not error <= operator.tolerance:  # NaN is wrong too
        raise Wrong(f"{detail}, more than {operator.tolerance:g}", figures)
    if judges_speed and operator.is_bound_by_bytes:
        copy_ms = median_ms(device, copies(device, operator))
        figures |= {"copy_ms": copy_ms, "times_copy": milliseconds / copy_ms}
        detail += f"; {milliseconds / copy_ms:.1f} times a copy of as many bytes ({copy_ms:.3f} ms)"
        if milliseconds > operator.times_copy * copy_ms:
            raise Wrong(f"{detail}, more than {operator.times_copy:g} times", figures)
    return Found(detail, figures)


def copies(device: Device, operator: Operator) -> Callable[[], None]:
    """Copies that move the operator's bytes in as many launches: what the operator takes if only bytes count."""
    size = max(1, round(operator.bytes / operator.launches / 2))  # a copy reads each byte and writes it
    part = torch.zeros(size, dtype=torch.uint8, device=device.torch_device)

    def work() -> None:
        for _ in range(operator.launches):
            part.clone()

    work()  # the first one takes memory
    return work


def median_ms(device: Device, work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        device.synchronize()
        began = time.perf_counter()
        work()
        device.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e3


def relative_error(result: Tensor, expected: Tensor) -> float:
    result = result.detach().float().cpu()
    expected = expected.detach().float().cpu()
    return float((result - expected).norm() / expected.norm())


def draw(*shape: int) -> Tensor:
    """Random numbers on the host, the same for every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def write_cache(device: Device, rows: int, capacity: int) -> Callable[[], Tensor]:
    """A token of each row into one layer of the cache, each row at its own position."""
    H = 6
    D = 128
    cache = KVCache.empty(1, rows, capacity, H, D, device.torch_device, torch.bfloat16, key_offset=True)
    k = device.to_device(draw(rows, 1, H, D).bfloat16())
    positions = device.to_device(torch.arange(rows)[:, None] * 7 % (capacity - 1))

    def work() -> Tensor:
        cache.write(0, k, k, cache.indices(positions))
        return cache.read(0)[0]

    return work


def top_of(device: Device, rows: int, vocab: int) -> Callable[[], Tensor]:
    logits = device.to_device(draw(rows, vocab))
    return lambda: logits.topk(50, dim=-1).values


def cumulative_sum(device: Device, rows: int, vocab: int) -> Callable[[], Tensor]:
    probabilities = device.to_device(draw(rows, vocab).softmax(dim=-1))
    return lambda: probabilities.cumsum(dim=-1)


def read_back(device: Device, outputs: int, inputs: int) -> Callable[[], Tensor]:
    """A matrix in 4 bits, read back in bf16: a look-up of 8 bytes for each byte of it."""
    blocks = outputs * inputs // nf4.BLOCK
    codes = torch.randint(256, (blocks, nf4.BLOCK // 2), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    codes = device.to_device(codes)
    factors = device.to_device(draw(blocks).abs())
    return lambda: nf4.dequantize(codes, factors, (outputs, inputs), torch.bfloat16)


def embedding_backward(device: Device, tokens: int, vocab: int, width: int) -> Callable[[], Tensor]:
    """The gradient of a table: rows of tokens that occur several times add up."""
    ids = device.to_device(torch.randint(vocab, (tokens,), generator=torch.Generator().manual_seed(0)))
    table = torch.zeros(vocab, width, device=device.torch_device, requires_grad=True)
    out_grad = device.to_device(draw(tokens, width))
    out = F.embedding(ids, table)
    return lambda: torch.autograd.grad(out, table, out_grad, retain_graph=True)[0]


def expert_products(device: Device, rows: int) -> Callable[[], Tensor]:
    """Products of rows in groups (experts/), forward and backward; all gradients. One group is empty: its matrix must
    have a gradient of 0, not what was in memory."""
    trains(device)
    C = 768
    counts = torch.tensor([rows // 8] * 6 + [0, rows - 6 * (rows // 8)])
    groups = Groups(rows, device.to_device(counts))
    x = device.to_device(draw(rows, C).to(device.dtype)).requires_grad_()
    weight = device.to_device(draw(8 * C, C)).requires_grad_()
    toward = device.to_device(draw(rows, C).to(device.dtype))

    def work() -> Tensor:
        out = grouped_product(device.kernels, x, weight, groups)
        gradients = torch.autograd.grad(out, (x, weight), toward)
        return torch.cat([part.float().flatten() for part in (out, *gradients)])

    return work


def packed_attention(device: Device, rows: int, tokens: int, documents: int) -> Callable[[], Tensor]:
    """Attention within `documents` documents of one length, forward and backward; the gradient of v."""
    trains(device)
    H = 6
    D = 128
    numbers = (torch.arange(rows * tokens) * documents // (rows * tokens)).view(rows, tokens)
    segments = Segments.from_numbers(numbers).to(device.to_device)
    q, k, v = (device.to_device(part.to(device.dtype)).requires_grad_() for part in draw(3, rows, tokens, H, D))

    def work() -> Tensor:
        out = device.kernels.attention(q, k, v, scale=D**-0.5, segments=segments)
        # In a document of one token the gradients of q and k are 0: there is nothing to choose from.
        return torch.autograd.grad(out.float().square().sum(), (q, k, v))[2]

    return work


# ---------------------------------------------------------------------- train: speed, and memory against the count


LEAST_MFU = 0.1  # a step below a tenth of the nominal peak waits for something else than its products


def train_depth_12(kind: str, sizes: Sizes, record: Path) -> None:
    check(record, f"train depth {sizes.depth}", train_steps, kind, sizes)  # a small one is not as deep


def train_depth_20(kind: str, sizes: Sizes, record: Path) -> None:
    check(record, "train depth 20", train_steps, kind, replace(sizes, depth=20))


def train_steps(kind: str, sizes: Sizes) -> Found:
    """`bench train`, if its counted memory fits, and its peak against the count."""
    device = devices.init(kind)
    trains(device)
    if sizes.depth > CARD.depth and sizes.rows < CARD.rows:
        raise Skip("only at its full size")
    counted = 0
    if kind != "cpu":  # the peak of a CPU is the whole process
        counted = counted_bytes(device, sizes)
        free, total = device.module.mem_get_info()
        if counted + 2 * GIB > free:
            raise Skip(f"needs {counted / GIB:.1f} GiB and some, {free / GIB:.1f} of {total / GIB:.1f} are free")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.json"
        command = [sys.executable, "-m", "scripts.bench", "train", "--device", kind, "--compile", "off"]
        command += [f"--depth={sizes.depth}", f"--device_batch_size={sizes.rows}", f"--max_seq_len={sizes.tokens}"]
        command += [f"--vocab_size={sizes.vocab_size}", f"--steps={sizes.steps}", f"--json={file}"]
        output = run_command(command)
        measured = json.loads(file.read_text())
    tokens = measured["tokens_per_second"]
    peak = measured["peak_memory_bytes"]
    figures = {"tokens_per_second": tokens, "peak_gib": peak / GIB, "counted_gib": counted / GIB}
    detail = f"depth {sizes.depth}, {tokens:,.0f} tokens/s"
    if measured["mfu"]:
        detail += f", {measured['mfu']:.1%} of the nominal peak"
        figures["mfu"] = measured["mfu"]
    detail += f"; peak {peak / GIB:.2f} GiB"
    if counted:
        detail += f", counted {counted / GIB:.2f}"
        if abs(peak / counted - 1) > 0.05:
            raise Wrong(f"{detail}: more than 5% apart", figures)
    if sizes.judges_speed and measured["mfu"] and measured["mfu"] < LEAST_MFU:
        raise Wrong(f"{detail}; below {LEAST_MFU:.0%} of the peak", figures)
    return Found(detail, figures, output)


def counted_bytes(device: Device, sizes: Sizes) -> int:
    """The peak of a step of `bench train`, as `--dry_run` counts it: on tensors without data."""
    rows = sizes.rows
    tokens = sizes.tokens
    config = scaling.model_config(sizes.depth, sizes.vocab_size, tokens)
    with torch.device("meta"):
        model = GPT(config, device.kernels)
    ledger = memory.begin(device, model)
    try:
        optimizer = make_optimizer(model, scaling.rates(config, rows * tokens, 1000 * rows * tokens), device)
        ids = torch.zeros(2, rows, tokens, dtype=torch.long, device=device.torch_device)
        ledger.count_step(model, optimizer, [(ids[0], ids[1])], next_token_loss)
    finally:
        ledger.modes.close()
    products = 2 * rows * tokens * 1024 * device.dtype.itemsize  # the bare product that bench times beside the step
    return max(ledger.peaks.values()) + products


def run_command(command: Sequence[str]) -> str:
    """What a command printed. Raises RuntimeError: when it failed, with the end of its output."""
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace",
    )  # fmt: skip
    if done.returncode:
        lines = done.stdout.strip().splitlines() or ["no output"]
        raise RuntimeError("\n".join([lines[-1], *lines[-40:]]))
    return done.stdout.strip()


# ---------------------------------------------------------------------- two ranks


def two_ranks(kind: str, sizes: Sizes, record: Path) -> None:
    check(record, "two ranks", start_ranks, kind, record)


def start_ranks(kind: str, record: Path) -> Found:
    device = devices.init(kind)
    count = 2 if kind == "cpu" else device.module.device_count()
    if count < 2:
        raise Skip("there is one device")
    trains(device)
    command = [sys.executable, "-m", "nanochat.run.launch", "--nproc_per_node=2", "-m", "nanochat.run.full_check"]
    run_command([*command, "rank", "--device", kind, "--record", str(record)])
    return Found("both ended")


def rank(kind: str, sizes: Sizes, record: Path) -> None:
    """One of the two: rank 0 writes the lines of what passed, and a rank whose check fails writes its own."""
    device = devices.init(kind)
    for name, function in RANK_CHECKS.items():
        # A file of each rank's own, so that only what both have passed is a PASS.
        own = record.with_name(f"{record.name}.{device.rank}")
        passed = check(own, f"two ranks: {name}", function, device)
        (line,) = (Line(**json.loads(text)) for text in own.read_text().splitlines()[-1:])
        if device.is_main or not passed:
            add_line(record, line)
        if not passed:
            sys.exit(1)  # the launcher ends the other rank, which may wait for this one
    devices.shutdown(device)


def uneven_exchange(device: Device) -> Found:
    """all_to_all with other counts for each pair of ranks, none among them."""
    counts = [[0, 3], [5, 1]]  # rows that rank i sends to rank j
    leaving = counts[device.rank]
    arriving = [row[device.rank] for row in counts]
    rows = []
    for target, count in enumerate(leaving):
        rows += [[10.0 * device.rank + target, float(place)] for place in range(count)]
    expected = []
    for source, count in enumerate(arriving):
        expected += [[10.0 * source + device.rank, float(place)] for place in range(count)]
    sent = device.to_device(torch.tensor(rows).view(-1, 2))
    arrived = sent.new_empty(sum(arriving), 2)
    dist.all_to_all_single(arrived, sent, arriving, leaving)
    if arrived.tolist() != expected:
        raise Wrong(f"rank {device.rank} got {arrived.tolist()}, expected {expected}")
    return Found(f"rows {counts[0]} and {counts[1]} arrive")


def shared_tensor(device: Device) -> Found:
    """reduce_scatter and all_gather of one tensor, as the optimizer uses them."""
    R = device.world_size
    whole = torch.arange(4.0 * R, device=device.torch_device)
    part = torch.empty(4, device=device.torch_device)
    dist.reduce_scatter_tensor(part, whole * (device.rank + 1))
    gathered = torch.empty_like(whole)
    dist.all_gather_into_tensor(gathered, part)
    if not torch.equal(gathered.cpu(), whole.cpu() * sum(range(1, R + 1))):
        raise Wrong(f"rank {device.rank} got {gathered.tolist()}")
    return Found("the sums of both come back")


def train_together(device: Device) -> Found:
    """Three steps of a small model: both ranks must end with the same weights, and a lower loss."""
    config = scaling.model_config(3, 1024, 128)  # an odd number of matrices: Muon's shares are uneven
    model = GPT(config, device.kernels)
    model.init_weights(0)
    model.to(device.torch_device)
    optimizer = make_optimizer(model, scaling.rates(config, 1024, 1_024_000), device)
    generator = torch.Generator().manual_seed(device.rank)
    ids = device.to_device(torch.randint(1024, (4, 129), generator=generator))
    losses = []
    for _ in range(3):
        batch = (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        losses.append(float(train_step(model, optimizer, [batch], next_token_loss, device=device).loss))
    sums = [parameter.detach().double().sum().item() for parameter in model.cpu().parameters()]
    if any(other != sums for other in collectives.gather_values(sums, device)):
        raise Wrong("the ranks have different weights after three steps")
    if not losses[-1] < losses[0]:
        raise Wrong(f"the loss went from {losses[0]:.4f} to {losses[-1]:.4f}")
    return Found(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, the same weights on both")


RANK_CHECKS = {"all_to_all": uneven_exchange, "reduce_scatter": shared_tensor, "training": train_together}


# ---------------------------------------------------------------------- profile: one step


def profile(kind: str, sizes: Sizes, record: Path) -> None:
    check(record, "profile", profile_step, kind, sizes)


def profile_step(kind: str, sizes: Sizes) -> Found:
    """The fourth of four steps of training."""
    device = devices.init(kind)
    trains(device)
    rows = sizes.rows
    tokens = sizes.tokens
    config = scaling.model_config(sizes.depth, sizes.vocab_size, tokens)
    model = GPT(config, device.kernels).to(device.torch_device)
    model.init_weights()
    optimizer = make_optimizer(model, scaling.rates(config, rows * tokens, 1000 * rows * tokens), device)
    ids = torch.randint(sizes.vocab_size, (rows, tokens + 1), generator=torch.Generator().manual_seed(0))
    batch = (device.to_device(ids[:, :-1].contiguous()), device.to_device(ids[:, 1:].contiguous()))
    texts: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "profile"
        with Recorder(1, 4, device, folder, texts.append) as recorder:
            for step in range(1, 5):
                train_step(model, optimizer, [batch], next_token_loss, device=device)
                recorder.boundary(step)
        files = sorted(path.name for path in folder.rglob("*") if path.is_file())  # the folders have the host's name
    summary, *table = texts[0].splitlines()[:-1]  # the last line is the folder, which is gone
    if not table:
        raise Wrong(f"{summary}; but the profiler wrote no table of kernels: {', '.join(files)[:300]}")
    return Found(summary, table="\n".join(table))


# ---------------------------------------------------------------------- the command

COMMANDS: dict[str, Callable[..., None]] = {
    "probe": probe,
    "decode": decode,
    "operators": operators,
    "train depth 12": train_depth_12,
    "train depth 20": train_depth_20,
    "two ranks": two_ranks,
    "rank": rank,
    "profile": profile,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="One part of `check_npu.py --full`.")
    parser.add_argument("part", choices=COMMANDS)
    parser.add_argument("--device", default="auto", help="npu, cuda or cpu")
    parser.add_argument("--small", action="store_true", help="small sizes on every device, as on a CPU")
    parser.add_argument("--record", type=Path, required=True, help="append the lines to this file")
    options = parser.parse_args()
    kind = devices.kind_of(options.device)
    sizes = SMALL if options.small or kind == "cpu" else CARD
    COMMANDS[options.part](kind, sizes, options.record)


if __name__ == "__main__":
    main()
