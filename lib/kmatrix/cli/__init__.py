"""The command line: one function per make target. The only package that prints and that catches KmatrixError."""
