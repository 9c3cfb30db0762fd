"""The tables of what rooms offer: a name without a room is one line. test_house.py checks where every row leads."""

import pytest
from tiny import complaint

from nanochat.ground import cli, rooms


def test_a_name_that_no_room_offers_is_one_line():
    line = complaint(lambda: rooms.find("tasks", "x"))
    assert line.startswith("no room offers 'x' for tasks") and "\n" not in line


def test_a_row_that_names_no_file_is_an_error_that_ends(monkeypatch):
    monkeypatch.setattr(rooms, "table", lambda seam: {"x": "nanochat.nosuch:X"})
    with pytest.raises(ModuleNotFoundError, match="nosuch") as raised:
        rooms.find("tasks", "x")
    assert cli._explain(raised.value) is None  # it looks at every cause of an error
