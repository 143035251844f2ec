"""Lowering of verified programs to PTX and to machine code: one lowering (`ir.py`), and a table for each back end."""
