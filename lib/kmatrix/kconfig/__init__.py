"""Kconfig + defconfig + fragments + overrides -> values in force, or an error with file, line, symbol and cause.

kconfiglib is used as a library and only here. Its own command-line tools are never called: they end with
status 0 on most mistakes. The rule of this package: what is asked for is in force afterwards, or it is refused.
"""

from kmatrix.kconfig.assign import parse_override, read_assignments
from kmatrix.kconfig.strict import Assignment, Cause, cause, put_in_force
from kmatrix.kconfig.tree import Tree

__all__ = ["Assignment", "Cause", "Tree", "cause", "parse_override", "put_in_force", "read_assignments"]
