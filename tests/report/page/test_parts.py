"""Text, colours and places that all sections of the page share."""

from __future__ import annotations

import doctest
from itertools import pairwise

import pytest

from kmatrix.report.page.parts import figures, text
from kmatrix.report.page.parts.colours import OPTIMIZERS, classes_of_values, colour_classes, dashes, optimizer_colours
from kmatrix.report.page.parts.figures import Point, Scale, nice_ticks, pareto, pareto_front, spread_labels
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


def test_a_narrow_strip_has_few_ticks_and_two_at_least():
    found, step = nice_ticks(3.2757, 3.2842, most=3)  # of 0.005 there is one, of 0.002 there are five

    assert found == pytest.approx([3.276, 3.28, 3.284])
    assert [figures.tick_text(value, step) for value in found] == ["3.276", "3.280", "3.284"]


@pytest.mark.parametrize("values", [(1.0, 1.0), (float("nan"), 1.0), (1.0, float("inf"))])
def test_ticks_of_no_range_are_one_value(values):
    assert len(nice_ticks(*values)[0]) == 1


def test_a_scale_draws_what_lies_outside_at_the_edge():
    scale = Scale(0.0, 10.0)

    assert [scale.at(value) for value in (0, 5, 10, 1000, -1000)] == [0, 50, 100, 102, -2]
    assert scale.unbounded(20) == 200
    assert scale.span(-5, 4) == figures.Span(0, 40, before=True, after=False)
    assert Scale(0.0, 10.0, 300, 100).span(2, 20) == figures.Span(100, 260, before=False, after=True)


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


def test_labels_at_line_ends_are_apart_and_keep_their_order():
    placed = spread_labels([50, 51, 52, 200], gap=14, low=0, high=210)

    assert placed == sorted(placed)
    assert min(b - a for a, b in pairwise(placed)) >= 14
    assert placed[0] >= 0
    assert placed[-1] <= 210


def test_an_optimizer_keeps_its_colour_in_every_report():
    assert optimizer_colours(["muon", "adamw"]) == {"adamw": 0, "muon": 1}
    assert optimizer_colours(["sgd", "muon"])["muon"] == 1
    both = optimizer_colours(["lion", "adamwadv"])  # the same preferred colour: one gives way
    assert both["lion"] == 5
    assert both["adamwadv"] != 5
    eight = list(OPTIMIZERS)[:8]
    assert sorted(optimizer_colours(eight).values()) == list(range(8))


def test_with_one_optimizer_the_first_axis_that_varies_has_the_colours():
    axes = {"optimizer": ["adamw"], "seed": ["1", "2"], "lr": ["0.1", "0.01", "0.001"]}
    configurations = [{"optimizer": "adamw", "lr": value} for value in axes["lr"]]

    assert colour_classes(configurations, axes) == ["r6", "r3", "r0"]
    assert classes_of_values(["cosine", "linear"]) == {"cosine": "k0", "linear": "k1"}
    assert colour_classes([{"optimizer": "muon"}], {"optimizer": ["muon"]}) == ["k1"]


def test_configurations_of_one_colour_have_different_dashes():
    assert dashes(["k0", "k1", "k0", "k0", "k0", "k0"]) == [0, 0, 1, 2, 3, 0]


def test_short_names_leave_out_what_all_have_in_common():
    assert short_names(["muon, 4 GPUs", "adamw, 4 GPUs"]) == ["muon", "adamw"]
    assert short_names(["muon, 4 GPUs"]) == ["muon, 4 GPUs"]
    assert short_names(["a", "a, b"]) == ["a", "b"]
