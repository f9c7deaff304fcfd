"""The length of runs that a budget of time or money shapes: measured speed, calibration, and the steps that fit."""
