"""Run a matrix: resume what is left, drive an engine over it, handle signals, archive replaced results."""
