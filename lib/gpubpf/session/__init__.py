"""A session traces processes through their agents, and gives tools the collected maps, logs, rings and counts."""
