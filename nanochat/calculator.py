"""The calculator that a chat model calls: an expression in, its value as text out, or None.

The text is cut into tokens from an allow-list, parsed with Python's `ast`, and evaluated node by node from a second
allow-list; Python itself never evaluates anything. Caps on length, nesting and size keep every input far below 10 ms.
Calls share no state, so threads need no lock.
"""

import ast
import operator
import re
from decimal import Context, Decimal, InvalidOperation, Overflow, Underflow
from fractions import Fraction

MAX_LENGTH = 400  # characters of an expression
MAX_DEPTH = 100  # nested nodes; a sum of N terms is N deep
MAX_DIGITS = 100  # in every intermediate number, and so in the answer
MAX_POWER_BITS = 2000  # in a power that is computed exactly
ROUNDED_DIGITS = 40  # significant digits of a number whose exact fraction would be too long
ROOT_DIGITS = 25  # for other powers: roots take 0.04 ms, with 40 digits 0.07 ms
PRINTED_DIGITS = 15  # the precision of a double: rounding errors of the digits above never show

# Text has no backslash: Python warns about unknown escapes, and counting letters needs none.
TOKEN = re.compile(
    r"""
    (?P<text>      "[^"\\\n]*" | '[^'\\\n]*' )
  | (?P<grouped>   (?<![\d.,]) [0-9]{1,3} (?:,[0-9]{3})+ (?![\d,]) )
  | (?P<number>    (?:[0-9]+\.?[0-9]*|\.[0-9]+) (?:[eE][+-]?[0-9]+)? )
  | (?P<count>     \.count\b )
  | (?P<operator>  \*\*|//|[-+*/%()]|[ \t]+ )
  | (?P<other>     . )
    """,
    re.VERBOSE | re.DOTALL,
)


# Possible ends of an unfinished expression, whose last token is incomplete.
UNFINISHED = re.compile(
    r"""(?: "[^"\\\n]* | '[^'\\\n]* | \.c?o?u?n?t? | (?:,[0-9]{3})*,[0-9]{0,2} | [eE][+-]? | = )[ \t]*\Z""",
    re.VERBOSE,
)


class NoAnswer(Exception):
    """The expression is not allowed, or has no value."""


def calculate(expression: str) -> str | None:
    """The value of an arithmetic expression as text; None if it is not allowed or has no value. It never raises.

    Allowed: whole and decimal numbers (`12`, `1,234.5`, `.5`, `2e3`), `+ - * / // % **`, signs, parentheses,
    `"text".count("x")`, and one `=` at the end. `//` and `%` round down as Python's do.

    Numbers are exact fractions, so that `100.1 - 100` is `0.1` and `1/3*3` is `1`. An answer has at most 15
    significant digits and no trailing zeros; a whole one has all its digits and no point (`6/2` is `3`); one below a
    millionth has an exponent (`1e-07`).
    """
    if not isinstance(expression, str) or len(expression) > MAX_LENGTH:
        return None
    try:
        python = _to_python(expression.strip().removesuffix("=").strip())
        tree = ast.parse(python, mode="eval")
        return _format(_evaluate(tree.body, MAX_DEPTH))
    except (NoAnswer, SyntaxError, ValueError, ArithmeticError, MemoryError, RecursionError):
        return None


def can_continue(text: str) -> bool:
    """Whether an expression that `calculate` accepts may begin with this text; False if that is impossible.

    Otherwise a model that writes prose into a call would continue to the end of its reply.
    """
    text = text.strip()
    if len(text) > MAX_LENGTH:
        return False
    for token in TOKEN.finditer(text):
        if token.lastgroup == "other":
            return UNFINISHED.match(text, token.start()) is not None
    return True


def _to_python(text: str) -> str:
    """The expression without thousands separators. Unlisted tokens and deep nesting never reach Python's parser."""
    if text.count("(") > MAX_DEPTH:
        raise NoAnswer
    parts = []
    for token in TOKEN.finditer(text):
        if token.lastgroup == "other":
            raise NoAnswer
        parts.append(token[0].replace(",", "") if token.lastgroup == "grouped" else token[0])
    return "".join(parts)


def _evaluate(node: ast.expr, depth: int) -> Fraction:
    if depth == 0:
        raise NoAnswer
    match node:
        case ast.Constant(value=int() | float() as value):
            return _checked(Fraction(repr(value)))  # the shortest decimal with this value, as it was typed
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _evaluate(operand, depth - 1)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, depth - 1)
        case ast.BinOp(left=left, op=operation, right=right):
            compute = OPERATIONS[type(operation)]
            return _checked(Fraction(compute(_evaluate(left, depth - 1), _evaluate(right, depth - 1))))
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str(text)), attr="count"),
            args=[ast.Constant(value=str(part))],
            keywords=[],
        ):
            return Fraction(text.count(part))
    raise NoAnswer


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    bits = abs(exponent) * max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator == 1 and bits <= MAX_POWER_BITS:
        return base ** int(exponent)
    power = _context(ROOT_DIGITS).power(_rounded(base, ROUNDED_DIGITS), _rounded(exponent, ROUNDED_DIGITS))
    return Fraction(power)


OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


def _checked(value: Fraction) -> Fraction:
    """The value, rounded if its fraction is long. Raises NoAnswer: when it is too large."""
    if abs(value) >= 10**MAX_DIGITS:
        raise NoAnswer
    if value.denominator >= 10**MAX_DIGITS:
        return Fraction(_rounded(value, ROUNDED_DIGITS))
    return value


def _rounded(value: Fraction, digits: int) -> Decimal:
    """The value with this many digits. Raises ArithmeticError: when it is too small for MAX_DIGITS."""
    return _context(digits).divide(Decimal(value.numerator), Decimal(value.denominator))


def _context(digits: int) -> Context:
    """A new decimal context for each operation, because an operation writes to its flags."""
    return Context(prec=digits, Emin=-MAX_DIGITS, Emax=MAX_DIGITS, traps=[InvalidOperation, Overflow, Underflow])


def _format(value: Fraction) -> str:
    short = _rounded(value, PRINTED_DIGITS)
    if short == short.to_integral_value():
        return str(round(value))
    if abs(short) < Decimal("1e-6"):
        mantissa, exponent = f"{short:e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent):03d}"
    return f"{short:f}".rstrip("0").rstrip(".")
