"""Only the command line has parsed arguments as a namespace. Every other stage takes a group of options, which never changes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LIBRARY = ROOT / "lib" / "gpubpf"
# Modules that turn words into options: the parser, the groups, and the subcommands of gpubpf.
COMMAND_LINE = {
    "calls/snoop_options.py",
    "check/command.py",
    "exporter/command.py",
    "mcp/command.py",
    "memory/memory_options.py",
    "query/command.py",
    "query/difference_command.py",
    "report/command.py",
    "show/command_line.py",
    "show/options.py",
    "show/parsed.py",
}


def modules() -> dict[str, ast.AST]:
    """Return the library's modules that have a word of a command line, by path."""
    texts = {path.relative_to(LIBRARY).as_posix(): path.read_text() for path in LIBRARY.rglob("*.py")}
    return {
        path: ast.parse(text)
        for path, text in texts.items()
        if not path.startswith("tools/") and re.search(r"\b(args|Namespace)\b", text)
    }


def namespaces(tree: ast.AST) -> bool:
    """Return whether code names argparse's namespace."""
    return any(
        (isinstance(node, ast.Attribute) and node.attr == "Namespace")
        or (isinstance(node, ast.alias) and node.name == "Namespace")
        for node in ast.walk(tree)
    )


def by_name(tree: ast.AST) -> list[int]:
    """Return the lines that take an argument by a name that is computed, or change an argument."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr", "setattr", "vars")
            and isinstance(node.args[0], ast.Name)
            and node.args[0].id == "args"
        )
        or (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "args"
        )
    ]


def test_what_is_not_allowed_is_found() -> None:
    assert namespaces(ast.parse("def f(args: argparse.Namespace): pass"))
    assert namespaces(ast.parse("from argparse import Namespace"))
    wrong = "args.kernel = []\ngetattr(args, 'out', None)\nargs.allocations &= True"
    assert sorted(by_name(ast.parse(wrong))) == [1, 2, 3]
    assert not by_name(ast.parse("print(args.kernel)\ngetattr(b, 'attach')"))


def test_only_the_command_line_has_a_namespace() -> None:
    found = modules()
    assert {path for path, tree in found.items() if namespaces(tree)} == COMMAND_LINE
    assert {path for path, tree in found.items() if by_name(tree)} <= {
        "show/command_line.py",
        "show/parsed.py",
    }


def test_a_tool_hands_on_no_namespace_and_changes_none() -> None:
    tools = sorted((ROOT / "tools").glob("*.py"))
    assert len(tools) > 15
    for tool in tools:
        tree = ast.parse(tool.read_text())
        assert not namespaces(tree), f"{tool.name} hands on its parsed arguments; hand on a group of options"
        assert not (lines := by_name(tree)), f"{tool.name}: lines {lines}"
