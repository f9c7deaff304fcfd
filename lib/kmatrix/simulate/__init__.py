"""Simulated NVIDIA GPUs: a drop-in replacement for libnvidia-ml.so.1 that plays a scenario.

The unmodified client library (nvidia-ml-py) and every program built on it run on top, so monitoring can be tested and
demonstrated without a GPU. The names of simulated GPUs end in "(simulated)".
`python -m kmatrix.simulate --gpus 4 -- COMMAND` runs a command with them. See docs/gputop.md.
"""
