"""The files of a matrix and of its runs: names, formats and values."""
