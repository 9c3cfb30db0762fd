"""Every name and keyword of torch_npu that the project uses exists in an old, a middle and the two newest releases.

`npu_names.txt` lists them, a use a line: where it must exist, the name, the number of positional arguments (`*`: hidden
by a starred argument, `-`: not called), the keywords. A test compares the list with the sources. To renew it:

    python tests/simnpu/test_npu_names.py

`module.x` is a name of Device.module, which is torch.npu or torch.cuda: a new one must exist in `both`, until the list
is changed by hand to `npu` or `cuda`. `newest`: the code looks whether an older torch_npu has it. The wheels' Python
files and operator declarations are read as text: neither CANN nor their torch is needed.
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
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import check_npu
from simnpu import build

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("npu_names.txt")
NEWEST = "2.14.0"  # torch_npu; newer than the torch that the project takes
VERSIONS = ("2.7.1", "2.9.0", check_npu.TORCH, NEWEST)  # torch_npu has the number of its torch
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")  # names do not depend on it
# What an expression begins with, and the name that it stands for.
ROOTS = (
    (r"importlib\.import_module\('(torch_npu[\w.]*)'\)", r"\1"),
    (r"torch\.npu\b", "torch_npu.npu"),
    (r"(torch_npu|torch\.ops\.npu)\b", r"\1"),
    (r"\w+\.module\b", "module"),
    (r"getattr\(torch, (\w+\.)*kind(, None)?\)", "module"),
)


# ---- What the project uses ---------------------------------------------------------------------------------


class Use(NamedTuple):
    name: str  # torch_npu.npu_rms_norm, torch.ops.npu.npu_rms_norm_backward, module.set_device
    positional: str = "-"
    keywords: tuple[str, ...] = ()


class Collector(ast.NodeVisitor):
    """Walks a file and notes uses."""

    def __init__(self, path: str):
        self.path = path
        self.uses: set[Use] = set()
        self.aliases: dict[str, str] = {}  # variable -> dotted name
        self.keys: dict[str, set[str]] = {}  # variable that holds a dict -> its keys

    def name(self, node: ast.expr) -> str:
        """The dotted name that an expression stands for; empty for anything else."""
        text = ast.unparse(node)
        first, dot, rest = text.partition(".")
        text = self.aliases.get(first, first) + dot + rest
        for pattern, name in ROOTS:
            if match := re.match(pattern + r"((?:\.\w+)*)$", text):
                return match.expand(name) + match[match.lastindex or 0]
        return text if re.fullmatch(r"module(\.\w+)*", text) and first in self.aliases else ""

    def note(self, node: ast.expr, call: ast.Call | None = None) -> bool:
        name = self.name(node)
        if call and name:
            keywords = {keyword.arg for keyword in call.keywords if keyword.arg}
            for keyword in (keyword for keyword in call.keywords if keyword.arg is None):  # **options
                held = self.keys.get(ast.unparse(keyword.value))
                assert held, f"{self.path}:{node.lineno}: what **{ast.unparse(keyword.value)} holds is not seen"
                keywords |= held
            starred = any(isinstance(argument, ast.Starred) for argument in call.args)
            self.uses.add(Use(name, "*" if starred else str(len(call.args)), tuple(sorted(keywords))))
        elif "." in name:
            self.uses.add(Use(name))
        return bool(name)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not self.note(node):
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if not (isinstance(node.func, ast.Name | ast.Attribute) and self.note(node.func, node)):
            self.visit(node.func)
        for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
            self.visit(argument)

    def visit_ImportFrom(self, node: ast.ImportFrom | ast.Import) -> None:
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for name in (module + alias.name for alias in node.names):
            if name.startswith("torch_npu."):
                self.uses.add(Use(name))
                self.aliases[name.rpartition(".")[2]] = name

    visit_Import = visit_ImportFrom

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> None:
        self.generic_visit(node)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "ModuleType":
                self.aliases[ast.unparse(target)] = "module"
            elif node.value and (name := self.name(node.value)):
                self.aliases[ast.unparse(target)] = name
            if isinstance(node.value, ast.Dict):
                texts = {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
                self.keys.setdefault(ast.unparse(target), set()).update(texts)

    visit_AnnAssign = visit_AugAssign = visit_Assign

    def visit_arg(self, node: ast.arg) -> None:
        if node.annotation and ast.unparse(node.annotation) == "ModuleType":
            self.aliases[node.arg] = "module"

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.keys = {}
        self.generic_visit(node)


def uses_of(path: str, text: str) -> set[Use]:
    collector = Collector(path)
    collector.visit(ast.parse(text))
    return collector.uses


def uses_of_the_project() -> set[Use]:
    files = [*ROOT.glob("nanochat/**/*.py"), *ROOT.glob("scripts/**/*.py"), ROOT / "check_npu.py"]
    return {use for file in files for use in uses_of(file.relative_to(ROOT).as_posix(), file.read_text("utf-8"))}


def listed() -> dict[Use, str]:
    """Where each use of the list must exist."""
    lines = [line.split() for line in LIST.read_text("utf-8").splitlines()]
    return {Use(name, positional, tuple(keywords)): where for where, name, positional, *keywords in lines}


def renew() -> None:
    where = listed()
    lines = [
        " ".join((where.get(use, "both" if use.name.startswith("module.") else "npu"), *use[:2], *use.keywords))
        for use in sorted(uses_of_the_project())
    ]
    LIST.write_text("\n".join(lines) + "\n", "utf-8")


# ---- What there is -----------------------------------------------------------------------------------------


def complaint_of_call(use: Use, signature: inspect.Signature) -> str | None:
    """Why the call does not fit."""
    keywords: dict[str, Any] = dict.fromkeys(use.keywords)
    try:
        if use.positional == "*":
            signature.bind_partial(**keywords)
        else:
            signature.bind(*[None] * int(use.positional), **keywords)
    except TypeError as error:
        return str(error)
    return None


def signature_of(function: ast.FunctionDef) -> inspect.Signature:
    arguments = copy.deepcopy(function.args)
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
    bare = ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, ast.Constant(None))))
    return inspect.signature(eval(compile(bare, "wheel", "eval")))


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

    def complaint(self, use: Use) -> str | None:
        name = re.sub(r"^module\b", "torch_npu.npu", use.name)
        package, _, operator = name.rpartition(".")
        if package in ("torch_npu", "torch.ops.npu") and operator in self.operators:
            signatures = self.operators[operator]
        elif package == "torch.ops.npu":
            return f"{name} is no operator"
        else:
            signatures = self.signatures(name)
        complaints = [complaint_of_call(use, signature) for signature in signatures if use.positional != "-"]
        return f"{name} {complaints[0]}" if complaints and all(complaints) else None

    def signatures(self, name: str) -> list[inspect.Signature]:
        """The ways to call it; none where text does not tell. Raises LookupError: when there is no such name."""
        module, *names = name.split(".")
        while names and self.files(f"{module}.{names[0]}"):
            module += f".{names.pop(0)}"
        if not names:
            return []
        # What a module imports is defined in a neighbour, or compiled.
        files = self.files(module)
        text = files[0].read_text("utf-8")
        if names[0] not in names_in(ast.parse(text)):
            raise LookupError(f"{module} has no {names[0]}")
        renamed = re.search(rf"(\w+) as {names[0]}\b", text)
        defined = renamed[1] if renamed else names[0]
        found = []
        for text in (file.read_text("utf-8") for file in files):
            if not re.search(rf"^(def|class) {defined}\b", text, re.MULTILINE):
                continue
            for node in ast.parse(text).body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == defined:
                    found += signatures_of(node) if len(names) == 1 else []
                    if len(names) > 1 and not re.search(rf"\b{names[1]}\b", ast.unparse(node)):
                        raise LookupError(f"{names[0]} has no {names[1]}")
        return found

    def files(self, module: str) -> list[Path]:
        """A module's file and, of a package, its other files; none where there is no such module."""
        path = self.folder / module.replace(".", "/")
        if path.is_dir():
            return sorted(path.glob("*.py"), key=lambda file: file.name != "__init__.py")
        return [file for file in [path.with_suffix(".py")] if file.is_file()]


