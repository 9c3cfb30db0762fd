"""What several tests are made of: tiny models whose every weight matters, a tiny tokenizer, and real ranks."""

import contextlib
import gc
import importlib
import io
import json
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat import device as devices
from nanochat import losses, rollout
from nanochat.adapters import lora
from nanochat.adapters.nf4 import NF4Linear
from nanochat.conversation import Rendered
from nanochat.device import Device
from nanochat.engine import Engine
from nanochat.gpt import GPT, GPTConfig
from nanochat.ground import cli, rooms
from nanochat.kernels.gradients import WrittenKernels
from nanochat.mixture import RenderedPair
from nanochat.operators import TorchKernels
from nanochat.ranks import decide_on_rank_zero
from nanochat.run import saver
from nanochat.tokenizer import Tokenizer

# The last is one Chinese character.
MERGES = (b"th", b"he", b"the", b" t", b" the", b"an", b"\xe4\xbb", b"\xe4\xbb\x8e")
RANK_SECONDS = 300  # a rank that takes longer hangs
# What processes of `forkserver` have imported when they start: most of the seconds that a rank takes otherwise.
PRELOADED = ["pytest", "torch._dynamo", "torch.distributed.fsdp"]
PRELOADED += ["scripts.base_train", "scripts.chat_dpo", "scripts.chat_rl"]

# Everything the fast preset has and these have not, and the other way round.
PLAIN = {
    "window_pattern": "L", "mlp": "swiglu", "mlp_width": 48, "rope_theta": 10_000.0, "qk_scale": 1.0,
    "norm_weight": True, "embedding_norm": False, "value_embeddings": False, "residual_scales": False, "logit_cap": 0.0,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "fast": {},
    "ungrouped": {"n_kv_head": 4, "norm_weight": True, "lookback_heads": 3},
    "qwen3": {**PLAIN, "qk_norm": "before_rotary", "head_dim": 16, "tied_head": True},
    "qwen2": {**PLAIN, "qk_norm": "none", "attention_bias": True, "tied_head": True},
    "llama": {**PLAIN, "qk_norm": "none"},
    "qwen3_5": {
        **PLAIN, "qk_norm": "before_rotary", "head_dim": 16, "rotary_dims": 8, "attention_gate": True,
        "window_pattern": "LDD", "state_key_heads": 2, "state_value_heads": 4, "state_key_dim": 8,
        "state_value_dim": 8, "norm_eps": 1e-3,  # a norm of a sum that cancels to nearly 0 would amplify rounding
    },
}  # fmt: skip


LIVELY_ADAPTERS = lora.Lora(4, 8.0)
FOUR_EXPERTS: dict[str, Any] = {"experts": 4, "experts_per_token": 2, "mlp_width": 24}
EXPERT_SHAPES: dict[str, dict[str, Any]] = {
    "experts": {**FOUR_EXPERTS, "shared_experts": 1},
    "qwen3_moe": {**SHAPES["qwen3"], **FOUR_EXPERTS, "router": "softmax"},
    "qwen3_5_moe": {
        **SHAPES["qwen3_5"],
        **FOUR_EXPERTS,
        "router": "softmax",
        "shared_experts": 1,
        "shared_gate": True,
    },
}


def tiny_config(**changes: Any) -> GPTConfig:
    """The fast preset in milliseconds: windows of 8, two query heads to a key head, a vocabulary that is padded."""
    sizes = {"vocab_size": 100, "sequence_len": 32, "n_layer": 3, "width": 32, "n_head": 4, "n_kv_head": 2}
    return GPTConfig(**{**sizes, "window_pattern": "SSL", **changes})


def sample_episodes(sampler: Any, tokenizer: Tokenizer, device: Device, questions: Any, **settings: Any) -> Any:
    """Episodes of each question by all ranks, which call it together, as chat_rl samples them."""
    own = rollout.sample_on_rank(sampler, tokenizer, device, lambda: questions, **settings)
    return rollout.gather_samples(own, device)


def all_losses(seam: str) -> dict[str, Any]:
    """The losses that --loss of chat_rl or chat_dpo may name."""
    own = {"grpo": losses.GRPO} if seam == "policy losses" else {}
    return own | {name: rooms.find(seam, name) for name in rooms.names(seam)}


def rendered_pairs(ids: list[list[int]], masks: list[list[int]]) -> list[RenderedPair]:
    """Pairs of replies, of which neighbours are a pair."""
    replies = [Rendered(one, mask, cut=False) for one, mask in zip(ids, masks, strict=True)]
    return list(zip(replies[0::2], replies[1::2], strict=True))


