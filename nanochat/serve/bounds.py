"""A JSON schema made narrower, so that its replies are right and share their tokens.

Every document within the narrower schema is valid under the client's, too. There are two reasons to narrow:

`exact`: llguidance accepts some keywords that it does not follow exactly. It computes bounds in 64 bits, its times have
a 60th second, and names of an object may repeat. What cannot be narrowed to something right is refused by name. Formats
that the specification does not define are annotations, which it says to ignore.

`bounded`: closing.py makes every reply end in time, whatever is in it. But a small model that rambles in the first
field would leave only the shortest values for the others. So texts and lists without a maximum share the tokens, and an
object that lists its properties gets no others. What the schema itself says stays as it is.
"""

import itertools
import json
from collections.abc import Iterator
from decimal import ROUND_CEILING, Decimal
from typing import Any, TypeGuard

from nanochat.ground.cli import UserError

# Keywords whose values are data, or schemas by name. All other values may be schemas.
DATA = ("const", "enum", "default", "examples")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# A text with one of these has a length already, or its length follows from a pattern.
LIMITS = ("maxLength", "pattern", "format", "enum", "const")
# Next to `properties` these may require further properties, or mention some of them.
MORE_PROPERTIES = ("anyOf", "oneOf", "$ref", "unevaluatedProperties", "minProperties")
CHARACTERS_PER_TOKEN = 4  # in English with a large vocabulary; otherwise fewer
TOKENS_PER_ITEM = 8  # of a list
LEAST_CHARACTERS = 32
LEAST_ITEMS = 4
MOST_ITEMS = 100  # llguidance writes out every repetition
MOST_VALUES = 6  # in a list without repetition, which has 64 forms
DIGITS = 15  # most digits of a number: clients and llguidance read it back exactly
LARGEST = 10**DIGITS

# Texts of each format that all validators accept: no 60th second, no year 0, no endless labels.
_DAYS = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8])"
_DATE = f"([1-9][0-9]{{3}}-({_DAYS})|[1-9][0-9](0[48]|[2468][048]|[13579][26])-02-29)"
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_CLOCK})"
_HOUR = "[0-9]{1,4}H([0-9]{1,2}M([0-9]{1,2}S)?)?|[0-9]{1,4}M([0-9]{1,2}S)?|[0-9]{1,4}S"
_DAY = "[0-9]{1,4}Y([0-9]{1,2}M([0-9]{1,2}D)?)?|[0-9]{1,4}M([0-9]{1,2}D)?|[0-9]{1,4}D"
_HOST = r"([A-Za-z0-9]{1,16}(-[A-Za-z0-9]{1,16})?\.){1,3}[A-Za-z]{2,8}"
_EMAIL = rf"[A-Za-z0-9]{{1,16}}([._+-][A-Za-z0-9]{{1,16}}){{0,2}}@{_HOST}"
_PATH = r"(/([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-F]{2})*)*"
_QUERY = r"(\?([A-Za-z0-9._~=&+/-]|%[0-9A-F]{2})*)?(#[A-Za-z0-9._~=&/-]*)?"
_URI = rf"([a-z][a-z0-9+]{{1,15}}://{_HOST}(:[1-9][0-9]{{0,3}})?{_PATH}{_QUERY}|mailto:{_EMAIL}|file://{_PATH})"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(\.{_OCTET}){{3}}"
_GROUP = "[0-9a-f]{1,4}"
_IPV6 = f"(({_GROUP}:){{7}}{_GROUP}|({_GROUP}:){{1,6}}:{_GROUP}|::({_GROUP})?)"
_HEX4 = "[0-9a-f]{4}"
_HEX8 = "[0-9a-f]{8}"
_POINTER = "(/[A-Za-z0-9_-]*)*"
FORMATS = {
    "date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}", "duration": f"P({_DAY}|T({_HOUR})|[0-9]{{1,4}}W)",
    "email": _EMAIL, "idn-email": _EMAIL, "hostname": _HOST, "idn-hostname": _HOST,
    "uri": _URI, "iri": _URI, "uri-reference": _URI, "iri-reference": _URI, "uri-template": _URI,
    "ipv4": _IPV4, "ipv4network": _IPV4, "ipv4interface": _IPV4, "ipvanyaddress": _IPV4, "ipvanynetwork": _IPV4,
    "ipvanyinterface": _IPV4, "ipv6": _IPV6, "ipv6network": _IPV6, "ipv6interface": _IPV6,
    "json-pointer": _POINTER, "relative-json-pointer": f"[0-9]{_POINTER}", "regex": "[A-Za-z0-9 _-]*",
    "base64": "([A-Za-z0-9+/]{4})*", "base64url": "([A-Za-z0-9_-]{4})*",
    "uuid": f"{_HEX8}(-{_HEX4}){{3}}-{_HEX8}{_HEX4}",
    **{f"uuid{n}": f"{_HEX8}-{_HEX4}-{n}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-{_HEX8}{_HEX4}" for n in range(1, 9)},
}  # fmt: skip


class SchemaError(UserError):
    """A schema that cannot be followed."""


# ---------------------------------------------------------------------- what llguidance does not follow exactly


def exact(schema: Any) -> Any:
    """A copy of the schema that llguidance follows exactly.

    Raises SchemaError: when a keyword cannot be followed.
    """
    schema = json.loads(json.dumps(schema))
    for part in list(parts_of(schema)):
        part.pop("x-guidance", None)  # settings of llguidance, which are not the client's
        _narrow_constants(part)
        _narrow_numbers(part)
        _narrow_format(part)
        if part.pop("uniqueItems", False) is True:
            _narrow_set(part, schema)
        required = part.get("required")
        if _count(part, "minProperties") > 1 + (len(required) if isinstance(required, list) else 0):
            # Names that are not required may repeat.
            raise SchemaError("the schema has minProperties over 1: list the names in required instead")
    return schema


