"""Every name and keyword of torch_npu that the project uses stands in the oldest, a middle and the newest release.

The uses come from the syntax trees of nanochat/, scripts/ and check_npu.py: `torch_npu.x`, `torch.npu.x`,
`torch.ops.npu.x`, and `device.module.x`, which is torch.npu or torch.cuda and so is looked up in both, unless an
`if kind == ...` around it says for which of them it is. The names come from the wheels' Python files and operator
declarations, read as text: nothing of them is imported, so neither CANN nor their torch is needed.
"""

import ast
import copy
import functools
import inspect
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import check_npu
from simnpu import build

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("2.7.1", "2.9.0", check_npu.TORCH)  # torch_npu has the number of its torch
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")  # names do not depend on it
KINDS = frozenset({"npu", "cuda", "cpu"})
# What Device.module is; torch.cpu is not looked into.
MODULE = {"npu": "torch_npu.npu", "cuda": "torch.cuda"}


# ---- What the project uses ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Use:
    """A name, and what it is called with."""

    place: str
    name: str  # "torch_npu.npu.set_device", "torch.ops.npu.npu_rms_norm", "torch.cuda.set_device"
    called: bool = False
    positional: int | None = 0  # None where *arguments hide how many
    keywords: frozenset[str] = frozenset()


class Collector(ast.NodeVisitor):
    """Walks a file and notes uses. `kinds` are the kinds of device for which the code at hand runs."""

    def __init__(self, path: str):
        self.path = path
        self.uses: list[Use] = []
        self.kinds = KINDS
        self.aliases: dict[str, dict[str, str]] = {}  # variable -> kind -> dotted name
        self.keys: dict[str, dict[str, set[str]]] = {}  # variable that holds a dict -> kind -> its keys

    def names(self, node: ast.AST) -> dict[str, str]:
        """The dotted name that an expression stands for, by kind; empty for anything else."""
        found: dict[str, str] = {}
        if isinstance(node, ast.Name):
            found = {"npu": "torch_npu"} if node.id == "torch_npu" else self.aliases.get(node.id, {})
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            found = {kind: f"{name}.{node.attr}" for kind, name in self.names(node.value).items()}
            if text in ("torch.npu", "torch.ops.npu"):
                found = {"npu": {"torch.npu": "torch_npu.npu"}.get(text, text)}
            elif not found and node.attr == "module":
                found = MODULE
        elif isinstance(node, ast.Call):
            text = ast.unparse(node)
            if re.fullmatch(r"getattr\(torch, (\w+\.)*kind\)", text):
                found = MODULE
            elif match := re.fullmatch(r"importlib\.import_module\('(torch_npu[\w.]*)'\)", text):
                found = {"npu": match[1]}
        return {kind: name for kind, name in found.items() if kind in self.kinds}

    def note(self, node: ast.expr, call: ast.Call | None = None) -> bool:
        names = self.names(node)
        for kind, name in names.items():
            use = Use(f"{self.path}:{node.lineno}", name)
            if call:
                keywords = {keyword.arg for keyword in call.keywords if keyword.arg}
                for keyword in call.keywords:
                    if keyword.arg is None:  # **options
                        held = self.keys.get(ast.unparse(keyword.value), {})
                        assert held.get(kind), f"{use.place}: what **{ast.unparse(keyword.value)} holds is not seen"
                        keywords |= held[kind]
                starred = any(isinstance(argument, ast.Starred) for argument in call.args)
                use = Use(use.place, name, True, None if starred else len(call.args), frozenset(keywords))
            self.uses.append(use)
        return bool(names)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not self.note(node):
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if not (isinstance(node.func, ast.Name | ast.Attribute) and self.note(node.func, node)):
            self.visit(node.func)
        for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
            self.visit(argument)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").partition(".")[0] == "torch_npu":
            for alias in node.names:
                self.uses.append(Use(f"{self.path}:{node.lineno}", f"{node.module}.{alias.name}"))
                self.aliases[alias.asname or alias.name] = {"npu": f"{node.module}.{alias.name}"}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] == "torch_npu":
                self.uses.append(Use(f"{self.path}:{node.lineno}", alias.name))
                if alias.asname:
                    self.aliases[alias.asname] = {"npu": alias.name}

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.assign(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)
            self.assign(node.target, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        if isinstance(node.op, ast.BitOr):
            self.assign(node.target, node.value)

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            if names := self.names(value):
                self.aliases.setdefault(target.id, {}).update(names)
            if isinstance(value, ast.Dict):
                texts = {str(key.value) for key in value.keys if isinstance(key, ast.Constant)}
                for kind in self.kinds:
                    self.keys.setdefault(target.id, {}).setdefault(kind, set()).update(texts)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outside = self.kinds, self.aliases, self.keys
        self.kinds = KINDS
        self.aliases = {name: dict(names) for name, names in self.aliases.items()}
        self.keys = {}
        for argument in node.args.args:
            if argument.annotation and ast.unparse(argument.annotation) == "ModuleType":
                self.aliases[argument.arg] = dict(MODULE)
        self.block(node.body)
        self.kinds, self.aliases, self.keys = outside

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self.block(node.body, narrow(node.test, self.kinds, True))
        self.block(node.orelse, narrow(node.test, self.kinds, False))

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self.block([node.body], narrow(node.test, self.kinds, True))
        self.block([node.orelse], narrow(node.test, self.kinds, False))

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        before = self.kinds
        for value in node.values:
            self.visit(value)
            self.kinds = narrow(value, self.kinds, isinstance(node.op, ast.And))
        self.kinds = before

    def block(self, body: Iterable[ast.AST], kinds: frozenset[str] | None = None) -> None:
        """Visit in order; what follows an `if` that leaves the function runs for the other kinds alone."""
        before = self.kinds
        self.kinds = before if kinds is None else kinds
        for node in body:
            self.visit(node)
            if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Return | ast.Raise | ast.Continue):
                self.kinds = narrow(node.test, self.kinds, False)
        self.kinds = before


