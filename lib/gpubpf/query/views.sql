-- The ready views of `gpubpf query`: one statement for each. A view whose records are missing in DIR is left out.
-- The comment above a view is its description in `gpubpf query --list`.

-- the launches that began latest after the call (launchlate -v)
CREATE VIEW slowest_launches AS
SELECT host, day, run, pid, comm, kernel, launch, latency_ns, api_ns, wait_ns, overhead_ns, exec_ns, waited_for
FROM launchlate_launch
ORDER BY latency_ns DESC NULLS LAST;

-- source lines by the bytes that memory moved in vain (memtrace)
CREATE VIEW worst_lines AS
SELECT kernel, source, op, space,
       sum(requests)::BIGINT AS requests, sum(bytes)::BIGINT AS bytes, sum(wasted_bytes)::BIGINT AS wasted_bytes,
       count(DISTINCT host) AS hosts, count(DISTINCT run) AS runs
FROM memtrace_site
GROUP BY ALL
ORDER BY wasted_bytes DESC NULLS LAST;

-- launches that were not measured, and why (every tool)
CREATE VIEW launches_lost AS
SELECT host, day, tool, run, lost.key AS reason, lost.value AS launches
FROM (SELECT host, day, tool, run, unnest(map_entries(not_instrumented)) AS lost FROM summaries)
ORDER BY launches DESC;

-- each host: how much was measured there (every tool)
CREATE VIEW hosts AS
SELECT host, count(*) AS runs, sum(launches_matched)::BIGINT AS launches,
       sum(launches_instrumented)::BIGINT AS measured,
       sum(launches_instrumented) / nullif(sum(launches_matched), 0) AS share,
       sum(duration_ns)::BIGINT AS duration_ns
FROM summaries
GROUP BY host
ORDER BY share, host;

-- hosts on which a kernel takes longer than elsewhere (launchlate)
CREATE VIEW stragglers AS
WITH means AS (
    SELECT kernel, host, sum(count)::BIGINT AS launches, sum(count * exec_ns.mean) / sum(count) AS mean_ns
    FROM launchlate_kernel
    WHERE exec_ns IS NOT NULL AND count > 0
    GROUP BY kernel, host
), medians AS (
    SELECT kernel, median(mean_ns) AS median_ns, count(*) AS hosts FROM means GROUP BY kernel
)
SELECT kernel, host, launches, mean_ns, median_ns, mean_ns / nullif(median_ns, 0) AS ratio, hosts
FROM means JOIN medians USING (kernel)
WHERE hosts > 1
ORDER BY ratio DESC NULLS LAST;
