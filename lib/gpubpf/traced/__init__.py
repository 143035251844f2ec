"""The traced processes: reaching them, serving their agents, and the state of a measurement that all of this shares."""
