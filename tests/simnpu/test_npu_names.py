"""Every name and keyword of torch_npu that the project uses exists in an old, a middle and the two newest releases.

The wheels' Python files and operator declarations are read as text: neither CANN nor their torch is needed. `module.x`
is a name of Device.module, which is torch.npu or torch.cuda: it must exist in both, but for those of `ELSEWHERE`.
"""

import ast
import copy
import functools
import inspect
import os
import re
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import check_npu
from simnpu import build

ROOT = Path(__file__).resolve().parents[2]
NEWEST = "2.14.0"  # torch_npu; newer than the torch that the project takes
VERSIONS = ("2.7.1", "2.9.0", check_npu.TORCH, NEWEST)  # torch_npu has the number of its torch
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")  # names do not depend on it
# Where names of Device.module must exist, if not in both. Newest: the code looks whether an older torch_npu has them.
ELSEWHERE = {
    "CUDAGraph": "cuda", "get_device_capability": "cuda", "NPUGraph": "npu", "is_bf16_supported": "npu",
    "get_task_queue_enable": "newest", "set_task_queue_enable": "newest",
}  # fmt: skip
# What an expression begins with, and the name that it stands for.
ROOTS = (
    (r"importlib\.import_module\('torch_npu'\)", "torch_npu"),
    (r"torch\.npu\b", "torch_npu.npu"),
    (r"(torch_npu|torch\.ops\.npu)\b", r"\1"),
    (r"\w+\.module\b", "module"),
    (r"getattr\(torch, (\w+\.)*kind(, None)?\)", "module"),
)


# ---- What the project uses ---------------------------------------------------------------------------------


class Use(NamedTuple):
    name: str  # torch_npu.npu_rms_norm, torch.ops.npu.npu_rms_norm_backward, module.set_device
    positional: int | None = None  # arguments; None: not called, or a starred argument hides how many
    keywords: tuple[str, ...] = ()


def uses_of(path: str, text: str) -> Iterator[Use]:
    tree = ast.parse(text)
    # variable -> an expression of ROOTS
    aliases = {"module": "device.module"} if "module: ModuleType" in text else {}
    keys: dict[str, set[str]] = {}  # variable that holds a dict -> its keys

    def name_of(node: ast.expr) -> str:
        """The dotted name that an expression stands for; empty for anything else."""
        first, dot, rest = ast.unparse(node).partition(".")
        text = aliases.get(first, first) + dot + rest
        for pattern, name in ROOTS:
            if match := re.match(pattern + r"((?:\.\w+)*)$", text):
                return match.expand(name) + match[match.lastindex or 0]
        return ""

    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch_npu"):
            yield from (Use(f"{node.module}.{alias.name}") for alias in node.names)
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if name := name_of(node.value):
                aliases[ast.unparse(target)] = re.sub(r"^module\b", "device.module", name)
            if isinstance(node.value, ast.Dict):
                texts = {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
                keys.setdefault(ast.unparse(target), set()).update(texts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and "." in (name := name_of(node)) and name != "torch.ops.npu":
            yield Use(name)
        if not isinstance(node, ast.Call) or "." not in (name := name_of(node.func)):
            continue
        keywords = {keyword.arg for keyword in node.keywords if keyword.arg}
        for held in (ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg is None):
            assert held in keys, f"{path}:{node.lineno}: what **{held} holds is not seen"
            keywords |= keys[held]
        starred = any(isinstance(argument, ast.Starred) for argument in node.args)
        yield Use(name, None if starred else len(node.args), tuple(sorted(keywords)))


@functools.cache
def all_uses() -> set[Use]:
    files = [*ROOT.glob("nanochat/**/*.py"), *ROOT.glob("scripts/**/*.py")]
    texts = {file.as_posix(): file.read_text("utf-8") for file in files}
    # Only these have a chance; a syntax tree takes time.
    chosen = {name: text for name, text in texts.items() if re.search(r"npu\b|\bmodule\.|getattr\(torch, ", text)}
    return {use for name, text in chosen.items() for use in uses_of(name, text)}


def uses_of_the_project(*places: str) -> set[Use]:
    """Those that must exist in one of these places, or everywhere."""
    uses = all_uses()
    assert {"torch_npu.npu_fusion_attention", "module.set_device", "module.mem_get_info"} <= {use.name for use in uses}
    found = set()
    for use in uses:
        package, _, name = use.name.partition(".")
        where = ELSEWHERE.get(name, "both") if package == "module" else "npu"
        if where in (*places, "both"):
            found.add(use)
    return found


# ---- What there is -----------------------------------------------------------------------------------------


def complaint_of_call(use: Use, signature: inspect.Signature) -> str | None:
    """Why the call does not fit."""
    keywords: dict[str, Any] = dict.fromkeys(use.keywords)
    try:
        if use.positional is None:
            signature.bind_partial(**keywords)
        else:
            signature.bind(*[None] * use.positional, **keywords)
    except TypeError as error:
        return str(error)
    return None


def signature_of(function: ast.FunctionDef, is_method: bool) -> inspect.Signature:
    arguments = copy.deepcopy(function.args)
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
    bare = ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, ast.Constant(None))))
    signature = inspect.signature(eval(compile(bare, "wheel", "eval")))
    return signature.replace(parameters=[*signature.parameters.values()][is_method:])  # without self


