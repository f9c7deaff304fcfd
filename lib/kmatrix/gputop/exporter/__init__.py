"""The exporter: the GPUs of this machine, and the runs on them, as metrics for Prometheus."""
