"""The control side of kmatrix: configuration, matrix, runner, status and reports. Nothing here imports torch."""

from pathlib import Path

ROOT = Path(__file__).parents[2]  # the checkout: Kconfig, defconfigs/, gpt2/
