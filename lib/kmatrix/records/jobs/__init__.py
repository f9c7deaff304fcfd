"""The files of a matrix that a cluster runs: its jobs, their shares of the runs, and who runs a share now."""
