"""What tests compute on a device by its name: on "cpu" in the tests' own process, on "npu:0" in a simulated one.

Everything is drawn on the host, so that both see the same numbers.
"""

import contextlib
import gc
import importlib
import inspect
import io
import tempfile
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tiny
import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat import device as devices
from nanochat import engine, scaling
from nanochat.adapters import lora
from nanochat.adapters.nf4 import NF4Linear
from nanochat.attention import Segments
from nanochat.cross_entropy import linear_cross_entropy
from nanochat.engine import Engine, SamplingParams
from nanochat.experts.layer import grouped_product
from nanochat.gpt import GPT, AddNorm, GPTConfig, Norm
from nanochat.kernels import decoding
from nanochat.kernels.adamw import unfused_adamw
from nanochat.kernels.cpu import CpuKernels
from nanochat.kernels.grouped import Groups
from nanochat.losses import masked_loss
from nanochat.operators import TorchKernels
from nanochat.packing import PackedBatch
from nanochat.run.progress import Meter, Progress
from nanochat.train import make_adamw, make_optimizer, next_token_loss, train_step
from simnpu import operators


class PlainKernels(CpuKernels):
    """The operations of a CPU, on any device."""

    device_type = None
    adamw = staticmethod(unfused_adamw)


# ---------------------------------------------------------------------- cases


def _model(device: devices.Device, shape: str, kernels: TorchKernels | None = None, **changes: Any) -> GPT:
    config = tiny.tiny_config(**{**(tiny.SHAPES | tiny.EXPERT_SHAPES)[shape], **changes})
    return tiny.lively_model(config, kernels=kernels or device.kernels).to(device.torch_device)


def _engine(found: devices.Device, shape: str = "fast", graphs: Any = "off", stops: bool = False) -> Engine:
    tokenizer = tiny.tiny_tokenizer()
    model = _model(found, shape, vocab_size=tokenizer.vocab_size, sequence_len=160).eval()
    made = Engine(model, tokenizer, found, graphs)
    if not stops:
        made.stop_ids = set()
        made.call_start = made.call_end = -1  # the model writes them at random
    return made


