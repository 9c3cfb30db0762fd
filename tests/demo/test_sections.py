"""The reader of the demo's text files: sections, entries, comments."""

from pathlib import Path

import pytest

from nanochat.demo import sections as reader
from nanochat.demo.sections import entries, sections, word_lists

FILES = sorted(path.name for path in Path(reader.__file__).parent.glob("*.txt"))


def test_entries_and_comments(tmp_path, monkeypatch):
    text = "# What it is.\n[a b]\nYes, please!\n- {b} | {a}-{b}\n\n# More.\n[c]\n"
    text += "x?   one, two\n     three\n{y} z.\n    q\nx?  4\n"
    (tmp_path / "some.txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr(reader, "__file__", str(tmp_path / "sections.py"))
    assert sections("some.txt")["a b"] == ["Yes, please!", "- {b} | {a}-{b}"]
    assert entries(sections("some.txt")["c"]) == {"x?": ["one, two", "three", "4"], "{y} z.": ["q"]}
    assert word_lists("some.txt", "c")["x?"] == ["one", "two", "three", "4"]


@pytest.mark.parametrize("file", FILES)
def test_every_file_explains_itself_and_has_no_empty_section(file: str):
    assert (Path(reader.__file__).parent / file).read_text(encoding="utf-8").startswith("# ")
    assert sections(file) and all(sections(file).values())
