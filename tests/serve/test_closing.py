"""A reply under a schema always ends by itself, as a valid document, however few tokens it has. Rows without a schema
keep every bit."""

import contextlib
import json
from typing import Any

import jsonschema_rs
import pytest
import tiny
import torch

from nanochat.engine import NewToken, Row, Slots
from nanochat.sampling import SamplingParams
from nanochat.serve.bounds import LEAST_CHARACTERS, bounded, parts_of
from nanochat.serve.closing import hints_of
from nanochat.serve.grammar import Grammar, SchemaError, Vocabulary


def record(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required or properties)}


TEXT = {"type": "string"}
TEXTS = {"type": "array", "items": TEXT}
NODE = record(value=TEXT, children={"type": "array", "items": {"$ref": "#/$defs/node"}})
TERM = {"$ref": "#/$defs/term"}
SUM = record(kind={"const": "add"}, left=TERM, right=TERM)
NUMBER = record(kind={"const": "number"}, value={"type": "number"})
SCHEMAS: dict[str, Any] = {
    "text": TEXT,
    "anything": {},
    "any object": {"type": "object"},
    "any list": {"type": "array"},
    "record": record(name=TEXT, age={"type": "integer"}),
    "closed record": {**record(name=TEXT, age={"type": "integer"}), "additionalProperties": False},
    "record of records": record(a=record(b=record(c=TEXT, d=TEXTS)), e={"type": "boolean"}),
    "optional": record("name", a={"$ref": "#"}, name=TEXT),
    "unlisted": {"type": "object", "required": ["x", "y"]},
    "map": {"type": "object", "additionalProperties": TEXTS},
    "map by pattern": {"type": "object", "patternProperties": {"^x_": {"type": "integer"}}},
    "at most two": {"type": "object", "additionalProperties": TEXT, "maxProperties": 2},
    "list": TEXTS,
    "lists of lists": {"type": "array", "minItems": 2, "items": {"type": "array", "minItems": 2, "items": TEXT}},
    "tuple": {"type": "array", "prefixItems": [TEXT, {"type": "integer"}], "minItems": 2},
    "tree": {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    "linked list": record(next={"anyOf": [{"$ref": "#"}, {"type": "null"}]}, value={"type": "number"}),
    "terms": {"$ref": "#/$defs/term", "$defs": {"term": {"anyOf": [SUM, NUMBER]}}},
    "all of": {"allOf": [record(a=TEXT), record(b=TEXT)]},
    "next to any of": {**record("k", k=TEXT), "anyOf": [record(u=TEXT), record(w={"type": "integer"})]},
    "one of": {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "boolean"}]},
    "several types": {"type": ["string", "null", "array"]},
    "enum": {"enum": ["a", "bb", 3, None]},
    "const": {"const": {"a": [1, "é😀"]}},
    "address": {"type": "string", "pattern": r"^[a-z]+@[a-z]+\.com$"},
    "unanchored": {"type": "string", "pattern": r"\.txt$"},
    "words, then a word": {"type": "string", "pattern": r"^([a-z]+ )*end\.$"},
    "beyond ASCII": {"type": "string", "pattern": "^[é-ü]{3}$"},
    "minLength": {"type": "string", "minLength": 20},
    "minLength, maxLength": record(a={"type": "string", "minLength": 3, "maxLength": 9}, b=TEXT),
    "number": {"type": "number"},
    "from 150": {"type": "integer", "minimum": 150},
    "multiple": record(a={"type": "integer", "multipleOf": 997, "minimum": 1}, b={"type": "integer", "multipleOf": 7}),
    "date-time": {"type": "string", "format": "date-time"},
    "email": record(mail={"type": "string", "format": "email"}, url={"type": "string", "format": "uri"}),
}


@pytest.fixture(scope="module")
def engine() -> Any:
    return tiny.make_engine(stops=True, sequence_len=256)


@pytest.fixture(scope="module")
def vocabulary(engine: Any) -> Vocabulary:
    return Vocabulary(engine.tokenizer, engine.tokenizer.reply_ends[0])


