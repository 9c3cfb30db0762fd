"""The corpus `pydoc`: the documentation of the running Python, read in place. It needs no network and no download."""

import ast
import os
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from nanochat.ground.cli import UserError


class PydocCorpus:
    """The documentation of the running Python, one document a module or topic; every tenth is validation."""

    name = "pydoc"

    def __init__(self, split: Literal["train", "val"]):
        import pydoc_data.topics

        root = Path(sysconfig.get_path("stdlib"))
        skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
        files: list[Path] = []
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in skip]
            files += [Path(folder, name) for name in names if name.endswith((".py", ".rst", ".txt"))]
        files = [file.relative_to(root) for file in files if file.stat().st_size > 200]  # no empty __init__.py
        files.sort(key=Path.as_posix)
        if not files:
            raise UserError(f"--data pydoc: this Python keeps no readable standard library at {root}; try --data demo")
        self.root = root
        self.topics: dict[str, str] = pydoc_data.topics.topics
        items: list[Path | str] = [*files, *sorted(self.topics)]
        self.items = items[9::10] if split == "val" else [item for n, item in enumerate(items) if n % 10 != 9]

    def block_count(self) -> int:
        return len(self.items)

    def read_block(self, index: int) -> list[str]:
        item = self.items[index]
        if isinstance(item, str):
            return [self.topics[item]]
        source = (self.root / item).read_bytes()
        if item.suffix != ".py":
            return [source.decode("utf-8", "replace")]
        name = ".".join(item.with_suffix("").parts).removesuffix(".__init__")
        return [_module_document(name, source)]


def _module_document(name: str, source: bytes) -> str:
    """Docstrings and signatures of one module as readable text, from its syntax tree."""

    def descriptions(body: list[ast.stmt], indent: str) -> Iterator[str]:
        for node in body:
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            doc = ast.get_docstring(node)
            if node.name.startswith("_") and not doc:
                continue
            if isinstance(node, ast.ClassDef):
                bases = ", ".join(ast.unparse(base) for base in node.bases)
                heading = f"class {node.name}({bases})" if bases else f"class {node.name}"
            else:
                heading = f"def {node.name}({ast.unparse(node.args)})"
            if doc:
                heading += f"\n{textwrap.indent(doc, '    ')}"
            yield textwrap.indent(heading, indent)
            if isinstance(node, ast.ClassDef):
                yield from descriptions(node.body, indent + "    ")

    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return f"module {name}\n"
    heading = f"module {name}\n\n{ast.get_docstring(tree) or ''}".rstrip()
    return "\n\n".join([heading, *descriptions(tree.body, "")]) + "\n"