def _batches(steps: int, to: Callable[[Tensor], Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of some steps."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(0, 100, (3, 33), generator=generator)
        yield to(tokens[:, :-1].contiguous()), to(tokens[:, 1:].contiguous())


PROMPTS = [[5, 6, 7], [9] * 12, list(range(20, 37))]


def _rates(rate: float = 0.01) -> scaling.Rates:
    return scaling.Rates(**dict.fromkeys(inspect.signature(scaling.Rates).parameters, rate))


def train_losses(
    device: str, dtype: str = "float32", shape: str = "fast", steps: int = 3, packed: bool = False,
    plain: bool = False,
) -> list[float]:  # fmt: skip
    """Losses and gradient norms of some steps, each read by the meter as a script does; then the weights' sums."""
    found = devices.init(device, dtype)
    model = _model(found, shape, PlainKernels() if plain else None)
    optimizer = make_optimizer(model, _rates(), found, "adamw" if plain else "muon")
    meter = Meter(Progress(), found)
    generator = torch.Generator().manual_seed(2)
    figures = []
    for inputs, targets in _batches(steps, (lambda tensor: tensor) if packed else found.to_device):
        batch: Any = (inputs, targets)
        loss_fn: Any = next_token_loss
        if packed:
            numbers = (torch.rand(3, 32, generator=generator) < 0.2).cumsum(1)
            batch = PackedBatch(inputs, targets, Segments.from_numbers(numbers), numbers).to(found)
            loss_fn = masked_loss
        stats = train_step(model, optimizer, [batch], loss_fn, device=found)
        meter.add(stats, inputs.numel())
        read = meter.read(stats)
        figures += [read["loss"], read["grad_norm"]]
    return figures + [parameter.detach().cpu().double().sum().item() for parameter in model.parameters()]


def vocabulary_loss(device: str, dtype: str, cap: float) -> dict[str, list[float]]:
    """The losses of 64 tokens over 32,768 logits, and sums of squares of the gradients, as the device's model computes
    them."""
    found = devices.init(device, dtype)
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randn(64, 128, generator=generator), torch.randn(32768, 128, generator=generator) / 8]
    hidden, weight = (one.to(found.torch_device).requires_grad_() for one in drawn)
    targets = found.to_device(torch.randint(0, 32768, (64,), generator=generator))
    sizes = (cap, 32, None, found.kernels.loss_in_fp32)
    losses = linear_cross_entropy(hidden.to(found.dtype), weight, targets, *sizes, "none")
    total = linear_cross_entropy(hidden.to(found.dtype), weight, targets, *sizes)
    total.backward()
    squares = [one.grad.float().square().sum(dim=1).tolist() for one in (hidden, weight)]
    return {"losses": [total.item(), *losses.tolist()], "hidden": squares[0], "weight": [sum(squares[1])]}


def adapter_losses(
    device: str, dtype: str = "float32", shape: str = "qwen3", base_format: Any = "plain", steps: int = 4
) -> list[float]:
    """Losses and gradient norms of some steps that train adapters alone."""
    found = devices.init(device, dtype)
    model = _model(found, shape)
    weights = {name: tensor.float().cpu() for name, tensor in model.state_dict().items()}
    lora.attach(model.to(found.dtype), lora.Lora(4, 8.0, base_format=base_format))
    for name, layer in model.named_modules():
        if isinstance(layer, NF4Linear):
            layer.set_weight(weights[f"{name}.weight"])
    lora.init_adapters(model)
    optimizer = make_adamw(model, 0.01, found)
    figures = []
    for batch in _batches(steps, found.to_device):
        stats = train_step(model, optimizer, [batch], next_token_loss, device=found)
        figures += [stats.loss.item(), stats.grad_norm.item()]
    return figures


def skipped_steps(device: str, fused: bool = False) -> list[bool]:
    """Whether steps that must change nothing do: a NaN in the loss, and no target at all; then whether a good one does.

    `fused` plants torch_npu's own AdamW, whose adapter ignores that a step is to be skipped.
    """
    found = devices.init(device, "float32")
    model = _model(found, "fast")
    if fused:
        model.kernels.adamw = TorchKernels().adamw  # type: ignore[method-assign]
    optimizer = make_optimizer(model, _rates(), found)
    (good,) = _batches(1, found.to_device)
    nothing = (good[0], torch.full_like(good[1], -1))

    def poisoned(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        loss, targets = next_token_loss(model, batch)
        return loss * torch.nan, targets

    def changes(batch: Any, loss_fn: Any) -> bool:
        def everything() -> list[Tensor]:
            return [tensor.detach().cpu().clone() for tensor in (*model.parameters(), *optimizer.state_dict().values())]

        before = everything()
        train_step(model, optimizer, [batch], loss_fn, device=found)
        return not all(torch.equal(one, other) for one, other in zip(before, everything(), strict=True))

    train_step(model, optimizer, [good], next_token_loss, device=found)
    return [changes(good, poisoned), changes(nothing, next_token_loss), changes(good, next_token_loss)]


def refusals(device: str, expressions: Sequence[str]) -> tuple[list[str | None], bool]:
    """What each expression of x, a 4 x 4 matrix on the device, raises, None for nothing; and whether x @ x works."""
    x = torch.rand(4, 4).to(device)
    messages: list[str | None] = []
    for text in expressions:
        try:
            eval(text, {"x": x, "torch_npu": importlib.import_module("torch_npu")})
            messages.append(None)
        except RuntimeError as error:
            messages.append(str(error))
    return messages, (x @ x).sum().item() > 0


def kernels(device: str, names: Sequence[str] = ()) -> list[str]:
    """The kernels for chips of these names, or for the device's own."""
    if not names:
        return [str(devices.init(device).kernels)]
    return [str(devices.runtime_of("npu").kernels(torch.float32, name)) for name in names]


def greedy_tokens(
    device: str, dtype: str = "float32", shape: str = "fast", graphs: str = "off", max_tokens: int = 90
) -> list[list[int]]:  # fmt: skip
    """Greedy replies to prompts of several lengths at once."""
    found = devices.init(device, dtype)
    sampling = SamplingParams(temperature=0.0)
    return _engine(found, shape, graphs).generate(PROMPTS, max_tokens=max_tokens, sampling=sampling)[0]


def under_the_environment(device: str, older: bool = False) -> dict[str, Any]:
    """Losses of some steps and sampled replies, twice, under the variables that the process has; how often a token was
    recorded, the level of the task queue, and what was printed.

    `older`: as with a torch_npu before 2.13, which cannot change the level of its task queue.
    """
    kind = device.partition(":")[0]
    level = getattr(getattr(torch, kind), "get_task_queue_enable", lambda: None)
    if older:
        del torch.npu.set_task_queue_enable, torch.npu.get_task_queue_enable
    printed = io.StringIO()
    count = unittest.mock.patch.object(decoding, "capture", side_effect=decoding.capture)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), count as captures:
        losses = train_losses(device, packed=True)[:6:2]
        replies = [sampled_tokens(device, dtype="float32", graphs="auto") for _ in range(2)]
    numbers = {"losses": losses, "replies": replies}
    return {**numbers, "recorded": captures.call_count, "level": level(), "printed": printed.getvalue()}


def sampled_tokens(device: str, seed: int = 0, dtype: str = "auto", graphs: str = "off") -> list[list[int]]:
    found = devices.init(device, dtype)
    made = _engine(found, graphs=graphs, stops=True)
    return made.generate_batch([5, 6, 7], 4, max_tokens=20, top_k=50, top_p=0.9, seed=seed)[0]


def served_tokens(device: str, graphs: str = "off") -> list[list[int]]:
    """Greedy replies of the scheduler to requests that come and go, some with settings of their own."""
    from nanochat.serve.scheduler import Request, Scheduler  # here, because tests/on_device needs no server

    found = devices.init(device, "float32")
    scheduler = Scheduler(_engine(found, graphs=graphs), slots=4, prefill_chunk=16)
    scheduler.start()
    prompts = [(5, 6, 7), (9,) * 12, tuple(range(20, 57)), (9,) * 12 + (4,), (8, 3), (5, 6, 7, 8)]
    settings = [{}, {"repetition_penalty": 1.3}, {}, {}, {}, {"temperature": 0.8, "top_k": 1}]
    streams = [
        scheduler.submit(
            Request(prompt, 20 + 7 * number, SamplingParams(**{"temperature": 0.0, **one}), logprobs=2 * number - 1)
        )
        for number, (prompt, one) in enumerate(zip(prompts, settings, strict=True))
    ]
    replies = [[token for chunk in stream for token in chunk.token_ids] for stream in streams]
    scheduler.close()
    return replies


def service_session(device: str) -> list[Any]:
    """A session of the tinker client with the training service: losses of three steps, then a sample's tokens and
    their log probabilities."""
    from service_clients import IDS, NAME, base_model, client_of, datum, lora_client, serving, tinker

    from scripts.train_server import Config, open_service

    with tempfile.TemporaryDirectory() as folder:
        source = str(base_model().source)
        service = open_service(Config(source=source, device=device, dtype="float32", name=NAME, folder=Path(folder)))
        with serving(service) as address:
            training = lora_client(client_of(address))
            losses = []
            for _ in range(3):
                gradients = training.forward_backward([datum(ids) for ids in IDS], "cross_entropy")
                training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
                losses.append(gradients.result().metrics["loss:sum"])
            sampler = training.save_weights_and_get_sampling_client().result()
            params = tinker.SamplingParams(max_tokens=8, temperature=0.8, seed=3)
            (sequence,) = sampler.sample(tinker.ModelInput.from_ints(IDS[0]), 1, params).result().sequences
    return [losses, list(sequence.tokens), list(sequence.logprobs)]


def replies_of_one_engine(device: str) -> dict[str, Any]:
    """Three equal calls of `generate`: the bytes that are allocated and the recordings made after each; and the bytes
    once the engine is gone, which the garbage collector must not be needed for."""
    found = devices.init(device, "bfloat16")
    greedy_tokens(device, "bfloat16", max_tokens=2)  # what all models share is in memory now
    allocated, made = [], []
    captures = 0
    capture = decoding.capture

    def counting(*arguments: Any) -> Any:  # a Mock would keep the arguments, and with them the engine
        nonlocal captures
        captures += 1
        return capture(*arguments)

    gc.collect()
    gc.disable()
    before = torch.npu.memory_allocated()
    with unittest.mock.patch.object(decoding, "capture", counting):
        engine_ = _engine(found, graphs="on")
        for _ in range(3):
            engine_.generate([[5, 6, 7], [9] * 12, [3]], max_tokens=60, sampling=SamplingParams(), max_rows=2)
            allocated.append(torch.npu.memory_allocated())
            made.append(captures)
    del engine_
    left = torch.npu.memory_allocated() - before
    gc.enable()
    return {"allocated": allocated, "recorded": made, "left": left}


def tokens_if_recording_fails(device: str, by: str) -> dict[str, Any]:
    """Greedy replies where torch_npu refuses to record: in the middle, or before it begins."""
    found = devices.init(device, "float32")
    right = engine.Slots._forward

    def waits(self: Any, cache: Any) -> Any:
        logits, noise = right(self, cache)
        if torch.npu.is_current_stream_capturing():
            logits.sum().item()
        return logits, noise

    plant = unittest.mock.patch.object(engine.Slots, "_forward", waits)
    if by == "no streams":
        refusing = unittest.mock.Mock(side_effect=RuntimeError("aclrtCreateStream, error code is 207005"))
        plant = unittest.mock.patch.object(torch.npu.NPUGraph, "capture_begin", refusing)
    with plant, contextlib.redirect_stderr(io.StringIO()) as said:
        tokens = [greedy_tokens(device, graphs="on", max_tokens=20) for _ in range(2)]
    decoding.NOT_RECORDING.clear()
    assert tokens[0] == tokens[1]
    return {"tokens": tokens[0], "said": said.getvalue(), "device": found.kind}


# The pieces of the model that kernel_gradients knows, each with a window or another option.
KERNELS = (
    "attention", "attention 8", "attention 39", "packed", "packed 8", "packed split", "packed split 8", "norm",
    "norm 1", "norm eps", "rotate", "swiglu", "sum", "sum 1", "sum eps", "grouped", "grouped empty",
)  # fmt: skip


def kernel_gradients(device: str, dtype: str, name: str) -> list[float]:
    """Output and input gradients of one piece of the model, flattened."""
    found = devices.init(device, dtype)
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator).to(getattr(torch, dtype))
        return drawn.to(found.torch_device).requires_grad_()

    name, _, window = name.partition(" ")
    inputs = [draw(2, 40, 6, 16), draw(2, 40, 2, 16), draw(2, 40, 2, 16)]
    if name == "attention":
        out = found.kernels.attention(*inputs, scale=0.3, window=int(window or 0))
    elif name == "packed":
        numbers = (torch.rand(2, 40, generator=generator) < 0.2).cumsum(1)
        segments = Segments.from_numbers(numbers).to(found.to_device)
        with contextlib.ExitStack() as stack:
            if window.startswith("split"):  # more documents than a call of the operator takes
                window = window.removeprefix("split")
                if found.kind == "npu":
                    npu = importlib.import_module("nanochat.kernels.npu")
                    assert npu.MOST_DOCUMENTS == operators.MOST_DOCUMENTS
                    stack.enter_context(unittest.mock.patch.object(npu, "MOST_DOCUMENTS", 5))
            out = found.kernels.attention(*inputs, scale=0.3, window=int(window or 0), segments=segments)
    elif name in ("norm", "sum"):
        config = GPTConfig(norm_weight=window == "1", norm_eps=0.5 if window == "eps" else 1e-6)
        norm = (Norm if name == "norm" else AddNorm)(16, config, found.kernels).to(found.torch_device)
        if norm.weight is not None:
            norm.weight.data = draw(16).data.float()
            inputs.append(norm.weight)
        out = norm(inputs[0]) if name == "norm" else torch.cat(norm(inputs[1], inputs[2]))
    elif name == "swiglu":
        out = found.kernels.swiglu(inputs[0])
    elif name == "grouped":
        sizes = [3, 30, 0, 7] if window else [10, 9, 8, 13]
        inputs = [draw(40, 16), draw(4 * 24, 16)]
        groups = Groups(40, found.to_device(torch.tensor(sizes)))
        out = grouped_product(found.kernels, *inputs, groups)
        assert device == "cpu" or "sizes" not in vars(groups), "the host has waited for the counts"
    else:
        angles = torch.rand(40, 1, 8, generator=generator).repeat(1, 1, 2).to(getattr(torch, dtype))
        out = found.kernels.rotate(inputs[0], angles.cos().to(found.torch_device), angles.sin().to(found.torch_device))
    weights = torch.randn(out.shape, generator=generator).to(out.dtype).to(found.torch_device)
    (out * weights).float().sum().backward()
    tensors = [out, *(x.grad for x in inputs if x.grad is not None)]
    return torch.cat([F.normalize(t.detach().float().cpu().flatten(), dim=0) for t in tensors]).tolist()
