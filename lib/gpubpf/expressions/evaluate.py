"""Evaluate an expression on the host, with the same results as the C text that c_text.py makes of it.

Expressions over launches are evaluated here, because launches are known from the operation log, not from a device program.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpubpf.expressions.syntax import CASTS, MASK, Binary, Call, Conditional, Name, Node, Number, Unary


def signed(value: int) -> int:
    """Return the low 64 bits of a number as a signed number."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def evaluate(node: Node, values: Mapping[str, int]) -> int:
    """Return the value of an expression, from 0 to 2**64 - 1. `values`: the values of its names, in the same range."""
    match node:
        case Number():
            return node.value
        case Name():
            return values[node.name] & MASK
        case Call():
            argument = evaluate(node.argument, values)
            if bits := CASTS.get(node.function):
                low = argument & (1 << bits) - 1
                return (low - (low >> bits - 1 << bits)) & MASK
            return argument.bit_count() if node.function == "popcount" else max(0, argument.bit_length() - 1)
        case Unary():
            operand = evaluate(node.operand, values)
            return {"-": -operand & MASK, "~": ~operand & MASK, "!": int(not operand)}[node.operator]
        case Conditional():
            return evaluate(node.yes if evaluate(node.condition, values) else node.no, values)
        case Binary():
            return _binary(node, evaluate(node.left, values), evaluate(node.right, values)) & MASK


def _binary(node: Binary, left: int, right: int) -> int:
    if node.signed:
        left, right = signed(left), signed(right) if node.operator not in ("<<", ">>") else right
    match node.operator:
        case "||":
            return int(bool(left) or bool(right))
        case "&&":
            return int(bool(left) and bool(right))
        case "|":
            return left | right
        case "^":
            return left ^ right
        case "&":
            return left & right
        case "==":
            return int(left == right)
        case "!=":
            return int(left != right)
        case "<":
            return int(left < right)
        case "<=":
            return int(left <= right)
        case ">":
            return int(left > right)
        case ">=":
            return int(left >= right)
        case "<<":
            return left << (right & 63)
        case ">>":
            return left >> (right & 63)
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
    if not right:
        return 0 if node.operator == "/" else left
    quotient = abs(left) // abs(right) * (-1 if (left < 0) != (right < 0) else 1)  # C rounds towards 0
    return quotient if node.operator == "/" else left - quotient * right