def narrow(test: ast.expr, kinds: frozenset[str], outcome: bool) -> frozenset[str]:
    """The kinds for which `test` can come out so."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == outcome:
        for value in test.values:
            kinds = narrow(value, kinds, outcome)
    elif isinstance(test, ast.Compare) and re.fullmatch(r"(\w+\.)*kind", ast.unparse(test.left)):
        right = test.comparators[0]
        if isinstance(right, ast.Constant) and isinstance(test.ops[0], ast.Eq | ast.NotEq):
            equal = isinstance(test.ops[0], ast.Eq) == outcome
            return kinds & {right.value} if equal else kinds - {right.value}
    return kinds


def uses_of(path: str, text: str) -> list[Use]:
    collector = Collector(path)
    collector.visit(ast.parse(text))
    return collector.uses


def uses_of_the_project() -> list[Use]:
    files = sorted([*ROOT.glob("nanochat/**/*.py"), *ROOT.glob("scripts/**/*.py"), ROOT / "check_npu.py"])
    return [use for file in files for use in uses_of(file.relative_to(ROOT).as_posix(), file.read_text("utf-8"))]


# ---- What there is -----------------------------------------------------------------------------------------


def complaint_of_call(use: Use, signature: inspect.Signature) -> str | None:
    """Why the call does not fit."""
    keywords = dict.fromkeys(use.keywords)
    try:
        if use.positional is None:
            signature.bind_partial(**keywords)
        else:
            signature.bind(*[None] * use.positional, **keywords)
    except TypeError as error:
        return str(error)
    return None


def signature_of(function: ast.FunctionDef, bound: bool) -> inspect.Signature:
    arguments = copy.deepcopy(function.args)
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
    bare = ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, ast.Constant(None))))
    signature = inspect.signature(eval(compile(bare, "wheel", "eval")))
    return signature.replace(parameters=[*signature.parameters.values()][1:]) if bound else signature


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


OPAQUE = None  # it exists, and text does not tell what it is: compiled, or from another package
Thing = (
    str | tuple[str, ast.stmt] | list[inspect.Signature] | None
)  # a module, a definition in one, an operator, OPAQUE


class Wheel:
    """The names in an unpacked wheel of torch_npu."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.operators: dict[str, list[inspect.Signature]] = {}
        for file in sorted(folder.glob("torch_npu/csrc/aten/*.yaml")):
            custom = re.search(r"^custom:\n(.*?)(?=^\w)", file.read_text("utf-8"), re.MULTILINE | re.DOTALL)
            for name, schema in re.findall(r"func: (\w+)(?:\.\w+)?\((.*)\) ?->", custom[1] if custom else ""):
                self.operators.setdefault(name, []).append(signature_of_schema(schema))
        self._modules: dict[str, ast.Module | None] = {}

    def complaint(self, use: Use) -> str | None:
        try:
            signatures = self.signatures(self.find(use.name))
        except LookupError as error:
            return str(error)
        complaints = [complaint_of_call(use, signature) for signature in signatures]
        return f"{use.name} {complaints[0]}" if use.called and complaints and all(complaints) else None

    def find(self, dotted: str) -> Thing:
        """Raises LookupError: when there is no such name."""
        if dotted.startswith("torch.ops.npu."):
            name = dotted.split(".")[3]
            if name not in self.operators:
                raise LookupError(f"{dotted} is no operator")
            return self.operators[name]
        thing: Thing = "torch_npu"
        for name in dotted.split(".")[1:]:
            thing = self.member(thing, name)
        return thing

    def member(self, thing: Thing, name: str) -> Thing:
        if isinstance(thing, str):
            return self.in_module(thing, name)
        module, definition = thing if isinstance(thing, tuple) else ("", None)
        if isinstance(definition, ast.ClassDef):
            for node in definition.body:
                if name in defined(node):
                    return module, node
            for base in definition.bases:
                try:
                    return self.member(self.in_module(module, ast.unparse(base)), name)
                except LookupError:
                    continue
            raise LookupError(f"{definition.name} has no {name}")
        return OPAQUE

    def in_module(self, module: str, name: str, before: tuple[str, ...] = ()) -> Thing:
        if module == "torch_npu" and name in self.operators:
            return self.operators[name]
        tree = self.tree(module)
        if tree is None:
            return OPAQUE
        stars = []
        for node in statements(tree.body):
            if isinstance(node, ast.ImportFrom):
                source = absolute(node, module, self.is_package(module))
                if node.names[0].name == "*":
                    stars.append(source)
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        if source == module:  # from . import a module of this package
                            return f"{module}.{alias.name}"
                        return self.in_module(source, alias.name) if source.startswith("torch_npu") else OPAQUE
            elif name in defined(node):
                return module, node
        if self.tree(f"{module}.{name}") or next(self.folder.glob(f"{module}.{name}".replace(".", "/") + "*.so"), None):
            return f"{module}.{name}"
        for source in stars:
            if source.startswith("torch_npu") and source not in before and self.exports(source, name):
                try:
                    return self.in_module(source, name, (*before, source))
                except LookupError:
                    continue
        raise LookupError(f"{module} has no {name}")

    def exports(self, module: str, name: str) -> bool:
        """Whether `from module import *` brings the name."""
        tree = self.tree(module)
        for node in statements(tree.body) if tree else ():
            if isinstance(node, ast.Assign) and "__all__" in defined(node) and isinstance(node.value, ast.List):
                return name in ast.literal_eval(node.value)
        return not name.startswith("_")

    def signatures(self, thing: Thing) -> list[inspect.Signature]:
        """The ways to call it; none where text does not tell."""
        if isinstance(thing, list):
            return thing
        if isinstance(thing, tuple) and isinstance(thing[1], ast.FunctionDef):
            return [signature_of(thing[1], bound=False)]
        if isinstance(thing, tuple) and isinstance(thing[1], ast.ClassDef):
            for name in ("__init__", "__new__"):
                made = [node for node in thing[1].body if isinstance(node, ast.FunctionDef) and node.name == name]
                if made:
                    return [signature_of(made[0], bound=True)]
        return []

    def is_package(self, module: str) -> bool:
        return (self.folder / module.replace(".", "/") / "__init__.py").is_file()

    def tree(self, module: str) -> ast.Module | None:
        if module not in self._modules:
            path = self.folder / module.replace(".", "/")
            path = path / "__init__.py" if self.is_package(module) else path.with_suffix(".py")
            self._modules[module] = ast.parse(path.read_text("utf-8")) if path.is_file() else None
        return self._modules[module]


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Those that run when the module is imported, also inside of `if`, `try` and `with`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, part, ()))
            for handler in getattr(node, "handlers", ()):
                yield from statements(handler.body)


