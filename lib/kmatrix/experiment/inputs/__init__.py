"""What the runs of a matrix read: data, initial weights and benchmarks."""
