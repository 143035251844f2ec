"""Questions about the driver. `python3 -m gpu.questions NAME` asks one, and prints the answer as JSON in its last line.

Runs on any driver that has the functions; no kernel of it runs longer than some seconds by itself. Exit status 77: cannot be asked
here; 1: could not be asked.

asking.py    what a question is, and the children that it is asked in
machine.py   what the machine lets the tools do
handles.py   symbols and handles
memory.py    registered host memory; what a ring holds after a trap, after SIGKILL
swaps.py     kernels in a graph, replaced by copies
clocks.py    globaltimer, clock64
arithmetic.py  the carry flag
costs.py     marks in a stream
cupti.py     CUPTI's correlation ids; enabling its records while a kernel runs
waiting.py   persistent kernels, captures, kernels that do not end
"""

from gpu.questions import machine, handles, memory, swaps, clocks, arithmetic, costs, cupti, waiting  # noqa: F401, I001  the order in which they are asked
from gpu.questions.asking import QUESTIONS, Question

__all__ = ["QUESTIONS", "Question", "named"]


def named(name: str) -> Question:
    """Return the question of this name."""
    return next(question for question in QUESTIONS if question.name == name)
