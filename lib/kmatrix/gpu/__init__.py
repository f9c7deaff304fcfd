"""GPUs of this machine: detection, sampling, recordings. A run on the CPU is sampled by rank instead."""
