"""Ask questions about the records that tools kept with ``--parquet DIR``, in SQL, on DuckDB (``gpubpf query``).

with views.connect(["DIR"]) as database:        # a DuckDB connection with a view for each type of record, and those of views.sql
    database.sql("SELECT * FROM slowest_launches")
"""
