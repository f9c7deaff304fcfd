"""Energy from recordings: one rule for the summary, the page and the loss curves.

The counter of a GPU is used before the integral of its power (trapezoids). A counter that fell was reset. Over a gap
(`Samples.gap_s`), only a counter that goes on knows the energy: power is not integrated. Energy is unknown (NaN) while
a GPU has neither.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kmatrix.report.gpu.recordings import Recording
from kmatrix.report.gpu.samples import Array, Samples

Places = npt.NDArray[np.intp]

SLACK_S = 2.0  # before the first or after the last sample: still recorded


def steps_of(samples: Samples) -> Array:
    """Return the energy (J) between neighbouring samples (samples - 1, devices); NaN: unknown; 0 in a gap of power."""
    energy, power = (samples.values[name] for name in ("energy_j", "power"))
    found = np.full((len(samples) - 1, len(samples.devices)), np.nan)
    for device in range(len(samples.devices)):
        if np.count_nonzero(~np.isnan(energy[:, device])) > 1:
            found[:, device] = _counted(samples, energy[:, device])
        elif not np.isnan(power[:, device]).all():
            found[:, device] = _integrated(samples, power[:, device])
    return found


def _counted(samples: Samples, energy: Array) -> Array:
    """Return the increases of an energy counter. Unknown: from a reset that happened in a gap, and after its end."""
    known = np.flatnonzero(~np.isnan(energy))
    widths, rises = np.diff(samples.time[known]), np.diff(energy[known])
    rises = np.where(rises >= 0, rises, np.where(widths > samples.gap_s, np.nan, 0.0))
    return _spread(samples, known, rises)


def _integrated(samples: Samples, power: Array) -> Array:
    """Return the integral of power. Unknown: where power is, for longer than a gap."""
    known = np.flatnonzero(~np.isnan(power))
    widths = np.diff(samples.time[known])
    areas = widths * (power[known][1:] + power[known][:-1]) / 2
    is_gap = widths > samples.gap_s
    areas[is_gap] = np.where(np.diff(known)[is_gap] == 1, 0.0, np.nan)
    return _spread(samples, known, areas)


def _spread(samples: Samples, known: Places, joules: Array) -> Array:
    """Return the energy of each step from that between the samples with a value, in proportion to time.

    known: places of these samples. Before the first and after the last one, energy is unknown if that takes longer than
    a gap.
    """
    if len(known) == len(samples):
        return joules
    widths = np.diff(samples.time)
    steps = np.zeros(len(widths))
    inside = np.arange(known[0], known[-1])
    of = np.searchsorted(known, inside, side="right") - 1
    share = widths[inside] / np.maximum(np.diff(samples.time[known])[of], 1e-9)
    steps[inside] = joules[of] * np.where(np.diff(known)[of] == 1, 1.0, share)
    for part in (slice(0, known[0]), slice(known[-1], None)):
        if widths[part].sum() > samples.gap_s:
            steps[part] = np.nan
    return steps


def between(time: Array, steps: Array, begins: Array, ends: Array) -> Array:
    """Return the energy (J) of each device from each begin to its end (spans, devices); NaN if a part is unknown.

    time: of the samples (s).  steps: of `steps_of`.  Begins and ends outside of the recording are cut to it.
    """
    unknown = np.isnan(steps)
    found = np.empty((len(begins), steps.shape[1]))
    for device in range(steps.shape[1]):
        total = np.concatenate([[0.0], np.nancumsum(steps[:, device])])
        holes = np.concatenate([[0.0], np.cumsum(unknown[:, device])])
        joules, lost = (np.interp(ends, time, each) - np.interp(begins, time, each) for each in (total, holes))
        found[:, device] = np.where(lost > 0, np.nan, joules)
    return found


def joules_at(recordings: Sequence[Recording], times: Sequence[float]) -> Array:
    """Return the energy (J) of all devices of a run from the start of its first recording to each of these times.

    recordings: of all attempts. times: Unix s, of the machine that recorded. NaN: in no recording, or after an unknown
    amount. All are NaN for several nodes, whose clocks may differ. The energy between two recordings is in none.
    """
    wanted = np.asarray(times, dtype=float)
    found = np.full(len(wanted), np.nan)
    if len({one.node for one in recordings}) != 1:
        return found
    before = 0.0
    for samples in (one.samples for one in recordings):
        total = np.concatenate([[before], before + np.cumsum(steps_of(samples).sum(axis=1))])
        before = float(total[-1])
        if (np.diff(samples.wall) < 0).any():
            continue  # the clock was set back: a time may mean two moments
        inside = (wanted >= samples.wall[0] - SLACK_S) & (wanted <= samples.wall[-1] + SLACK_S)
        found[inside] = np.interp(wanted[inside], samples.wall, total)
    return found
