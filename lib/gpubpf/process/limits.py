"""What a process, a user and the machine may cost the tool. All limits are beyond what programs need; what exceeds one is reported.

A limit protects the tool from processes that it does not trust. So it belongs here, and not beside the code that enforces it: a
reader sees at once how much memory, time and how many files strangers can take.
"""

from __future__ import annotations

# --- one traced process ---

TEXT = 64 << 20  # bytes of names, reasons and stacks
PENDING = 4096  # images and modules without an answer
CONTEXTS = 4096
RINGS = 64
READINGS, READING_BYTES = 64, 256 << 20  # that the tool has not taken yet; older ones are dropped
SEND_WAIT = 5.0  # seconds to take a message; for a message to every process: for all of them together

# --- all traced processes ---

BUFFERED_RECORDS = 1 << 22  # log records that the tool has not taken yet

# --- processes of the machine that map a file named like a GPU driver ---

DRIVERS_OF_PROCESS = 16  # files that get a probe
DRIVERS_OF_USER = 64  # likewise; not for root, as containers often run as root
DRIVERS = 2048
UNMAPPED_DRIVERS = 64  # probed files that no process maps
