"""The local engine: the processes of runs on this machine, their GPUs and their recorders."""
