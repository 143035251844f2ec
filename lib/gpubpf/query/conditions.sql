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
