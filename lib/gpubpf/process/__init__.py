"""Another process: its memory, libraries, threads and users, and why it cannot be traced."""
