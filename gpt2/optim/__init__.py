"""Optimizers: builders by name, those that PyTorch does not have, and all optimizers of a run as one."""
