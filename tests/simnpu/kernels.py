"""CPU-backed kernels for the operators that torch_npu registers on PrivateUse1, over the same memory.

`register()` takes torch_npu's own list of operators from the dispatcher and replaces each that computes: a kernel makes
CPU tensors over the memory of its NPU tensors, runs the CPU's operator, and copies the results into NPU tensors from
torch_npu's allocator. What torch_npu does above that (autograd, autocast, allocation, views) stays as it is, and an
operator that torch_npu lacks stays missing. The npu:: operators come from operators.py.

 - New tensors are contiguous, as torch_npu allocates them.
 - float64 and complex tensors can be stored and copied to and from the host, nothing else; LIMITS has more.
 - Asynchronous copies go through the runtime's aclrtMemcpyAsync, which cann.c delays.
 - While a graph is captured, kernels are recorded and not run: new tensors hold 0xFF bytes until the replay, which runs
   the kernels over the same memory. Collectives run at once.
"""

import atexit
import ctypes
import inspect
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import tomllib
from .operators import OPERATORS

CPU = torch.device("cpu")

FACTS = tomllib.loads(Path(__file__).with_name("torch_npu.toml").read_text("utf-8"))
KEPT, WAITING, SCALARS, RANDOM, NOT_RECORDED, OLD_CHIPS = (
    frozenset(FACTS[name].split()) for name in ("kept", "waiting", "scalars", "random", "not_recorded", "old_chips")
)


def _by_dtype(names: dict[str, str]) -> dict[torch.dtype, str]:
    return {getattr(torch, name): label for name, label in names.items()}


REFUSED = _by_dtype(FACTS["refused"])
LIMITS = {operator: _by_dtype(names) for operator, names in FACTS["limits"].items()}
POISON = 0xFF  # in each byte: NaN, -1
OFFSET_STEP = 12  # what a random operator advances a generator by: torch_npu's 10, in fours

npu: Any  # torch.npu
_library: ctypes.CDLL
_captures: ctypes.c_int
_keep: list[Any] = []  # registrations and callbacks live as long as the process


# ---- memory ----


def alias(tensor: torch.Tensor, storages: dict[int, Any] | None = None) -> torch.Tensor:
    """A CPU tensor over the memory of an NPU tensor. Tensors of one storage share one, given the same `storages`:
    then the CPU's checks for overlaps see what they should."""
    storage = tensor.untyped_storage()
    pointer = storage.data_ptr()
    made = storages.get(pointer) if storages is not None else None
    if made is None:
        made = torch._C._construct_storage_from_data_pointer(pointer, CPU, storage.nbytes())
        if storages is not None:
            storages[pointer] = made
    result = torch.empty(0, dtype=tensor.dtype, device=CPU)
    return result.set_(made, tensor.storage_offset(), tensor.shape, tensor.stride())


def _current_device() -> torch.device:
    return torch.device("npu", npu.current_device())


# ---- the runtime ----


def _stream() -> int:
    return npu.current_stream().npu_stream


def _check(error: int, what: str) -> None:
    if error:
        message = _library.aclGetRecentErrMsg()
        text = message.decode() if message else ""
        raise RuntimeError(f"{what}: NPU function error, error code is {error}\n{text}")


def _host_waits(what: str) -> None:
    """The host waits for the current stream: unfinished copies there arrive."""
    _check(_library.aclrtSynchronizeStream(_stream()), what)


# ---- graphs ----


Graph = list[Callable[[], Any]]  # what one capture recorded
_graphs: dict[int, Graph] = {}


def _capturing() -> Graph | None:
    """The graph that the current stream is captured into."""
    if not _captures.value:
        return None
    return _graphs.get(_library.simnpu_graph(_stream()))


def _on_capture(identity: int, begins: int) -> None:
    if begins == 1:
        _graphs[identity] = []
    elif begins < 0:
        _graphs.pop(identity, None)


def _on_replay(identity: int) -> int:
    graph = _graphs[identity]
    try:
        with torch.inference_mode():  # the tensors may be an inference's
            for run in graph:
                run()
    except Exception as error:  # an exception cannot pass through C
        warnings.warn(f"a kernel of a captured graph failed: {error}", stacklevel=2)
        return 1
    return 0


