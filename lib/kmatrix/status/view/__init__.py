"""The parts of the view of a matrix: values, devices of runs, estimates, forecasts, and which files changed."""
