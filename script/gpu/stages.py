"""The stages, in the order in which they are run."""

from gpu import answers, facts, overhead, patched, references, sanitizer, smoke

STAGES = {
    "smoke": smoke.parts,
    "patched": patched.parts,
    "answers": answers.parts,
    "overhead": overhead.parts,
    "facts": facts.parts,
    "frameworks": overhead.framework_parts,
    "matrices": facts.matrices,
    "sanitizer": sanitizer.parts,
    "references": references.parts,
}
STAGE_SECONDS = 480  # no other stage than smoke runs longer
