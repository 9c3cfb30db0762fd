"""A grammar allows what the schema allows, and what a hostile schema costs is bounded."""

import json
import subprocess
import time
from typing import Any

import pytest
import tiny

from nanochat.serve.grammar import (
    MAX_REPEATS,
    MAX_SCHEMA,
    MORE_SECONDS,
    OPTIONS,
    TOKEN_SECONDS,
    SchemaError,
    Vocabulary,
)
from nanochat.serve.grammar_trial import try_out
from nanochat.serve.scheduler import Request, Scheduler
from nanochat.serve.tools import call_schema

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine() -> Any:
    return tiny.make_engine(stops=True, sequence_len=256)


@pytest.fixture(scope="module")
def vocabulary(engine: Any) -> Vocabulary:
    return Vocabulary(engine.tokenizer, engine.tokenizer.reply_ends[0])


def test_no_special_token_but_the_end_is_ever_allowed(engine: Any, vocabulary: Vocabulary):
    grammar = vocabulary.compile({"type": "string"}, 200)
    text = len(engine.tokenizer.tokens)
    for token in engine.tokenizer.encode('"a<|user_end|>"'):
        assert not grammar.allowed()[text:].any()
        grammar.accept(token)
    assert grammar.allowed().nonzero().tolist() == [[engine.tokenizer.reply_ends[0]]]


def test_what_is_given_is_written_as_the_tokenizer_writes_it(engine: Any, vocabulary: Vocabulary):
    grammar = vocabulary.compile({"const": "the other"}, 200)
    for token in engine.tokenizer.encode('"the other"'):  # " the" is one token, and not four of a byte each
        assert grammar.allowed().nonzero().tolist() == [[token]]
        grammar.accept(token)


@pytest.mark.parametrize("key", ["$defs", "definitions"])
def test_the_references_of_each_tool_lead_to_its_own_schema(engine: Any, vocabulary: Vocabulary, key: str):
    def parameters(kind: str) -> dict[str, Any]:
        return {"properties": {"key": {"$ref": f"#/{key}/Key"}, "more": {"$ref": "#"}}, key: {"Key": {"type": kind}}}

    schema = call_schema([("first", parameters("string")), ("second", parameters("integer"))])
    calls = [("first", '{"key":"a","more":{"key":"b"}}'), ("second", '{"key":1,"more":{"key":2}}')]
    for name, arguments in calls:
        grammar = vocabulary.compile(schema, 200, is_compact=True)
        for token in engine.tokenizer.encode(f'{{"name":"{name}","arguments":{arguments}}}'):
            assert grammar.allowed()[token]
            grammar.accept(token)
        assert grammar.allowed().nonzero().tolist() == [[engine.tokenizer.reply_ends[0]]]


@pytest.mark.parametrize(
    "parameters", [None, {}, {"type": "object", "properties": {}}, {"properties": {}, "required": []}], ids=repr
)
def test_a_tool_without_parameters_gets_no_arguments(vocabulary: Vocabulary, parameters: Any):
    grammar = vocabulary.compile(call_schema([("now", parameters)]), 200, is_compact=True)
    text = '{"name":"now","arguments":{}}'
    written = b""
    while written != text.encode():
        (token,) = grammar.allowed().nonzero().flatten().tolist()
        written += vocabulary.tokens[grammar.accept(token)]
        assert text.encode().startswith(written)


NESTED: dict[str, Any] = {}
for _ in range(99):
    NESTED = {"anyOf": [{"items": NESTED, "type": "array"}]}