def defined(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return set()


def absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parents = module.split(".")
    above = parents[: len(parents) - node.level + is_package]
    return ".".join([*above, *([node.module] if node.module else [])])


def complaint_of_torch(use: Use) -> str | None:
    """The same of a name in the torch that is installed here."""
    thing: Any = torch
    for name in use.name.split(".")[1:]:
        if not hasattr(thing, name):
            return f"{use.name}: torch has no {name} there"
        thing = getattr(thing, name)
    try:
        complaint = complaint_of_call(use, inspect.signature(thing)) if use.called else None
    except ValueError:  # compiled
        return None
    return f"{use.name} {complaint}" if complaint else None


def complaints(uses: Iterable[Use], wheel: Wheel | None) -> list[str]:
    """What torch_npu (torch.cuda without a wheel) does not have."""
    ours = (use for use in uses if use.name.startswith("torch.cuda") == (wheel is None))
    found = ((use, wheel.complaint(use) if wheel else complaint_of_torch(use)) for use in ours)
    return [f"{use.place} {complaint}" for use, complaint in found if complaint]


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
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", temporary]
            command += ["--disable-pip-version-check", "--python-version", "3.11", f"torch_npu=={version}"]
            command += [f"--platform={platform}" for platform in PLATFORMS]
            try:
                answer = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600)
            except subprocess.TimeoutExpired:
                pytest.skip(f"torch_npu {version} could not be downloaded within 10 minutes")
            if answer.returncode:
                pytest.skip(f"torch_npu {version} could not be downloaded: {answer.stderr.strip()[-300:]}")
            names = Path(temporary) / "names"
            with zipfile.ZipFile(next(Path(temporary).glob("*.whl"))) as archive:
                for member in archive.namelist():
                    if member.endswith((".py", ".yaml")):
                        archive.extract(member, names)
                    elif member.endswith(".so"):  # that it is there is enough
                        (names / member).parent.mkdir(parents=True, exist_ok=True)
                        (names / member).touch()
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


