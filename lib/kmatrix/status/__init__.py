"""The state of every run, read from files: status, alerts, stragglers, disk space and time left."""
