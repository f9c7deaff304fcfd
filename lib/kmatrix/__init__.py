"""The control side of kmatrix: configuration, matrix, runner, status and reports. Nothing here imports torch."""
