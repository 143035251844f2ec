"""launchlate: when each launch was called, started and ended, and what it waited for."""
