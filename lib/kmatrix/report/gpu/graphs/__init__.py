"""The GPU graphs of a matrix as PNG, a module per graph; `matrix.draw` and `device_timelines.draw` write the files.

A graph is a function of RunGpus that returns a figure, or the reason why there is nothing to draw.
"""
