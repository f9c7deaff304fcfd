"""gallery.html: one page about several matrices, and the addresses of their runs at W&B."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from urllib.parse import unquote

import pytest
from scipy import stats

from html_reader import Element, read_html
from kmatrix.report.analysis import analyse
from kmatrix.report.formats.facts import wandb_groups
from kmatrix.report.formats.results_md import markdown
from kmatrix.report.gallery.assemble import write_gallery
from kmatrix.report.page.assemble import render_page
from kmatrix.report.page.parts.text import MINUS
from kmatrix.report.write import write_page
from page_sections import section
from programs import main
from records_factory import FakeRun, make_matrix, runs_with_seeds

MARKUP = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
NAMES = [f"test_matrix_results_2026112{day}_052300" for day in range(4)]


def two_optimizers() -> list[FakeRun]:
    losses = {"muon": (3.270, 3.281, 3.279), "adamw": (3.372, 3.379, 3.383)}
    return [run for name, values in losses.items() for run in runs_with_seeds(3, values, optimizer=name)]


def cards(folder, matrices) -> list[Element]:
    page = write_gallery(folder, matrices)
    return read_html(page.read_text(encoding="utf-8")).one("main").all("section")


def test_each_matrix_has_its_verdict_its_leader_and_a_link(tmp_path):
    decided = make_matrix(tmp_path, two_optimizers(), name=NAMES[0])
    single = make_matrix(tmp_path, [FakeRun()], name=NAMES[1])
    write_page(analyse(decided))

    first, second = cards(tmp_path, [decided, single])

    assert first.one("h2").text == "muon beats adamw by 0.1013 ± 0.0076 nats/token"
    (link,) = first.all("a")
    assert (tmp_path / unquote(link.attributes["href"])).resolve() == decided.page
    facts = dict(zip([one.text for one in first.all("dt")], [one.text for one in first.all("dd")], strict=True))
    assert facts["Lowest mean loss"] == "muon, 3.2767 nats/token"
    found = stats.ttest_1samp([0.102, 0.098, 0.104], 0).confidence_interval()  # adamw - muon, by seed
    expected = f"-0.1013 (-{found.high:.4f} to -{found.low:.4f}), muon compared with adamw"
    assert facts["Difference"] == expected.replace("-", MINUS)
    assert facts["Runs"] == "6 finished"
    assert len(first.one("figure").all("polyline")) == 2
    assert second.all("a") == []  # it has no page yet
    assert "(no report.html)" in second.text


def test_a_gallery_elsewhere_links_to_pages_by_relative_paths_that_hold_any_name(tmp_path):
    matrix = make_matrix(tmp_path / "a #? ü:b", [FakeRun()])
    write_page(analyse(matrix))
    (folder := tmp_path / "out").mkdir()

    (link,) = cards(folder, [matrix])[0].all("a")

    assert link.attributes["href"].startswith("./../a%20%23%3F%20")
    assert (folder / unquote(link.attributes["href"])).resolve() == matrix.page.resolve()


def test_a_damaged_matrix_and_a_foreign_folder_are_shown_with_their_errors(tmp_path):
    good = make_matrix(tmp_path, two_optimizers(), name=NAMES[0])
    newer = make_matrix(tmp_path, [FakeRun()], name=NAMES[1])
    newer.matrix_json.write_text(json.dumps({**json.loads(newer.matrix_json.read_text()), "schema": 99}))
    (foreign := tmp_path / NAMES[2]).mkdir()

    first, second, third = cards(tmp_path, [type(good)(foreign), newer, good])

    assert first.one("h2").text == second.one("h2").text == "No verdict: the matrix cannot be read"
    assert "matrix.json is missing" in first.text
    assert "matrix.json has schema 99" in second.text
    assert third.one("h2").text.startswith("muon beats adamw")


def test_text_of_users_is_text_and_nothing_is_loaded(tmp_path):
    runs = [replace(run, axes={**run.axes, "note": MARKUP.replace("/", "|")}) for run in two_optimizers()]
    html = write_gallery(tmp_path, [make_matrix(tmp_path, runs, name=NAMES[0])]).read_text(encoding="utf-8")

    assert "<img" not in html
    found = read_html(html)
    (policy,) = [one.attributes["content"] for one in found.all("meta") if "http-equiv" in one.attributes]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        assert base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() in policy
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", html)
    assert " style=" not in html.partition("</style>")[2]


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


def with_link(tmp_path, link: str):
    numbers = analyse(make_matrix(tmp_path, [FakeRun()]))
    return replace(numbers, runs=tuple(replace(run, links={"wandb": link}) for run in numbers.runs))


def test_runs_at_wandb_are_linked_as_the_group_of_the_matrix(tmp_path):
    numbers = with_link(tmp_path, "https://wandb.ai/me/gpt2-1a2b3/runs/0123456789")
    address = f"https://wandb.ai/me/gpt2-1a2b3/groups/{numbers.name}/workspace"

    assert wandb_groups(numbers) == [address]
    found = section(read_html(render_page(numbers)), "provenance")
    assert [one.attributes["href"] for one in found.all("a")] == [address]
    assert f"<{address}>" in markdown(numbers)


@pytest.mark.parametrize(
    "link",
    [
        "/results/wandb/offline-run-20260101_000000-x",
        "javascript:alert(1)//me/x/runs/1",
        "http://wandb.ai/me/x/runs/1",
        "https://user:key@wandb.ai/me/x/runs/1",
        'https://wandb.ai/me/"><script>/runs/1',
        "https://wandb.ai/me/x\n/runs/1",
        "https://[wandb.ai/me/x/runs/1",
        "https://wandb.ai/runs/",
        "https:///me/x/runs/1",
    ],
)
def test_an_address_of_another_form_than_that_of_a_run_has_no_link(tmp_path, link):
    assert wandb_groups(with_link(tmp_path, link)) == []
