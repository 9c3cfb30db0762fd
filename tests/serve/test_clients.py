"""Each client that docs/deploy.md names gets what it expects, unmodified; the table there says so and is current."""

import re
from collections.abc import Iterator

import pytest
from clients_table import CALLS, DOCUMENTS, TABLE, WORDS, Call, outcome, row, server

pytest.importorskip("openai", reason="the extra `dev` brings openai")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server() as url:
        yield url


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.client}: {call.call}")
def test_a_call_of_the_table(url: str, call: Call):
    if not call.is_installed:
        pytest.skip(f"{call.package} is not installed: the extra `clients`, or npm, brings it")
    assert outcome(call, url) == (call.refused or "works")


@pytest.mark.parametrize("number", range(len(DOCUMENTS)))
def test_the_table_has_every_call_with_its_outcome(number: int):
    found = TABLE.search(DOCUMENTS[number].read_text())
    assert found is not None
    lines = [re.sub(r" \d[\w.+-]* \|", " |", line, count=1) for line in found[0].splitlines()[2:]]
    assert lines == [row(call, "").replace("  |", " |").format(**WORDS[number]) for call in CALLS]
