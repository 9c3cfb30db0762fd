"""S14. Clients learn nothing of each other.

What a second client can count or measure is the same whatever the first one wrote: a prompt is read again for another
request, and shared only between the choices of one.
"""

from typing import Any

import pytest
from fake_server import until
from running_schedulers import GREEDY, make_engine, prompt_of, started, tokens_of

from nanochat.serve.scheduler import Request

running = pytest.fixture(started)


def test_a_client_learns_nothing_of_what_another_one_wrote(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """S14: after a prompt equal to the one before, and after another one as long, all counts and all work are equal."""
    engine = make_engine()
    secret, other = prompt_of(50, 1), prompt_of(50, 2)
    seen = []
    for written in (secret, other):
        scheduler = running(engine, slots=4)
        work: list[tuple[str, Any]] = []
        slots = scheduler.slots
        prefill, copy, decode = slots.prefill, slots.copy, slots.decode
        monkeypatch.setattr(slots, "prefill", lambda s, p, f, run=prefill, to=work: to.append((s, f)) or run(s, p, f))
        monkeypatch.setattr(slots, "copy", lambda *a, run=copy, to=work: to.append(("copy", a)) or run(*a))
        monkeypatch.setattr(slots, "decode", lambda run=decode, to=work, **a: to.append(("decode", a)) or run(**a))
        first = scheduler.submit(Request(written, 4, GREEDY))  # as one request ends, and while another one runs
        tokens_of(first)
        running_on = scheduler.submit(Request(written, 30, GREEDY))
        until(lambda stream=running_on: stream.completion_tokens > 0)
        began = len(work)
        guess = scheduler.submit(Request(secret, 4, GREEDY))
        tokens = tokens_of(guess)
        of_the_guess = [entry for entry in work[began:] if entry[0] != "decode"]
        tokens_of(running_on)
        samples = {}
        for family in scheduler.metrics.registry.collect():
            for sample in family.samples:
                if not sample.name.endswith(("_bucket", "_sum", "_created")):  # times
                    samples[(sample.name, *sorted(sample.labels.values()))] = sample.value
        seen.append((tokens, of_the_guess, samples))
    assert seen[0] == seen[1]
    assert seen[0][1] and "copy" not in {name for name, _ in seen[0][1]}