# ---- random numbers ----


def _draw(generator: torch.Generator) -> int:
    """The seed of the next random operator, from the seed and the offset of torch_npu's generator, which advances."""
    seed, offset = generator.get_state().view(torch.int64).tolist()
    generator.set_state(torch.tensor([seed, offset + OFFSET_STEP], dtype=torch.int64).view(torch.uint8))
    return hash((seed, offset))


# ---- the kernel of an operator ----


class Run(NamedTuple):
    """What an operator on the CPU has made."""

    result: Any
    outs: list[torch.Tensor]  # of its out arguments


Compute = Callable[[dict[str, Any]], Run]


class Kernel:
    """Runs `compute` in place of an NPU operator."""

    def __init__(self, operator: torch._ops.OpOverload, compute: Callable[..., Any]) -> None:
        self.operator, self.compute = operator, compute
        schema = operator._schema
        self.name = schema.name.partition("::")[2]
        self.refused = REFUSED | LIMITS.get(self.name, {})
        if _soc() in OLD_CHIPS:
            self.refused[torch.bfloat16] = f"DT_BFLOAT16 on {_soc()}"
        self.takes_scalars = self.name.removesuffix("_") in SCALARS
        self.label = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        self.names = [argument.name for argument in schema.arguments]
        self.positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
        self.has_generator = "generator" in self.names
        self.is_random = self.has_generator or self.name in RANDOM
        # out arguments may have another shape than the result: they get it afterwards
        self.outs = [a.name for a in schema.arguments if a.is_out]
        # a result that is one of the arguments, by the letter of its alias annotation
        written = {
            next(iter(a.alias_info.before_set)): a.name
            for a in schema.arguments
            if a.alias_info is not None and a.alias_info.is_write and a.alias_info.before_set
        }
        self.returned = [
            written.get(next(iter(r.alias_info.before_set), "")) if r.alias_info is not None else None
            for r in schema.returns
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = Call(self)
        given = dict(zip(self.names, args, strict=False)) | kwargs
        converted = {name: call.converted(name, value) for name, value in given.items()}
        if self._waits_for(given):
            _host_waits(self.label)
        device = call.device or _current_device()
        graph = _capturing()
        if graph is not None and self.name in NOT_RECORDED:
            raise RuntimeError(f"{self.label}: not supported in a graph that is captured")
        run = self._run(given.get("generator"), device, graph)
        if graph is not None:
            return self._record(graph, run, converted, given, device)
        return self._finished(run(converted), given, device, _write)

    def _waits_for(self, given: dict[str, Any]) -> bool:
        """Whether the host must know data to go on."""
        if self.name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            masks = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in given["indices"])
            return masks and ("values" not in given or given["values"].numel() != 1)
        if self.name == "repeat_interleave":
            return isinstance(given.get("repeats"), torch.Tensor) and given.get("output_size") is None
        return self.name in WAITING or (self.name == "one_hot" and given.get("num_classes", -1) == -1)

    def _run(self, generator: torch.Generator | None, device: torch.device, graph: Graph | None) -> Compute:
        """What computes on the CPU, with the arguments by name."""

        def run(converted: dict[str, Any]) -> Run:
            # The first missing one and all after it go by their defaults, or by name.
            args = []
            outs = {name: _fresh(converted[name]) for name in self.outs}
            rest = {**converted, **outs}
            for name in self.positional:
                if name not in rest:
                    break
                args.append(rest.pop(name))
            result = self.compute(*args, **rest)
            return Run(result, [tensor for out in outs.values() for tensor in _flat(out)])

        if not self.is_random:
            return run
        if graph is not None:
            raise RuntimeError(f"{self.label}: random numbers in a captured graph are not modelled")
        seed = _draw(generator or npu.default_generators[device.index])

        def run_random(converted: dict[str, Any]) -> Run:
            if self.has_generator:
                return run({**converted, "generator": torch.Generator().manual_seed(seed)})
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                return run(converted)

        return run_random

    def _finished(
        self, run: Run, given: dict[str, Any], device: torch.device, write: Callable[[torch.Tensor, torch.Tensor], None]
    ) -> Any:
        """The operator's results as NPU tensors; `write` gets each that has to be filled, and with what."""
        targets = [tensor for name in self.outs for tensor in _flat(given[name])]
        for target, value in zip(targets, run.outs, strict=True):
            if target.shape != value.shape:
                target.resize_(value.shape)
            write(target, value)

        def moved(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [moved(item) for item in value]
            if not isinstance(value, torch.Tensor):
                return value
            if value.dtype in REFUSED:
                raise RuntimeError(f"{self.label}: the result would be {REFUSED[value.dtype]}, which is not supported")
            target = torch.empty(value.shape, dtype=value.dtype, device=device)
            write(target, value)
            return target

        if not isinstance(run.result, tuple):
            name = self.returned[0] if self.returned else None
            return moved(run.result) if name is None else given[name]
        names = self.returned
        return tuple(moved(v) if n is None else given[n] for v, n in zip(run.result, names, strict=True))

    def _record(
        self, graph: Graph, run: Compute, converted: dict[str, Any], given: dict[str, Any], device: torch.device
    ) -> Any:
        """Results with their shapes and no content; the run comes at each replay."""
        targets: list[torch.Tensor] = []

        def remember(target: torch.Tensor, value: torch.Tensor) -> None:
            targets.append(alias(target))
            if target.is_contiguous():
                ctypes.memset(target.data_ptr(), POISON, target.numel() * target.element_size())

        finished = self._finished(run(_cloned(converted)), given, device, remember)

        def at_replay() -> None:
            done = run(converted)
            results = done.result if isinstance(done.result, tuple) else (done.result,)
            new = [value for value, name in zip(results, self.returned, strict=False) if name is None]
            for target, value in zip(targets, [*done.outs, *_flat(new)], strict=True):
                target.copy_(value)

        graph.append(at_replay)
        return finished


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _flat(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def _fresh(out: Any) -> Any:
    """An out argument for the CPU to fill: it may get another shape, which memory of an NPU tensor cannot."""
    return [_fresh(item) for item in out] if isinstance(out, list | tuple) else out.new_empty(0)


def _write(target: torch.Tensor, value: torch.Tensor) -> None:
    alias(target).copy_(value)


def _cloned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, list | tuple):
        return [_cloned(item) for item in value]
    if isinstance(value, dict):
        return {name: _cloned(item) for name, item in value.items()}
    return value


def _is_wrapped_number(tensor: torch.Tensor) -> bool:
    """Whether torch made this tensor of no dimensions out of a number in Python: then it gives way to any type."""
    narrower = {torch.float64: torch.float32, torch.int64: torch.int32}.get(tensor.dtype)
    if narrower is None:
        return tensor.dtype == torch.bool
    return torch.result_type(tensor, torch.zeros((), dtype=narrower)) == narrower


class Call:
    """The arguments of one call, made fit for the CPU."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.device: torch.device | None = None
        self.storages: dict[int, Any] = {}

    def converted(self, name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.tensor(name, value)
        if isinstance(value, list | tuple):
            return [self.converted(name, item) for item in value]
        if isinstance(value, torch.device):
            if value.type != "cpu":
                self.device = value if value.index is not None else _current_device()
            return CPU
        if isinstance(value, torch.Generator):
            if value.device.type == "cpu":
                raise RuntimeError(f"{self.kernel.label}: expected an NPU generator, got one of the CPU")
            return None
        if value is torch.float64 and name == "dtype":
            raise RuntimeError(f"{self.kernel.label}: dtype DT_DOUBLE is not supported")
        if name == "pin_memory":
            return None
        return value

    def tensor(self, name: str, value: torch.Tensor) -> torch.Tensor:
        kernel = self.kernel
        device = value.device
        if device.type == "cpu" and value.dim() == 0 and (kernel.takes_scalars or _is_wrapped_number(value)):
            return value
        if value.dtype in kernel.refused:
            raise RuntimeError(f"{kernel.label}: Tensor {name} not implemented for {kernel.refused[value.dtype]}")
        if device.type == "cpu":
            if not (name == "indices" and kernel.name.startswith(("index", "_index"))):
                raise RuntimeError(f"{kernel.label}: {name} is not on the same device as the other tensors")
            _host_waits(f"{kernel.label}: indices on the host")
            return value
        if self.device is None:
            self.device = device
        elif device != self.device:
            raise RuntimeError(f"{kernel.label}: tensors on two devices, {self.device} and {device}")
        return alias(value, self.storages)


# ---- copies ----


_under_way: deque[tuple[int, torch.Tensor]] = deque()  # host buffers of copies that may not have arrived
_under_way_lock = threading.Lock()


def _memory_copy(target: torch.Tensor, source: torch.Tensor, to_host: bool, non_blocking: bool) -> None:
    """Between host and device: contiguous, of one type."""
    size = target.numel() * target.element_size()
    kind = 2 if to_host else 1
    host = target if to_host else source
    graph = _capturing()
    if graph is not None and non_blocking:
        if not host.is_pinned():
            _library.simnpu_invalidate(_stream())
            raise RuntimeError("copy_: a copy of memory that is not pinned cannot be captured in a graph")
        pointers = target.data_ptr(), source.data_ptr()
        graph.append(lambda: _start_copy(pointers[0], pointers[1], size, kind, host))
    elif non_blocking:
        _start_copy(target.data_ptr(), source.data_ptr(), size, kind, host)
    else:
        _host_waits("blocking copy to the host" if to_host else "blocking copy to the device")
        _check(_library.aclrtMemcpy(target.data_ptr(), size, source.data_ptr(), size, kind), "aclrtMemcpy")


def _start_copy(target: int, source: int, size: int, kind: int, host: torch.Tensor) -> None:
    with _under_way_lock:
        oldest = _library.simnpu_oldest_ticket()
        while _under_way and _under_way[0][0] < oldest:
            _under_way.popleft()
        _under_way.append((_library.simnpu_ticket(), host))
    _check(_library.aclrtMemcpyAsync(target, size, source, size, kind, _stream()), "aclrtMemcpyAsync")


def _copy_to_device(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    ready = source.to(target.dtype).expand_as(target).contiguous()
    between = target if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype, device=target.device)
    _memory_copy(between, ready, to_host=False, non_blocking=non_blocking)
    if between is not target:
        _copy_on_device(target, between)


def _copy_to_host(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    if source.shape != target.shape or not source.is_contiguous():
        source = source.expand_as(target).clone(memory_format=torch.contiguous_format)
    is_direct = target.is_contiguous() and target.dtype == source.dtype
    between = target if is_direct else torch.empty(target.shape, dtype=source.dtype)
    _memory_copy(between, source, to_host=True, non_blocking=non_blocking)
    if between is not target:
        target.copy_(between)


def _copy_on_device(target: torch.Tensor, source: torch.Tensor) -> None:
    for tensor in (target, source):
        if tensor.dtype in REFUSED:
            raise RuntimeError(f"aten::copy_: not implemented for {REFUSED[tensor.dtype]} on the device")
    if target.device != source.device:
        with npu.device(target.device):
            _host_waits("copy between devices")
        with npu.device(source.device):
            _host_waits("copy between devices")
    storages: dict[int, Any] = {}
    to, from_ = alias(target, storages), alias(source, storages)
    graph = _capturing()
    if graph is None:
        to.copy_(from_)
    else:
        from_.expand(to.shape)  # or raises
        graph.append(lambda: to.copy_(from_))


def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if target.numel() == 0:
        return target
    if target.device.type == "cpu":
        with npu.device(source.device):
            _copy_to_host(target, source, non_blocking)
    elif source.device.type == "cpu":
        with npu.device(target.device):
            _copy_to_device(target, source, non_blocking)
    else:
        _copy_on_device(target, source)
    return target


def _copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if target.shape != source.shape:
        target.resize_(source.shape)
    return copy_(target, source)


def _local_scalar_dense(tensor: torch.Tensor) -> Any:
    with npu.device(tensor.device):
        _host_waits("item")
    return alias(tensor).item()


def contiguous(tensor: torch.Tensor, *, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    if memory_format not in (torch.contiguous_format, torch.preserve_format):
        raise RuntimeError("NPU contiguous operator only supported contiguous memory format.")
    return tensor if tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)


# ---- computations that have another name, or none, on the CPU ----


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype, copy=True)


def _fused_adamw_(
    weights: Any, grads: Any, firsts: Any, seconds: Any, largest: Any, steps: Any, *, grad_scale: Any = None,
    found_inf: Any = None, **settings: Any,
) -> None:  # fmt: skip
    """As torch_npu's adapter, which hands neither grad_scale nor found_inf on: test_adapters.py reads it in the log."""
    torch._fused_adamw_(weights, grads, firsts, seconds, largest, steps, **settings)


COMPUTED: dict[str, Callable[..., Any]] = {
    "aten::_fused_adamw_": _fused_adamw_,
    "npu::npu_dtype_cast": _cast,
    "npu::_npu_dtype_cast": _cast,
    "npu::npu_dtype_cast_backward": _cast,
    "npu::_npu_dtype_cast_backward": _cast,
    "npu::npu_dtype_cast_": lambda target, source: target.copy_(source),
    "npu::one_": lambda tensor: tensor.fill_(1),
}
# Kernels of torch_npu's above PrivateUse1 that call C++ below it by its name, not through the dispatcher.
FALL_THROUGH = ("aten::one_hot", "aten::max.out", "aten::min.out", "aten::nanmean.out")
DIRECT: dict[str, Callable[..., Any]] = {
    "aten::copy_": copy_,
    "npu::copy_memory_": copy_,
    "aten::_copy_from_and_resize": _copy_from_and_resize,
    "aten::_local_scalar_dense": _local_scalar_dense,
    "aten::contiguous": contiguous,
}


# ---- operators that torch_npu's C++ calls without the dispatcher ----


class _Tensor(ctypes.Structure):
    """An aclTensor of cann.c."""

    _fields_ = [
        *(("dimensions", ctypes.c_int64), ("sizes", ctypes.c_int64 * 16), ("strides", ctypes.c_int64 * 16)),
        *(("offset", ctypes.c_int64), ("type", ctypes.c_int32), ("data", ctypes.c_void_p)),
    ]

    def alias(self) -> torch.Tensor:
        dtype = getattr(torch, FACTS["types"][str(self.type)])
        sizes, strides = self.sizes[: self.dimensions], self.strides[: self.dimensions]
        extent = self.offset + 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        storage = torch._C._construct_storage_from_data_pointer(self.data or 0, CPU, max(extent, 0) * dtype.itemsize)
        return torch.empty(0, dtype=dtype).set_(storage, self.offset, sizes, strides)


class _Integers(ctypes.Structure):
    _fields_ = [("count", ctypes.c_uint64), ("items", ctypes.POINTER(ctypes.c_int64))]


def _inplace_copy(target: Any, source: Any) -> Callable[[], Any]:
    to, from_ = _Tensor.from_address(target).alias(), _Tensor.from_address(source).alias()
    return lambda: to.copy_(from_)


def _zero_pad(tensor: Any, pads: Any, value: Any, out: Any) -> Callable[[], Any]:
    """What torch_npu pads short lists of a collective with is zero."""
    from_, to = _Tensor.from_address(tensor).alias(), _Tensor.from_address(out).alias()
    widths = _Integers.from_address(pads)
    return lambda: to.copy_(torch.nn.functional.pad(from_, widths.items[: widths.count]))


CALLED_BY_NAME = {"aclnnInplaceCopy": _inplace_copy, "aclnnConstantPadNd": _zero_pad}


def _on_operator(name: bytes, arguments: Any, count: int) -> int:
    try:
        with torch.no_grad():
            run = CALLED_BY_NAME[name.decode()](*arguments[:count])
            graph = _capturing()
            if graph is None:
                run()
            else:
                graph.append(run)
    except Exception as error:  # an exception cannot pass through C
        warnings.warn(f"{name.decode()}: {error}", stacklevel=2)
        return 1
    return 0


# ---- registration ----


def _operator(name: str) -> torch._ops.OpOverload:
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


def _modelled(function: Callable[..., Any], operator: torch._ops.OpOverload) -> Callable[..., Any]:
    """A function of operators.py with the arguments of the operator: what it does not model must be at its default."""
    known = inspect.signature(function).parameters
    defaults = {argument.name: argument.default_value for argument in operator._schema.arguments}
    returned = len(operator._schema.returns)  # older wheels lack the last results of some operators

    def compute(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(defaults, args, strict=False)) | kwargs
        for name, value in given.items():
            if name not in known and (isinstance(value, torch.Tensor) or value != defaults[name]):
                raise RuntimeError(f"{function.__name__}: {name}: only its default is modelled")
        results = function(**{name: value for name, value in given.items() if name in known})
        return results[:returned] if isinstance(results, tuple) else results

    return compute


def _lazy(name: str, compute: Callable[..., Any] | None) -> Callable[..., Any]:
    """A kernel that is made at its first call: a process uses few of a thousand."""
    made: list[Kernel] = []

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not made:
            if name in OPERATORS and _soc() in OLD_CHIPS:
                raise RuntimeError(f"{name.partition('::')[2]}: {_soc()} has no such operator, error code is 561103")
            operator = _operator(name)
            ours = _modelled(OPERATORS[name], operator) if name in OPERATORS else compute
            made.append(Kernel(operator, ours or operator))
        return made[0](*args, **kwargs)

    return kernel


def _soc() -> str:
    return os.environ.get("SIMNPU_SOC", "")  # read late: forks.py sets it once this has been imported


def _replaced(name: str) -> bool:
    base = name.partition("::")[2].partition(".")[0]
    if not name.startswith("aten::") or base in KEPT:
        return False
    try:
        schema = torch._C._get_schema(name.partition(".")[0], name.partition(".")[2])
    except RuntimeError:  # an implementation of an operator that this torch does not have
        return False
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return not is_view and torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU")


def register() -> None:
    """Put the kernels in the place of torch_npu's; once, after torch_npu has been imported."""
    global npu, _library, _captures
    if "SIMNPU_LIBRARY" not in os.environ:
        raise RuntimeError("this is no simulated process: start it with tests/simnpu/run")
    npu = getattr(torch, "npu")  # noqa: B009  # torch_npu adds it
    _library = ctypes.CDLL(os.environ["SIMNPU_LIBRARY"])
    _captures = ctypes.c_int.in_dll(_library, "simnpu_captures")
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    _library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    _library.aclrtSynchronizeStream.argtypes = [pointer]
    _library.aclrtMemcpy.argtypes = [pointer, size, pointer, size, integer]
    _library.aclrtMemcpyAsync.argtypes = [pointer, size, pointer, size, integer, pointer]
    _library.simnpu_oldest_ticket.restype = _library.simnpu_ticket.restype = ctypes.c_uint64
    _library.simnpu_graph.argtypes = _library.simnpu_invalidate.argtypes = [pointer]
    _hook_up()

    # torch 2.7 overrides with a warning only, and has no flag for it.
    flag = "allow_override"
    override = {flag: True} if flag in inspect.signature(torch.library.Library.impl).parameters else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is overridden is the purpose
        libraries = {space: torch.library.Library(space, "IMPL", "PrivateUse1") for space in ("aten", "npu")}
        _keep.append(libraries)
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
            space, _, rest = name.partition("::")
            compute = OPERATORS.get(name) or COMPUTED.get(name)
            if name in DIRECT:
                libraries[space].impl(rest, DIRECT[name], **override)
            elif compute is not None or _replaced(name):
                libraries[space].impl(rest, _lazy(name, compute), **override)
        above = torch.library.Library("aten", "IMPL", "AutogradPrivateUse1")
        _keep.append(above)
        for name in FALL_THROUGH:
            above.impl(name.partition("::")[2], torch.library.fallthrough_kernel, **override)
        # A product becomes those that autograd knows, as on the CPU: torch_npu's own has a backward pass to itself.
        above.impl("matmul", torch.ops.aten.matmul.default.decompose, **override)


def _hook_up() -> None:
    capture = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_int)(_on_capture)
    replay = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint32)(_on_replay)
    destroy = ctypes.CFUNCTYPE(None, ctypes.c_uint32)(lambda identity: _on_capture(identity, -1))
    operator = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int)
    run = operator(_on_operator)
    _keep.extend([capture, replay, destroy, run])
    _library.simnpu_hooks(capture, replay, destroy, run)
    atexit.register(_library.simnpu_hooks, capture, replay, None, run)  # graphs outlive Python
