"""One measurement: the processes it covers, what their agents say, what tools read of it."""
