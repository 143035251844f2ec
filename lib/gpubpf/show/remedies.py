"""What to do about launches that are not counted: one short text for each kind of reason, where that is certain."""

from __future__ import annotations

_WITH_PTX = "with PTX, by nvcc -gencode arch=compute_NN,code=compute_NN or +PTX in TORCH_CUDA_ARCH_LIST"
# Beginning of a reason → remedy. The reasons are a stable interface (records/reasons.py, images/).
_REMEDIES = {
    "map too small": "increase --map-memory",
    "SASS only": f"build it {_WITH_PTX}, or with -lineinfo; for code compiled at run time see docs/jit.md; "
    "what tools measure with --sass is in docs/machine-code.md",
    "PTX for a newer GPU": f"measure it on such a GPU, or build it for this one {_WITH_PTX}",
    "PTX for another GPU": f"measure it on that GPU, or build it for this one {_WITH_PTX}",
    "linked from several images": "build or compile each part with PTX, or with -lineinfo",
    "link-time optimised code (-dlto) without PTX": "build it without -dlto, or with PTX beside it",
    "PTX not found": "start the program with the tool, which then sees what it loads",
}


def remedy(reason: str) -> str:
    """Return what a user can do about a reason; "" if that is not certain."""
    return next((text for beginning, text in _REMEDIES.items() if reason.startswith(beginning)), "")
