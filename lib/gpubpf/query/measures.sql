-- What `gpubpf diff` compares: one row for each run and measure. A statement whose records are missing is left out.
--
-- value       mean of a launch, a request or a barrier, in `unit`
-- better      whether more of it is better
-- spread      standard deviation of the value, as a share of it, if another run does the same work; 0: runs give the same value;
--             null: one run cannot show it
-- samples     how many samples the spread is made of
-- resolution  the least noise of the value, in `unit`: what a clock can tell apart
-- basis       what the value was made from, if that matters: values are compared with those that have the same basis

-- one row for each run and measure
CREATE TABLE measures (
    tool VARCHAR, run VARCHAR, kernel VARCHAR, place VARCHAR, measure VARCHAR, unit VARCHAR, better BOOLEAN, value DOUBLE,
    spread DOUBLE, samples BIGINT, resolution DOUBLE DEFAULT 0, basis VARCHAR DEFAULT ''
);

-- how each run was sampled; '': it was not
CREATE TABLE samplings (run VARCHAR, sampling VARCHAR);

-- blocks or warps
INSERT INTO samplings SELECT run, coalesce(format('1 in {} {}s', sampling.one_in, sampling.unit), '') FROM summaries;

-- one in how many launches each run measured, if not all
CREATE TABLE launch_samplings (run VARCHAR, one_in DOUBLE);

-- sampled launches
INSERT INTO launch_samplings
SELECT run, round(launches_matched / (launches_matched - not_instrumented['sampled out']))
FROM summaries WHERE not_instrumented['sampled out'] BETWEEN 1 AND launches_matched - 1;

-- runs on an embedded device
CREATE TABLE embedded (run VARCHAR);

-- embedded devices
INSERT INTO embedded SELECT run FROM summaries WHERE device = 'sim';

-- the name of a kernel; with its arguments if it has several instances
CREATE MACRO named(a_kernel, a_mangled) AS
    coalesce((SELECT any_value(name) FROM main.several AS one WHERE one.kernel = a_kernel AND one.mangled = a_mangled), a_kernel);

-- the shape of a launch, such as "<<<4x2,64>>>"
CREATE MACRO shape(grid, block_dim) AS
    '<<<' || regexp_replace(array_to_string(grid, 'x'), '(x1){1,2}$', '') || ','
    || regexp_replace(array_to_string(block_dim, 'x'), '(x1){1,2}$', '') || '>>>';

-- times of single launches; the slowest and fastest tenth of a run count as the next ones do, so that a pause of the host does not
-- hide everything else. The times are in bins of about 1 %, so that memory does
-- not grow with the launches. A launch does not say which instance of a kernel it is of.
INSERT INTO measures
WITH bins AS (
    SELECT run, kernel, grid, block_dim, 'GPU time' AS measure, floor(64 * log2(1 + exec_ns)) AS bin, count(*) AS launches,
           min(exec_ns) AS low, max(exec_ns) AS high, avg(exec_ns) AS mean, var_pop(exec_ns) AS variance,
           avg(coalesce(clock_error_ns, 0)) AS resolution
    FROM launchlate_launch WHERE exec_ns >= 0 AND kernel NOT IN (SELECT kernel FROM main.several) GROUP BY ALL
    UNION ALL
    SELECT run, kernel, grid, block_dim, 'launch latency', floor(64 * log2(1 + latency_ns)), count(*), min(latency_ns), max(latency_ns),
           avg(latency_ns), var_pop(latency_ns), avg(coalesce(clock_error_ns, 0))
    FROM launchlate_launch WHERE latency_ns >= 0 AND kernel NOT IN (SELECT kernel FROM main.several) GROUP BY ALL
), placed AS MATERIALIZED (
    SELECT * EXCLUDE (grid, block_dim), shape(grid, block_dim) AS place FROM bins
    UNION ALL SELECT * EXCLUDE (grid, block_dim), '' FROM bins
), ranked AS (
    SELECT *, sum(launches) OVER upward AS below, sum(launches) OVER downward AS above
    FROM placed
    WINDOW upward AS (PARTITION BY run, kernel, place, measure ORDER BY bin),
           downward AS (PARTITION BY run, kernel, place, measure ORDER BY bin DESC)
), bounds AS (
    SELECT run, kernel, place, measure, sum(launches) AS launches, min(low) FILTER (WHERE below >= all_launches / 10) AS least,
           max(high) FILTER (WHERE above >= all_launches / 10) AS most
    FROM ranked JOIN (SELECT run, kernel, place, measure, sum(launches) AS all_launches FROM placed GROUP BY ALL)
        USING (run, kernel, place, measure)
    GROUP BY ALL
), bounded AS (
    SELECT placed.* EXCLUDE (mean, variance), least, most, greatest(least(mean, most), least) AS mean,
           CASE WHEN high < least OR low > most THEN 0 ELSE variance END AS variance
    FROM placed JOIN bounds USING (run, kernel, place, measure)
), means AS (
    SELECT run, kernel, place, measure, sum(launches * mean) / sum(launches) AS mean FROM bounded GROUP BY ALL
)
SELECT 'launchlate', run, kernel, place, measure, 'ns', false, means.mean,
       CASE WHEN sum(launches) > 4 AND means.mean > 0 THEN
           CASE WHEN any_value(least) = any_value(most) THEN 0
                ELSE sqrt(sum(launches * (variance + (bounded.mean - means.mean) ** 2)) / (sum(launches) - 1)) / means.mean END END,
       sum(launches), sum(launches * resolution) / sum(launches), ''