def signature_of_schema(schema: str) -> inspect.Signature:
    """From the arguments of an operator's declaration: "Tensor x, int[]? y=None, *, str z='half'"."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = []
    for part in re.split(r",\s*(?![^\[(]*[\])])", schema):  # not inside of brackets
        if part == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
        elif part:
            declared, equals, _ = part.partition("=")
            default = None if equals else inspect.Parameter.empty
            parameters.append(inspect.Parameter(declared.split()[-1], kind, default=default))
    return inspect.Signature(parameters, __validate_parameters__=False)


class Wheel:
    """The names in the text of an unpacked wheel of torch_npu."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.operators: dict[str, list[inspect.Signature]] = {}
        for file in sorted(folder.glob("torch_npu/csrc/aten/*.yaml")):
            custom = re.search(r"^custom:\n(.*?)(?=^\w)", file.read_text("utf-8"), re.MULTILINE | re.DOTALL)
            for name, schema in re.findall(r"func: (\w+)(?:\.\w+)?\((.*)\) ?->", custom[1] if custom else ""):
                self.operators.setdefault(name, []).append(signature_of_schema(schema))

    def signatures(self, name: str) -> list[inspect.Signature]:
        """The ways to call it; none where text does not tell. Raises LookupError: when there is no such name."""
        package, _, last = name.rpartition(".")
        if package in ("torch_npu", "torch.ops.npu") and last in self.operators:
            return self.operators[last]
        if package == "torch.ops.npu":
            raise LookupError(f"{name} is no operator")
        module, *names = name.split(".")
        while names and self.files(f"{module}.{names[0]}"):
            module += f".{names.pop(0)}"
        found = []
        texts = [file.read_text("utf-8") for file in self.files(module)]
        if not names:
            return []
        if not texts or names[0] not in names_in(ast.parse(texts[0])):
            raise LookupError(f"{module} has no {names[0]}")
        # What a module imports is defined in a neighbour, or compiled.
        renamed = re.search(rf"(\w+) as {names[0]}\b", texts[0])
        defined = renamed[1] if renamed else names[0]
        for text in texts:
            if not re.search(rf"^(def|class) {defined}\b", text, re.MULTILINE):
                continue
            for node in ast.parse(text).body:
                if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name != defined:
                    continue
                if len(names) > 1 and not re.search(rf"\b{names[1]}\b", ast.unparse(node)):
                    raise LookupError(f"{names[0]} has no {names[1]}")
                makers = [node, *node.body] if isinstance(node, ast.ClassDef) else [node]
                makers = [one for one in makers if isinstance(one, ast.FunctionDef)]
                makers = [one for one in makers if one is node or one.name in ("__init__", "__new__")]
                if len(names) == 1:
                    found += [signature_of(one, is_method=one is not node) for one in makers[:1]]
        return found

    def files(self, module: str) -> list[Path]:
        """A module's file and, of a package, its other files; none where there is no such module."""
        path = self.folder / module.replace(".", "/")
        if path.is_dir():
            return sorted(path.glob("*.py"), key=lambda file: file.name != "__init__.py")
        return [file for file in [path.with_suffix(".py")] if file.is_file()]


def names_in(module: ast.Module) -> set[Any]:
    """What a module defines, imports, or lists in `__all__`."""
    found = set()
    for statement in module.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            found.add(statement.name)
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.alias):
                found.add(node.asname or node.name)
            elif isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Constant):
                found.add(node.value)
    return found


class Cuda:
    """torch.cuda of the torch that is installed here."""

    def signatures(self, name: str) -> list[inspect.Signature]:
        thing: Any = torch
        for part in name.split(".")[1:]:
            if not hasattr(thing, part):
                raise LookupError(f"{name}: torch has no {part} there")
            thing = getattr(thing, part)
        try:
            return [inspect.signature(thing)]
        except ValueError:  # compiled
            return []


def complaints(uses: Iterable[Use], there: Wheel | Cuda) -> list[str]:
    """What does not exist there, or takes other arguments."""
    found = []
    for use in uses:
        name = re.sub(r"^module\b", "torch_npu.npu" if isinstance(there, Wheel) else "torch.cuda", use.name)
        try:
            signatures = there.signatures(name)
        except LookupError as error:
            found.append(str(error))
            continue
        is_called = use.positional is not None or use.keywords
        wrong = [complaint_of_call(use, signature) for signature in signatures if is_called]
        if wrong and all(wrong):
            found.append(f"{name} {wrong[0]}")
    return found


