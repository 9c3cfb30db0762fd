"""Files and texts from outside: what never ends, fills the memory or commands a terminal is refused or shown."""

import json
import os

import pytest

from nanochat.ground import cli, log
from nanochat.ground.untrusted import printable, read_json, require_file


def refused(path, **options) -> str:
    with pytest.raises(ValueError) as caught:
        read_json(path, **options)
    return str(caught.value)


def test_json_of_a_regular_file_and_of_a_link_to_one(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"é": [1, None]}))
    (tmp_path / "link").symlink_to(path)
    assert read_json(path) == read_json(tmp_path / "link") == {"é": [1, None]}
    assert read_json(path, max_bytes=path.stat().st_size) == {"é": [1, None]}
    assert " 3 bytes" in refused(path, max_bytes=3)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none")
    for content, words in ((b"[" * 100_000, "nested"), (b"\xff\xfe{}", "decode byte"), (b"{", "Expecting")):
        path.write_bytes(content)
        assert words in refused(path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "zero", tmp_path):
        assert "no regular file" in refused(path)
        with pytest.raises(ValueError):
            require_file(path)


# ---------------------------------------------------------------------- terminals

HOSTILE = {
    "\x1b[2Ja": r"\x1b[2Ja",  # clears the screen
    "\x1b]0;title\x07": r"\x1b]0;title\x07",  # renames the window
    "\x9b5n": r"\x9b5n",  # a report, typed into the shell
    "safe\rgone": r"safe\rgone",  # overwrites the line
    "a\bb\x00\x7f": r"a\x08b\x00\x7f",
    "\u202eabc\u2066": r"\u202eabc\u2066",  # reads backwards
}


@pytest.mark.parametrize("text", HOSTILE)
def test_a_terminal_is_not_commanded(capsys, text):
    shown = HOSTILE[text]
    assert printable(text) == shown
    log.print0("sample:", text)
    log.warn(text)
    with pytest.raises(SystemExit):
        cli.fail(f"--source {text}: no such folder")
    out, err = capsys.readouterr()
    assert out == f"sample: {shown}\n"
    # An error is one line: white space in it, such as a carriage return, is one space.
    assert err.startswith(f"warning: {shown}\n") and "\x1b" not in err and "\r" not in err and "\x9b" not in err


def test_text_stays_as_it_is():
    text = "two lines\n\tof 潮水 🌊 é, \u00a0 and a tab"
    assert printable(text) == text and printable("a\r\nb") == "a\nb"