FROM bounded JOIN means USING (run, kernel, place, measure)
GROUP BY run, kernel, place, measure, means.mean;

-- times of kernels: they are compared where single launches of a measurement were not kept
INSERT INTO measures
SELECT 'launchlate', run, named(kernel, mangled) AS kernel_name, '', 'GPU time', 'ns', false,
       sum(count * exec_ns.mean) / sum(count), NULL, sum(count), max(coalesce(clock_error_ns, 0)), 'kernels'
FROM launchlate_kernel
WHERE exec_ns IS NOT NULL AND count > 0
GROUP BY run, kernel_name;

-- GPU time by kernel, of all host stacks
INSERT INTO measures (tool, run, kernel, place, measure, unit, better, value, spread, samples)
SELECT 'gpuprofile', run, named(kernel, mangled) AS kernel_name, '', 'GPU time', 'ns', false, sum(gpu_ns) / sum(launches), NULL, sum(launches)
FROM gpuprofile_stack
WHERE launches > 0
GROUP BY run, kernel_name;

-- memory traffic of kernels
INSERT INTO measures (tool, run, kernel, place, measure, unit, better, value, spread, samples)
SELECT 'memtrace', run, named(kernel, mangled) AS kernel_name, '', 'sectors per launch', '', false, sum(sectors) / sum(launches),
       CASE WHEN NOT bool_or(sampled IS NOT NULL) THEN 0
            WHEN sum(sectors) > 0 THEN sqrt(sum(standard_error.sectors ** 2)) / sum(sectors) END, sum(launches)
FROM memtrace_kernel
WHERE sectors IS NOT NULL AND launches > 0
GROUP BY run, kernel_name;

-- memory traffic of lines
INSERT INTO measures (tool, run, kernel, place, measure, unit, better, value, spread, samples)
WITH kernels AS (
    SELECT run, kernel, sum(launches) AS launches, bool_or(sampled IS NOT NULL) AS sampled
    FROM memtrace_kernel
    GROUP BY run, kernel
), lines AS (
    SELECT run, kernel, coalesce(source, 'PTX line ' || ptx_line, 'offset ' || "offset", '') AS place, space || ' ' || op AS access,
           sum(requests) AS requests, sum(sectors) AS sectors,
           sum(requests) FILTER (WHERE sectors IS NOT NULL) AS located,
           sum(requests) FILTER (WHERE bank_ways IS NOT NULL) AS banked,
           sum(requests * bank_ways.mean) AS ways, sqrt(sum(standard_error.requests ** 2)) AS requests_error,
           sqrt(sum(standard_error.sectors ** 2)) AS sectors_error
    FROM memtrace_site
    GROUP BY ALL
), values AS (
    SELECT *, requests / launches AS often, sectors / located AS sectors_each, ways / banked AS ways_each
    FROM lines JOIN kernels USING (run, kernel)
    WHERE requests > 0 AND launches > 0
)
SELECT 'memtrace', run, kernel, place, access || 's per launch', '', false, often,
       CASE WHEN sampled THEN requests_error / requests ELSE 0 END, 1000
FROM values
UNION ALL
SELECT 'memtrace', run, kernel, place, 'sectors per ' || access, '', false, sectors_each,
       CASE WHEN NOT sampled THEN 0 WHEN sectors > 0 THEN sectors_error / sectors END, 1000
FROM values
WHERE sectors_each IS NOT NULL AND access NOT LIKE 'shared %'
UNION ALL
SELECT 'memtrace', run, kernel, place, 'bank ways per ' || access, '', false, ways_each, CASE WHEN sampled THEN NULL ELSE 0 END, 1000
FROM values
WHERE ways_each IS NOT NULL;

-- divergence of kernels
INSERT INTO measures (tool, run, kernel, place, measure, unit, better, value, spread, samples)
SELECT 'warpdiv', run, named(kernel, mangled) AS kernel_name, '', 'lane-instructions per launch', '', false,
       sum(lane_instructions) / sum(launches), 0, sum(launches)
