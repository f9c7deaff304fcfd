"""The recorder of a run: a program that samples its devices at a fixed rate and writes the recording."""