# ---- The wheels --------------------------------------------------------------------------------------------


def folder_of(version: str) -> Path | None:
    """Where a wheel lies unpacked: the simulator's, or its names alone."""
    found = [*build.cache().glob(f"torch_npu-{version}-*")]
    return found[0] if found else None


@functools.cache
def wheel_of(version: str) -> Wheel:
    """Downloads it the first time. Skips the test: when the package index does not answer."""
    folder = folder_of(version)
    if folder is None:
        build.cache().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=build.cache()) as temporary:
            options = ["--python-version", "3.11", *(f"--platform={platform}" for platform in PLATFORMS)]
            try:
                wheel = build.download(version, Path(temporary), *options)
            except build.Unavailable as reason:
                pytest.skip(str(reason))
            names = Path(temporary) / "names"
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(names, [name for name in archive.namelist() if name.endswith((".py", ".yaml"))])
            folder = build.cache() / f"torch_npu-{version}-names"
            try:
                names.rename(folder)
            except OSError:  # another process was faster
                assert folder.is_dir()
    return Wheel(folder)


# ---- The tests ---------------------------------------------------------------------------------------------

EACH_VERSION = pytest.mark.parametrize(
    "version",
    [pytest.param(version, marks=() if folder_of(version) else pytest.mark.slow) for version in VERSIONS],
)


@EACH_VERSION
def test_torch_npu_has_what_the_project_uses(version: str):
    uses = uses_of_the_project("npu", *(["newest"] if version in VERSIONS[-2:] else []))
    assert not complaints(uses, wheel_of(version))


def test_torch_cuda_has_what_the_project_uses_of_both():
    uses = {use for use in uses_of_the_project("cuda") if use.name.startswith("module.")}
    assert len(uses) > 10 and not complaints(uses, Cuda())


FUSED = "torch_npu.npu_fusion_attention"
PLANTED = {
    "torch_npu.npu_fusion_attentoin(q, k, v, 4, 'BSND')": "torch_npu has no npu_fusion_attentoin",
    f"{FUSED}(q, k, v, 4, 'BSND', attention_mask=m)": "unexpected keyword argument 'attention_mask'",
    f"{FUSED}(q, k, v, 4)": "missing a required argument: 'input_layout'",
    f"few = {{'scale': 1.0}}\nfew |= {{'mask': m}}\n{FUSED}(q, k, v, 4, 'BSND', **few)": "argument 'mask'",
    "torch_npu.npu_rms_norm(x, gain, 1e-6, 3)": "too many positional arguments",
    "torch.ops.npu.npu_rms(x)": "torch.ops.npu.npu_rms is no operator",
    "torch.npu.synchronise()": "torch_npu.npu has no synchronise",
    "device.module.memory_held()": "torch_npu.npu has no memory_held",
    "device.module.set_device(0, quick=True)": "torch_npu.npu.set_device got an unexpected keyword argument 'quick'",
    "getattr(torch, kind).devices()": "torch_npu.npu has no devices",
    "def f(module: ModuleType):\n    return module.CUDAGraph()": "torch_npu.npu has no CUDAGraph",
    "m.module.Event(timing=True)": "torch_npu.npu.Event got an unexpected keyword argument 'timing'",
    "tool = importlib.import_module('torch_npu').profiler\ntool.profiles()": "torch_npu.profiler has no profiles",
    "torch_npu.profiler.AiCMetrics.AiCoreNine": "AiCMetrics has no AiCoreNine",
    "from torch_npu import npu_swigloo": "torch_npu has no npu_swigloo",
}


@EACH_VERSION
def test_planted_mistakes_are_found(version: str):
    for code, complaint in PLANTED.items():
        found = complaints(set(uses_of("planted.py", code)), wheel_of(version))
        assert found and all(complaint in one for one in found), (code, found)


def test_planted_mistakes_are_found_in_torch_cuda():
    for code, name in (("device.module.NPUGraph()", "NPUGraph"), ("device.module.memory_stats(of=1)", "of")):
        found = complaints(uses_of("planted.py", code), Cuda())
        assert found and all(one.startswith("torch.cuda.") and name in one for one in found)


def test_a_dict_that_cannot_be_followed_is_an_error():
    with pytest.raises(AssertionError, match=r"\*\*options"):
        list(uses_of("planted.py", "torch_npu.npu_rms_norm(x, **options)"))


def test_an_index_out_of_reach_skips_with_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SIMNPU_CACHE", os.fspath(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(pytest.skip.Exception, match=r"no torch_npu 0\.0\.1 wheel"):
        wheel_of("0.0.1")
