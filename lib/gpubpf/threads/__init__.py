"""threadhist: how often each thread runs, and how evenly the work is divided."""
