"""Every file of a matrix and of a run: its name, and what the files of a run say together."""
