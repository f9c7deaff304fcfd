"""The parts of the view of a matrix: values, devices of runs, estimates, and which files changed."""
