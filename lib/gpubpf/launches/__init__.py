"""launchlate: when each kernel launch was called, started and ended, and what it waited for."""