def names_in(module: ast.Module) -> set[str]:
    """What a module defines, imports, or lists in `__all__`."""
    found: set[str] = set()
    for statement in module.body:
        inside = [statement] if isinstance(statement, ast.FunctionDef | ast.ClassDef) else ast.walk(statement)
        for node in inside:
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
                case ast.alias(name=name, asname=other):
                    found.add(other or name)
        if ast.unparse(statement).startswith("__all__"):
            found |= {node.value for node in ast.walk(statement) if isinstance(node, ast.Constant)}
    return found


def signatures_of(node: ast.FunctionDef | ast.ClassDef) -> list[inspect.Signature]:
    if isinstance(node, ast.FunctionDef):
        return [signature_of(node)]
    makers = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name in ("__init__", "__new__")]
    made = [signature_of(one) for one in makers[:1]]
    return [signature.replace(parameters=[*signature.parameters.values()][1:]) for signature in made]  # without self


def complaint_of_torch(use: Use) -> str | None:
    """The same of a name of torch.cuda in the torch that is installed here."""
    thing: Any = torch.cuda
    for name in use.name.split(".")[1:]:
        if not hasattr(thing, name):
            return f"torch.cuda.{name}: torch has no {name} there"
        thing = getattr(thing, name)
    try:
        complaint = complaint_of_call(use, inspect.signature(thing)) if use.positional != "-" else None
    except ValueError:  # compiled
        return None
    return f"torch.cuda.{name} {complaint}" if complaint else None


