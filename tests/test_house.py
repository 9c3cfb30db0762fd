"""The rules of the house, read from the syntax trees of nanochat/ and scripts/.

Each rule is a function from a source file to its violations. It runs over the real tree, and over a
planted violation, so that no rule passes because it looks at nothing.
"""

import ast
import functools
import graphlib
import importlib
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from test_setup import tomllib

from nanochat.ground import rooms

ROOT = Path(__file__).resolve().parent.parent

# The budget: today's value of each number, which may only fall. Two percent of slack let a file be split. A change that
# makes a number smaller lowers its row: `python tests/test_house.py` prints today's values.
SLACK = 1.02
BUDGET = {
    "lines of code: nanochat/, scripts/ and check_npu.py": 40_249,
    "lines of the story": 6_786,
    "lines of ground and run": 5_315,
    "flags": 134,
    "seams": 11,
    "lines that a default base_train on a CPU imports": 10_111,
    "lines of tests": 43_458,
    "words of English documents": 29_956,
}
# The files that are shown to a friend. What else is directly in nanochat/ counts with ground/ and run/.
STORY = """
device tokenizer gpt attention rotary cross_entropy operators optim scaling loader train losses
conversation packing sampling engine calculator chat rollout task mixture bpb
checkpoint_manager
"""

PACKAGES = {path.parent.name for path in ROOT.glob("nanochat/*/__init__.py")}
# What each ring may import. The story is all files directly in nanochat/. A room may import every ring.
BELOW = {"ground": {"ground"}, "story": {"ground", "story"}, "run": {"ground", "story", "run"}}

VENDOR_FILES = re.compile(r"nanochat/(device|kernels/\w+)\.py")
VENDOR_WORD = re.compile(
    r"(?<![a-z0-9])(npu|cuda|hccl|nccl)(?![a-z0-9])", re.IGNORECASE
)  # torch_npu, npu_x, is_cuda too
OUR_FILES = re.compile(r"check_npu\.py|speedrun_npu\.sh|setup_ascend\.sh")

WORK = re.compile(r"(torch|logging|subprocess|random|warnings|socket|urllib|np|numpy)\.|(open|print|input|exec|eval)$")
BEFORE_TORCH = {
    """if not os.environ.keys() & {'GOMP_SPINCOUNT', 'OMP_WAIT_POLICY', 'KMP_BLOCKTIME'}:
    os.environ['GOMP_SPINCOUNT'] = '10000'""",
    "os.environ.setdefault('MKL_CBWR', 'AUTO')",
}
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
PICKLING_COLLECTIVE = re.compile(r"(gather|scatter|broadcast|send|recv)_object")
EMPTY_NAMES = re.compile(r"(^|_)(utils?|common|helpers?|managers?|misc)(_|$)")


@dataclass(frozen=True)
class Source:
    """One file: its path below the project, its text, its tree."""

    path: str
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".")

    @property
    def ring(self) -> str:
        """The ring or the room of the file."""
        return ring_of(self.module)


def ring_of(module: str) -> str:
    """The ring of a module by its dotted name: its folder in nanochat/, "story" without a folder, or "scripts"."""
    top, _, rest = module.partition(".")
    folder = rest.partition(".")[0]
    return top if top != "nanochat" else folder if folder in PACKAGES else "story"


