"""The calculator a chat model calls: an expression in, its answer as text out, or None.

The text is cut into tokens from an allow-list, parsed with Python's `ast`, and walked node by node from a second
allow-list; nothing is ever evaluated by Python itself. Caps on length, nesting and size keep every input far below
10 ms. No state is shared between calls, so threads need no lock.
"""

import ast
import math
import re
from decimal import Context, Decimal, DivisionByZero, InvalidOperation, Overflow, Underflow

MAX_LENGTH = 400  # characters of an expression
MAX_DEPTH = 100  # nested nodes; a sum of N terms is N deep
MAX_DIGITS = 100  # of any number on the way, and so of the answer
WORKING_DIGITS = 40  # significant digits of a number with a decimal point
PRINTED_DIGITS = 15  # what a double is good for: errors of the working digits never show

Number = int | Decimal

# A backslash stays out of text: Python warns about unknown escapes, and counting letters needs none.
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
    """The expression is not allowed, or has no answer."""


def calculate(expression: str) -> str | None:
    """The answer of an arithmetic expression as text; None where it is not allowed or has no answer.

    Allowed: whole and decimal numbers (`12`, `1,234.5`, `.5`, `2e3`), `+ - * / // % **`, signs, parentheses,
    `"text".count("x")`, and one `=` at the end. `//` and `%` round down as Python's do.

    Whole numbers are exact. Others are decimal, not binary, and carry 40 digits (17 where they are typed or come from
    a broken power), so that `100.1 - 100` is `0.1`. An answer is printed with at most 15 significant digits and no
    trailing zeros; a whole one with all its digits and no point (`6/2` and `1.5*2` are `3`), one below a millionth
    with an exponent (`1e-07`).

    No answer: dividing by zero, the root of a negative number, anything of more than 100 digits on either side of the
    point, more than 400 characters. It never raises.
    """
    if not isinstance(expression, str) or len(expression) > MAX_LENGTH:
        return None
    try:
        tree = ast.parse(_python(expression.strip().removesuffix("=").strip()), mode="eval")
        # A context of its own: its flags are written to, and threads share nothing.
        context = Context(
            prec=WORKING_DIGITS,
            Emin=-MAX_DIGITS,
            Emax=MAX_DIGITS - 1,
            traps=[DivisionByZero, InvalidOperation, Overflow, Underflow],
        )
        return _text(_value(tree.body, context, MAX_DEPTH), context)
    except (NoAnswer, SyntaxError, ValueError, ArithmeticError, MemoryError, RecursionError):
        return None


def _python(text: str) -> str:
    """The expression without thousands separators; refuses every token that is not listed, and deep parentheses,
    before Python's parser sees them."""
    parts, depth = [], 0
    for token in TOKEN.finditer(text):
        part = token[0]
        if token.lastgroup == "other":
            raise NoAnswer
        depth += (part == "(") - (part == ")")
        if depth > MAX_DEPTH:
            raise NoAnswer
        parts.append(part.replace(",", "") if token.lastgroup == "grouped" else part)
    return "".join(parts)


def _value(node: ast.expr, context: Context, depth: int) -> Number:
    if depth == 0:
        raise NoAnswer
    match node:
        case ast.Constant(value=int() | float() as value):
            # A float's repr is the shortest decimal that names it: what was typed.
            return _checked(value if isinstance(value, int) else context.create_decimal(repr(value)))
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, context, depth - 1)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _value(operand, context, depth - 1)
            return -value if isinstance(value, int) else context.minus(value)
        case ast.BinOp(left=left, op=operator, right=right):
            left_value, right_value = _value(left, context, depth - 1), _value(right, context, depth - 1)
            return _checked(_binary(left_value, operator, right_value, context))
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str(text)), attr="count"),
            args=[ast.Constant(value=str(part))],
            keywords=[],
        ):
            return text.count(part)
    raise NoAnswer


def _binary(left: Number, operator: ast.operator, right: Number, context: Context) -> Number:
    if isinstance(left, int) and isinstance(right, int):
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
                if right * (abs(left).bit_length() - 1) > MAX_DIGITS * 4:  # it has at least so many bits: too many
                    raise NoAnswer
                return left**right
    left, right = context.create_decimal(left), context.create_decimal(right)
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
            quotient, rest = context.divmod(left, right)  # rounds to zero
            if rest and (rest < 0) != (right < 0):
                quotient, rest = context.subtract(quotient, Decimal(1)), context.add(rest, right)
            return quotient if isinstance(operator, ast.FloorDiv) else rest
        case ast.Pow():
            if right == 0:
                return 1  # decimal has no answer to 0**0
            if right == right.to_integral_value():
                return context.power(left, right)
            return context.create_decimal(repr(math.pow(left, right)))  # 40 digits of a root would take 0.1 ms
    raise NoAnswer


def _checked(value: Number) -> Number:
    """Raises NoAnswer: where the number is not finite or too long."""
    # the context's exponents bound the size of a Decimal
    if not (value.is_finite() if isinstance(value, Decimal) else abs(value) < 10**MAX_DIGITS):
        raise NoAnswer
    return value


def _text(value: Number, context: Context) -> str:
    if isinstance(value, Decimal):
        short = Context(prec=PRINTED_DIGITS).plus(value)
        if value == value.to_integral_value() or short == short.to_integral_value():
            value = int(value.to_integral_value())
        elif abs(short) < Decimal("1e-6"):
            mantissa, exponent = f"{short:e}".split("e")
            return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent):03d}"
        else:
            return f"{short:f}".rstrip("0").rstrip(".")
    return str(value)