def complaints(uses: Iterable[Use], wheel: Wheel | None) -> list[str]:
    """What torch_npu (torch.cuda without a wheel) does not have."""
    found = []
    for use in uses:
        try:
            found.append(wheel.complaint(use) if wheel else complaint_of_torch(use))
        except LookupError as error:
            found.append(str(error))
    return [complaint for complaint in found if complaint]


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


def test_the_list_has_what_the_project_uses():
    assert listed().keys() == uses_of_the_project(), "python tests/simnpu/test_npu_names.py"


@EACH_VERSION
def test_torch_npu_has_what_the_project_uses(version: str):
    kinds = ("npu", "both", "newest") if version in VERSIONS[-2:] else ("npu", "both")
    uses = [use for use, where in listed().items() if where in kinds]
    assert {"torch_npu.npu_fusion_attention", "module.set_device"} <= {use.name for use in uses}
    assert not complaints(uses, wheel_of(version))


def test_torch_cuda_has_what_the_project_uses_of_both():
    uses = [use for use, where in listed().items() if where in ("cuda", "both")]
    assert {"module.set_device", "module.mem_get_info"} <= {use.name for use in uses}
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
        assert found == complaint


def test_planted_mistakes_are_found_in_torch_cuda():
    for code, name in (("device.module.NPUGraph()", "NPUGraph"), ("device.module.memory_stats(of=1)", "of")):
        (found,) = complaints(uses_of("planted.py", code), None)
        assert found.startswith("torch.cuda.") and name in found


def test_a_dict_that_cannot_be_followed_is_an_error():
    with pytest.raises(AssertionError, match=r"\*\*options"):
        uses_of("planted.py", "torch_npu.npu_rms_norm(x, **options)")


def test_an_index_out_of_reach_skips_with_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SIMNPU_CACHE", os.fspath(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(pytest.skip.Exception, match="torch_npu 0.0.1 could not be downloaded: ERROR: "):
        wheel_of("0.0.1")


if __name__ == "__main__":
    renew()