@functools.cache
def tree_of_the_project() -> list[Source]:
    files = sorted([*ROOT.glob("nanochat/**/*.py"), *ROOT.glob("scripts/**/*.py")])
    return [Source(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in files]


def imports(source: Source) -> Iterator[str]:
    """Dotted names imported anywhere in the file, `from package import module` as package.module."""
    package = source.path.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            is_package = base in ("nanochat", "scripts", *(f"nanochat.{name}" for name in PACKAGES))
            yield from (f"{base}.{alias.name}" if is_package else base for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func).endswith("import_module"):
            yield from (ast.literal_eval(argument) for argument in node.args[:1] if is_text(argument))


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def dotted(node: ast.AST) -> str:
    """`torch.cuda.empty_cache` for the attribute chain; "" where it does not start with a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


# ---- The rules -------------------------------------------------------------------------------------------


def rings_hold(source: Source) -> Iterator[str]:
    """A ring imports only what is below it, and no room; nobody imports scripts."""
    below = BELOW.get(source.ring)
    for name in imports(source):
        top, _, module = name.partition(".")
        if top == "scripts":
            yield f"{source.path} imports {name}: scripts import the library, nobody imports scripts"
        elif source.ring == "story" and name in ("importlib", "nanochat", "nanochat.*"):
            yield f"{source.path} imports {name}: the story names the modules that it imports"
        elif top == "nanochat" and source.path.endswith("/__init__.py") and name != "nanochat.chat":
            yield f"{source.path} imports {name}: a package's __init__ imports nothing of ours"
        elif top == "nanochat" and module and below and ring_of(name) not in below:
            yield f"{source.path} imports {name}, and {source.ring} may import only: {', '.join(sorted(below))}"


def vendor_words(source: Source) -> Iterator[str]:
    if VENDOR_FILES.match(source.path):
        return
    tree = source.tree
    silent = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            silent |= {id(part) for key in node.keywords if key.arg == "help" for part in ast.walk(key.value)}
    for node in ast.walk(tree):
        # The string fields of a node are a constant's text, and the names of what is defined, read, passed or imported.
        texts = [value for _, value in ast.iter_fields(node) if isinstance(value, str)]
        for text in () if isinstance(node, ast.Constant) and id(node) in silent else texts:
            if match := VENDOR_WORD.search(OUR_FILES.sub("", text)):
                line = getattr(node, "lineno", "?")
                yield f"{source.path}:{line} says {match[0]!r}: only nanochat/device.py knows vendors"


def work_at_import(source: Source) -> Iterator[str]:
    def runs(node: ast.AST) -> Iterator[ast.AST]:
        """The parts of an expression that run now: not the bodies of lambdas."""
        yield node
        for child in ast.iter_child_nodes(node):
            if not isinstance(node, ast.Lambda):
                yield from runs(child)

    def judge_expression(node: ast.AST | None) -> Iterator[str]:
        for part in runs(node) if node else ():
            name = dotted(part.func) if isinstance(part, ast.Call) else dotted(part)
            if (isinstance(part, ast.Call) and WORK.match(name)) or name in ("os.environ", "os.getenv", "sys.argv"):
                yield f"{source.path}:{getattr(part, 'lineno', '?')} runs {name} at import"

    def judge_body(body: list[ast.stmt], in_class: bool) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for default in [*node.args.defaults, *node.args.kw_defaults]:
                    yield from judge_expression(default)
            elif isinstance(node, ast.ClassDef):
                yield from judge_body(node.body, in_class=True)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                yield from judge_expression(node.value)
            elif isinstance(node, ast.If) and (
                "__name__" in ast.unparse(node.test)
                or "TYPE_CHECKING" in ast.unparse(node.test)
                or "find_spec(" in ast.unparse(node.test)  # looks for the packages before a module imports them
            ):
                continue
            elif source.path == "nanochat/__init__.py" and ast.unparse(node) in BEFORE_TORCH:
                continue  # has to come before torch is imported, wherever that happens
            elif not isinstance(node, ast.Import | ast.ImportFrom | ast.Pass) and not (
                isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            ):
                yield f"{source.path}:{node.lineno} does work at import: {ast.unparse(node).splitlines()[0][:60]}"

    yield from judge_body(source.tree.body, in_class=False)


def swallowed_errors(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler):
            names = [dotted(part) for part in ast.walk(node.type)] if node.type else ["Exception"]
            silent = all(
                isinstance(part, ast.Pass | ast.Continue)
                or (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
                for part in node.body
            )
            if silent and {"Exception", "BaseException"} & set(names):
                yield f"{source.path}:{node.lineno} swallows every error: name the one that is expected, or handle it"


def unsafe_loading(source: Source) -> Iterator[str]:
    for name in imports(source):
        if name.partition(".")[0] in UNSAFE_MODULES:
            yield f"{source.path} imports {name}: safetensors and JSON instead"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and dotted(node.func) == "torch.load":
            safe = [
                key for key in node.keywords if key.arg == "weights_only" and getattr(key.value, "value", None) is True
            ]
            if not safe:
                yield f"{source.path}:{node.lineno} torch.load without weights_only=True"
        if isinstance(node, ast.Attribute) and PICKLING_COLLECTIVE.search(node.attr):
            yield f"{source.path}:{node.lineno} {node.attr} unpickles what another process sends: gather_values instead"
        if isinstance(node, ast.Attribute) and dotted(node) == "tiktoken.get_encoding":
            yield f"{source.path}:{node.lineno} tiktoken.get_encoding downloads"
        if isinstance(node, ast.ImportFrom) and node.module == "tiktoken":
            for alias in node.names:
                if alias.name == "get_encoding":
                    yield f"{source.path}:{node.lineno} tiktoken.get_encoding downloads"


def docstrings(source: Source) -> Iterator[str]:
    text = ast.get_docstring(source.tree)
    path = Path(source.path)
    if not text:
        yield f"{source.path} has no docstring that says what it is for"
    elif path.parts[0] == "scripts" and path.name != "__init__.py" and f"-m scripts.{path.stem}" not in text:
        yield f"{source.path} shows no example `python -m scripts.{path.stem}` in its docstring"


def names(source: Source) -> Iterator[str]:
    stem = Path(source.path).stem
    if stem != "checkpoint_manager" and EMPTY_NAMES.search(stem):
        yield f"{source.path}: the name says nothing; call it by its subject"


RULES = (rings_hold, vendor_words, work_at_import, swallowed_errors, unsafe_loading, docstrings, names)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps(rule: Callable[[Source], Iterator[str]]):
    sources = tree_of_the_project()
    assert len(sources) > 10
    violations = [violation for source in sources for violation in rule(source)]
    assert not violations, "\n" + "\n".join(violations)


def test_planted_violations_are_found_and_what_is_allowed_passes():
    rules = {rule.__name__: rule for rule in RULES}
    planted = tomllib.loads((ROOT / "tests/planted.toml").read_text(encoding="utf-8"))
    assert {rule for rule, *_ in planted["planted"]} == {rule for rule, *_ in planted["allowed"]} == rules.keys()
    for rule, path, text in planted["planted"]:
        assert list(rules[rule](Source(path, text))), (rule, path, text)
    for rule, path, text in planted["allowed"]:
        assert not list(rules[rule](Source(path, text))), (rule, path, text)


# ---- What plugs in ---------------------------------------------------------------------------------------

PLUGS = [
    (room, seam, name, place)
    for room in sorted(PACKAGES)
    for seam, rows in getattr(importlib.import_module(f"nanochat.{room}"), "PLUGS", {}).items()
    for name, place in rows.items()
]


def test_every_row_names_a_seam_and_something_of_its_room_once():
    assert {seam for _, seam, _, _ in PLUGS} == rooms.SEAMS
    assert len({(seam, name) for _, seam, name, _ in PLUGS}) == len(PLUGS)
    for room, _, name, place in PLUGS:
        module, _, attribute = place.partition(":")
        assert module.startswith(f"nanochat.{room}."), name
        body = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")).body
        defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
        defined |= {target.id for target in targets if isinstance(target, ast.Name)}
        assert attribute.partition(".")[0] in defined, place


# ---- The imports as a graph ------------------------------------------------------------------------------


def import_graph() -> dict[str, set[str]]:
    """module -> the modules of ours that it imports, wherever in the file; packages' __init__ are left out."""
    sources = {source.module: source for source in tree_of_the_project() if not source.path.endswith("__init__.py")}
    graph = {}
    for module, source in sources.items():
        found = set()
        for name in imports(source):
            # `from nanochat.gpt import GPT` is nanochat.gpt here, `from nanochat import gpt` is as well.
            found |= {candidate for candidate in (name, name.rpartition(".")[0]) if candidate in sources}
        graph[module] = found - {module}
    return graph


def test_no_import_circles():
    graphlib.TopologicalSorter(import_graph()).prepare()  # raises CycleError


# ---- The budget ------------------------------------------------------------------------------------------


def lines(*patterns: str) -> int:
    """The lines of all files that match."""
    return sum(file.read_text(encoding="utf-8").count("\n") for pattern in patterns for file in ROOT.glob(pattern))


def words(*patterns: str) -> int:
    """The words of all English files that match."""
    files = [file for pattern in patterns for file in ROOT.glob(pattern) if not file.name.endswith(".zh.md")]
    return sum(len(file.read_text(encoding="utf-8").split()) for file in files)


def flags() -> set[str]:
    """The names of all flags of all commands."""

    def flags_of(config: type) -> Iterator[str]:
        hints = get_type_hints(config, include_extras=True)
        for name, annotation in [(field.name, hints[field.name]) for field in fields(config)]:
            parts = [annotation, *parts_of(annotation)]
            # Flags that several commands share, and those of subcommands.
            groups = [part for part in parts if isinstance(part, type) and is_dataclass(part)]
            for group in groups:
                yield from flags_of(group)
            if not groups and "positional" not in repr(parts).lower():
                yield name

    def parts_of(annotation: object) -> Iterator[object]:
        for part in (*get_args(annotation), *getattr(annotation, "__metadata__", ())):
            yield part
            yield from parts_of(part)

    scripts = [importlib.import_module(f"scripts.{file.stem}") for file in sorted(ROOT.glob("scripts/*.py"))]
    return {flag for script in scripts if hasattr(script, "Config") for flag in flags_of(script.Config)}


TINY_RUN = """
import sys
from pathlib import Path
from nanochat.tokenizer import Tokenizer
Tokenizer([bytes([value]) for value in range(256)]).save(Path(sys.argv[1]) / "tokenizer")
for name in [name for name in sys.modules if name.partition(".")[0] in ("nanochat", "scripts")]:
    del sys.modules[name]  # what only this preparation needs does not count

import os
os.environ["NANOCHAT_BASE_DIR"] = sys.argv[1]
from nanochat.ground import cli
from scripts.base_train import Config, main
sys.argv[1:] = (
    "--device=cpu --depth=1 --num_iterations=1 --max_seq_len=32 --device_batch_size=1 --total_batch_size=32 "
    "--eval_tokens=32"
).split()
cli.run(main, Config, shows_progress=True)
print("imported", *(f"{name}={getattr(module, '__file__', None)}" for name, module in sys.modules.items()))
"""


@functools.cache
def imported() -> dict[str, str]:
    """The modules that a default `base_train` on a CPU has imported when it ends, with their files."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", TINY_RUN, folder]
        ended = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    output = ended.stdout.decode()
    assert ended.returncode == 0, ended.stderr.decode()
    (line,) = [line for line in output.splitlines() if line.startswith("imported ")]
    return dict(word.split("=", 1) for word in line.split()[1:])


def imported_files() -> set[str]:
    """Our files among them."""
    ours = [file for module, file in imported().items() if module.partition(".")[0] in ("nanochat", "scripts")]
    return {Path(file).relative_to(ROOT).as_posix() for file in ours}


def story_and_ground() -> tuple[int, int]:
    """Lines of the story, and of the ground with what is around a loop."""
    story = lines(*(f"nanochat/{name}.py" for name in STORY.split()))
    return story, lines("nanochat/*.py", "nanochat/ground/**/*.py", "nanochat/run/**/*.py") - story


def spent() -> dict[str, int]:
    """Today's value of each row of BUDGET."""
    story, ground = story_and_ground()
    values = (
        lines("nanochat/**/*.py", "scripts/**/*.py", "check_npu.py"),
        story,
        ground,
        len(flags()),
        len(rooms.SEAMS),
        lines(*imported_files()),
        lines("tests/**/*.py"),
        words("docs/*.md", "README.md", "CONTRIBUTING.md", "tests/README.md"),
    )
    return dict(zip(BUDGET, values, strict=True))


def overspent(values: dict[str, int]) -> list[str]:
    return [f"{row}: {value}, and not {BUDGET[row]}" for row, value in values.items() if value > SLACK * BUDGET[row]]


def test_the_budget_only_falls():
    values = spent()
    assert not overspent(values), "cut as much as this change adds"
    for row, value in values.items():
        if SLACK * value < BUDGET[row]:
            warnings.warn(f"{row}: {value} today: lower its row in BUDGET, which says {BUDGET[row]}", stacklevel=1)


def test_the_budget_counts_what_it_names_and_notices_what_is_overspent():
    assert not overspent(BUDGET)
    for row in BUDGET:
        assert len(overspent({**BUDGET, row: round(SLACK * BUDGET[row]) + 1})) == 1
    assert all((ROOT / f"nanochat/{name}.py").is_file() for name in STORY.split())
    assert {"depth", "top_p", "batches", "lora_rank", "port"} <= flags()
    assert not {"what", "sampling", "decoding", "message"} & flags()
    # A room that the run reaches by name, and one that it does not.
    assert {"scripts/base_train.py", "nanochat/gpt.py", "nanochat/kernels/cpu.py"} <= imported_files()
    assert "nanochat/serve/app.py" not in imported_files()


if __name__ == "__main__":
    for row, value in spent().items():
        print(f"{value:7,} {row} (BUDGET: {BUDGET[row]:,})")
