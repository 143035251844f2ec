"""Find device code in files and processes, instrument it, and assemble it."""
