"""PTX, as injection, listing and the embedded device read it: the model (`module`), reading (`tokens`, `parser`), facts about
opcodes (`opcodes`), control flow (`flow`), what functions call and use (`call_graph`), linking (`link`)."""
