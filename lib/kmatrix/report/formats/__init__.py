"""The forms in which the numbers of a matrix are written for other programs."""
