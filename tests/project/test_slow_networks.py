"""The table of docs/slow-networks.md is the one that its formulas give."""

from __future__ import annotations

import re

from kmatrix.shapes import NAMED, ModelShape, peak_tflops
from pages import DOCS

GPUS, MICRO_BATCH, BLOCK, MFU, LINE_RATE = 8, 12, 1024, 0.4, 0.9
ACCUMULATIONS = (1, 5, 20)


def shares(gbit):
    """Return the seconds on the network, and the shares of a step that wait for it, with these accumulations."""
    layers, heads, width = NAMED["124m"]
    shape = ModelShape(
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        block_size=BLOCK,
        vocab_size=50257,
        bias=True,
        weight_tying=True,
    )
    sent = 2 * (GPUS - 1) / GPUS * 4 * shape.params  # bytes per step that each node sends
    network = sent / (gbit * 1e9 / 8 * LINE_RATE)
    micro = shape.flops_per_token * BLOCK * MICRO_BATCH / (peak_tflops("NVIDIA A10G", "bf16") * 1e12 * MFU)
    waits = [(max(0.0, network - 2 / 3 * micro), micro * accumulation) for accumulation in ACCUMULATIONS]
    return network, [wait / (wait + compute) for wait, compute in waits]


def test_the_table_is_computed_by_the_formulas_of_the_page():
    text = (DOCS / "slow-networks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) Gbit/s \| ([\d.]+) s \| (\d+) % \| (\d+) % \| (\d+) % \|$", text, re.MULTILINE)

    assert [int(row[0]) for row in rows] == [1, 10, 25, 100]
    for gbit, seconds, *found in rows:
        network, expected = shares(int(gbit))
        assert seconds == f"{network:.2f}"
        assert found == [f"{100 * share:.0f}" for share in expected]
