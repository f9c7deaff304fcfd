"""Slurm as the scheduler of a matrix: its commands, what a cluster has, the job script, and the jobs of shares."""
