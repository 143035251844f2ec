"""PTX: the model (`module`), reading (`tokens`, `parser`), control flow (`flow`), instrumentation (`inject`), linking (`link`)."""
