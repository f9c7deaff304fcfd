"""Read an HTML page as a tree of elements, to test what it says without a browser."""

from __future__ import annotations

from html.parser import HTMLParser
from xml.etree.ElementTree import Element, TreeBuilder

VOID = {"meta", "link", "input", "br", "img", "hr"}  # elements without an end


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tree = TreeBuilder()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tree.start(tag, {name: value or "" for name, value in attrs})
        if tag in VOID:
            self.tree.end(tag)

    def handle_endtag(self, tag: str) -> None:
        ended = self.tree.end(tag).tag
        assert ended == tag, f"</{tag}> ends <{ended}>"

    def handle_data(self, data: str) -> None:
        self.tree.data(data)


def read_html(text: str) -> Element:
    """Return the root of a page. Fails if its elements are not nested."""
    reader = _Reader()
    reader.feed(text)
    return reader.tree.close()


def text_of(element: Element) -> str:
    """Return the text in an element, with single blanks."""
    return " ".join("".join(element.itertext()).split())


def rows_of(part: Element) -> list[list[str]]:
    """Return the texts of the cells of all tables in a part of a page, row by row."""
    return [[text_of(cell) for cell in row] for row in part.iter("tr")]
