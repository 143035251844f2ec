"""A session: traces processes through their agents, and gives tools the maps, logs, rings and counts that they collect."""
