"""The parts of the view of a matrix: its values, the devices of its runs, estimates, and which files changed."""
