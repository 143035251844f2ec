"""Access to another process: its memory, libraries, threads and user, and the reasons why it cannot be traced."""
