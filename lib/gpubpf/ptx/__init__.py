"""PTX: the model (`module`), reading (`tokens`, `parser`), facts about opcodes (`opcodes`), control flow (`flow`),
instrumentation (`inject`), linking (`link`)."""
