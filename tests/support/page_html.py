"""Read report.html as a browser does: its elements, without running anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "input", "img", "hr", "wbr"}  # elements without an end


@dataclass
class Element:
    """An element of the page. text: its own text, not that of the elements in it."""

    tag: str
    attributes: dict[str, str]
    text: str = ""


@dataclass
class PageElements(HTMLParser):
    """All elements of a page, in its order. `problems`: elements that end where they should not."""

    found: list[Element] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._open: list[Element] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.found.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open[-1].tag != tag:
            self.problems.append(f"</{tag}> in {[one.tag for one in self._open]}")
            return
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open:
            self._open[-1].text += data

    def all(self, tag: str) -> list[Element]:
        return [one for one in self.found if one.tag == tag]

    def by_id(self, name: str) -> Element:
        (element,) = [one for one in self.found if one.attributes.get("id") == name]
        return element


def read_html(text: str) -> PageElements:
    """Return the elements of a page."""
    page = PageElements()
    page.feed(text)
    page.close()
    page.problems += [f"<{one.tag}> is not closed" for one in page._open]
    return page
