"""The JSON records of ``gpubpf diff --json``."""

from __future__ import annotations

from gpubpf.show.fields import Field, Fields

VERDICTS = ("worse", "better", "same", "unknown")
SIDE = "a|b"
_MEASURE = (
    Field("tool", "string", "the tool that measured it"),
    Field("kernel", "string", "name of the kernel"),
    Field("place", "string", 'a source line or the shape of a launch; "" for the whole kernel'),
    Field("measure", "string", "what is compared"),
)
DIFFERENCE = Fields(
    "difference",
    "A measure that A and B have.",
    (
        *_MEASURE,
        Field("unit", "string", 'ns, or "" for a number'),
        Field("a", "number", "mean of the runs of A"),
        Field("b", "number", "mean of the runs of B"),
        Field("change", "number?", "(b - a) as a share of a; null if a is 0"),
        Field(
            "noise",
            "number?",
            "changes up to this share of a may be noise; null if a is 0, or if the noise is unknown",
        ),
        Field("verdict", "|".join(VERDICTS), "unknown: too few runs show the noise"),
        Field("runs_a", "integer", "runs of A that have the measure"),
        Field("runs_b", "integer", "runs of B that have the measure"),
    ),
)
NOT_COMPARED = Fields(
    "not_compared",
    "A measure that only A or B has, or that both have, but sampled differently.",
    (Field("side", f"{SIDE}?", "which has it; null: both"), *_MEASURE),
)
CONDITION = Fields(
    "condition",
    "How A or B was measured, such as the device, or what it lacks.",
    (
        Field("side", SIDE),
        Field("condition", "string", "what is said"),
        Field("value", "string"),
        Field("missing", "boolean", "true if records are missing, and not how it was measured"),
    ),
)
SUMMARY = Fields(
    "summary",
    "The last record: the number of measures by verdict.",
    (
        *(Field(name, "integer") for name in VERDICTS),
        Field("not_compared", "integer", "measures that were not compared"),
    ),
)
RECORDS = (DIFFERENCE, NOT_COMPARED, CONDITION, SUMMARY)
