"""Write an expression as C: every operation on u64, without branches, and with the functions of ARITHMETIC."""

from __future__ import annotations

from collections.abc import Mapping

from gpubpf.expressions.syntax import CASTS, TRUTH, Binary, Call, Conditional, Name, Node, Number, Unary

# eBPF has no signed division, and C does not define a division by 0. There are no branches: lanes that diverge may not reconverge, and
# code after the expressions looks at the lanes of a warp.
ARITHMETIC = """
static inline u64 gpu_divide(u64 a, u64 b) {
    u64 zero = !b;
    return a / (b | zero) & (zero - 1);
}
static inline u64 gpu_remainder(u64 a, u64 b) { return a - gpu_divide(a, b) * b; }
static inline u64 gpu_sign(u64 a) { return (u64)((s64)a >> 63); }              /* all bits, or none */
static inline u64 gpu_with_sign(u64 a, u64 sign) { return (a ^ sign) - sign; }
static inline u64 gpu_divide_signed(u64 a, u64 b) {
    u64 quotient = gpu_divide(gpu_with_sign(a, gpu_sign(a)), gpu_with_sign(b, gpu_sign(b)));
    return gpu_with_sign(quotient, gpu_sign(a ^ b));
}
static inline u64 gpu_remainder_signed(u64 a, u64 b) { return a - gpu_divide_signed(a, b) * b; }
static inline u64 gpu_select(u64 condition, u64 yes, u64 no) { return no ^ ((yes ^ no) & -(u64)!!condition); }
"""
_FUNCTIONS = {"popcount": "gpu_popcount", "log2": "gpu_log2"}
_HELPERS = {"/": "gpu_divide", "%": "gpu_remainder"}
_SIGNED_HELPERS = {"/": "gpu_divide_signed", "%": "gpu_remainder_signed"}


def c_text(node: Node, names: Mapping[str, str]) -> str:
    """Return C text for an expression, of type u64, in brackets if necessary. `names`: the C text of each name."""

    def text(part: Node) -> str:
        return c_text(part, names)

    match node:
        case Number():
            return f"{node.value}ull"
        case Name():
            return names[node.name]
        case Call():
            if node.function in CASTS:
                return f"(u64)({node.function})({text(node.argument)})"
            return f"(u64){_FUNCTIONS[node.function]}({text(node.argument)})"
        case Unary():
            return f"(u64)({node.operator}{text(node.operand)})"
        case Conditional():
            return f"gpu_select({text(node.condition)}, {text(node.yes)}, {text(node.no)})"
        case Binary():
            return _binary(node, text(node.left), text(node.right))


def _binary(node: Binary, left: str, right: str) -> str:
    operator = node.operator
    if operator in _HELPERS:
        return f"{(_SIGNED_HELPERS if node.signed else _HELPERS)[operator]}({left}, {right})"
    if operator in ("<<", ">>"):
        shifted = f"(s64){left}" if operator == ">>" and node.signed else left
        return f"(u64)({shifted} {operator} ({right} & 63))"
    if operator in ("<", "<=", ">", ">=") and node.signed:
        left, right = f"(s64){left}", f"(s64){right}"
    if operator in ("&&", "||"):
        return f"(u64)(!!{left} {operator[0]} !!{right})"
    return f"(u64)({left} {operator} {right})" if operator in TRUTH else f"({left} {operator} {right})"
