"""The configurations of the runs of a matrix as text: kconfiglib needs 2 ms for one, and there may be thousands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import kconfiglib as kc

from kmatrix.kconfig.tree import Tree


@dataclass(frozen=True, slots=True)
class _Template:
    """The text of one configuration, of which others differ in the values of some symbols alone."""

    text: str
    values: Mapping[str, str]  # of these symbols


class ConfigTexts:
    """Returns texts, which are those of kconfiglib for each configuration."""

    def __init__(self, tree: Tree, axes: Iterable[str]) -> None:
        """Find the axes that change no other symbol, such as the seed: only their own lines differ between runs."""
        self._tree, edges = tree, tree.edges()
        self._alone = [
            axis
            for axis in dict.fromkeys(axes)
            if axis not in tree.choices
            and tree.kconf.syms[axis].orig_type in (kc.INT, kc.HEX, kc.STRING)
            and edges.reached_from([axis]) == {axis}
        ]
        self._templates: dict[tuple[tuple[str, str], ...], _Template] = {}

    def find(self, points: Sequence[tuple[str, str]], values: Mapping[str, str]) -> str | None:
        """Return the text of a configuration, None if `render` has to make it.

        points: axis and value of each axis of the run.  values: effective values of all symbols.
        """
        template = self._templates.get(self._key(points))
        if template is None:
            return None
        text = f"\n{template.text}"
        for name, old in template.values.items():
            text = text.replace(self._line(name, old), self._line(name, values[name]))
        return text[1:]

    def render(self, points: Sequence[tuple[str, str]], values: Mapping[str, str]) -> str:
        """Return the text of the configuration that the tree has now. Arguments as of `find`."""
        text = str(self._tree.config_text())
        here = {name: values[name] for name, _ in points if name in self._alone}
        if all(f"\n{text}".count(self._line(name, value)) == 1 for name, value in here.items()):
            self._templates.setdefault(self._key(points), _Template(text, here))
        return text

    def _key(self, points: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        return tuple((name, "" if name in self._alone else value) for name, value in points)

    def _line(self, name: str, value: str) -> str:
        text = f'"{kc.escape(value)}"' if self._tree.kconf.syms[name].orig_type == kc.STRING else value
        return f"\nCONFIG_{name}={text}\n"