def _narrow_set(part: dict[str, Any], schema: dict[str, Any]) -> None:
    """Items are not compared while they are written. So a list of a few values becomes one of all that do not repeat,
    in the schema's order, and another list has one item."""
    items = part.get("items")
    items = items if isinstance(items, dict) else {}
    path = str(items.get("$ref")).split("/")
    if path[:2] == ["#", "$defs"] and len(path) == 3 and isinstance(schema.get("$defs"), dict):
        items = schema["$defs"].get(path[2])
    values = [False, True] if items == {"type": "boolean"} else isinstance(items, dict) and items.get("enum")
    is_plain = part.get("type") == "array" and not {"enum", "const", "prefixItems"} & set(part)
    if isinstance(values, list) and len(values) <= MOST_VALUES and is_plain:
        unique = [value for place, value in enumerate(values) if value not in values[:place] and _is_exact(value)]
        sizes = range(_count(part, "minItems"), min(_count(part, "maxItems", len(unique)), len(unique)) + 1)
        part["enum"] = [list(chosen) for size in sizes for chosen in itertools.combinations(unique, size)]
        for name in ("items", "minItems", "maxItems"):
            part.pop(name, None)
    elif _count(part, "minItems") > 1:
        raise SchemaError("the schema has uniqueItems with minItems over 1: leave uniqueItems out")
    else:
        part["maxItems"] = min(_count(part, "maxItems", 1), 1)


def _narrow_constants(part: dict[str, Any]) -> None:
    values = part.get("enum")
    if isinstance(values, list):
        part["enum"] = [value for value in values if _is_exact(value)]
        if values and not part["enum"]:
            raise SchemaError(f"the schema has enum with numbers of over {DIGITS} digits: write them as texts")
    if not _is_exact(part.get("const")):
        raise SchemaError(f"the schema has const with a number of over {DIGITS} digits: write it as a text")


def _is_exact(value: Any) -> bool:
    """Whether all numbers of a value have few digits."""
    numbers: list[str] = []
    settings: Any = dict.fromkeys(("parse_int", "parse_float", "parse_constant"), numbers.append)
    json.loads(json.dumps(value), **settings)
    return all(number[-1].isdigit() and _has_few_digits(Decimal(number)) for number in numbers)


def _has_few_digits(number: Decimal) -> bool:
    return abs(number) < LARGEST and _inward(number, False) == number


def _narrow_numbers(part: dict[str, Any]) -> None:
    """Replaces exclusive bounds by inclusive ones, of few digits, and bounds that are too far away."""
    for name, exclusive, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        limit = part.get(exclusive)
        if isinstance(limit, bool):  # draft 4's form
            del part[exclusive]
            limit = part.get(name) if limit else None
        # A maximum is the minimum of the negated numbers.
        found = []
        for value, is_exclusive in ((part.get(name), False), (limit, True)):
            if _is_number(value):
                is_near = abs(value) < LARGEST
                found.append(_inward(sign * Decimal(str(value)), is_exclusive) if is_near else sign * value)
        if found and max(found) >= LARGEST:
            raise SchemaError(
                f"the schema has {name} or {exclusive} with over {DIGITS} digits: numbers stay below that"
            )
        if _is_number(limit):
            part.pop(exclusive, None)
        if found:
            bound = sign * max(*found, 1 - LARGEST)
            part[name] = int(bound) if bound == int(bound) else float(bound)
        elif "multipleOf" in part and part.get("type") != "integer":
            part[name] = -sign * LARGEST // 10  # beyond it, validators refuse multiples that are doubles


def _inward(number: Decimal, is_exclusive: bool) -> Decimal:
    """The smallest number of few digits that is at least this one, or above it."""
    last = Decimal(1).scaleb(max(number.adjusted(), 0) - DIGITS + 1)
    bound = number.quantize(last, ROUND_CEILING)
    return bound + last if is_exclusive and bound == number else bound


def _narrow_format(part: dict[str, Any]) -> None:
    if not isinstance(part.get("format"), str):
        return
    pattern = FORMATS.get(part.pop("format"))
    if pattern is None or "const" in part or "enum" in part:
        return
    if "pattern" in part:
        part.setdefault("allOf", []).append({"pattern": f"^({pattern})$"})
    else:
        part["pattern"] = f"^({pattern})$"


# ---------------------------------------------------------------------- what a schema leaves open


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
    objects = [part for part in parts if isinstance(part.get("properties", part.get("patternProperties")), dict)]
    scattered = any("allOf" in part for part in parts)
    scattered = scattered or any(name in part for part in objects for name in MORE_PROPERTIES)
    for part in objects:
        listed = part.get("properties", {})
        required = part.get("required", [])
        is_listed = isinstance(required, list) and all(name in list(listed) for name in required)
        if (listed or "patternProperties" in part) and is_listed and not scattered:
            part.setdefault("additionalProperties", False)
    return schema


def parts_of(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all objects in it that may be schemas, whether or not they are well formed."""
    stack = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            stack += part
        if not isinstance(part, dict):
            continue
        yield part
        for name, value in part.items():
            if name in NAMED and isinstance(value, dict):
                stack += value.values()
            elif name not in DATA:
                stack.append(value)


def _has_type(part: dict[str, Any], name: str) -> bool:
    types = part.get("type")
    return types == name or (isinstance(types, list) and name in types)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _count(part: dict[str, Any], name: str, default: int = 0) -> int:
    value = part.get(name)
    return value if isinstance(value, int) else default
