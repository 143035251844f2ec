"""Number the probe sites and the slots of addresses while the functions of a module are rewritten."""

from __future__ import annotations

from collections.abc import Mapping

from gpubpf.ptx.indirect import Entry
from gpubpf.record import replace

from .values import Site


class SiteTable:
    """The probe sites of a module, by the new name of the function that contains them.

    Sites in called functions are numbered first. Each kernel continues from there, so kernels may use the same numbers.
    """

    def __init__(self, files: Mapping[int, str]) -> None:
        """Start without sites. `files`: names of source files by their number in `.file` directives."""
        self.files = files
        self.count = 0  # the next number; reset before each kernel to the number of sites in called functions
        self._by_function: dict[str, list[Site]] = {}

    def add(self, new_name: str, site: Site, source: tuple[int, int]) -> int:
        """Add a site with its number and source, and return the number.

        source: the file number and the line; 0 if unknown
        """
        file = self.files.get(source[0], "")
        number, self.count = self.count, self.count + 1
        made = replace(site, number=number, source=file, source_line=source[1] if file else 0)
        self._by_function.setdefault(new_name, []).append(made)
        return number

    def of(self, new_names: set[str]) -> tuple[Site, ...]:
        """Return the sites in these functions, by number."""
        found = (site for name in new_names for site in self._by_function.get(name, ()))
        return tuple(sorted(found, key=lambda site: site.number))


class VariableTable:
    """The module-scope variables that rewritten functions use, and the entries of tables with addresses of functions."""

    def __init__(self) -> None:
        self.slots: dict[str | Entry, int] = {}  # by name or entry: the index in the table of addresses
        self.kept: set[str] = set()  # declared in the sidecar as in the original, such as shared memory

    def offset(self, what: str | Entry) -> int:
        """Return the offset of a variable's or function's address in the table of addresses, in bytes. Adds a new address."""
        return 8 * self.slots.setdefault(what, len(self.slots))
