"""What XID errors mean: the codes that the NVIDIA driver writes into the log of the kernel.

Source: NVIDIA, "XID Errors", https://docs.nvidia.com/deploy/xid-errors/
"""

from __future__ import annotations

from collections.abc import Mapping

MEANINGS = {
    8: "the GPU stopped processing",
    13: "exception in a kernel, often an access out of bounds",
    31: "memory page fault: an illegal address in a kernel, or a defect",
    43: "the GPU stopped processing for a program that failed",
    45: "a program was ended before its work on the GPU was done",
    48: "uncorrectable memory error",
    61: "internal breakpoint of the microcontroller",
    62: "internal halt of the microcontroller",
    63: "a memory page or row was replaced",
    64: "a memory page or row could not be replaced",
    69: "exception in the graphics engine",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many corrected memory errors",
    94: "contained memory error: one program was ended",
    95: "uncontained memory error: the GPU needs a reset",
    119: "timeout of the GPU system processor",
    120: "error of the GPU system processor",
    140: "memory error that could not be contained",
}
# A fault of the GPU, its memory or its links, or a lost GPU. The others are most often errors of a program.
FAULTS = frozenset({48, 62, 63, 64, 74, 79, 94, 95, 119, 120, 140})


def xid_text(code: int) -> str:
    """Return the code of an XID error with its meaning, if it is a common one."""
    meaning = MEANINGS.get(code)
    return f"XID {code}: {meaning}" if meaning else f"XID {code}"


def xids_text(counts: Mapping[int, int]) -> str:
    """Return XID errors with their meanings. counts: code -> number of errors."""
    return "; ".join(xid_text(code) + (f" ({count} times)" if count > 1 else "") for code, count in counts.items())
