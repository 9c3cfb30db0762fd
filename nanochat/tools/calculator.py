"""The calculator that a chat model calls: an expression in, its value as text out, or None.

The text is cut into tokens from an allow-list, parsed with Python's `ast`, and evaluated node by node from a second
allow-list; Python itself never evaluates anything. Caps on length, nesting and size keep every input far below 10 ms.
Calls share no state, so threads need no lock.
"""

import ast
import math
import re
from decimal import Context, Decimal, DivisionByZero, InvalidOperation, Overflow, Underflow

MAX_LENGTH = 400  # characters of an expression
MAX_DEPTH = 100  # nested nodes; a sum of N terms is N deep
MAX_DIGITS = 100  # of every intermediate number, and so of the answer
WORKING_DIGITS = 40  # significant digits of a number with a decimal point
PRINTED_DIGITS = 15  # the precision of a double: rounding errors of the working digits never show

Number = int | Decimal

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


class NoAnswer(Exception):
    """The expression is not allowed, or has no value."""


def calculate(expression: str) -> str | None:
    """The value of an arithmetic expression as text; None where it is not allowed or has no value. It never raises.

    Allowed: whole and decimal numbers (`12`, `1,234.5`, `.5`, `2e3`), `+ - * / // % **`, signs, parentheses,
    `"text".count("x")`, and one `=` at the end. `//` and `%` round down as Python's do.

    Whole numbers are exact. Others are decimal, not binary, so that `100.1 - 100` is `0.1`. An answer has at most 15
    significant digits and no trailing zeros; a whole one has all its digits and no point (`6/2` is `3`); one below a
    millionth has an exponent (`1e-07`).
    """
    if not isinstance(expression, str) or len(expression) > MAX_LENGTH:
        return None
    # Every call has a context of its own, because operations write to its flags.
    context = Context(
        prec=WORKING_DIGITS,
        Emin=-MAX_DIGITS,
        Emax=MAX_DIGITS - 1,
        traps=[DivisionByZero, InvalidOperation, Overflow, Underflow],
    )
    try:
        python = _to_python(expression.strip().removesuffix("=").strip())
        tree = ast.parse(python, mode="eval")
        return _format(_evaluate(tree.body, context, MAX_DEPTH))
    except (NoAnswer, SyntaxError, ValueError, ArithmeticError, MemoryError, RecursionError):
        return None


def _to_python(text: str) -> str:
    """The expression without thousands separators. Unlisted tokens and deep parentheses never reach Python's parser."""
    parts = []
    depth = 0
    for token in TOKEN.finditer(text):
        part = token[0]
        if token.lastgroup == "other":
            raise NoAnswer
        if token.lastgroup == "grouped":
            part = part.replace(",", "")
        if part == "(":
            depth += 1
        elif part == ")":
            depth -= 1
        if depth > MAX_DEPTH:
            raise NoAnswer
        parts.append(part)
    return "".join(parts)


def _evaluate(node: ast.expr, context: Context, depth: int) -> Number:
    if depth == 0:
        raise NoAnswer
    match node:
        case ast.Constant(value=int() as value):
            return _checked(value)
        case ast.Constant(value=float() as value):
            return _checked(context.create_decimal(repr(value)))  # the shortest decimal that names it: what was typed
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _evaluate(operand, context, depth - 1)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _evaluate(operand, context, depth - 1)
            return -value if isinstance(value, int) else context.minus(value)
        case ast.BinOp(left=left, op=operator, right=right):
            first = _evaluate(left, context, depth - 1)
            second = _evaluate(right, context, depth - 1)
            value = None
            if isinstance(first, int) and isinstance(second, int):
                value = _whole(first, operator, second)
            if value is None:
                value = _decimal(context.create_decimal(first), operator, context.create_decimal(second), context)
            return _checked(value)
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str(text)), attr="count"),
            args=[ast.Constant(value=str(part))],
            keywords=[],
        ):
            return text.count(part)
    raise NoAnswer


def _whole(left: int, operator: ast.operator, right: int) -> int | None:
    """The exact value of two whole numbers; None where it is not whole."""
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.FloorDiv():
            return left // right
        case ast.Mod():
            return left % right
        case ast.Div() if left % right == 0:
            return left // right
        case ast.Pow() if right >= 0:
            least_bits = right * (abs(left).bit_length() - 1)
            if least_bits > MAX_DIGITS * 4:  # certainly too long: do not even compute it
                raise NoAnswer
            return left**right
    return None


def _decimal(left: Decimal, operator: ast.operator, right: Decimal, context: Context) -> Number:
    match operator:
        case ast.Add():
            return context.add(left, right)
        case ast.Sub():
            return context.subtract(left, right)
        case ast.Mult():
            return context.multiply(left, right)
        case ast.Div():
            return context.divide(left, right)
        case ast.FloorDiv() | ast.Mod():
            quotient, rest = context.divmod(left, right)  # rounds towards zero
            if rest and (rest < 0) != (right < 0):
                quotient = context.subtract(quotient, Decimal(1))
                rest = context.add(rest, right)
            return quotient if isinstance(operator, ast.FloorDiv) else rest
        case ast.Pow() if right == 0:
            return 1  # decimal has no value for 0**0
        case ast.Pow() if right == right.to_integral_value():
            return context.power(left, right)
        case ast.Pow():
            return context.create_decimal(repr(math.pow(left, right)))  # a root of 40 digits would take 0.1 ms
    raise NoAnswer


def _checked(value: Number) -> Number:
    """Raises NoAnswer: where the number is not finite or too long."""
    # The context's exponents bound the size of a Decimal.
    in_range = abs(value) < 10**MAX_DIGITS if isinstance(value, int) else value.is_finite()
    if not in_range:
        raise NoAnswer
    return value


def _format(value: Number) -> str:
    if isinstance(value, int):
        return str(value)
    short = Context(prec=PRINTED_DIGITS).plus(value)
    if short == short.to_integral_value():
        return str(int(value.to_integral_value()))
    if abs(short) < Decimal("1e-6"):
        mantissa, exponent = f"{short:e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent):03d}"
    return f"{short:f}".rstrip("0").rstrip(".")
