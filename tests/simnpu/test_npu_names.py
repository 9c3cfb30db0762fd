"""Every name and keyword of torch_npu that the project uses exists in an old, a middle and the two newest releases.

The wheels' Python files and operator declarations are read as text: neither CANN nor their torch is needed. `module.x`
is a name of Device.module, which is torch.npu or torch.cuda: it must exist in both, but for those of `ELSEWHERE`.
"""

import ast
import functools
import inspect
import os
import re
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import check_npu
from simnpu import build

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("2.7.1", "2.9.0", check_npu.TORCH, "2.14.0")  # torch_npu has the number of its torch
# Where names of Device.module must exist, if not in both. Newest: the code looks whether an older torch_npu has them.
ELSEWHERE = {
    "CUDAGraph": "cuda", "get_device_capability": "cuda", "NPUGraph": "npu", "is_bf16_supported": "npu",
    "get_task_queue_enable": "newest", "set_task_queue_enable": "newest",
}  # fmt: skip
# What an expression begins with, and the name that it stands for.
ROOTS = (
    (r"importlib\.import_module\('torch_npu'\)|torch_npu\b", "torch_npu"),
    (r"torch\.npu\b", "torch_npu.npu"),
    (r"torch\.ops\.npu\b", "torch_npu"),
    (r"\w+\.module\b|getattr\(torch, (?:\w+\.)*kind(?:, None)?\)", "module"),
)
Use = tuple[str, frozenset[str]]  # a dotted name, and the keywords of its call


def uses_of(text: str) -> Iterator[Use]:
    """A dict that a call takes with ** has the keys of every dict of that name in the file."""
    tree = ast.parse(text)
    # A variable of that name may also be a module of a model.
    is_device = "module: ModuleType" in text or "module = device.module" in text
    roots = [*ROOTS, (r"module\b", "module")] if is_device else ROOTS
    keys: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and isinstance(node.value, ast.Dict):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            texts = {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
            keys.setdefault(ast.unparse(target), set()).update(map(str, texts))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".update"):
            target = ast.unparse(node.func).removesuffix(".update")
            keys.setdefault(target, set()).update(str(one.arg) for one in node.keywords)
    for node in ast.walk(tree):
        expression = node.func if isinstance(node, ast.Call) else node
        if not isinstance(expression, ast.Attribute):
            continue
        written = ast.unparse(expression)
        for pattern, name in roots:
            if match := re.fullmatch(rf"(?:{pattern})((?:\.\w+)+)", written):
                keywords: set[str] = set()
                for one in node.keywords if isinstance(node, ast.Call) else ():
                    keywords |= {one.arg} if one.arg else keys[ast.unparse(one.value)]
                yield name + match[1], frozenset(keywords)


@functools.cache
def uses_of_the_project() -> set[Use]:
    texts = [path.read_text("utf-8") for room in ("nanochat", "scripts") for path in (ROOT / room).rglob("*.py")]
    found = {use for text in texts if re.search(r"npu\b|\bmodule\.", text) for use in uses_of(text)}
    assert {"torch_npu.npu_fusion_attention", "module.set_device", "module.mem_get_info"} <= {name for name, _ in found}
    return found


def uses_in(*places: str) -> set[Use]:
    """Those that must exist in one of these places, or everywhere."""
    chosen = set()
    for name, keywords in uses_of_the_project():
        package, _, last = name.partition(".")
        place = ELSEWHERE.get(last, "both") if package == "module" else "npu"
        if place in (*places, "both"):
            chosen.add((name, keywords))
    return chosen


class Wheel:
    """The names in the text of an unpacked wheel of torch_npu."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.operators: dict[str, set[str]] = {}  # an operator's arguments
        for file in folder.glob("torch_npu/csrc/aten/*.yaml"):
            for name, schema in re.findall(r"func: (\w+)(?:\.\w+)?\((.*)\) ?->", file.read_text("utf-8")):
                self.operators.setdefault(name, set()).update(re.findall(r"(\w+)(?==|,|$)", schema))

    def missing(self, use: Use) -> set[str]:
        """The parts of the name, and the keywords, that are not there."""
        parts = use[0].replace("module.", "torch_npu.npu.").split(".")
        if parts[1] in self.operators:
            return set(use[1]) - self.operators[parts[1]]
        folder = self.folder
        while parts and (folder / parts[0]).is_dir():
            folder /= parts.pop(0)
        words = set(re.findall(r"\w+", "".join(file.read_text("utf-8") for file in sorted(folder.glob("*.py")))))
        return {*parts, *use[1]} - words


def missing_in_cuda(use: Use) -> set[str]:
    """The same for torch.cuda of the torch that is installed here."""
    name = use[0].removeprefix("module.")
    thing = getattr(torch.cuda, name, None)
    if thing is None:
        return {name}
    return set(use[1]) - set(inspect.signature(thing).parameters) if use[1] else set()


def folder_of(version: str) -> Path | None:
    """Where a wheel lies unpacked: the simulator's, or only its names."""
    return next(build.cache().glob(f"torch_npu-{version}-*"), None)


@functools.cache
def wheel_of(version: str) -> Wheel:
    """Downloads it the first time. Skips the test: when the package index does not answer."""
    folder = folder_of(version)
    if folder is None:
        build.cache().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=build.cache()) as temporary:
            platforms = [f"--platform=manylinux{name}_x86_64" for name in ("_2_28", "_2_17", "2014")]
            try:
                wheel = build.download(version, Path(temporary), "--python-version", "3.11", *platforms)
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


FUSED = "torch_npu.npu_fusion_attention"
PLANTED = {  # a line of code, and what is missing
    "torch_npu.npu_fusion_attentoin(q, k, v, 4, 'BSND')": "npu_fusion_attentoin",
    f"{FUSED}(q, k, v, 4, 'BSND', attention_mask=m)": "attention_mask",
    f"few = {{'scale': 1.0}}\nfew |= {{'mask': m}}\n{FUSED}(q, k, v, 4, 'BSND', **few)": "mask",
    f"few = {{'scale': 1.0}}\nfew.update(modes=4)\n{FUSED}(q, k, v, 4, 'BSND', **few)": "modes",
    "torch.ops.npu.npu_rms(x)": "npu_rms",
    "device.module.memory_held()": "memory_held",
    "getattr(torch, kind).devices_of()": "devices_of",
    "tool = importlib.import_module('torch_npu').profiler.profiles()": "profiles",
}


@pytest.mark.parametrize(
    "version", [pytest.param(version, marks=() if folder_of(version) else pytest.mark.slow) for version in VERSIONS]
)
def test_torch_npu_has_what_the_project_uses(version: str):
    wheel = wheel_of(version)
    uses = uses_in("npu", *(["newest"] if version in VERSIONS[-2:] else []))
    assert not {use: missing for use in uses if (missing := wheel.missing(use))}
    for code, name in PLANTED.items():
        assert set().union(*map(wheel.missing, uses_of(code))) == {name}, code


def test_torch_cuda_has_what_the_project_uses_of_both():
    uses = [use for use in uses_in("cuda") if use[0].startswith("module.")]
    assert len(uses) > 10 and not [use for use in uses if missing_in_cuda(use)]
    for code, name in (("device.module.NPUGraph()", "NPUGraph"), ("device.module.memory_stats(of=1)", "of")):
        assert set().union(*map(missing_in_cuda, uses_of(code))) == {name}


def test_an_index_out_of_reach_skips_with_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SIMNPU_CACHE", os.fspath(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(pytest.skip.Exception, match=r"0\.0\.1"):
        wheel_of("0.0.1")
