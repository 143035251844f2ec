"""Make one self-contained HTML page of the records that tools kept with ``--parquet DIR`` (``gpubpf report``).

facts = facts.gather(["DIR"])           # aggregated with DuckDB (report.sql), bounded in size
page.text(facts)                        # HTML with uPlot, Tabulator and the facts inside; it needs no network
"""
