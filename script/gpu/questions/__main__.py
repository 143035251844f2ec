"""Ask the question that is named, with its arguments."""

from __future__ import annotations

import json
import os
import sys

from gpu.driver import DriverError
from gpu.questions import named
from gpu.questions.asking import CannotAsk, die_with_parent


def main() -> None:
    wanted = named(sys.argv[1])
    die_with_parent()
    status = 0
    try:
        print(json.dumps(wanted.ask(*sys.argv[2:])))
    except CannotAsk as error:
        print(error, file=sys.stderr)
        status = 77
    except DriverError as error:
        print(error, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # without waiting for what the driver may still wait for


if __name__ == "__main__":
    main()
