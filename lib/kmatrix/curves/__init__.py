"""Thinned curves of a run: losses, tokens, seconds and joules over steps, read once from its log and its recording."""
