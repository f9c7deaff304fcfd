"""Every number of the ranking, of the pairs and of the target on the page, computed here with SciPy alone.

Formulas are written down again from their sources; of the project only the page itself is read.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics

import pytest
from scipy import optimize, stats

from page_sections import page, rows, section
from records_factory import FakeRun, loss_at

TARGET = 3.2930
MARGIN = 0.0040
# lion has seeds of its own: it is compared with Welch's test. muon and soap are equal within the margin.
LOSSES = {
    "muon": dict(zip(range(1, 7), [3.27990, 3.28060, 3.28100, 3.27960, 3.28080, 3.28110], strict=True)),
    "soap": dict(zip(range(1, 7), [3.28050, 3.28010, 3.28170, 3.27990, 3.28040, 3.28120], strict=True)),
    "adamw": dict(zip(range(1, 7), [3.29170, 3.29310, 3.29240, 3.29090, 3.29480, 3.29210], strict=True)),
    "lion": dict(zip(range(7, 11), [3.29490, 3.29150, 3.29730, 3.28910], strict=True)),
}
SPEEDS = {"muon": 4000.0, "soap": 3200.0, "adamw": 5000.0, "lion": 4500.0}  # tokens/s
LEADER = "muon"
OTHERS = len(LOSSES) - 1
PAIRS = list(itertools.combinations(LOSSES, 2))


class Pair:
    """The comparison of a with b, computed with SciPy."""

    def __init__(self, a: str, b: str) -> None:
        self.x, self.y = LOSSES[a], LOSSES[b]
        self.seeds = sorted(self.x.keys() & self.y.keys())
        x, y = list(self.x.values()), list(self.y.values())
        if self.seeds:
            test = stats.ttest_rel([self.x[seed] for seed in self.seeds], [self.y[seed] for seed in self.seeds])
        else:
            test = stats.ttest_ind(x, y, equal_var=False)
        self.difference = statistics.fmean(x) - statistics.fmean(y)
        self.p, self.interval, self.freedom = float(test.pvalue), test.confidence_interval(0.95), float(test.df)
        self.half = float(self.interval.high - self.interval.low) / 2
        self.error = abs(self.difference / float(test.statistic))
        self.holm = math.nan  # set below

    def equal_within(self) -> float:
        """Return the smallest margin at which both one-sided tests are significant."""
        level = 0.05 / OTHERS

        def p_of(margin: float) -> float:
            upper = stats.t.cdf((self.difference - margin) / self.error, self.freedom)
            return max(upper, stats.t.sf((self.difference + margin) / self.error, self.freedom))

        return float(optimize.brentq(lambda margin: p_of(margin) - level, 0, 1, xtol=1e-12))

    def detectable(self, level: float) -> float:
        """Return the true difference that is found with a power of 80 %."""
        limit = stats.t.isf(level / 2, self.freedom)
        shift = optimize.brentq(lambda value: stats.nct.sf(limit, self.freedom, value) - 0.8, 0.1, 60, xtol=1e-12)
        return float(shift) * self.error

    @property
    def outcome(self) -> str:
        if self.equal_within() <= MARGIN:
            return "equivalent within 0.004"
        return "not distinguishable" if self.holm > 0.05 else "better" if self.difference < 0 else "worse"


@pytest.fixture(scope="module")
def found():
    """Return each pair, with p values corrected after Holm (1979), and the level of those that stay open."""
    pairs = {pair: Pair(*pair) for pair in PAIRS}
    largest = 0.0
    for rank, pair in enumerate(sorted(pairs.values(), key=lambda pair: pair.p)):
        pair.holm = largest = max(largest, min(1.0, (len(pairs) - rank) * pair.p))
    level = 0.05 / sum(pair.holm > 0.05 for pair in pairs.values())
    return pairs, level


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    runs = [
        FakeRun(optimizer=name, seed=seed, final_loss=loss, tokens_per_s=SPEEDS[name], axes={"seed": str(seed)})
        for name, losses in LOSSES.items()
        for seed, loss in losses.items()
    ]
    rules = {"min_difference": MARGIN, "target_loss": TARGET}
    return page(tmp_path_factory.mktemp("page"), runs, verdict=rules)


def minus(text: str) -> str:
    return text.replace("−", "-")


def decimals(text: str) -> int:
    return len(text.partition(".")[2])


def assert_number(printed: str, value: float, what: object) -> None:
    """Assert that every digit that is printed is right."""
    assert decimals(printed) >= 4, what
    assert minus(printed).lstrip("+") == f"{value:.{decimals(printed)}f}", what


def p_of(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def check_words(words: str, pair: Pair, level: float) -> None:
    """Check the word of a comparison, its p and what the page says about it besides."""
    outcome = pair.outcome
    assert words.startswith(outcome)
    if outcome.startswith("equivalent"):
        assert ("there is a difference" in words) == (pair.holm <= 0.05)
        return
    assert re.findall(r"p [=<] [\d.]+", words) == [p_of(pair.holm)]
    assert ("detectable" in words) == ("equal within" in words) == (outcome == "not distinguishable")
    if outcome == "not distinguishable":
        (margin,), (least,) = re.findall(r"equal within ([\d.]+)", words), re.findall(r"detectable ([\d.]+)", words)
        assert_number(margin, pair.equal_within(), words)
        assert_number(least, pair.detectable(level), words)


def test_the_scene_has_every_kind_of_comparison(found):
    pairs, _ = found
    assert {pair.outcome for pair in pairs.values()} == {
        *("better", "equivalent within 0.004", "not distinguishable"),
    }
    assert {bool(pair.seeds) for pair in pairs.values()} == {True, False}


def test_every_number_of_the_ranking_is_that_of_scipy(shown, found):
    pairs, level = found
    table = [cells for cells in rows(section(shown, "ranking").one("table", "rank")) if len(cells) > 2]
    assert [cells[1] for cells in table] == sorted(LOSSES, key=lambda name: statistics.fmean(LOSSES[name].values()))
    for rank, (number, name, seeds, mean, deviation, _, gap, _, words) in enumerate(table, 1):
        losses = list(LOSSES[name].values())
        assert (number, seeds) == (str(rank), str(len(losses)))
        middle, half = mean.split(" ± ")
        assert_number(middle, statistics.fmean(losses), name)
        assert_number(half, stats.t.ppf(0.975, len(losses) - 1) * stats.sem(losses), name)
        assert_number(deviation, statistics.stdev(losses), name)
        if name == LEADER:
            assert (gap, words) == ("leader", "")
            continue
        pair = pairs[LEADER, name]
        size, half = gap.split(" ± ")
        assert size.startswith("+")
        assert_number(size, -pair.difference, name)
        assert_number(half, pair.half, name)
        mirrored = "worse" if pair.outcome == "better" else pair.outcome
        assert words.startswith(mirrored)
        check_words(words.replace("worse", "better", 1), pair, level)


def test_every_number_of_the_other_pairs_is_that_of_scipy(shown, found):
    pairs, level = found
    listed = rows(section(shown, "ranking").one("table", "list-of-pairs"))
    assert len(listed) == len(PAIRS) - OTHERS
    for name, word, difference, interval, seeds, p, details in listed:
        pair = pairs[tuple(name.split(" against "))]
        assert_number(difference, pair.difference, name)
        low, high = interval.split(" to ")
        assert_number(low, pair.interval.low, name)
        assert_number(high, pair.interval.high, name)
        assert seeds == str(len(pair.seeds))
        check_words(f"{word} {p} {details}", pair, level)


def test_the_verdict_has_the_numbers_of_scipy(shown, found):
    pairs, _ = found
    text = section(shown, "verdict").one("article").text
    closest, equal = pairs[LEADER, "adamw"], pairs[LEADER, "soap"]
    patterns = (  # a sentence -> the numbers in it
        (r"the closest, adamw, by (\S+) ± (\S+) nats", (-closest.difference, closest.half)),
        (r"Against adamw: 95 % interval (\S+) to (\S+) nats", (-closest.interval.high, -closest.interval.low)),
        (
            r"soap are equivalent within 0\.004 nats/token: difference (\S+) \((\S+) to ([^)]+)\)",
            (equal.difference, equal.interval.low, equal.interval.high),
        ),
    )
    for pattern, values in patterns:
        for printed, value in zip(re.findall(pattern, text)[0], values, strict=True):
            assert_number(printed, value, pattern)
    assert f"Student's t), {p_of(closest.holm)} (Holm, 6 comparisons)" in text
    gaps = [LOSSES["adamw"][seed] - LOSSES[LEADER][seed] for seed in closest.seeds]
    alone = sum(statistics.variance(LOSSES[name].values()) for name in ("adamw", LEADER))
    assert f"pairing removed {100 * (1 - statistics.variance(gaps) / alone):.0f} % of the variance" in text
    signs = itertools.product((-1, 1), repeat=6)
    reached = sum(abs(sum(map(float.__mul__, gaps, map(float, one)))) >= sum(gaps) - 1e-12 for one in signs)
    assert f"exact sign-flip {p_of(reached / 64)}" in text


def test_every_number_of_the_target_is_counted_from_the_losses(shown):
    tests = {
        name: stats.ttest_1samp(list(losses.values()), TARGET, alternative="less").pvalue
        for name, losses in LOSSES.items()
    }
    corrected, largest = {}, 0.0
    for rank, name in enumerate(sorted(tests, key=lambda name: tests[name])):
        corrected[name] = largest = max(largest, min(1.0, (len(tests) - rank) * tests[name]))
    listed = rows(section(shown, "target").one("table"))
    assert {cells[0] for cells in listed} == LOSSES.keys()
    tokens_per_step = 8 * 128  # global batch x block size
    times = {name: 100 * tokens_per_step / SPEEDS[name] for name in ("muon", "soap", "adamw")}  # s, to the last step
    missed = 0
    for name, reached, below, steps, tokens, seconds, ratio, _ in listed:
        runs = [FakeRun(final_loss=loss) for loss in LOSSES[name].values()]
        first = [
            next(
                (step for step in range(0, run.steps + 1, run.eval_interval) if loss_at(run, step) <= TARGET), math.inf
            )
            for run in runs
        ]
        late = first.count(math.inf)
        missed += late
        assert reached == f"{len(runs) - late} of {len(runs)}" + (f" not reached in {late}" if late else "")
        assert below == (
            f"{'below' if corrected[name] <= 0.05 else 'not shown'} {p_of(corrected[name])}, {len(runs)} seeds"
        )
        median = statistics.median(first)
        if math.isinf(median):
            assert (steps, tokens, seconds, ratio) == (*["not reached"] * 3, "–")
            continue
        assert (steps, tokens) == (f"{median:.0f}", f"{median * tokens_per_step / 1000:.0f}k")
        assert (seconds, ratio) == (f"{times[name]:.1f} s", f"{times[name] / min(times.values()):.2f}×")
    assert missed > 0
    assert f"Not reached in {missed} of 22 runs" in section(shown, "target").text
