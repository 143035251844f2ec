"""What script/gpu-check is made of: docs/gpu.md says how it is used.

machine.py     where it runs, how things are started there
stages.py      the stages
stage.py       a stage: its parts, each with a time limit, its results as JSON
pack.py        what is taken along to the machine with the GPU
smoke.py       the first stage: ten parts in 90 seconds, each the ground of the next
facts.py       questions about the driver (those of questions/, asked through driver.py, each in a process of its own)
answers.py     known answers of every tool (records.py says what is right)
overhead.py    what each tool costs: ratios
references.py  what other ways to measure cost, where they are there
sanitizer.py   whether kernels without PTX can be reached by the Compute Sanitizer API
report.py      results of stages → a report
probes.py      device programs as its patches
programs/      CUDA, C++ and Python programs that are measured
"""
