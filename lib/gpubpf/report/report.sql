-- What `gpubpf report` shows, aggregated so that any amount of records gives a page of bounded size. A statement whose records are
-- missing is left out.

-- a time in words
CREATE MACRO duration(ns) AS
    CASE WHEN ns >= 1e9 THEN format('{:.3g} s', ns / 1e9) WHEN ns >= 1e6 THEN format('{:.3g} ms', ns / 1e6)
         WHEN ns >= 1e3 THEN format('{:.3g} us', ns / 1e3) ELSE format('{:.0f} ns', ns::DOUBLE) END;

-- bytes in words
CREATE MACRO size(bytes) AS
    CASE WHEN bytes >= 1 << 30 THEN format('{:.3g} GB', bytes / (1 << 30)) WHEN bytes >= 1 << 20 THEN format('{:.3g} MB', bytes / (1 << 20))
         WHEN bytes >= 1 << 10 THEN format('{:.3g} KB', bytes / (1 << 10)) ELSE format('{:.0f} B', bytes::DOUBLE) END;

-- the findings. weight: a share of what all kernels of all runs did, so that findings of small kernels come last; share_of: of what.
-- A finding without share_of is about the whole result of a kernel. A weight below 1 in 1,000 is no finding.
CREATE TABLE findings (weight DOUBLE, share_of VARCHAR, tool VARCHAR, kernel VARCHAR, source VARCHAR, finding VARCHAR);

-- one row for each fact of a kernel; instances of a template have the same kernel and other mangled names
CREATE TABLE kernel_facts (kernel VARCHAR, mangled VARCHAR, fact VARCHAR, value DOUBLE);

-- one row for each fact of a source line
CREATE TABLE lines (kernel VARCHAR, source VARCHAR, fact VARCHAR, value DOUBLE);

-- launches with their times
CREATE VIEW launches AS
SELECT run, pid, host, kernel, start_ns, end_ns, exec_ns, latency_ns FROM launchlate_launch WHERE start_ns IS NOT NULL AND end_ns IS NOT NULL;

-- the runs with a timeline: those with most GPU time, and one more, so that the page can say that others have none
CREATE TABLE timelines AS
SELECT run, any_value(host) AS host, count(*) AS launches, min(start_ns) AS begin_ns, max(end_ns) AS end_ns, sum(exec_ns) AS gpu_ns,
       greatest(1, ((max(end_ns) - min(start_ns)) / 400)::BIGINT + 1) AS bin_ns
FROM launches
GROUP BY run
ORDER BY gpu_ns DESC, run
LIMIT 9;

