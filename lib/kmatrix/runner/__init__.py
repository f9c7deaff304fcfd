"""Run a matrix: plan its pending attempts, drive an engine over them, handle signals, archive replaced results."""
