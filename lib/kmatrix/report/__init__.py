"""Read run directories, compute the numbers of a matrix, and write summary, results and graphs."""

from kmatrix.report.analysis import analyse
from kmatrix.report.write import draw_graphs, write_summary

__all__ = ["analyse", "draw_graphs", "write_summary"]
