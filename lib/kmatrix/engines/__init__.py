"""Engines: the places where runs execute. `base` defines their common interface."""