class ReferenceKernels(WrittenKernels):
    """The operators as their formulas read, with autograd's gradients: every device's are compared with these."""

    def product(self, x: Tensor, weight: Tensor, cast: Tensor | None = None) -> Tensor:
        return F.linear(x, weight.to(x.dtype))

    def qkv_linear(self, has_equal_heads: bool) -> Any:
        return None

    def mix(self, x: Tensor, first: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a * x + b * first, first

    def relu_squared(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


def lively_model(config: GPTConfig, seed: int = 0, kernels: TorchKernels | None = None) -> GPT:
    """A model with noise on every parameter: freshly initialised, the output projections and gates are zero."""
    model = GPT(config, kernels)
    model.init_weights(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += noise * (0.1 if parameter.ndim < 2 else 1.5 / config.width**0.5)
        if config.tied_head:  # or every token would predict itself
            model.embedding.weight *= 0.2
    return model


def adapt(model: GPT, settings: lora.Lora = LIVELY_ADAPTERS, lively: bool = True) -> GPT:
    """The model with adapters; with `lively` their B is not 0."""
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model = model.to(model.kernels.dtype)
    lora.attach(model, settings)
    for name, layer in model.named_modules():
        if isinstance(layer, NF4Linear):
            layer.set_weight(weights[f"{name}.weight"])
    lora.init_adapters(model)
    if lively:
        generator = torch.Generator().manual_seed(7)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return model


def tiny_tokenizer() -> Tokenizer:
    """All bytes and a few merges, trained on nothing."""
    return Tokenizer([bytes([value]) for value in range(256)] + list(MERGES))


def cpu_device(**changes: Any) -> Device:
    """A single process on the CPU in fp32."""
    facts: dict[str, Any] = {"kind": "cpu", "module": torch.cpu, "dtype": torch.float32, "rank": 0, "local_rank": 0}
    return Device(**{**facts, "world_size": 1, "name": "test", "peak_flops": None, **changes})


def smallest_model(seed: int = 0) -> GPT:
    """One layer, of bytes: for thousands of checkpoints."""
    model = GPT(GPTConfig(vocab_size=267, sequence_len=8, n_layer=1, width=4, n_head=1, n_kv_head=1))
    model.init_weights(seed)
    return model


def make_engine(shape: str = "fast", stops: bool = False, **changes: Any) -> Engine:
    """A lively model over the tiny tokenizer's vocabulary, whose reply ends with a stop token only on request."""
    tokenizer = tiny_tokenizer()
    model = lively_model(tiny_config(**{**SHAPES[shape], "vocab_size": tokenizer.vocab_size, **changes}))
    engine = Engine(model, tokenizer, cpu_device())
    if not stops:
        engine.stop_ids = set()
        engine.call_start = engine.call_end = -1
    return engine


def complaint(call: Callable[[], Any]) -> str:
    """The one line of the UserError that this raises."""
    with pytest.raises(cli.UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def learned(tokenizer: Tokenizer, rendered: Rendered) -> str:
    """The text of a conversation's targets."""
    targets = [token for token, is_target in zip(rendered.ids, rendered.mask, strict=True) if is_target]
    return tokenizer.decode(targets)


def runs_of(mask: list[int]) -> list[tuple[int, int]]:
    """(begin, end) of each run of ones."""
    edges = [place for place in range(len(mask) + 1) if [0, *mask, 0][place] != [0, *mask, 0][place + 1]]
    return list(zip(edges[0::2], edges[1::2], strict=True))


def write_rows(path: Path, rows: list[Any]) -> str:
    """A .parquet, or a file of JSON lines, in which a row that is a text is written as it is."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return str(path)
    texts = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return str(path)


def momentum(seed: int | None = None) -> dict[str, Tensor]:
    """The state of an optimizer: with a seed a random one, without one zeros, to be loaded."""
    generator = torch.Generator().manual_seed(seed or 0)
    tensors = {"a.momentum": torch.randn(3, 5, generator=generator), "step/count": torch.tensor(7.0)}
    return tensors if seed is not None else {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def save_checkpoint(folder: Path, step: int, model: GPT, tokenizer: Tokenizer, meta: dict[str, Any]) -> Path:
    """A checkpoint without a state to resume from."""
    return saver.save(folder, step, model, tokenizer, meta, {}, {}, cpu_device())


BYTES = Tokenizer([bytes([value]) for value in range(256)])


def save_step(
    folder: Path, step: int, seed: int = 0, *, rank: int = 0, ranks: int = 1, stop: Any = None, **options: Any
) -> Path:
    """A checkpoint of the smallest model, all of which follows from the seed. With a stop a thread writes it, while
    steps, each with a collective, change everything."""
    model, state = smallest_model(seed), momentum(seed + rank)
    row = {"row": torch.tensor([seed + rank, 8])}
    device = cpu_device(rank=rank, world_size=ranks)
    meta = {"stage": "base", "seed": seed, "pretraining": {"seed": seed}}
    write = saver.prepare(folder, step, model, BYTES, meta, state, row, device, beside=stop is not None, **options)
    if stop is None:
        return write(None)
    written = None
    while written is None or not decide_on_rank_zero(device, written.done):
        for tensor in (*model.parameters(), *state.values(), *row.values()):
            tensor.data += 1
        meta["pretraining"]["seed"] += 1
        written = written or saver.in_thread(write, stop)
    return Path(decide_on_rank_zero(device, written.result))


def forkserver() -> ForkServerContext:
    """Starts processes that are clean, and yet do not import torch and the code first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def free_port() -> int:
    """A port that nobody uses, for a process that is started next.

    It is below the ports that the system chooses by itself: one of those may be another test's before it is used.
    """
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)  # not of the seeded generator: workers have the same one
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def run_ranks(function: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any]:
    """What `function(device, *args)` returns on each rank: tensors and plain values, in rank order.

    The ranks are processes joined over gloo as torchrun would join them; `function` must stand in a module.
    """
    size = str(world_size)
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            forkserver().Process(target=_rank, args=(function, args, rank, environment, folder), daemon=True)
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + RANK_SECONDS
        while (alive := [p for p in ranks if p.is_alive()]) and time.monotonic() < deadline:
            connection.wait([p.sentinel for p in alive], timeout=1)
            if any(p.exitcode for p in ranks):  # the others would wait for it
                deadline = min(deadline, time.monotonic() + 3)
        for process in ranks:
            process.kill()
            process.join()
        errors = [path.read_text() for path in sorted(Path(folder).glob("*.error"))]
        assert all(p.exitcode == 0 for p in ranks), "\n".join(errors) or f"a rank hung for {RANK_SECONDS} s or died"
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(world_size)]


def _rank(
    function: Callable[..., Any], args: tuple[Any, ...], rank: int, environment: dict[str, str], folder: str
) -> None:
    gc.freeze()  # a collection would copy the pages of all that the server of forks has imported
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    try:
        device = devices.init("cpu", "float32")
        torch.set_num_threads(1)
        torch.manual_seed(0)
        torch.save(function(device, *args), Path(folder) / f"{rank}.pt")
        devices.shutdown(device)
    except BaseException:
        (Path(folder) / f"{rank}.error").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise


class Kept:
    """Counts the bytes that a forward pass keeps for its backward pass, each storage once, without `constants`."""

    def __init__(self, constants: list[Tensor]):
        self.sizes: dict[int, int] = {}
        self.left_out = {tensor.untyped_storage().data_ptr() for tensor in constants}
        self.tensors: list[Tensor] = []  # alive until the end, so that no address is used twice

    def note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.left_out:
            self.sizes[storage.data_ptr()] = storage.nbytes()
            self.tensors.append(tensor)
        return tensor

    def counting(self) -> contextlib.AbstractContextManager[None]:
        return torch.autograd.graph.saved_tensors_hooks(self.note, lambda tensor: tensor)

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())


def is_running(pid: int) -> bool:
    """Whether a process has not ended. One that has ended stays in /proc until its parent has asked how, and a host's
    first process, which inherits orphans, may take its time."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def run_command(script: str, *flags: str, ranks: int = 2) -> str:
    """What `torchrun --nproc_per_node=<ranks> -m scripts.<script> -- <flags>` prints, without torchrun's start."""
    return "".join(run_ranks(command_on_a_rank, script, flags, world_size=ranks))


def command_on_a_rank(device: Device, script: str, flags: tuple[str, ...]) -> str:
    module = importlib.import_module(f"scripts.{script}")
    sys.argv = [script, "--", *flags]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            cli.run(module.main, module.Config)
        except SystemExit as leaving:
            raise RuntimeError(printed.getvalue()) from leaving
    return printed.getvalue()
