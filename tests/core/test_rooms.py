"""The tables of what rooms offer: a row that leads nowhere is one line."""

import pytest
from tiny import complaint

from nanochat import rooms


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (None, "no room offers 'x' for tasks"),
        ("nanochat.nowhere:X", "module nanochat.nowhere "),
        ("nanochat.tasks.nowhere:X", "module nanochat.tasks.nowhere "),
        ("nanochat.rooms:X", "'nanochat.rooms' has no attribute 'X'"),
    ],
)
def test_a_row_that_leads_nowhere_is_named(monkeypatch, place, said):
    rows = {} if place is None else {"x": place}
    monkeypatch.setattr(rooms, "table", lambda seam: rows)
    line = complaint(lambda: rooms.find("tasks", "x"))
    assert said in line and (place or "") in line
