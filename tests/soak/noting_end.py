"""noting_end.py FILE TOOL ARGUMENTS: run a tool, and write into FILE when its measurement ended (CLOCK_MONOTONIC, in ns)."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from gpubpf.traced.measurement import Measurement

end = Measurement.end
noted = Path(sys.argv[1])


def note(measurement: Measurement) -> None:
    end(measurement)
    noted.write_text(str(measurement.ended_ns))


Measurement.end = note  # type: ignore[method-assign]
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