def decode(engine: Any, rows: list[Row], logprobs: int = -1) -> list[list[NewToken]]:
    """The tokens of rows that run together until all have ended."""
    slots = Slots(engine, len(rows))
    slots.fill(rows)
    replies: dict[Row, list[NewToken]] = {row: [] for row in rows}
    while slots.rows:
        new_tokens = slots.decode(logprobs)
        for new in new_tokens:
            replies[new.row].append(new)
        slots.release({new.row for new in new_tokens if new.finish_reason})
    return list(replies.values())


def read(text: str) -> Any:
    """The document; a number beyond Python's floats becomes the largest, because the validator knows no infinity."""
    return json.loads(text, parse_float=lambda number: max(min(float(number), 1e308), -1e308))


def rows_of(engine: Any, grammar: Grammar, max_tokens: int, count: int = 3) -> list[Row]:
    prompt = engine.tokenizer.encode("the", prepend="<|bos|>")
    return [
        Row(prompt, max_tokens, SamplingParams(temperature=seed * 1.0, seed=seed), grammar=grammar.copy(max_tokens))
        for seed in range(count)
    ]


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_reply_is_a_whole_document(engine: Any, vocabulary: Vocabulary, name: str):
    schema = SCHEMAS[name]
    for max_tokens in (200, 64):
        grammar = vocabulary.compile(schema, max_tokens)
        # Also with the very fewest tokens: then the closing is the reply.
        rows = rows_of(engine, grammar, max_tokens) + rows_of(engine, grammar, len(grammar._closing))
        for reply in decode(engine, rows):
            assert reply[-1].finish_reason == "stop" and reply[-1].id == engine.tokenizer.reply_ends[0]
            document = read(engine.tokenizer.decode([new.id for new in reply[:-1]]))
            assert jsonschema_rs.is_valid(schema, document), document


@pytest.mark.parametrize(
    ("name", "shortest"),
    [
        ("text", '""'),
        ("any object", "{}"),
        ("number", "0"),
        ("map", "{}"),
        ("optional", '{"name":""}'),
        ("enum", '"a"'),
    ],
)
def test_the_first_closing_is_the_shortest_document(vocabulary: Vocabulary, name: str, shortest: str):
    assert len(vocabulary.compile(SCHEMAS[name], 200, is_compact=True)._closing) == len(vocabulary(shortest)) + 1


def test_a_schema_that_does_not_fit_is_refused_with_the_length_that_does(engine: Any, vocabulary: Vocabulary):
    schema = {"type": "string", "minLength": 50}
    with pytest.raises(SchemaError, match="takes 53 tokens, and 52 are left") as refused:
        vocabulary.compile(schema, 52)
    assert "\n" not in str(refused.value)
    (reply,) = decode(engine, rows_of(engine, vocabulary.compile(schema, 53), 53, count=1))
    assert len(json.loads(engine.tokenizer.decode([new.id for new in reply[:-1]]))) == 50


def test_a_forced_end_is_the_same_among_other_rows_and_has_its_own_logprobs(engine: Any, vocabulary: Vocabulary):
    grammar = vocabulary.compile(SCHEMAS["record"], 40)

    def rows() -> list[Row]:
        others = [Row(row.prompt, 40, row.sampling) for row in rows_of(engine, grammar, 40)]
        return rows_of(engine, grammar, 40) + others

    together = decode(engine, rows(), logprobs=0)
    alone = [decode(engine, [row], logprobs=0)[0] for row in rows()]
    assert [[new.id for new in reply] for reply in together] == [[new.id for new in reply] for reply in alone]
    for reply in together[:3]:
        assert len(reply) == 40  # the model did not stop by itself
        tokens = [*reply[0].row.prompt, *(new.id for new in reply)]
        with torch.inference_mode():
            logits = engine.model.logits(engine.model.hidden(torch.tensor([tokens[:-1]])))[0]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[-len(reply) :, 0]
        torch.testing.assert_close(torch.tensor([new.logprobs[0] for new in reply]), expected, atol=1e-4, rtol=1e-4)