FROM warpdiv_kernel
WHERE launches > 0
GROUP BY run, kernel_name
UNION ALL
SELECT 'warpdiv', run, named(kernel, mangled) AS kernel_name, '', 'efficiency of warps', '', true,
       sum(lane_instructions) / nullif(sum(wave * instructions), 0), 0, sum(launches)
FROM warpdiv_kernel
WHERE instructions > 0
GROUP BY run, kernel_name;

-- divergence of lines
INSERT INTO measures (tool, run, kernel, place, measure, unit, better, value, spread, samples)
WITH kernels AS (
    SELECT run, named(kernel, mangled) AS kernel, sum(launches) AS launches FROM warpdiv_kernel GROUP BY ALL
), branches AS (
    SELECT run, named(kernel, mangled) AS kernel, source, lost FROM warpdiv_branch
)
SELECT 'warpdiv', run, kernel, source, 'lost lane-instructions', '', false, sum(lost) / any_value(launches), 0, any_value(launches)
FROM branches JOIN kernels USING (run, kernel)
WHERE lost IS NOT NULL AND launches > 0
GROUP BY run, kernel, source;

-- work of threads
INSERT INTO measures (tool, run, kernel, place, measure, unit, better, value, spread, samples)
WITH kernels AS (
    SELECT run, named(kernel, mangled) AS kernel, shape(grid, block_dim) AS place, work_kind, sum(launches) AS launches, sum(work) AS work,
           max(imbalance) AS imbalance, bool_or(sampled IS NOT NULL) AS sampled, sqrt(sum(standard_error.work ** 2)) AS error
    FROM threadhist_kernel
    WHERE work IS NOT NULL AND launches > 0
    GROUP BY ALL
)
SELECT 'threadhist', run, kernel, place, work_kind || ' per launch', '', false, work / launches,
       CASE WHEN NOT sampled THEN 0 WHEN work > 0 THEN error / work END, 1000
FROM kernels
UNION ALL
SELECT 'threadhist', run, kernel, place, 'imbalance of ' || work_kind, '', false, imbalance, CASE WHEN sampled THEN NULL ELSE 0 END,
       1000
FROM kernels
WHERE imbalance IS NOT NULL;

-- waits at barriers
INSERT INTO measures (tool, run, kernel, place, measure, unit, better, value, spread, samples)
SELECT 'barrierlate', run, named(kernel, mangled) AS kernel_name, source, 'wait at a barrier', 'ns', false, sum(waits * wait_ns.mean) / sum(waits), NULL, sum(waits)
FROM barrierlate_barrier
WHERE wait_ns IS NOT NULL AND waits > 0
GROUP BY run, kernel_name, source;

-- exits of threads
INSERT INTO measures (tool, run, kernel, place, measure, unit, better, value, spread, samples)
SELECT 'kernelretsnoop', run, named(kernel, mangled) AS kernel_name, shape(grid, block_dim), 'spread of exits', 'ns', false,
       sum(launches * grid_spread_ns.mean) / sum(launches), NULL, sum(launches)
FROM kernelretsnoop_kernel
WHERE grid_spread_ns IS NOT NULL AND launches > 0
GROUP BY ALL;

-- calls of CUDA
INSERT INTO measures (tool, run, kernel, place, measure, unit, better, value, spread, samples)
SELECT 'cudasnoop', run, api, '', 'time of a call', 'ns', false, sum(count * lat_ns.mean) / sum(count), NULL, sum(count)
FROM cudasnoop_api
WHERE lat_ns IS NOT NULL AND count > 0
GROUP BY run, api;

-- calls of HIP
INSERT INTO measures (tool, run, kernel, place, measure, unit, better, value, spread, samples)
SELECT 'hipsnoop', run, api, '', 'time of a call', 'ns', false, sum(count * lat_ns.mean) / sum(count), NULL, sum(count)
FROM hipsnoop_api
WHERE lat_ns IS NOT NULL AND count > 0
GROUP BY run, api;

-- sampled counts without a standard error: one run does not show the noise
UPDATE measures SET spread = NULL WHERE tool = 'warpdiv' AND run NOT IN (SELECT run FROM samplings WHERE sampling = '');

-- values that depend on the sampling: only equal samplings are compared
UPDATE measures SET basis = sampling
FROM samplings
WHERE measures.run = samplings.run AND (
    tool = 'warpdiv' AND measure <> 'efficiency of warps' OR tool = 'kernelretsnoop'
    OR tool = 'threadhist' AND starts_with(measure, 'imbalance')
);

-- counts of sampled launches
UPDATE measures SET basis = concat_ws(' of ', nullif(basis, ''), format('1 in {} launches', one_in::BIGINT))
FROM launch_samplings
WHERE measures.run = launch_samplings.run AND unit <> 'ns';

-- a clock of a GPU has ticks
UPDATE measures SET resolution = greatest(resolution, 1) WHERE unit = 'ns' AND run NOT IN (SELECT run FROM embedded);
