-- Under which conditions a measurement was made, for `gpubpf diff`: what makes it hard to compare. One row for each fact.

-- one row for each fact; many: it says what is missing, and not how it was measured
CREATE TABLE conditions (condition VARCHAR, value VARCHAR, missing BOOLEAN);

-- the device
INSERT INTO conditions
SELECT DISTINCT 'device', CASE device WHEN 'sim' THEN 'an embedded device' ELSE 'a GPU' END, false FROM summaries WHERE device IS NOT NULL;

-- hosts
INSERT INTO conditions SELECT DISTINCT 'host', host, false FROM summaries;

-- sampling
INSERT INTO conditions
SELECT DISTINCT tool || '''s sampling', format('1 in {} {}', sampling.one_in, sampling.unit), false FROM summaries WHERE sampling IS NOT NULL;

-- overhead limits
INSERT INTO conditions
SELECT DISTINCT tool || '''s budget', format('{:.3g} %', budget.percent), false FROM summaries WHERE budget IS NOT NULL;

-- lost records
INSERT INTO conditions
SELECT tool, format('lost {} records', sum(lost)), true FROM summaries WHERE lost > 0 GROUP BY tool;

-- launches that were not measured
INSERT INTO conditions
SELECT tool, format('did not measure {} launches ({})', sum(lost.value), lost.key), true
FROM (SELECT tool, unnest(map_entries(not_instrumented)) AS lost FROM summaries)
WHERE lost.value > 0
GROUP BY tool, lost.key;

-- launches of kernels with several instances
INSERT INTO conditions
SELECT 'launchlate', format('does not say which instance a launch is of ({})', string_agg(kernel, ', ')), true
FROM (SELECT DISTINCT left(kernel, 40) AS kernel FROM launchlate_launch SEMI JOIN main.several USING (kernel) ORDER BY ALL LIMIT 8)
HAVING count(*) > 0;

-- lines of kernels with several instances
INSERT INTO conditions
SELECT 'memtrace', format('counts the lines of all instances together ({})', string_agg(kernel, ', ')), true
FROM (SELECT DISTINCT left(kernel, 40) AS kernel FROM memtrace_site SEMI JOIN main.several USING (kernel) ORDER BY ALL LIMIT 8)
HAVING count(*) > 0;
