"""Checkpoints: written atomically, verified when read, and complete enough to resume bit for bit."""
