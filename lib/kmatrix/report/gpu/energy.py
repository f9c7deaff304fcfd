"""Energy from recordings: one rule for the summary, the page and the loss curves.

The counter of a GPU is used before the integral of its power (trapezoids). A counter that fell was reset. Over a gap
(`Samples.gap_s`), only a counter that goes on knows the energy: power is not integrated. Energy is unknown (NaN) while
a GPU has neither.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kmatrix.report.gpu.samples import Array, Samples

SLACK_S = 2.0  # before the first or after the last sample: still recorded
Interval = tuple[float, float]  # s since the first sample


def steps_of(samples: Samples) -> Array:
    """Return the energy (J) between neighbouring samples (samples - 1, devices); NaN: unknown.

    0: in a gap of power, between two recordings, and of devices that are not in a recording.
    """
    energy, power = samples["energy_j"], samples["power"]
    found = np.zeros((len(samples) - 1, len(samples.devices)))
    for part in samples.parts:
        time, steps = samples.time[part.rows], slice(part.rows.start, part.rows.stop - 1)
        for device in part.places:
            found[steps, device] = _steps(time, energy[part.rows, device], power[part.rows, device], samples.gap_s)
    return found


def _steps(time: Array, energy: Array, power: Array, gap_s: float) -> Array:
    widths = np.diff(time)
    is_gap = widths > gap_s
    if np.count_nonzero(~np.isnan(energy)) > 1:
        rises = np.diff(_filled(time, energy, gap_s, is_counter=True))
        return np.where(rises < 0, np.where(is_gap, np.nan, 0.0), rises)  # nobody knows what a reset in a gap lost
    filled = _filled(time, power, gap_s, is_counter=False)
    return np.where(is_gap, 0.0, widths) * (filled[1:] + filled[:-1]) / 2


def _filled(time: Array, values: Array, gap_s: float, *, is_counter: bool) -> Array:
    """Return values with those between known ones, but in holes that are longer than a gap only of a counter that rose.

    A short hole at the begin or the end has the nearest value.
    """
    is_known = ~np.isnan(values)
    known = np.flatnonzero(is_known)
    if not len(known) or len(known) == len(values):
        return values
    # Holes: before each known value, and at the end
    unknown = np.diff(time[known], prepend=time[0], append=time[-1]) > gap_s
    if is_counter:
        unknown[1:-1] &= np.diff(values[known]) < 0
    found = np.interp(time, time[known], values[known])
    found[~is_known & unknown[np.cumsum(is_known)]] = np.nan
    return found


def within(time: Array, intervals: Sequence[Interval]) -> Array:
    """Return how much (s) of each step between samples is within intervals, which are in order of time."""
    edges = np.ravel(intervals)
    if not len(edges):
        return np.zeros(len(time) - 1)
    inside = np.cumsum(np.diff(edges, prepend=edges[0]) * (np.arange(len(edges)) % 2))
    return np.diff(np.interp(time, edges, inside))


def joules_within(samples: Samples, steps: Array, intervals: Sequence[Interval]) -> float:
    """Return the energy (J) of all devices within intervals; NaN if a part of it is unknown. steps: of `steps_of`."""
    inside, widths = within(samples.time, intervals), np.diff(samples.time)
    touched = inside > 0
    return float((steps.sum(axis=1)[touched] * inside[touched] / widths[touched]).sum())


def joules_at(samples: Samples, times: Sequence[float]) -> Array:
    """Return the energy (J) of all devices of a machine from its first sample to each of these times (its Unix s).

    NaN: in no recording, after an unknown amount, or if its clock was set back: a time may mean two moments. The
    energy between two recordings is in none.
    """
    wanted, wall = np.asarray(times, dtype=float), samples.wall
    total = np.concatenate([[0.0], np.cumsum(steps_of(samples).sum(axis=1))])
    inside = np.zeros(len(wanted), dtype=bool)
    if (np.diff(wall) >= 0).all():
        for part in samples.parts:
            inside |= (wanted >= wall[part.rows][0] - SLACK_S) & (wanted <= wall[part.rows][-1] + SLACK_S)
    return np.where(inside, np.interp(wanted, wall, total), np.nan)
