"""Every promise has one file with its number, and tests/README.md lists them.

`python tests/promises/test_table_of_promises.py` writes that table from the files' docstrings.
"""

import ast
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
README = FOLDER.parent / "README.md"
# T: training, S: serving, P: people.
PROMISES = [f"{letter}{number}" for letter, last in (("T", 13), ("S", 18), ("P", 11)) for number in range(1, last + 1)]
BEGIN, END = "<!-- promises -->", "<!-- end of promises -->"  # around the table in tests/README.md


def files_of(number: str) -> list[Path]:
    return sorted(FOLDER.glob(f"test_{number[0].lower()}{int(number[1:]):02}_*.py"))


def promise_of(file: Path) -> str:
    """The first line of the docstring: "T2. Resuming is exact in every stage." """
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def table() -> list[str]:
    rows = []
    for number in PROMISES:
        for file in files_of(number):
            promise = promise_of(file).removeprefix(f"{number}. ").removesuffix(".").replace("|", "\\|")
            rows.append(f"| [{number}](promises/{file.name}) | {promise} |")
    return ["| | promise |", "|---|---|", *rows]


def test_the_readme_lists_the_promises():
    assert README.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].split("\n")[1:-1] == table()


@pytest.mark.parametrize("number", PROMISES)
def test_every_promise_has_one_file_with_tests(number: str):
    (file,) = files_of(number)
    assert re.match(rf"{number}\. \S.*\.$", promise_of(file))
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assert [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def test_no_file_has_another_number():
    known = {file for number in PROMISES for file in files_of(number)}
    assert set(FOLDER.glob("test_[tsp][0-9]*.py")) == known


if __name__ == "__main__":
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    assert rest, f"{README} needs the lines {BEGIN} and {END}"
    README.write_text("\n".join([before + BEGIN, *table(), END + rest.partition(END)[2]]), encoding="utf-8")
