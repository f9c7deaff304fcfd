"""Which runs a matrix wants now: with adaptive seeds, or with successive halving."""