HOSTILE = {
    "huge": {"enum": [str(number) for number in range(MAX_SCHEMA)]},
    "repeats": {"type": "array", "minItems": MAX_REPEATS + 1, "items": {"type": "integer"}},
    "a reference to itself": {"$ref": "#"},
    "a reference to another host": {"$ref": "https://example.com/schema.json"},
    "many branches": {"anyOf": [{"type": "object", "properties": {f"a{n}": {}}} for n in range(400)]},
    "a product of choices": {"allOf": [{"anyOf": [{"enum": [[n, m]]} for n in range(9)]} for m in range(30)]},
    "impossible": {"enum": []},
    "no such type": {"type": "strin"},
    "no such keyword": {"type": "array", "uniqueItems": True},
    "patterns for one text": {"allOf": [{"type": "string", "pattern": f"a{{1,{n}}}"} for n in range(1, 40)]},
    "a divisor": {"type": "integer", "multipleOf": 429496729},
    "a divisor with decimals": {"type": "number", "multipleOf": 4294.96729},
    "a product of divisors": {"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 89, 83)]},
    "look-around": {"type": "string", "pattern": "(?=a)b"},
    "references in a circle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "too deep": NESTED,
    "too long": {"type": "string", "minLength": 10**9},
    "too many": {"type": "array", "minItems": 10**400},
}
WORDS = {  # what the line names, where it is a short one
    "a reference to itself": "$ref",
    "references in a circle": "$ref",
    "too deep": "128",
    "too long": "minLength 1,000,000,000: ",
    "too many": "minItems 10,000,",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_refused_in_a_line_and_a_moment(vocabulary: Vocabulary, name: str):
    began = time.process_time()  # of this process alone: the machine may be busy
    with pytest.raises(SchemaError) as refused:
        vocabulary.compile(HOSTILE[name], 200)
    line = str(refused.value)
    assert time.process_time() - began < 1 and "\n" not in line
    assert WORDS.get(name, "") in line and len(line) < (120 if name in WORDS else 300)


COSTLY = {
    "a long text": {"enum": ["x" * 15000]},
    "a long text of an object": {"const": {str(number): "y" * 20 for number in range(400)}},
    "a long pattern": {"type": "string", "pattern": "^[ab]{900}$"},
    "a long list": {"type": "array", "minItems": 1000, "items": {"type": "integer"}},
    "lists of lists": {"type": "array", "minItems": 99, "items": {"type": "array", "minItems": 9, "items": PERSON}},
    "a long minimum": {"type": "string", "minLength": 9000},
    "a multiple": {"type": "integer", "multipleOf": 9973},
}


@pytest.mark.parametrize("name", COSTLY)
def test_what_a_schema_costs_is_bounded_before_and_after_the_first_token(vocabulary: Vocabulary, name: str):
    """Half a second, then a millisecond a token: other clients wait for it. The machine may be half as fast."""
    began = time.process_time()
    try:
        grammar = vocabulary.compile(COSTLY[name], 20_000)
    except SchemaError:
        return
    finally:
        assert time.process_time() - began < 1
    began, count = time.process_time(), 60
    for seed in range(count):
        allowed = grammar.allowed().nonzero().flatten().tolist()
        if grammar.accept(allowed[seed % len(allowed)]) == vocabulary.eos_token_id:
            break
    assert time.process_time() - began < 2 * (MORE_SECONDS + count * TOKEN_SECONDS)


def test_a_reply_that_costs_too_much_ends_with_the_limit(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nanochat.serve.grammar.MORE_SECONDS", 0.0)
    monkeypatch.setattr("nanochat.serve.grammar.TOKEN_SECONDS", 0.0)
    grammar = vocabulary.compile(PERSON, 200).copy(200)
    grammar.allowed()
    assert "over 0 ms a token" in grammar.error


def test_divisors_whose_product_is_small_are_followed(vocabulary: Vocabulary):
    prices = {name: {"type": "number", "multipleOf": step} for name, step in (("a", 0.01), ("b", 0.05), ("c", 250))}
    properties = prices | {"d": {"type": "integer", "multipleOf": 7}}
    grammar = vocabulary.compile({"type": "object", "properties": properties}, 200)
    for token in vocabulary('{"d":'):
        grammar.accept(token)
    assert not grammar.error


def test_what_no_limit_of_ours_foresees_ends_in_the_child():
    """The divisor stands for any keyword that costs more than we know of."""
    options = json.dumps(OPTIONS)
    try_out('{"type": "integer", "multipleOf": 7}', options)
    with pytest.raises(subprocess.SubprocessError):
        try_out('{"type": "integer", "multipleOf": 429496729}', options)


def test_a_grammar_that_fails_ends_its_request_alone(engine: Any, vocabulary: Vocabulary):
    class Failing:
        error = ""

        def allowed(self) -> Any:
            return vocabulary.compile({"type": "string"}, 200).allowed()

        def accept(self, token: int) -> int:
            self.error = "too many items"
            return token

    scheduler = Scheduler(engine, slots=2)
    scheduler.start()
    prompt = tuple(engine.tokenizer.encode("the", prepend="<|bos|>"))
    failing: Any = Failing()
    streams = scheduler.submit_all([Request(prompt, 5, grammar=failing), Request(prompt, 5)])
    failed, fine = ([chunk for chunk in stream][-1] for stream in streams)
    scheduler.close()
    assert failed.finish_reason == "error" and failed.is_clients_error and "too many items" in failed.error
    assert fine.finish_reason in ("stop", "length")
