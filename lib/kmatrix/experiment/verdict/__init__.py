"""How the losses of a planned matrix will be compared."""
