"""The GPUs of this machine: which there are, and what they do."""
