"""Where a matrix stands: status, estimate, logs."""
