"""Bounds for what a JSON schema leaves open, so that one field does not take all tokens of a reply.

closing.py makes every reply end in time, whatever is in it. But a small model that rambles in the first field would
leave only the shortest values for the others. So texts and lists without a maximum share the tokens, and an object that
lists its properties gets no others. What the schema itself says stays as it is, and every document within these bounds
is valid under the schema, too.
"""

import json
from collections.abc import Iterator
from typing import Any

# Where a schema contains further schemas: by name, in a list, or one.
NAMED = ("properties", "patternProperties", "$defs", "definitions")
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = ("items", "additionalProperties")
# A text with one of these has a length already, or its length follows from a pattern.
LIMITS = ("maxLength", "pattern", "format", "enum", "const")
# Next to `properties` these may require further properties, or mention some of them.
MORE_PROPERTIES = ("anyOf", "oneOf", "$ref", "patternProperties", "unevaluatedProperties", "minProperties")
CHARACTERS_PER_TOKEN = 4  # in English with a large vocabulary; otherwise fewer
TOKENS_PER_ITEM = 8  # of a list
LEAST_CHARACTERS = 32
LEAST_ITEMS = 4
MOST_ITEMS = 100  # llguidance writes out every repetition


def bounded(schema: Any, max_tokens: int) -> Any:
    """A copy of the schema with bounds for a reply of at most `max_tokens` tokens."""
    schema = json.loads(json.dumps(schema))
    parts = list(parts_of(schema))
    texts = [part for part in parts if _has_type(part, "string") and not any(name in part for name in LIMITS)]
    lists = [part for part in parts if _has_type(part, "array") and "maxItems" not in part]
    # A single one may take all tokens. The share is computed from a power of two, so that chats of many lengths bring
    # few different schemas to compile.
    if len(texts) + len(lists) > 1:
        share = 2 ** (max_tokens.bit_length() - 1) // (len(texts) + len(lists))  # tokens
        for part in texts:
            part["maxLength"] = max(share * CHARACTERS_PER_TOKEN, LEAST_CHARACTERS, _count(part, "minLength"))
        for part in lists:
            most = min(max(share // TOKENS_PER_ITEM, LEAST_ITEMS), MOST_ITEMS)
            first = part.get("prefixItems")
            part["maxItems"] = max(most, _count(part, "minItems"), len(first) if isinstance(first, list) else 0)

    # An object whose properties are listed in several places must not be closed in one of them.
    objects = [part for part in parts if isinstance(part.get("properties"), dict)]
    scattered = any("allOf" in part for part in parts)
    scattered = scattered or any(name in part for part in objects for name in MORE_PROPERTIES)
    for part in objects:
        required = part.get("required", [])
        is_listed = isinstance(required, list) and all(name in list(part["properties"]) for name in required)
        if part["properties"] and is_listed and not scattered:
            part.setdefault("additionalProperties", False)
    return schema


def parts_of(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all schemas in it that are objects, whether or not they are well formed."""
    stack = [schema]
    while stack:
        part = stack.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for name in NAMED:
            if isinstance(part.get(name), dict):
                stack += part[name].values()
        for name in LISTED:
            if isinstance(part.get(name), list):
                stack += part[name]
        stack += [part.get(name) for name in SINGLE]


def _has_type(part: dict[str, Any], name: str) -> bool:
    types = part.get("type")
    return types == name or (isinstance(types, list) and name in types)


def _count(part: dict[str, Any], name: str) -> int:
    value = part.get(name)
    return value if isinstance(value, int) else 0
