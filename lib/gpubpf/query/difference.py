"""Compare two measurements of one program: ``gpubpf diff``. The statistics are in measures.sql and differences.sql.

with difference.compare("before", "after", floor=0.01) as database:
    database.sql("FROM compared")           # one row for each measure that both have
    database.sql("FROM not_compared")       # measures that only one has
    database.sql("FROM a.conditions")       # how A was measured, and what it lacks
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gpubpf.errors import Error
from gpubpf.query import views
from gpubpf.query.limits import time_limit
from gpubpf.show.table import printable

_HERE = os.path.dirname(__file__)
SIDES = ("a", "b")
_SEVERAL = """
    CREATE TABLE several AS
    WITH instances AS (SELECT 'a' AS side, * FROM a.instances UNION ALL SELECT 'b', * FROM b.instances), counted AS (
        SELECT *, count(DISTINCT mangled) OVER (PARTITION BY side, kernel) AS beside FROM instances
    )
    SELECT kernel, mangled, coalesce(any_value(demangled), mangled) AS name
    FROM counted
    WHERE kernel IN (SELECT kernel FROM counted WHERE beside > 1)
    GROUP BY kernel, mangled
"""  # a kernel with one instance in each measurement is compared, also if the instance changed
_VERSIONS = """
    INSERT INTO conditions
    SELECT DISTINCT 'gpubpf version', decode(value), false FROM parquet_kv_metadata(?) WHERE decode(key) = 'gpubpf.version'
"""


@contextmanager
def compare(
    a: Sequence[str],
    b: Sequence[str],
    floor: float,
    memory: int | None = None,
    timeout: float | None = None,
) -> Iterator[Any]:
    """Yield a DuckDB connection with the tables of differences.sql, and with the schemas a and b.

    a, b: the directories of each measurement.
    floor: changes below this share are not findings, for example 0.01.
    memory: the most that DuckDB may use, in bytes; None: 80 % of the machine's memory.
    timeout: the most that reading the records may take, in seconds; None: any time.

    Raises Error if there is nothing to compare.
    """
    with views.opened(memory) as database, time_limit(database, timeout):
        files = {}
        for side, directories in zip(SIDES, (a, b), strict=True):
            database.execute(f"CREATE SCHEMA {side}")
            database.execute(f"SET schema = '{side}'")
            files[side] = views.add_records(database, directories)
            views.run_file(database, os.path.join(_HERE, "instances.sql"))
        database.execute("SET schema = 'main'")
        database.execute(_SEVERAL)
        for side, directories in zip(SIDES, (a, b), strict=True):
            database.execute(f"SET schema = '{side}'")
            for name in ("measures.sql", "conditions.sql"):
                views.run_file(database, os.path.join(_HERE, name))
            database.execute("DELETE FROM measures WHERE value IS NULL OR NOT isfinite(value)")
            database.execute(_VERSIONS, [[path for paths in files[side].values() for path in paths]])
            if not database.sql("SELECT count(*) FROM measures").fetchall()[0][0]:
                where = ", ".join(map(printable, directories))
                raise Error(
                    f"{where} has no records that can be compared; measure with launchlate -v, memtrace, warpdiv, "
                    "threadhist or barrierlate"
                )
        views.lock(database, {})
        database.execute("SET schema = 'main'")
        database.execute("SET VARIABLE floor = ?", [floor])
        for _, statement in views.statements(os.path.join(_HERE, "differences.sql")):
            database.execute(statement)
        if not database.sql("SELECT count(*) FROM compared").fetchall()[0][0]:
            raise Error(
                "the two measurements have no measure in common; measure the same kernels with the same tools and options"
            )
        yield database
