"""Models: GPT-2 and nanochat, with their attention, loss and key-value cache."""
