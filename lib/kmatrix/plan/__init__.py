"""Before a run: what it computes and what it needs, in plain arithmetic."""
