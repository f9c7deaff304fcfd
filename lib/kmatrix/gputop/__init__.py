"""gputop: a live terminal screen of all GPUs, from the driver, from a running recorder, or as a replay of a run."""
