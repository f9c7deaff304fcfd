"""Plan, make and run a matrix. Nothing here prints; errors are KmatrixError."""
