"""Symbols -> runs: expand the axes, exclude illegal cells with a reason, deduplicate, name and identify.

Pure and deterministic: the same configuration gives the same runs, names and ids, in the same order.
Symbols are known by name here, never by meaning; arithmetic between them comes as rules from `kmatrix.config`.
"""
