"""Guesses of the next tokens from the row's own."""

import pytest

from nanochat.tools.lookup import Lookup


@pytest.mark.parametrize(
    ("text", "count", "guess"),
    [
        ("the cat saw the ", 3, "cat"),
        ("abcXabcYab", 2, "cY"),  # the latest occurrence counts
        ("xbcP abcQ abc", 1, "Q"),  # and of the longest that occurred
        ("hababab", 5, "ababa"),  # past the end it continues with itself
        ("aaaa", 3, "aaa"),
        ("abcdefgh", 4, ""),
        ("abcab", 0, ""),
        ("", 4, ""),
        ("a", 4, ""),
    ],
)
def test_a_text_goes_on_as_it_did_before(text: str, count: int, guess: str) -> None:
    assert bytes(Lookup(text.encode()).guess(count)).decode() == guess