# What an older torch_npu lacks, and device.py looks for before it uses it.
LATER = ("torch_npu.npu.set_task_queue_enable", "torch_npu.npu.get_task_queue_enable")


@EACH_VERSION
def test_torch_npu_has_what_the_project_uses(version: str):
    uses = [use for use in uses_of_the_project() if use.name.startswith(("torch_npu", "torch.ops.npu"))]
    assert {"torch_npu.npu_fusion_attention", "torch_npu.npu.set_device"} <= {use.name for use in uses}
    if version in ("2.7.1", "2.9.0"):
        uses = [use for use in uses if use.name not in LATER]
    assert not complaints(uses, wheel_of(version))


def test_torch_cuda_has_what_the_project_uses_of_both():
    uses = [use for use in uses_of_the_project() if use.name.startswith("torch.cuda")]
    assert {"torch.cuda.set_device", "torch.cuda.mem_get_info"} <= {use.name for use in uses}
    assert not complaints(uses, None)


PLANTED = [
    ("torch_npu.npu_fusion_attentoin(q, k, v, 4, 'BSND')", "torch_npu has no npu_fusion_attentoin"),
    (
        "torch_npu.npu_fusion_attention(q, k, v, 4, 'BSND', attention_mask=m)",
        "torch_npu.npu_fusion_attention got an unexpected keyword argument 'attention_mask'",
    ),
    (
        "torch_npu.npu_fusion_attention(q, k, v, 4)",
        "torch_npu.npu_fusion_attention missing a required argument: 'input_layout'",
    ),
    ("torch_npu.npu_rms_norm(x, gain, 1e-6, 3)", "torch_npu.npu_rms_norm too many positional arguments"),
    (
        "few = {'scale': 1.0}\nfew |= {'mask': m}\ntorch_npu.npu_fusion_attention(q, k, v, 4, 'BSND', **few)",
        "torch_npu.npu_fusion_attention got an unexpected keyword argument 'mask'",
    ),
    ("torch.ops.npu.npu_rms(x)", "torch.ops.npu.npu_rms is no operator"),
    ("torch.npu.synchronise()", "torch_npu.npu has no synchronise"),
    ("device.module.memory_held()", "torch_npu.npu has no memory_held"),
    ("device.module.set_device(0, quick=True)", "torch_npu.npu.set_device got an unexpected keyword argument 'quick'"),
    ("getattr(torch, kind).devices()", "torch_npu.npu has no devices"),
    ("def f(module: ModuleType):\n    return module.CUDAGraph()", "torch_npu.npu has no CUDAGraph"),
    ("m.module.Event(timing=True)", "torch_npu.npu.Event got an unexpected keyword argument 'timing'"),
    ("tool = importlib.import_module('torch_npu').profiler\ntool.profiles()", "torch_npu.profiler has no profiles"),
    ("torch_npu.profiler.AiCMetrics.AiCoreNine", "AiCMetrics has no AiCoreNine"),
    ("from torch_npu import npu_swigloo", "torch_npu has no npu_swigloo"),
]


