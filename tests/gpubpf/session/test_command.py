"""The environment of a command."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpubpf.session.command import rocr_tool


@pytest.mark.parametrize(
    ("library", "environment", "variables"),
    [
        ("/opt/a/lib.so", {}, {"HSA_TOOLS_LIB": "/opt/a/lib.so"}),
        ("/opt/a/lib.so", {"HSA_TOOLS_LIB": "one two"}, {"HSA_TOOLS_LIB": "one two /opt/a/lib.so"}),
        ("/opt/a b/lib.so", {}, {"HSA_TOOLS_LIB": "lib.so", "LD_LIBRARY_PATH": "/opt/a b"}),
        (
            "/opt/a b/lib.so",
            {"HSA_TOOLS_LIB": "one", "LD_LIBRARY_PATH": "/x:/y"},
            {"HSA_TOOLS_LIB": "one lib.so", "LD_LIBRARY_PATH": "/opt/a b:/x:/y"},
        ),
    ],
)
def test_rocr_loads_the_agent_from_any_path(
    library: str, environment: dict[str, str], variables: dict[str, str]
) -> None:
    assert rocr_tool(Path(library), environment) == variables
