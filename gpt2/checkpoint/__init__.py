"""Checkpoints: written whole or not at all, verified when they are read, and enough to go on bit for bit."""

from gpt2.checkpoint.files import load, save
from gpt2.checkpoint.keeper import Keeper
from gpt2.checkpoint.state import Carried, Parts, restore, state, weights

__all__ = ["Carried", "Keeper", "Parts", "load", "restore", "save", "state", "weights"]
