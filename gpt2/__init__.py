"""The trainer: GPT-2 in PyTorch. It reads run.json and writes its results into the run directory."""
