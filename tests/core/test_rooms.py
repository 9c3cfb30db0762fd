"""The tables of what rooms offer: a name without a room is one line. test_house.py checks where every row leads."""

from tiny import complaint

from nanochat.ground import rooms


def test_a_name_that_no_room_offers_is_one_line():
    line = complaint(lambda: rooms.find("tasks", "x"))
    assert line.startswith("no room offers 'x' for tasks") and "\n" not in line
