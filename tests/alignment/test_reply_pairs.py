"""Preferences as micro-batches: what is reported of the first ones."""

from dataclasses import replace

from nanochat.alignment import reply_pairs
from nanochat.conversation import Rendered


def reply(question: list[int], answer: list[int]) -> Rendered:
    return Rendered([*question, *answer], [0] * len(question) + [1] * len(answer), cut=False)


def test_first_examples_that_cannot_teach_are_reported(capsys):
    reply_pairs.report_first([(reply([1], [2]), reply([1], [3]))], 9, True)
    assert capsys.readouterr().err == ""
    long = replace(reply([1], [2]), cut=True)
    reply_pairs.report_first([(long, reply([1], [2]))], 9, False)
    (line,) = capsys.readouterr().err.splitlines()
    assert "1 of the first 2 replies" in line and "--max_seq_len" in line
