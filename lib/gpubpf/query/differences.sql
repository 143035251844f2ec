-- The differences of two measurements: schemas a and b have the measures of each (measures.sql). Needs the variable `floor`.

-- quantiles of Student's t distribution: |t| is above the numbers in a share of 1e-3, 1e-4, 1e-5 and 1e-6 of all cases
CREATE TABLE quantiles AS
SELECT * FROM (VALUES
    (1, [636.6, 6366, 6.366e4, 6.366e5]), (2, [31.6, 99.99, 316.2, 1000]), (3, [12.92, 28, 60.4, 130.2]),
    (4, [8.61, 15.54, 27.77, 49.46]), (5, [6.869, 11.18, 17.9, 28.48]), (6, [5.959, 9.082, 13.56, 20.05]),
    (7, [5.408, 7.885, 11.21, 15.77]), (8, [5.041, 7.12, 9.783, 13.26]), (9, [4.781, 6.594, 8.827, 11.64]),
    (10, [4.587, 6.211, 8.15, 10.52]), (11, [4.437, 5.921, 7.647, 9.701]), (12, [4.318, 5.694, 7.261, 9.085]),
    (13, [4.221, 5.513, 6.954, 8.603]), (14, [4.14, 5.363, 6.706, 8.218]), (15, [4.073, 5.239, 6.502, 7.903]),
    (16, [4.015, 5.134, 6.33, 7.642]), (17, [3.965, 5.044, 6.184, 7.421]), (18, [3.922, 4.966, 6.058, 7.232]),
    (19, [3.883, 4.897, 5.949, 7.069]), (20, [3.85, 4.837, 5.854, 6.927]), (21, [3.819, 4.784, 5.769, 6.802]),
    (22, [3.792, 4.736, 5.694, 6.691]), (23, [3.768, 4.693, 5.626, 6.593]), (24, [3.745, 4.654, 5.566, 6.504]),
    (25, [3.725, 4.619, 5.511, 6.424]), (26, [3.707, 4.587, 5.461, 6.352]), (27, [3.69, 4.558, 5.415, 6.286]),
    (28, [3.674, 4.53, 5.373, 6.225]), (29, [3.659, 4.506, 5.335, 6.17]), (30, [3.646, 4.482, 5.299, 6.119]),
    (40, [3.551, 4.321, 5.053, 5.768]), (60, [3.46, 4.169, 4.825, 5.449]), (120, [3.373, 4.025, 4.613, 5.158]),
    (1000, [3.3, 3.906, 4.44, 4.922])
) AS listed(freedom, t);

-- each measure of both: its value in A and B, and the noise
CREATE TABLE compared AS
WITH sides AS (
    SELECT side, tool, kernel, place, measure, unit, better, basis, count(*) AS runs, avg(value) AS mean,
           CASE WHEN min(value) < max(value) THEN stddev_samp(value) ELSE 0 END AS run_deviation,
           CASE WHEN count(spread) = count(*) THEN max(spread) * abs(mean) END AS own_deviation, min(samples) AS samples,
           max(resolution) AS resolution
    FROM (SELECT 'a' AS side, * FROM a.measures UNION ALL SELECT 'b', * FROM b.measures)
    GROUP BY ALL
), shapes AS (  -- a kernel whose launches all have one shape is compared once
    SELECT tool, kernel, measure, count(DISTINCT place) AS shapes, count(DISTINCT side) AS measured
    FROM sides
    WHERE tool = 'launchlate' AND place <> ''
    GROUP BY ALL
), pairs AS (
    SELECT a.* EXCLUDE (side, runs, mean, run_deviation, own_deviation, samples, resolution), a.mean AS a, b.mean AS b, a.runs AS runs_a,
           b.runs AS runs_b, a.runs + b.runs - 2 AS run_freedom,
           ((a.runs - 1) * a.run_deviation ** 2 + (b.runs - 1) * b.run_deviation ** 2) AS run_squares,
           (a.own_deviation ** 2 + b.own_deviation ** 2) / 2 AS own_variance, least(a.samples, b.samples) - 1 AS own_freedom,
           greatest(a.resolution, b.resolution) AS resolution
    FROM sides AS a JOIN sides AS b USING (tool, kernel, place, measure, unit, better, basis)
    WHERE a.side = 'a' AND b.side = 'b' AND NOT (a.place = '' AND (tool, kernel, measure) IN (
        SELECT (tool, kernel, measure) FROM shapes WHERE shapes = 1 AND measured = 2
    ))
    QUALIFY row_number() OVER (PARTITION BY tool, kernel, place, measure ORDER BY basis = 'kernels', basis) = 1
), counted AS (  -- from the spread of runs if they are enough; else from what one run shows. Runs with one choice of blocks are equal
    SELECT *, run_freedom > 1 AND (run_squares > 0 OR unit = 'ns') AS by_runs,
           CASE WHEN by_runs THEN run_freedom ELSE least(own_freedom, 1000) END AS freedom,
           CASE WHEN by_runs THEN run_squares / run_freedom
                WHEN own_variance IS NOT NULL THEN greatest(own_variance, run_squares) END AS variance
    FROM pairs
), strict AS (  -- the more comparisons, the stricter is each: at most one in 1,000 pairs of equal measurements has a false finding
    SELECT least(4, 1 + ceil(log10(greatest(count(*), 1))))::INT AS level FROM counted WHERE variance > 0
), noisy AS (
    SELECT counted.*, CASE WHEN variance = 0 THEN 0 ELSE t[level] * sqrt(variance * (1 / runs_a + 1 / runs_b)) END AS random,
           CASE WHEN random < resolution THEN resolution ELSE random END AS noise  -- null if `random` is
    FROM counted CROSS JOIN strict ASOF LEFT JOIN quantiles ON counted.freedom >= quantiles.freedom
)
SELECT tool, kernel, place, measure, unit, a, b, (b - a) / nullif(abs(a), 0) AS change, noise / nullif(abs(a), 0) AS noise,
       CASE WHEN noise IS NULL THEN 'unknown'
            WHEN abs(b - a) <= noise OR abs(b - a) <= getvariable('floor') * abs(a) THEN 'same'
            WHEN (b > a) = better THEN 'better'
            ELSE 'worse' END AS verdict,
       runs_a, runs_b, by_runs
FROM noisy
ORDER BY tool, kernel, place, measure;

-- measures that only one has, or that both have, but sampled differently
CREATE VIEW not_compared AS
WITH names AS (
    SELECT DISTINCT 'a' AS side, tool, kernel, place, measure, basis FROM a.measures
    UNION ALL SELECT DISTINCT 'b', tool, kernel, place, measure, basis FROM b.measures
)
SELECT CASE WHEN count(DISTINCT side) = 1 THEN any_value(side) END AS side, tool, kernel, place, measure
FROM names
GROUP BY tool, kernel, place, measure
HAVING count(DISTINCT basis) = count(*)  -- no basis is on both sides
ORDER BY side, tool, kernel, place, measure;
