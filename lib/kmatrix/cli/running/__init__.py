"""The commands that train, one module per group of commands."""