-- GPU time by moment and kernel
CREATE TABLE moments AS
WITH names AS (
    SELECT kernel, row_number() OVER (ORDER BY sum(exec_ns) DESC, kernel) AS place FROM launches GROUP BY kernel
), parts AS (
    SELECT run, CASE WHEN place <= 7 THEN kernel ELSE 'other kernels' END AS kernel, one.start_ns - begin_ns AS start_ns,
           one.end_ns - begin_ns AS end_ns, bin_ns,
           unnest(range((one.start_ns - begin_ns) // bin_ns, (one.end_ns - begin_ns) // bin_ns + 1)) AS bin
    FROM launches AS one JOIN timelines USING (run) JOIN names USING (kernel)
)
SELECT run, kernel, bin, sum(greatest(0, least(end_ns, (bin + 1) * bin_ns) - greatest(start_ns, bin * bin_ns)))::BIGINT AS ns
FROM parts
GROUP BY run, kernel, bin
ORDER BY run, bin;

-- latency of launches by moment
CREATE TABLE latencies AS
SELECT run, (launches.start_ns - begin_ns) // bin_ns AS bin, floor(2 * log2(greatest(latency_ns, 1)))::INT AS half_octave,
       count(*) AS launches
FROM launches JOIN timelines USING (run)
WHERE latency_ns IS NOT NULL
GROUP BY ALL;

-- the full names of kernels in each process
CREATE TABLE names (run VARCHAR, pid BIGINT, kernel VARCHAR, mangled VARCHAR, demangled VARCHAR);

-- full names of launchlate
INSERT INTO names SELECT DISTINCT run, pid, kernel, mangled, demangled FROM launchlate_kernel WHERE mangled IS NOT NULL;

-- full names of gpuprofile
INSERT INTO names SELECT DISTINCT run, pid, kernel, mangled, demangled FROM gpuprofile_stack WHERE mangled IS NOT NULL;

-- full names of memtrace
INSERT INTO names SELECT DISTINCT run, pid, kernel, mangled, demangled FROM memtrace_kernel WHERE mangled IS NOT NULL;

-- full names of threadhist
INSERT INTO names SELECT DISTINCT run, pid, kernel, mangled, demangled FROM threadhist_kernel WHERE mangled IS NOT NULL;

-- full names of kernelretsnoop
INSERT INTO names SELECT DISTINCT run, pid, kernel, mangled, demangled FROM kernelretsnoop_kernel WHERE mangled IS NOT NULL;

-- launches with the full names of their kernels; without those of which it is unknown which instance of a template they are
CREATE VIEW named_launches AS
WITH own AS (
    SELECT run, pid, kernel, any_value(mangled) AS mangled, count(DISTINCT mangled) AS instances FROM names GROUP BY run, pid, kernel
), anywhere AS (
    SELECT kernel, any_value(mangled) AS only_one FROM names GROUP BY kernel HAVING count(DISTINCT mangled) = 1
)
SELECT run, pid, kernel, coalesce(mangled, only_one) AS mangled, exec_ns, latency_ns
FROM launches LEFT JOIN own USING (run, pid, kernel) LEFT JOIN anywhere USING (kernel)
WHERE coalesce(instances, 1) = 1;

-- the times of kernels in each process; single: each launch was kept
CREATE TABLE times (
    run VARCHAR, pid BIGINT, kernel VARCHAR, mangled VARCHAR, single BOOLEAN, launches BIGINT, gpu_ns DOUBLE, latency_ns DOUBLE
);

-- times of launches
INSERT INTO times
SELECT run, pid, kernel, mangled, true, count(*), sum(exec_ns), approx_quantile(latency_ns, 0.5)
FROM named_launches
GROUP BY run, pid, kernel, mangled;

-- times where single launches were not kept
INSERT INTO times
SELECT run, pid, kernel, mangled, false, sum(count), sum(count * exec_ns.mean), sum(count * latency_ns.p50) / sum(count)
FROM launchlate_kernel AS these
WHERE exec_ns IS NOT NULL AND count > 0
      AND NOT EXISTS (SELECT 1 FROM times WHERE times.run = these.run AND times.pid = these.pid AND times.kernel = these.kernel)
GROUP BY run, pid, kernel, mangled;

-- GPU time by host stack
INSERT INTO times
SELECT run, pid, kernel, mangled, false, sum(launches), sum(gpu_ns), NULL
FROM gpuprofile_stack
WHERE launches > 0
GROUP BY run, pid, kernel, mangled;

-- launches and times
INSERT INTO kernel_facts
SELECT kernel, mangled, unnest(['launches', 'gpu_ns', 'mean_ns', 'latency_ns']),
       unnest([sum(launches), sum(gpu_ns), sum(gpu_ns) / sum(launches),
               CASE WHEN bool_or(NOT single) THEN
                   sum(launches * latency_ns) / nullif(sum(launches) FILTER (WHERE latency_ns IS NOT NULL), 0) END])
FROM times
GROUP BY kernel, mangled;

-- quantiles, if each launch was kept
INSERT INTO kernel_facts
WITH kept AS (
    SELECT kernel, coalesce(mangled, '') AS name FROM times GROUP BY kernel, name HAVING bool_and(single)
)
SELECT kernel, mangled, unnest(['p99_ns', 'latency_ns']),
       unnest([approx_quantile(exec_ns, 0.99), approx_quantile(latency_ns, 0.5)])
FROM (SELECT *, coalesce(mangled, '') AS name FROM named_launches) JOIN kept USING (kernel, name)
GROUP BY kernel, mangled;

-- memory traffic
INSERT INTO kernel_facts
SELECT kernel, mangled, unnest(['memory_ratio', 'wasted_bytes']), unnest([sum(sectors) / nullif(sum(sectors_least), 0), sum(wasted_bytes)])
FROM memtrace_kernel
GROUP BY kernel, mangled;

-- efficiency of warps
INSERT INTO kernel_facts
SELECT kernel, mangled, 'efficiency', sum(lane_instructions) / nullif(sum(wave * instructions), 0)
FROM warpdiv_kernel
WHERE instructions > 0
GROUP BY kernel, mangled;

-- imbalance of threads
INSERT INTO kernel_facts
SELECT kernel, mangled, 'imbalance', max(imbalance)
FROM threadhist_kernel
WHERE imbalance IS NOT NULL
GROUP BY kernel, mangled;

-- spread of exits
INSERT INTO kernel_facts
SELECT kernel, mangled, 'exits_ns', sum(launches * grid_spread_ns.mean) / sum(launches)
FROM kernelretsnoop_kernel
WHERE grid_spread_ns IS NOT NULL AND launches > 0
GROUP BY kernel, mangled;

-- one row for each fact of a kernel with its full name
CREATE TABLE kernels AS
WITH full_names AS (
    SELECT mangled, any_value(demangled) AS demangled FROM names GROUP BY mangled
)
SELECT kernel, mangled, coalesce(demangled, mangled) AS full_name, fact, value
FROM kernel_facts LEFT JOIN full_names USING (mangled)
WHERE value IS NOT NULL;

-- memory traffic of lines
INSERT INTO lines
SELECT kernel, source, unnest(['requests', 'memory_ratio', 'wasted_bytes', 'bank_ways']),
       unnest([sum(requests), sum(sectors) / nullif(sum(sectors_least), 0), sum(wasted_bytes),
               sum(requests * bank_ways.mean) / nullif(sum(requests) FILTER (WHERE bank_ways IS NOT NULL), 0)])
FROM memtrace_site
WHERE source IS NOT NULL
GROUP BY kernel, source;

-- instructions of lines
INSERT INTO lines
SELECT kernel, source, unnest(['instructions', 'efficiency']),
       unnest([sum(instructions), sum(lane_instructions) / nullif(sum(wave * instructions), 0)])
FROM warpdiv_line
GROUP BY kernel, source;

-- branches of lines
INSERT INTO lines
SELECT kernel, source, unnest(['diverged', 'lost']), unnest([sum(diverged) / nullif(sum(executed), 0), sum(lost)])
FROM warpdiv_branch
GROUP BY kernel, source;

-- barriers of lines
INSERT INTO lines
SELECT kernel, source, 'wait_ns', sum(waits * wait_ns.mean) / sum(waits) FROM barrierlate_barrier WHERE wait_ns IS NOT NULL AND waits > 0
GROUP BY kernel, source;

-- not-a-number of lines
INSERT INTO lines SELECT kernel, source, 'nans', sum(count) FROM nansnoop_nan WHERE source IS NOT NULL GROUP BY kernel, source;

-- finding: a launch does not end
INSERT INTO findings
SELECT 1, NULL, 'gpuhang', kernel, NULL,
       format('had run for {} and did not end: {}', duration(max(running_ns)),
              CASE verdict WHEN 'deadlock' THEN 'its warps wait for each other' ELSE 'its loops cannot end by themselves' END)
FROM gpuhang_hang
WHERE verdict IN ('deadlock', 'spinning')
GROUP BY kernel, verdict;

-- finding: NaN and infinity
INSERT INTO findings
SELECT 1, NULL, 'nansnoop', kernel, source,
       format('computes {} ({:,} in all)', CASE kind WHEN 'nan' THEN 'NaN' WHEN 'inf' THEN 'an infinity' ELSE kind END, sum(count)::BIGINT)
FROM nansnoop_nan
WHERE kind <> 'denormal'
GROUP BY kernel, source, kind;

-- finding: memory moved in vain
INSERT INTO findings
WITH places AS (
    SELECT kernel, source, op, space, sum(wasted_bytes) AS wasted_bytes, sum(sectors) AS sectors,
           sum(greatest(sectors - sectors_least, 0)) AS wasted, sum(sectors) / nullif(sum(sectors_least), 0) AS ratio,
           any_value(pattern ORDER BY wasted_bytes DESC) AS pattern
    FROM memtrace_site
    WHERE space <> 'shared'
    GROUP BY ALL
), weighed AS (
    SELECT *, wasted / sum(sectors) OVER () AS weight, wasted / sum(sectors) OVER (PARTITION BY kernel) AS kernel_share FROM places
)
SELECT weight, 'of all memory traffic', 'memtrace', kernel, source,
       format('its {}s move {} in vain, {:.3g} times what contiguous lanes need ({}): {:.1f} % of the kernel''s traffic', op,
              size(wasted_bytes), ratio, coalesce(pattern, 'mixed'), 100 * kernel_share)
FROM weighed
WHERE ratio >= 1.5 AND weight >= 0.001 AND kernel_share >= 0.01;

-- finding: bank conflicts
INSERT INTO findings
WITH places AS (
    SELECT kernel, source, op, sum(requests) FILTER (WHERE bank_ways IS NOT NULL) AS shared,
           sum(requests * bank_ways.mean) AS turns, sum(requests * coalesce(bank_ways.mean, 1)) AS all_turns
    FROM memtrace_site
    GROUP BY kernel, source, op
), weighed AS (
    SELECT *, turns / nullif(shared, 0) AS ways, (turns - shared) / nullif(sum(all_turns) OVER (), 0) AS weight,
           (turns - shared) / nullif(sum(all_turns) OVER (PARTITION BY kernel), 0) AS kernel_share
    FROM places
)
SELECT weight, 'of the turns of all memory requests', 'memtrace', kernel, source,
       format('its shared-memory {}s take {:.3g} turns instead of one: bank conflicts', op, ways)
FROM weighed
WHERE ways >= 2 AND weight >= 0.001 AND kernel_share >= 0.01;

-- finding: divergence
INSERT INTO findings
WITH kernels AS (
    SELECT run, kernel, sum(wave * instructions) AS slots FROM warpdiv_kernel GROUP BY run, kernel
), places AS (
    SELECT run, kernel, source, sum(lost) AS lost FROM warpdiv_branch GROUP BY run, kernel, source
), weighed AS (
    SELECT kernel, source, sum(lost) / nullif((SELECT sum(slots) FROM kernels), 0) AS weight,
           sum(lost) / nullif(sum(slots), 0) AS kernel_share
    FROM places JOIN kernels USING (run, kernel)
    GROUP BY kernel, source
)
SELECT weight, 'of the lane-instructions of all kernels', 'warpdiv', kernel, source,
       format('warps split here: {:.1f} % of the kernel''s lane-instructions are lost', 100 * kernel_share)
FROM weighed
WHERE weight >= 0.001 AND kernel_share >= 0.05;

-- finding: uneven work
INSERT INTO findings
WITH weighed AS (  -- idle: what the threads could do while the busiest one works
    SELECT kernel, work_kind, max(imbalance) AS imbalance,
           sum(work * (imbalance - 1)) FILTER (WHERE imbalance >= 1.25) AS idle, sum(work * imbalance) AS possible
    FROM threadhist_kernel
    GROUP BY kernel, work_kind
), shares AS (
    SELECT *, idle / nullif(sum(possible) OVER (PARTITION BY work_kind), 0) AS weight FROM weighed
)
SELECT weight, 'of the work of all kernels, if each thread did as much as the busiest', 'threadhist', kernel, NULL,
       format('the work is uneven: the busiest thread does {:.3g} times the mean ({})', imbalance, work_kind)
FROM shares
WHERE weight >= 0.001;

-- runs on an embedded device, whose times say nothing about a GPU
CREATE TABLE embedded (run VARCHAR);

-- these runs, where their ends are known
INSERT INTO embedded SELECT DISTINCT run FROM summaries WHERE device = 'sim';

-- finding: an idle GPU
INSERT INTO findings
WITH busy AS (
    SELECT run, bin, least(1, sum(ns) / any_value(bin_ns)) AS share FROM moments JOIN timelines USING (run) GROUP BY run, bin
), runs AS (
    SELECT run, 1 - sum(share) * any_value(bin_ns) / nullif(any_value(end_ns - begin_ns), 0) AS idle, any_value(launches) AS launches
    FROM busy JOIN timelines USING (run)
    GROUP BY run
)
SELECT idle, 'of the time between the first and the last launch of the run', 'launchlate', NULL, NULL,
       format('the GPU ran no kernel of the program for {:.0f} % of the time between its first and last launch (run {})', 100 * idle, run)
FROM runs
WHERE idle > 0.5 AND launches > 9 AND run NOT IN (SELECT run FROM embedded);

-- work of threads, by block and thread: the sum over all runs that count the same; a record has what its thread did in an interval
CREATE TABLE threads AS
WITH kinds AS (
    SELECT run, pid, kernel, grid, block_dim, any_value(work_kind) AS work_kind, max(imbalance) AS imbalance
    FROM threadhist_kernel
    WHERE imbalance IS NOT NULL
    GROUP BY run, pid, kernel, grid, block_dim
), worst AS (
    SELECT kernel, grid, block_dim, work_kind, max(imbalance) AS imbalance
    FROM kinds
    GROUP BY kernel, grid, block_dim, work_kind
    ORDER BY imbalance DESC, kernel, work_kind
    LIMIT 6
), sums AS (
    SELECT kernel, grid, block_dim, work_kind, block, thread, sum(work) AS work
    FROM threadhist_thread JOIN kinds USING (run, pid, kernel, grid, block_dim)
    GROUP BY kernel, grid, block_dim, work_kind, block, thread
), located AS (
    SELECT kernel, grid, block_dim, work_kind, imbalance, work,
           block[1] + grid[1] * (block[2] + grid[2] * block[3]) AS of_block,
           thread[1] + block_dim[1] * (thread[2] + block_dim[2] * thread[3]) AS of_thread,
           greatest(1, (list_product(grid)::BIGINT + 63) // 64) AS blocks_each,
           greatest(1, (list_product(block_dim)::BIGINT + 127) // 128) AS threads_each
    FROM sums JOIN worst USING (kernel, grid, block_dim, work_kind)
)
SELECT imbalance, kernel, work_kind, array_to_string(grid, 'x') AS blocks, array_to_string(block_dim, 'x') AS block_threads,
       blocks_each, threads_each, of_block // blocks_each AS y, of_thread // threads_each AS x, avg(work) AS work
FROM located
GROUP BY ALL
ORDER BY ALL;

-- what was measured
CREATE TABLE runs AS
SELECT run, tool, host, day::VARCHAR AS day, device, launches_matched, launches_instrumented, lost, duration_ns FROM summaries;

-- all that was measured, in one row
CREATE TABLE about AS
SELECT count(*) AS runs, string_agg(DISTINCT tool, ', ' ORDER BY tool) AS tools, count(DISTINCT host) AS hosts, min(day) AS first_day,
       max(day) AS last_day, count(*) FILTER (WHERE device = 'sim') AS embedded
FROM runs
HAVING count(*) > 0;

-- what was not measured, and why
CREATE TABLE missing AS
SELECT tool, reason, sum(launches)::BIGINT AS launches, count(DISTINCT run) AS runs
FROM (SELECT tool, run, lost.key AS reason, lost.value AS launches
      FROM (SELECT tool, run, unnest(map_entries(not_instrumented)) AS lost FROM summaries)
      UNION ALL SELECT tool, run, 'records lost', lost FROM summaries)
WHERE launches > 0
GROUP BY tool, reason
ORDER BY launches DESC, tool, reason;
