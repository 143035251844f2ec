"""gputop: what runs on the GPUs of this machine, by process and interval."""
