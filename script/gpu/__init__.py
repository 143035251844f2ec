"""The parts of script/gpu-check. docs/gpu.md says how to use it.

machine.py     the machine that the check runs on, and how it starts programs
stages.py      the stages
stage.py       a stage: its parts, each with a time limit, its results as JSON
pack.py        what the machine with the GPU needs, packed
smoke.py       the first stage: ten parts in 90 seconds, each the ground of the next
facts.py       questions about the driver (those of questions/, asked through driver.py, each in its own process)
patched.py     kernels without PTX under --sass
answers.py     known answers of every tool (records.py has them)
cases.py       programs out of the ordinary: other CUDA runtimes, setmaxnreg, printf and limits, two contexts
overhead.py    the overhead of each tool: ratios
references.py  the overhead of other profilers, if they are installed
sanitizer.py   whether the Compute Sanitizer API can instrument kernels without PTX (probes.py makes its patches)
report.py      results of stages → a report
programs/      CUDA, C++ and Python programs that are measured
"""
