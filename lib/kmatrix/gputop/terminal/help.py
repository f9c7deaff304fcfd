"""The page of help: every key, column and letter of the screen."""

from __future__ import annotations

KEYS = (
    ("up, down, k, j", "select a GPU or a process"),
    ("page up, page down", "ten further"),
    ("0 to 9", "select this GPU"),
    ("tab", "from the GPUs to the processes and back"),
    ("m", "next metric of the charts"),
    ("c, l", "charts below the table; large charts instead of it"),
    ("v", "only the GPUs of CUDA_VISIBLE_DEVICES"),
    ("a", "all alerts"),
    ("s, r", "sort the processes by the next column; reverse the order"),
    ("u", "only the processes of the next user"),
    ("I, T, K", "send SIGINT, SIGTERM or SIGKILL to the selected process, after a question"),
    ("Ctrl+L", "paint the screen again"),
    ("h, ?", "this page"),
    ("q, Ctrl+C", "quit"),
)
REPLAY = (
    ("space", "pause, resume"),
    ("left, right", "10 s back and forward"),
    ("[ and ]", "60 s back and forward"),
    ("0, e", "to the start, to the end"),
)
COLUMNS = (
    ("util", "time in which a kernel ran: 100 % does not mean fast"),
    ("mem GiB", "used and total memory; red at the limit of the alerts"),
    ("W/limit", "watts and power limit: a GPU at its limit is healthy"),
    ("temp", "degrees Celsius; yellow near the limit of the alerts, red at it"),
    ("throt", "clocks are reduced by: P power cap, T heat, H hardware, B power brake"),
    ("SM, tensor, DRAM", "time in which multiprocessors, tensor cores, memory were active"),
    ("PCIe, NVLink", "MiB/s sent and received"),
    ("ECC", "memory errors: corrected/uncorrected"),
    ("new", "time since the driver last changed a value, from 2 s on"),
)


def help_lines(*, replay: bool) -> list[str]:
    """Return the lines of the page. replay: with its keys."""
    keys = (*KEYS, *REPLAY) if replay else KEYS
    wide = max(len(name) for name, _ in (*keys, *COLUMNS))
    return [
        "Keys",
        *(f"  {name:{wide}}  {text}" for name, text in keys),
        "",
        "Columns; - is unknown",
        *(f"  {name:{wide}}  {text}" for name, text in COLUMNS),
        "",
        "Any key closes this page.",
    ]