def test_a_token_is_replaced_only_where_the_document_would_not_end(vocabulary: Vocabulary):
    grammar = vocabulary.compile(TEXT, 6)
    (quote,), (letter,), (euro,) = vocabulary('"'), vocabulary("a"), vocabulary("e")
    assert [grammar.accept(token) for token in (quote, letter, euro)] == [quote, letter, euro]
    assert grammar.allowed().sum() > 100  # three are left, the closing takes two
    first_of_three = vocabulary("中")[0]  # two more bytes would have to follow it, then the closing
    assert grammar.accept(first_of_three) == quote
    assert grammar.allowed().nonzero().tolist() == [[vocabulary.eos_token_id]]


# ---------------------------------------------------------------------- bounds


def test_what_is_open_shares_the_tokens_and_what_is_bounded_stays():
    schema = record(a=TEXT, b={**TEXT, "maxLength": 9999}, c=TEXTS, d={**TEXTS, "maxItems": 500}, e={"const": TEXT})
    properties = bounded(schema, 256)["properties"]  # a, c, and the items of c and d
    assert properties["a"] == {**TEXT, "maxLength": 256 // 4 * 4}
    assert properties["b"]["maxLength"] == 9999 and properties["d"]["maxItems"] == 500
    assert properties["c"]["maxItems"] == 256 // 4 // 8 and properties["c"]["items"]["maxLength"] == 256
    assert properties["e"] == {"const": TEXT} and "maxLength" not in schema["properties"]["a"]
    least = bounded(record(a={**TEXT, "minLength": 80}, b=TEXT), 16)["properties"]
    assert [part["maxLength"] for part in least.values()] == [80, LEAST_CHARACTERS]
    assert bounded(TEXT, 256) == TEXT and bounded(record(a=TEXT), 256)["properties"]["a"] == TEXT  # nothing to share


def test_an_object_has_the_properties_that_it_lists():
    assert bounded(record(a=record(b=TEXT)), 99)["properties"]["a"]["additionalProperties"] is False
    for name in ("any object", "unlisted", "map", "all of", "next to any of"):
        assert 'additionalProperties": false' not in json.dumps(bounded(SCHEMAS[name], 99)), name
    is_open = {**record(a=TEXT), "additionalProperties": True}
    assert bounded(is_open, 99) == is_open


def test_bounds_that_contradict_the_schema_are_left_out(vocabulary: Vocabulary):
    long = {"allOf": [TEXT, {"type": "string", "minLength": 70}]}
    grammar = vocabulary.compile(record(a=long, b=TEXT), 100)
    for token in vocabulary('{"a":"' + "x" * 70 + '","b":""}'):
        assert grammar.accept(token) == token


def test_the_first_text_leaves_tokens_for_the_others(vocabulary: Vocabulary):
    grammar = vocabulary.compile(record(a=TEXT, b=TEXT), 64)
    for token in vocabulary('{"a":"' + "the" * (64 // 2 * 4 // 3) + "th"):
        assert grammar.accept(token) == token
    assert grammar.allowed().nonzero().tolist() == [[vocabulary('"')[0]]]


@pytest.mark.parametrize(
    "value", [None, True, -1, 0.5, float("nan"), 10**400, "x", [], [[1]], [{}], {}, {"a": 1}], ids=repr
)
def test_odd_values_of_keywords_are_refused_in_a_line_or_followed(vocabulary: Vocabulary, value: Any):
    names = "type properties required items minLength maxItems minItems prefixItems format pattern multipleOf minimum"
    for name in [*names.split(), "anyOf", "additionalProperties", "$defs", "enum", "maxLength"]:
        schema = {**record(a=TEXT, b={**TEXT, name: value}), name: value}
        bounded(schema, 100)
        hints_of(parts_of(schema))
    with contextlib.suppress(SchemaError):
        vocabulary.compile(record(a=TEXT, b={"type": "string", "minLength": value, "format": value}), 100)
