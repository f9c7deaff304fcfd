"""The trainer: GPT-2 in PyTorch, driven by a run.json and writing into a run's folder."""
