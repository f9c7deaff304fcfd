"""The adapter for NVIDIA GPUs: device detection and samples through NVML."""
