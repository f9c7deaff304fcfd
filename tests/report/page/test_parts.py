"""Text, colours and places that all sections of the page share."""

from __future__ import annotations

import doctest

import pytest

from kmatrix.report.page.parts import figures, text
from kmatrix.report.page.parts.colours import OPTIMIZERS, optimizer_colours
from kmatrix.report.page.parts.figures import Point, nice_ticks, pareto, pareto_front
from kmatrix.report.page.parts.groups import short_names


def test_the_examples_of_text_hold():
    assert doctest.testmod(text).failed == 0


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), -float("inf")])
def test_unknown_numbers_are_an_en_dash(value):
    formats = (text.fixed, text.signed, text.whole, text.significant, text.percent, text.change)
    for form in (*formats, text.duration, text.date_time, text.big, text.dollars):
        assert form(value) == "–", form.__name__


def test_hostile_text_is_visible_and_cannot_reorder_the_page():
    assert text.shown("\x1b[31m\x00\x7f\u202eevil\u2066\ud800\x9b") == "␛[31m␀␡\ufffdevil\ufffd\ufffd\ufffd"
    assert text.shown("x\n\ty") == "x\n\ty"
    assert text.one_line("a\nb\r\n  c") == "a b␍ c"
    assert len(text.name("x" * 10_000)) < 160
    assert text.name("x" * 10_000).endswith("(10,000 characters)")


@pytest.mark.parametrize(
    ("low", "high", "values"),
    [
        (2.21, 2.43, [2.25, 2.3, 2.35, 2.4]),
        (0, 100, [0, 20, 40, 60, 80, 100]),
        (-0.013, 0.011, [-0.01, -0.005, 0.0, 0.005, 0.01]),
    ],
)
def test_ticks_are_round_and_few(low, high, values):
    found, step = nice_ticks(low, high, most=6)

    assert found == pytest.approx(values)
    assert [float(figures.tick_text(value, step).replace("−", "-")) for value in found] == pytest.approx(values)


def point(name: str, x: float, y: float, **more: float) -> Point:
    return Point(name=name, tip=name, colour="k0", group=0, x=x, y=y, **more)


def test_the_pareto_front_is_what_nothing_beats_in_both():
    assert pareto_front([(1, 5), (2, 3), (3, 4), (4, 1), (4, 2), (0.5, 5)]) == [5, 1, 3]


def test_a_pareto_panel_joins_the_front_and_counts_what_it_omits():
    good = [point(name, x, y, low=y - 0.001, high=y + 0.001) for name, x, y in (("a", 10, 3.30), ("b", 20, 3.28))]
    panel = pareto("loss and time", "time", "loss", [*good, point("c", 30, 3.29), point("far", 5, 9.0)])

    assert panel is not None
    assert panel.omitted == 1
    assert {one.name: one.front for one in panel.points} == {"a": True, "b": True, "c": False}
    assert len(panel.front.split()) == 3  # two corners, and the step between them
    assert pareto("one", "x", "y", good[:1]) is None


def test_labels_do_not_overlap():
    crowd = [point(f"configuration {at}", 10 + at * 0.01, 3.28 + at * 0.0001) for at in range(12)]
    panel = pareto("", "", "", crowd, names=12)

    assert panel is not None
    labelled = [one for one in panel.points if one.label is not None]
    assert labelled
    areas = [next(area for label, area in figures._spots(one) if label == one.label) for one in labelled]
    assert not [1 for a in areas for b in areas if a is not b and figures._overlap(a, b)]


def test_an_optimizer_keeps_its_colour_in_every_report():
    assert optimizer_colours(["muon", "adamw"]) == {"adamw": 0, "muon": 1}
    assert optimizer_colours(["sgd", "muon"])["muon"] == 1
    both = optimizer_colours(["lion", "adamwadv"])  # the same preferred colour: one gives way
    assert both["lion"] == 5
    assert both["adamwadv"] != 5
    eight = list(OPTIMIZERS)[:8]
    assert sorted(optimizer_colours(eight).values()) == list(range(8))


def test_short_names_leave_out_what_all_have_in_common():
    assert short_names(["muon, 4 GPUs", "adamw, 4 GPUs"]) == ["muon", "adamw"]
    assert short_names(["muon, 4 GPUs"]) == ["muon, 4 GPUs"]
    assert short_names(["a", "a, b"]) == ["a", "b"]
