-- What `gpubpf diff` compares: one row for each run and measure. A statement whose records are missing is left out.
--
-- value    mean of a launch, a request or a barrier, in `unit`
-- better   whether more of it is better
-- spread   standard deviation of the value, as a share of it, if another run does the same work; 0: runs give the same value;
--          null: one run cannot show it
-- samples  how many samples the spread is made of

-- one row for each run and measure
CREATE TABLE measures (
    tool VARCHAR, run VARCHAR, kernel VARCHAR, place VARCHAR, measure VARCHAR, unit VARCHAR, better BOOLEAN, value DOUBLE,
    spread DOUBLE, samples BIGINT
);

-- the shape of a launch, such as "<<<4x2,64>>>"
CREATE MACRO shape(grid, block_dim) AS
    '<<<' || regexp_replace(array_to_string(grid, 'x'), '(x1){1,2}$', '') || ','
    || regexp_replace(array_to_string(block_dim, 'x'), '(x1){1,2}$', '') || '>>>';

-- times of single launches; the slowest and fastest tenth of a run count as the next ones do, so that a pause of the host does not
-- hide everything else
INSERT INTO measures
WITH launches AS (
    SELECT run, kernel, unnest([shape(grid, block_dim), '']) AS place, unnest([exec_ns, exec_ns]) AS exec_ns,
           unnest([latency_ns, latency_ns]) AS latency_ns
    FROM launchlate_launch
), times AS (
    UNPIVOT launches ON exec_ns AS 'GPU time', latency_ns AS 'launch latency' INTO NAME measure VALUE ns
), bounded AS (
    SELECT run, kernel, place, measure, quantile_disc(ns, 0.1) AS low, quantile_disc(ns, 0.9) AS high FROM times GROUP BY ALL
)
SELECT 'launchlate', run, kernel, place, measure, 'ns', false, avg(greatest(least(ns, high), low)) AS mean_ns,
       CASE WHEN count(*) > 4 AND mean_ns > 0 THEN stddev_samp(greatest(least(ns, high), low)) / mean_ns END, count(*)
FROM times JOIN bounded USING (run, kernel, place, measure)
GROUP BY run, kernel, place, measure;

-- times of kernels, where single launches were not kept
INSERT INTO measures
SELECT 'launchlate', run, kernel, '', 'GPU time', 'ns', false, sum(count * exec_ns.mean) / sum(count), NULL, sum(count)
FROM launchlate_kernel AS these
WHERE exec_ns IS NOT NULL AND count > 0 AND NOT EXISTS (SELECT 1 FROM measures WHERE measures.run = these.run)
GROUP BY run, kernel;

-- GPU time by kernel, of all host stacks
INSERT INTO measures
SELECT 'gpuprofile', run, kernel, '', 'GPU time', 'ns', false, sum(gpu_ns) / sum(launches), NULL, sum(launches)
FROM gpuprofile_stack
WHERE launches > 0
GROUP BY run, kernel;

-- memory traffic of kernels
INSERT INTO measures
SELECT 'memtrace', run, kernel, '', 'sectors per launch', '', false, sum(sectors) / sum(launches),
       CASE WHEN bool_or(sampled IS NOT NULL) THEN NULL ELSE 0 END, sum(launches)
FROM memtrace_kernel
WHERE sectors IS NOT NULL AND launches > 0
GROUP BY run, kernel;

-- memory traffic of lines
INSERT INTO measures
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
INSERT INTO measures
SELECT 'warpdiv', run, kernel, '', 'lane-instructions per launch', '', false, sum(lane_instructions) / sum(launches), 0, sum(launches)
FROM warpdiv_kernel
WHERE launches > 0
GROUP BY run, kernel
UNION ALL
SELECT 'warpdiv', run, kernel, '', 'efficiency of warps', '', true, sum(lane_instructions) / nullif(sum(wave * instructions), 0), 0, sum(launches)
FROM warpdiv_kernel
WHERE instructions > 0
GROUP BY run, kernel;

-- divergence of lines
INSERT INTO measures
WITH kernels AS (SELECT run, kernel, sum(launches) AS launches FROM warpdiv_kernel GROUP BY run, kernel)
SELECT 'warpdiv', run, kernel, source, 'lost lane-instructions', '', false, sum(lost) / any_value(launches), 0, any_value(launches)
FROM warpdiv_branch JOIN kernels USING (run, kernel)
WHERE lost IS NOT NULL AND launches > 0
GROUP BY run, kernel, source;

-- work of threads
INSERT INTO measures
WITH kernels AS (
    SELECT run, kernel, shape(grid, block_dim) AS place, work_kind, sum(launches) AS launches, sum(work) AS work,
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
INSERT INTO measures
SELECT 'barrierlate', run, kernel, source, 'wait at a barrier', 'ns', false, sum(waits * wait_ns.mean) / sum(waits), NULL, sum(waits)
FROM barrierlate_barrier
WHERE wait_ns IS NOT NULL AND waits > 0
GROUP BY run, kernel, source;

-- exits of threads
INSERT INTO measures
SELECT 'kernelretsnoop', run, kernel, shape(grid, block_dim), 'spread of exits', 'ns', false,
       sum(launches * grid_spread_ns.mean) / sum(launches), NULL, sum(launches)
FROM kernelretsnoop_kernel
WHERE grid_spread_ns IS NOT NULL AND launches > 0
GROUP BY ALL;

-- calls of CUDA
INSERT INTO measures
SELECT 'cudasnoop', run, api, '', 'time of a call', 'ns', false, sum(count * lat_ns.mean) / sum(count), NULL, sum(count)
FROM cudasnoop_api
WHERE lat_ns IS NOT NULL AND count > 0
GROUP BY run, api;

-- calls of HIP
INSERT INTO measures
SELECT 'hipsnoop', run, api, '', 'time of a call', 'ns', false, sum(count * lat_ns.mean) / sum(count), NULL, sum(count)
FROM hipsnoop_api
WHERE lat_ns IS NOT NULL AND count > 0
GROUP BY run, api;
