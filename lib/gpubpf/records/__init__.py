"""What a measurement returns: logs, rings, contents of maps, clocks and launch shapes, and the reasons for what is missing."""
