"""Read an HTML page as a tree of elements, to test what it says without a browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "input", "br", "img", "hr"}
NOT_SHOWN = {"script", "style", "title", "head"}


@dataclass
class Element:
    """An element with its attributes, and elements and texts in it."""

    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    children: list[Element | str] = field(default_factory=list, repr=False)

    @property
    def classes(self) -> set[str]:
        return set(self.attributes.get("class", "").split())

    @property
    def text(self) -> str:
        """The text in it, with single blanks; texts of different cells and lines are apart."""
        return re.sub(r"\s+", " ", "".join(self._texts())).strip()

    @property
    def lines(self) -> list[str]:
        """The lines of the text in it, as a <pre> shows them."""
        return "".join(self._texts()).strip("\n").split("\n")

    def all(self, tag: str = "", name: str = "") -> list[Element]:
        """Return all elements below it with this tag and with this class."""
        return [one for one in self._below() if tag in ("", one.tag) and (not name or name in one.classes)]

    def one(self, tag: str = "", name: str = "") -> Element:
        """Return the only element below it with this tag and this class."""
        (found,) = self.all(tag, name)
        return found

    def by_id(self, identifier: str) -> Element | None:
        """Return the element with this id, or None."""
        return next((one for one in self._below() if one.attributes.get("id") == identifier), None)

    def _below(self) -> Iterator[Element]:
        for child in self.children:
            if isinstance(child, Element):
                yield child
                yield from child._below()

    def _texts(self) -> Iterator[str]:
        for child in self.children:
            if isinstance(child, str):
                yield child
            elif child.tag not in NOT_SHOWN:
                yield from child._texts()
                if child.tag in ("td", "th", "dt", "dd", "li", "p", "h1", "h2", "h3", "div", "br", "summary", "svg"):
                    yield " "


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> ends <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def read_html(text: str) -> Element:
    """Return the page as a tree. Fails if its elements are not nested."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert len(reader.open) == 1, f"<{reader.open[-1].tag}> does not end"
    return reader.open[0]
