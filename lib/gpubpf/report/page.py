"""Write a report as one HTML page: the template, the libraries and the facts, all inside. The page loads nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import zlib
from collections.abc import Mapping
from typing import Any

from gpubpf import __version__
from gpubpf.show.table import printable

_HERE = os.path.dirname(__file__)
_SCRIPTS = ("vendor/uPlot.iife.min.js", "vendor/tabulator.min.js", "page.js")
_STYLES = ("vendor/uPlot.min.css", "vendor/tabulator_simple.min.css", "page.css")
_LICENSES = ("vendor/uPlot.LICENSE.txt", "vendor/tabulator.LICENSE.txt")


def text(facts: Mapping[str, Any], title: str) -> str:
    """Return the page.

    facts: what `facts.gather` returns.
    title: the title of the page.

    Names in the facts come from traced programs. They are compressed and encoded in base64, and the page's script only uses them as
    text. The browser runs no other script: the page's policy has the hashes of these.
    """
    scripts = [_read(name) for name in _SCRIPTS]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    policy = "; ".join(
        (
            "default-src 'none'",
            "script-src " + " ".join(f"'sha256-{one}'" for one in hashes),
            "style-src 'unsafe-inline'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    packed = base64.b64encode(zlib.compress(json.dumps(facts, separators=(",", ":")).encode(), 9)).decode()
    parts = {
        "policy": policy,
        "title": html.escape(printable(title)),
        "version": html.escape(__version__),
        "licenses": html.escape("\n\n".join(map(_read, _LICENSES))),
        "styles": "\n".join(f"<style>{_read(name)}</style>" for name in _STYLES),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
        "facts": packed,
    }
    return re.sub(r"@(\w+)@", lambda found: parts[found[1]], _read("page.html"))


def _read(name: str) -> str:
    """Return a file of this package, without the line that names a source map, which the page does not have."""
    with open(os.path.join(_HERE, name), encoding="utf-8") as file:
        lines = file.read().split("\n")
    return "\n".join(
        line for line in lines if not line.startswith(("//# sourceMappingURL", "/*# sourceMapping"))
    )
