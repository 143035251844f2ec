"""One measurement, as tools see it: `Session` starts it, reads it and ends it."""
