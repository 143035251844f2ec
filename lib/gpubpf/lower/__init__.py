"""Lower verified programs to PTX or machine code: one lowering (`ir.py`), with a table for each back end."""
