"""Kconfig + defconfig + fragments + command line -> effective values, or an error with file, line, symbol and cause.

kconfiglib is used as a library and only here. Its own command-line tools are never called: they exit with
status 0 on most mistakes. The rule of this package: every line takes effect, or it is refused.
"""
