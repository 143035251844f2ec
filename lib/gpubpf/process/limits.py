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

GREETINGS = 64  # connections that have not said yet which GPUs they are for
CONNECTIONS_OF_PROCESS = (
    256  # in all: a process has another one after it executes a program or initializes ROCr again
)

# --- all traced processes ---

CONNECTIONS_OF_USER = 4096  # at the same time; not for root
CONNECTIONS = 16384  # at the same time
TEXTS = 512 << 20  # bytes of names, reasons and stacks
UNFINISHED = 512 << 20  # bytes of messages that have arrived in part
REFUSED = 1000  # processes of other users that are counted because they connected
SETTLE_WAIT = 0.5  # seconds to admit processes before the command's results are read

BUFFERED_RECORDS = 1 << 22  # log records that the tool has not taken yet

# --- processes of the machine that map a file named like a GPU driver ---

DRIVERS_OF_PROCESS = 16  # files that get a probe
DRIVERS_OF_USER = 64  # likewise; not for root, as containers often run as root
DRIVERS = 2048
UNMAPPED_DRIVERS = 64  # probed files that no process maps
