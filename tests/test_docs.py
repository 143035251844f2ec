"""The documentation: links and anchors lead somewhere, files that it names exist, and every tool has a page.

script/docs checks links as well, when it builds the site; this test needs nothing installed. tests/test_written.py runs
what is shown.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.md"))
LINKED = [*PAGES, *(name for name in ("README.md", "CONTRIBUTING.md") if (ROOT / name).exists())]
LONGEST = 100
# Where the files are that pages name by a path.
PLACES = [
    ROOT,
    ROOT / "lib",
    ROOT / "lib/gpubpf",
    ROOT / "lib/gpubpf/agent",
    ROOT / "lib/cudasim",
    ROOT / "lib/hipsim",
]
SOURCES = ("lib", "tests", "tools", "script", "benchmarks", "man")
SUFFIXES = {".py", ".h", ".cpp", ".c", ".cu", ".def", ".8", ".txt", ""}

_FENCE = re.compile(r"^ *(```|~~~)")
_HEADING = re.compile(r"^#+ +(.*?) *#*$")
_CODE = re.compile(r"`[^`]*`")
_LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)>\s]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_FILE = re.compile(r"(?<![\w./*-])((?:[\w.-]+/)+[\w-]+\.(?:py|h|cpp|c|cu|def|js))\b(?![\w/])")
_CITED = re.compile(r'\bdocs/([\w/-]+\.md)(?:, "([^"]+)")?')


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def outside_fences(page: str) -> list[str]:
    """Return the lines of a page that are not in a fenced code block."""
    lines, inside = [], False
    for line in text_of(page).splitlines():
        if _FENCE.match(line):
            inside = not inside
        elif not inside:
            lines.append(line)
    return lines


@cache
def headings(page: str) -> list[str]:
    return [found[1] for line in outside_fences(page) if (found := _HEADING.match(line))]


def on_github(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")


def on_the_site(heading: str) -> str:
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower())


def links(page: str) -> list[str]:
    """Return the targets of a page's links that are not addresses on the web."""
    text = _CODE.sub("", "\n".join(outside_fences(page)))
    return [target for target in _LINK.findall(text) if not re.match(r"[a-z]+:", target)]


@pytest.mark.parametrize("page", LINKED)
def test_links_lead_somewhere(page: str) -> None:
    broken = []
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        if not target.exists():
            broken.append(f"{link}: there is no such file")
        elif anchor and target.suffix == ".md":
            there = headings(target.resolve().relative_to(ROOT).as_posix())
            if not any(anchor == on_github(heading) == on_the_site(heading) for heading in there):
                broken.append(f"{link}: no heading there has this anchor")
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("page", PAGES)
def test_links_stay_in_the_site(page: str) -> None:
    """MkDocs knows the files below docs/ only."""
    outside = [
        link
        for link in links(page)
        if not ((ROOT / page).parent / link.partition("#")[0]).resolve().is_relative_to(DOCS)
    ]
    assert not outside, f"name these as code, not as links: {outside}"


@pytest.mark.parametrize("page", PAGES)
def test_lines_are_short(page: str) -> None:
    """Rows of tables may be longer, and words that cannot be broken, such as an address."""
    long = [
        f"{number}: {line}"
        for number, line in enumerate(text_of(page).splitlines(), 1)
        if len(line) > LONGEST
        and not line.lstrip().startswith("|")
        and not line.lstrip(" -*").startswith("[")
        if len(line.split()) > 1
    ]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    missing = {
        name for name in _FILE.findall(text_of(page)) if not any((place / name).exists() for place in PLACES)
    }
    assert not missing


def test_the_security_page_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    files = list((ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(?:tests/[\w/]+/)?(test_\w+\.py)`", text)
    assert len(named) >= 8 and set(named) <= {file.name for file in files}
    functions = {name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)}
    named = re.findall(r"`(test_\w+)`", text)
    assert len(named) >= 8 and set(named) <= functions


def _tracked(*folders: str) -> list[str]:
    """Return the paths of the files in git."""
    command = ["git", "-C", ROOT, "ls-files", "-z", *folders]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]


def _words(names: list[str]) -> set[str]:
    """Return the words in the paths of files, and in the files, except generated data."""
    sources = (ROOT / name for name in names if Path(name).suffix not in (".json", ".ptx", ".svg"))
    texts = (path.read_text(errors="replace") for path in sources if path.is_file())
    return {word for text in (*names, *texts) for word in re.findall(r"\w+", text)}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_what_contributing_names_exists() -> None:
    """Words in capital letters, such as NAME and POINT, stand for names of the reader's."""
    text = re.sub(
        r"^    .*$", "", text_of("CONTRIBUTING.md"), flags=re.M
    )  # commands of several words are run elsewhere
    quoted = [name for name in re.findall(r"`([^`\n]+)`", text) if re.fullmatch(r"[\w.]+(\(.*\))?", name)]
    stands = re.compile(r"(^|_)(NAME|POINT|FILE|OPCODE)(_|$)")
    words = {word for name in quoted for word in re.findall(r"[A-Za-z_]\w+", name) if not stands.search(word)}
    known = _words(_tracked("lib", "tests", "tools", "script", "benchmarks", "pyproject.toml"))
    assert len(words) > 80
    assert not words - known


def test_contributing_lists_the_packages_in_the_order_of_their_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [set(layer.replace("gpubpf.", "").split(" | ")) for layer in contracts[0]["layers"]]
    rows = re.findall(r"^\| (\d+) \| `(\w+?)(?:\.py)?` \|", text_of("CONTRIBUTING.md"), flags=re.M)
    table: dict[int, set[str]] = {}
    for number, package in rows:
        table.setdefault(int(number), set()).add(package)
    table[1].remove("tools")  # which is a link to another folder
    assert [table[number] for number in sorted(table)] == layers
    inside = {path.stem for path in (ROOT / "lib/gpubpf").iterdir() if path.suffix in ("", ".py")}
    assert inside - {"__init__", "__main__", "__pycache__", "include", "tools"} == set().union(*layers)


def test_sections_that_sources_cite_exist() -> None:
    """Comments and man pages cite `docs/timing.md, "Clocks"`."""
    missing = []
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*"):
            if (
                path.suffix not in SUFFIXES
                or not path.is_file()
                or path.is_symlink()
                or path == Path(__file__)
            ):
                continue
            try:
                text = path.read_text()
            except UnicodeDecodeError:
                continue  # a program that was built
            if "docs/" not in text:
                continue
            text = re.sub(
                r"\s*\n\s*(?://|#|\*|\.\\\")?\s*", " ", text
            )  # a sentence may go on in the next line
            for page, heading in _CITED.findall(text):
                if not (DOCS / page).exists():
                    missing.append(f"{path.relative_to(ROOT)}: there is no docs/{page}")
                elif heading and heading not in headings(f"docs/{page}"):
                    missing.append(f"{path.relative_to(ROOT)}: docs/{page} has no section {heading!r}")
    assert not missing, "\n".join(missing)


def test_every_tool_has_a_page() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    pages = {path.stem: path for path in (DOCS / "tools").glob("*.md") if path.stem != "index"}
    assert set(pages) == set(scripts)
    for name, path in pages.items():
        assert path.read_text().startswith(f"# {name}\n") and f"{name}(8)" in path.read_text()
        assert f"]({name}.md)" in (DOCS / "tools" / "index.md").read_text()


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    names = {Path(page).relative_to("docs").as_posix() for page in PAGES}
    assert set(re.findall(r"[\w/-]+\.md", navigation)) == names
