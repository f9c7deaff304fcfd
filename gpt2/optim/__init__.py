"""Optimizers: a name in the configuration becomes one or two torch optimizers that step as one."""

from gpt2.optim.builders import BUILDERS, build
from gpt2.optim.groups import block_matrices, decay_groups
from gpt2.optim.optimizers import Optimizers

__all__ = ["BUILDERS", "Optimizers", "block_matrices", "build", "decay_groups"]
