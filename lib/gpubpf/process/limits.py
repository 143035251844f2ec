"""Limits on what a process, a user and the machine may cost the tool. They are beyond what programs need. Exceeding one is reported.

A limit protects the tool from processes that it does not trust. The limits are here, and not beside the code that enforces them, so
that a reader sees at once how much memory, time and how many files untrusted processes can take.

If all processes share a limit X, X_OF_USER is the limit for the processes of one user. `exceeded` checks both.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping

# --- what a process shows in /proc ---

SMALL_FILE = 1 << 20  # bytes of a file that the kernel itself limits, and of a list of mounts
LARGEST_LIST = 32 << 20  # bytes of a list: three times what the default vm.max_map_count mappings need
LONGEST_LINE = 1 << 15  # bytes: a path of PATH_MAX bytes has up to 16 KiB when all are escaped
LONGEST_LIST = 5.0  # seconds of CPU time to read a list and process its lines
LARGEST_ENVIRONMENT = (
    6 << 20
)  # bytes: the most that execve(2) accepts, unless the limit on the stack is raised
LONGEST_VARIABLE = 1 << 17  # bytes: MAX_ARG_STRLEN
MAPPINGS = 1 << 17  # mappings to keep: twice the default of vm.max_map_count
EXPORTS = 1 << 14  # exports of a driver library; real ones have a thousand
DESCENDANTS = 4096  # descendants of a process to search for untraced processes
SCAN_BURST, SCAN_SHARE = (
    5.0,
    0.1,
)  # seconds for the processes of a user at once, and the share of the time from then on

SYMBOLS = 20.0  # seconds of CPU time to read the symbols of the files that a user's processes name
SYMBOL_BYTES = 1 << 30  # bytes of symbols that are kept
SYMBOL_BYTES_OF_USER = 256 << 20
NAMED_FILES = 512  # files in the host stacks of a process

# --- one traced process ---

TEXT = 64 << 20  # bytes of names, reasons and stacks
FILES = 256  # images and memory of contexts; with more, the files of all processes of the user are limited
PENDING = 4096  # images and modules without an answer
CONTEXTS = 4096
RINGS = 64
READINGS, READING_BYTES = 64, 256 << 20  # untaken readings, and their bytes; older readings are dropped
SEND_WAIT = 5.0  # seconds to take a message

GREETINGS = 64  # connections whose agent has not reported its GPU vendor yet
CONNECTIONS_OF_PROCESS = (
    256  # in all: a process has another one after it executes a program or initializes ROCr again
)

# --- all traced processes ---

CONNECTIONS = 16384  # at the same time, or fewer (traced/shares.py)
CONNECTIONS_OF_USER = 4096
ENTRIES = 1 << 18  # connections in total, since each gets an entry in the report
ENTRIES_OF_USER = 1 << 16
TEXTS = 512 << 20  # bytes of names, reasons and stacks
TEXTS_OF_USER = 128 << 20
MODULES = 1 << 30  # about how many bytes of names and sites of kernels in modules
MODULES_OF_USER = 256 << 20
UNFINISHED = 512 << 20  # bytes of messages that have arrived in part
UNFINISHED_OF_USER = 128 << 20
# Files that the tool keeps open. A user's connections take at most a quarter of the files that the tool may open.
FILES_OF_CONNECTION = 8
WAITING_FILES = 4  # files of one connection whose messages have not arrived completely
FOREIGN_FILES = 1024  # files that are not in memory: closing one may take for ever
FOREIGN_FILES_OF_USER = 256
REFUSED = 1000  # processes of other users that are counted because they connected
SETTLE_WAIT = 0.5  # seconds to admit processes before the command's results are read

UNANSWERED = 64  # looks at processes that have not ended (patience.py)
UNANSWERED_OF_USER = 8
HELD, HELD_OF_USER = 1024, 256  # processes that are held at a time, each for some milliseconds
HELPERS = 16  # hold helpers that replace one which a process made wait for ever
STUCK_THREADS = 64  # replaced threads of one kind of work, which wait for memory that never arrives

BUFFERED_RECORDS = (
    1 << 22
)  # log records that the tool has not taken yet, without the last records of each process
BUFFERED_RECORDS_OF_USER = 1 << 20

# --- processes of the machine that map a file named like a GPU driver ---

DRIVERS_OF_PROCESS = 16  # files that get a probe, or are searched to identify the driver
DRIVERS = 2048
DRIVERS_OF_USER = 64
UNMAPPED_DRIVERS = 64  # probed files that no process maps

# --- libraries with uprobes at their functions (linux/uprobes.py) ---

LIBRARIES = 2048  # files
LIBRARIES_OF_USER = 256
CODE = 10.0  # seconds of CPU time to find the returns of a library's functions; real libraries take less than one
DELAYED_LIBRARIES = 4096  # files that get their probes later, because their users have used up their time
NOTICES = 1024  # different notices about libraries


def files() -> tuple[int, int]:
    """Return how many files the tool may open, and how many the processes of one user may take."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most, most // 4


def exceeded(taken: Mapping[int, int], user: int, most: int, of_user: int, more: int = 0) -> str:
    """Return who has taken too much of a resource: "its user", "root", "all users but root" or "the machine"; "" if nobody has.

    Containers often run as root, so root may take more than other users. But neither root nor all other users together can take
    everything: each of the two leaves as much as one user may take.

    taken: amounts by user ID.
    user: ID of the user who has just taken something.
    most: limit for all processes.
    of_user: limit for the processes of one user.
    more: amount that `user` is about to take in addition.
    """
    of_root = taken.get(0, 0) + (0 if user else more)
    others = sum(taken.values()) - taken.get(0, 0) + (more if user else 0)
    if user and taken.get(user, 0) + more > of_user:
        return "its user"
    if (others if user else of_root) > most - of_user:
        return "all users but root" if user else "root"
    return "the machine" if of_root + others > most else ""
