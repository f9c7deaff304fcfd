"""report.html is one file that loads nothing, and in which text stays text."""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import tomllib
from pathlib import Path

import pytest

from kmatrix.records.paths import ROOT
from kmatrix.report.analysis import analyse
from kmatrix.report.page import assemble
from kmatrix.report.page.assemble import embedded, policy, render_page, write_page
from page_html import PageElements, read_html
from records_factory import FakeRun, make_matrix, runs_with_seeds

PACKAGE = Path(assemble.__file__).parent
MARKUP = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>{{ 7*7 }}"
HOSTILE = MARKUP + "\x1b[31m\u202e"
# Of the files of the npm package uplot@1.6.32.
VENDORED = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


def page_of(tmp_path: Path, *runs: FakeRun, **fields: object) -> PageElements:
    return read_html(render_page(analyse(make_matrix(tmp_path, runs, **fields))))


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> PageElements:
    runs = [
        run
        for optimizer, losses in (("muon", (3.27, 3.28, 3.29)), ("adamw", (3.30, 3.31, 3.32)))
        for run in runs_with_seeds(3, losses, optimizer=optimizer)
    ]
    failed = FakeRun(
        optimizer="sgd",
        status="failed",
        reason="out of memory",
        stop_at=20,
        result=False,
        log_tail=("RuntimeError: boom",),
    )
    return page_of(tmp_path_factory.mktemp("page"), *runs, failed)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> PageElements:
    """A page whose names, values, reasons, logs and command are an attack."""
    runs = [
        FakeRun(axes={"note": MARKUP.replace("/", "|")}, train={"model": HOSTILE, "dataset": HOSTILE}),
        FakeRun(
            optimizer="<b>sgd",
            status="failed",
            reason=HOSTILE,
            log_tail=(HOSTILE, "x" * 10_000),
            stop_at=10,
            result=False,
        ),
    ]
    return page_of(tmp_path_factory.mktemp("hostile"), *runs, cuts=[(3, HOSTILE)])


def hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@pytest.mark.parametrize("kind", ["page", "hostile"])
def test_the_policy_allows_the_scripts_and_styles_of_the_page_and_nothing_else(kind, request):
    page = request.getfixturevalue(kind)
    (meta,) = [one for one in page.all("meta") if one.attributes.get("http-equiv") == "Content-Security-Policy"]
    rules = {name: words for name, *words in (part.split() for part in meta.attributes["content"].split("; "))}
    run = [one.text for one in page.all("script") if "type" not in one.attributes]

    assert rules["default-src"] == ["'none'"]
    assert rules["script-src"] == [hash_of(text) for text in run]
    assert rules["style-src"] == [hash_of(one.text) for one in page.all("style")]
    assert rules["require-trusted-types-for"] == ["'script'"]
    assert rules["trusted-types"] == rules["base-uri"] == rules["form-action"] == ["'none'"]
    assert rules["img-src"] == ["data:"]
    assert len(rules) == 8


@pytest.mark.parametrize("kind", ["page", "hostile"])
def test_the_page_has_nothing_that_loads_or_that_the_policy_refuses(kind, request):
    page = request.getfixturevalue(kind)

    assert page.problems == []
    allowed = {"html", "head", "body", "meta", "title", "link", "style", "script"}
    assert not {"img", "iframe", "object", "embed", "form", "base", "audio", "video"} & {one.tag for one in page.found}
    for one in page.found:
        names = set(one.attributes)
        assert "style" not in names, one
        assert not [name for name in names if name.startswith("on")], one
        assert "src" not in names, one
        if "href" in names and one.tag not in allowed:
            assert one.attributes["href"].startswith(("#", "https://", "http://")), one
    assert [one.attributes["href"][:19] for one in page.all("link")] == ["data:image/svg+xml,"]
    assert "url(" not in "".join(one.text for one in page.all("style")).replace("url(#", "")


@pytest.mark.parametrize("kind", ["page", "hostile"])
def test_ids_are_unique_and_links_have_their_targets(kind, request):
    page = request.getfixturevalue(kind)
    ids = [one.attributes["id"] for one in page.found if "id" in one.attributes]
    links = [one.attributes["href"] for one in page.all("a") if one.attributes["href"].startswith("#")]

    assert len(ids) == len(set(ids))
    assert links
    assert {link[1:] for link in links} <= set(ids)


def test_hostile_text_stays_text(hostile):
    assert len(hostile.all("script")) == 4  # before the page, the data, uPlot, the page's own
    data = json.loads(hostile.by_id("data").text)
    assert any("<script>document" in value for axis in data["axes"] for value in axis["values"])
    shown = "".join(one.text for one in hostile.found if one.tag not in ("script", "style"))
    assert "<script>document.title" in shown
    assert "{{ 7*7 }}" in shown
    for character in ("\x1b", "\u202e"):
        assert character not in shown
        assert character not in hostile.by_id("data").text


def test_data_cannot_end_their_element():
    value = {"<!--</script>": ["<script>", "&amp;", "\u2028\u2029"]}
    text = embedded(value)

    assert not {"<", ">", "&", "\u2028", "\u2029"} & set(text)
    assert json.loads(text) == value


def test_numbers_that_json_does_not_have_are_refused():
    with pytest.raises(ValueError, match="JSON"):
        embedded({"loss": float("nan")})


def test_the_policy_names_every_script():
    assert policy(["a", "b"], ["c"]).count("'sha256-") == 3


def test_the_page_is_replaced_at_once(tmp_path):
    numbers = analyse(make_matrix(tmp_path, [FakeRun()]))
    path = write_page(numbers)
    first = path.read_bytes()

    assert path == numbers.path / "report.html"
    assert write_page(numbers).read_bytes() == first  # the same numbers give the same page
    assert not list(numbers.path.glob("*.tmp*"))


@pytest.mark.parametrize("name", VENDORED)
def test_the_vendored_library_is_as_it_was_published(name):
    assert hashlib.sha256((PACKAGE / "vendor" / "uplot" / name).read_bytes()).hexdigest() == VENDORED[name]


def test_every_file_of_the_page_is_packaged():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    files = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*") if path.is_file()]
    others = [name for name in files if not name.endswith((".py", ".pyc"))]

    assert len(others) > 15
    assert [
        name for name in others if not any(fnmatch.fnmatch(name, one) for one in patterns["kmatrix.report.page"])
    ] == []


def test_every_script_is_in_the_page():
    assert {path.name for path in (PACKAGE / "static").glob("*.js")} == {*assemble.SCRIPTS, assemble.FIRST}
