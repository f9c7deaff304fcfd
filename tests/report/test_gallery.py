"""gallery.html: one page about several matrices."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from urllib.parse import unquote

from html_reader import read_html, text_of
from kmatrix.report.analyse import analyse
from kmatrix.report.page import write_gallery, write_page
from kmatrix.report.write import write_summary
from programs import main
from records_factory import FakeRun, make_matrix, runs_with_seeds

MARKUP = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
NAMES = [f"test_matrix_results_2026112{day}_052300" for day in range(4)]


def two_optimizers() -> list[FakeRun]:
    losses = {"muon": (3.270, 3.281, 3.279), "adamw": (3.372, 3.379, 3.383)}
    return [run for name, values in losses.items() for run in runs_with_seeds(3, values, optimizer=name)]


def report(matrix):
    results = analyse(matrix)
    write_page(matrix, results)
    write_summary(matrix, results)
    return matrix


def cards(folder, matrices):
    page = write_gallery(folder, matrices)
    return read_html(page.read_text(encoding="utf-8")).findall(".//section")


def test_each_matrix_has_its_verdict_and_a_link_to_its_page(tmp_path):
    decided = report(make_matrix(tmp_path, two_optimizers(), name=f"{NAMES[0]} a#?ü"))
    single = make_matrix(tmp_path, [FakeRun()], name=NAMES[1])
    write_summary(single, analyse(single))
    first, second = cards(tmp_path, [decided, single])
    assert text_of(first.find(".//h2")) == "muon beats adamw by 0.1013 ± 0.0076 nats/token"
    (link,) = first.iter("a")
    assert (tmp_path / unquote(link.get("href"))).resolve() == decided.page
    facts = dict(zip(map(text_of, first.iter("dt")), map(text_of, first.iter("dd")), strict=True))
    assert facts["finished"] == "6"
    assert second.find(".//a") is None  # it has no page yet


def test_a_matrix_without_readable_results_is_shown_with_its_error(tmp_path):
    good = report(make_matrix(tmp_path, two_optimizers(), name=NAMES[0]))
    newer, never = (make_matrix(tmp_path, [FakeRun()], name=name) for name in NAMES[1:3])
    report(newer).results.write_text('{"schema": 99}')
    first, second, third = cards(tmp_path, [never, newer, good])
    assert "results.json is missing" in text_of(first)
    assert "results.json has schema 99" in text_of(second)
    assert text_of(third.find(".//h2")).startswith("muon beats adamw")


def test_text_of_users_is_text_and_nothing_is_loaded(tmp_path):
    runs = [replace(run, axes={**run.axes, "note": MARKUP.replace("/", "|")}) for run in two_optimizers()]
    html = write_gallery(tmp_path, [report(make_matrix(tmp_path, runs, name=NAMES[0]))]).read_text(encoding="utf-8")
    assert "<img" not in html
    assert "<script" not in html
    (policy,) = [one.get("content") for one in read_html(html).iter("meta") if "http-equiv" in one.attrib]
    assert policy.startswith("default-src 'none'; script-src 'none'; style-src 'sha256-")
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    assert base64.b64encode(hashlib.sha256(style.encode()).digest()).decode() in policy


def test_the_command_shows_all_matrices_of_a_folder(tmp_path, capsys):
    for name in NAMES[:2]:
        make_matrix(tmp_path, [FakeRun()], name=name)

    assert main(["gallery", f"RESULTS_DIR={tmp_path}"]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'gallery.html'}\n"
    html = (tmp_path / "gallery.html").read_text()
    assert html.index(NAMES[1]) < html.index(NAMES[0])  # the newest first

    (empty := tmp_path / "empty").mkdir()
    assert main(["gallery", f"RESULTS_DIR={empty}"]) == 2
    assert "no test_matrix_results_* directory is there" in capsys.readouterr().err
    assert main(["gallery", f"RESULTS_DIR={tmp_path / 'nowhere'}"]) == 2
    assert "it is not a folder" in capsys.readouterr().err
