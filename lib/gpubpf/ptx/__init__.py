"""PTX: reading (`tokens`, `module`), control flow (`flow`), instrumentation (`inject`), linking (`link`)."""