@EACH_VERSION
def test_planted_mistakes_are_found(version: str):
    for code, complaint in PLANTED:
        (found,) = complaints(uses_of("planted.py", code), wheel_of(version))
        assert re.fullmatch(rf"planted\.py:\d {re.escape(complaint)}", found)


RIGHT = """
torch_npu.npu_fusion_attention(q, k, v, 4, "BSND", atten_mask=m, sparse_mode=2)
torch_npu.npu_rms_norm(x, gain, epsilon=1e-6)[0].sum().anything(of="a tensor")
torch_npu.npu_fusion_attention(*tensors, "BSND", scale=1.0)
torch.npu.Event(enable_timing=True)
torch_npu.npu.npu_config.set_compile_mode
graph = device.module.NPUGraph() if device.kind == "npu" else device.module.CUDAGraph()
with torch_npu.npu.graph(graph):
    torch.ops.npu.npu_rotary_mul(x, cos, sin, rotary_mode="half")
def capability(kind: str, module: ModuleType):
    if kind == "cuda":
        return module.cudart()
    if kind != "npu" or module.is_bf16_supported():
        raise ValueError
    return module.NPUGraph
"""


@EACH_VERSION
def test_what_is_right_passes(version: str):
    uses = uses_of("right.py", RIGHT)
    assert len([use for use in uses if use.name.startswith("torch.cuda")]) == 2
    assert not complaints(uses, wheel_of(version))


def test_planted_mistakes_are_found_in_torch_cuda():
    for code, name in (("device.module.NPUGraph()", "NPUGraph"), ("device.module.memory_stats(of=1)", "of")):
        (found,) = complaints(uses_of("planted.py", code), None)
        assert found.startswith("planted.py:1 torch.cuda.") and name in found


def test_a_dict_that_cannot_be_followed_is_an_error():
    with pytest.raises(AssertionError, match=r"\*\*options"):
        uses_of("planted.py", "torch_npu.npu_rms_norm(x, **options)")


def test_an_index_out_of_reach_skips_with_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SIMNPU_CACHE", os.fspath(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(pytest.skip.Exception, match="torch_npu 0.0.1 could not be downloaded: ERROR: "):
        wheel_of("0.0.1")
