"""The configurations of the runs of a matrix as text: kconfiglib needs 2 ms for one, and there may be thousands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import kconfiglib as kc

from kmatrix.kconfig.tree import Tree


@dataclass(frozen=True, slots=True)
class ConfigText:
    """A configuration as text."""

    full: str  # .config
    minimal: str  # the lines that differ from the defaults


@dataclass(frozen=True, slots=True)
class _Template:
    """The text of one configuration, of which others differ in the values of some symbols alone."""

    text: ConfigText
    values: Mapping[str, str]  # of these symbols
    defaults: Mapping[str, str]  # of the same


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

    def find(self, points: Sequence[tuple[str, str]], values: Mapping[str, str]) -> ConfigText | None:
        """Return the text of a configuration, None if `render` has to make it.

        points: axis and value of each axis of the run.  values: effective values of all symbols.
        """
        template = self._templates.get(self._key(points))
        if template is None:
            return None
        full, minimal = f"\n{template.text.full}", f"\n{template.text.minimal}"
        for name, old in template.values.items():
            new = values[name]
            if new == template.defaults[name]:  # without a line in the minimal text
                return None
            if new != old:
                full = full.replace(self._line(name, old), self._line(name, new))
                minimal = minimal.replace(self._line(name, old), self._line(name, new))
        return ConfigText(full[1:], minimal[1:])

    def render(self, points: Sequence[tuple[str, str]], values: Mapping[str, str]) -> ConfigText:
        """Return the text of the configuration that the tree has now. The tree is changed. Arguments as of `find`."""
        text = ConfigText(self._tree.config_text(), self._tree.minimal_text())
        here = {name: values[name] for name, _ in points if name in self._alone}
        defaults = {}
        for name in here:
            symbol = self._tree.kconf.syms[name]
            symbol.unset_value()
            defaults[name] = str(symbol.str_value)
        lines = [self._line(name, value) for name, value in here.items()]
        if all(f"\n{part}".count(line) == 1 for line in lines for part in (text.full, text.minimal)):
            self._templates.setdefault(self._key(points), _Template(text, here, defaults))
        return text

    def _key(self, points: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        return tuple((name, "" if name in self._alone else value) for name, value in points)

    def _line(self, name: str, value: str) -> str:
        text = f'"{kc.escape(value)}"' if self._tree.kconf.syms[name].orig_type == kc.STRING else value
        return f"\nCONFIG_{name}={text}\n"
