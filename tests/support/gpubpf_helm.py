"""The part of Helm's templates that deploy/helm uses: values, `toYaml … | nindent N`, and `if` without `else`."""

from __future__ import annotations

import re
from functools import reduce
from typing import Any

import yaml

_ACTION = re.compile(r"\{\{-?\s*(.*?)\s*-?\}\}")


def render(template: str, values: dict[str, Any], release: dict[str, str]) -> str:
    """Return a rendered template. Raises ValueError for what is not in the part of the language."""
    scope = {"Values": values, "Release": release}
    lines, shown = [], [True]
    for line in template.splitlines():
        stripped = line.strip()
        if found := re.fullmatch(r"\{\{-? if (\S+) -?\}\}", stripped):
            shown.append(shown[-1] and bool(_value(found[1], scope)))
        elif re.fullmatch(r"\{\{-? end -?\}\}", stripped):
            shown.pop()
        elif shown[-1]:
            lines.append(_ACTION.sub(lambda found: _text(found[1], scope), line))
    if shown != [True]:
        raise ValueError("an if without its end")
    return "".join(f"{line}\n" for line in lines)


def _text(action: str, scope: dict[str, Any]) -> str:
    if found := re.fullmatch(r"toYaml (\S+) \| nindent (\d+)", action):
        text = yaml.safe_dump(_value(found[1], scope), default_flow_style=False).rstrip("\n")
        return "\n" + "\n".join(" " * int(found[2]) + line for line in text.split("\n"))
    return str(_value(action, scope))


def _value(path: str, scope: dict[str, Any]) -> Any:
    if not re.fullmatch(r"(\.\w+)+", path):
        raise ValueError(path)
    return reduce(lambda found, name: found[name], path[1:].split("."), scope)
