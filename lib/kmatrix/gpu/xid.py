"""What XID errors mean: the codes that the NVIDIA driver writes into the log of the kernel.

Source: NVIDIA, "XID Errors", https://docs.nvidia.com/deploy/xid-errors/
"""

from __future__ import annotations

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
}


def xid_text(code: int) -> str:
    """Return the code of an XID error with its meaning, if it is a common one."""
    meaning = MEANINGS.get(code)
    return f"XID {code}: {meaning}" if meaning else f"XID {code}"
