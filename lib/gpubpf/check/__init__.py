"""`gpubpf check`: what this machine, or one process, lets the tools do, and what to do about the rest.

    for check, finding in probing.run(table.CHECKS, Machine()):
        finding.record(check.name)      # the JSON record "check"

A check is a row of `table.CHECKS`: its name, and a function that takes a `Machine` and returns a `Finding`, or None if it does not
apply. Whether something works is decided by the code that the tools use, not here. `process.findings` does the same for a process.
"""
