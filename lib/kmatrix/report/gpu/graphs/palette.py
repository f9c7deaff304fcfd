"""Colours of the GPU graphs. Those that occur together differ for readers with any kind of colour blindness."""

from __future__ import annotations

# Backgrounds, pale: lines in front of them stay visible.
PHASE_COLOURS = {"set-up": "#C6E8C8", "evaluation": "#FBE7A1", "checkpoint": "#A9B8F0", "ending": "#AAAAAA"}
TRAINING_COLOUR = "#56707F"  # next to the phases
# Up to eight devices of a run.
DEVICE_COLOURS = ("#009E73", "#332288", "#E69F00", "#B34700", "#AA4499", "#661100", "#005F56", "#222222")
CLASS_COLOURS = {"Excellent": "#C4E3F3", "Good": "#F1F6CF", "Fair": "#FFD98F", "Poor": "#F2A59B"}  # of a balance
HEAT_COLOURS = "cividis"  # of matplotlib: the same order of brightness for all readers
UNKNOWN_COLOUR = "#FFFFFF"  # in a heat map
