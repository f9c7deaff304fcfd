"""report.html: one self-contained page that says which configuration to use, by how much, at what cost and how sure.

`values.page_of` makes the values of the page from MatrixNumbers, `assemble.write_page` makes the file.
A section has a module here, a template and perhaps a script, all with its name:

- `<section>.py`: `<section>(numbers: MatrixNumbers, groups: Sequence[PageGroup]) -> <Section> | None`; None if there
  is nothing to show. The value is a frozen dataclass of numbers and text as they were recorded: the template formats
  them, with the filters of `parts.text`. It computes nothing that results.json has.
- `templates/_<section>.html.j2`: sees `page` (with the value as `page.<section>`) and `groups`, and imports the macros
  of `_marks.html.j2`. It is included only if there is a value, and writes one <section id="<section>">. No style=
  attribute and no on...= attribute: the policy refuses them. The colour of a configuration is the class `group.colour`
  of an element around it, which sets --c; an element with data-g="{{ group.index }}" follows the filter.
  A <table> stands in <div class="scroll">; class js-only: not without scripts, nojs: only without them (and in print);
  a <tr class="more"> waits for a button[data-all] after its table.
- `static/<section>.js`: part of one function together with the other scripts, in the order of `assemble.SCRIPTS`.
  What it draws is the attribute `script` of the section's value, a mapping that JSON can hold: `D.<section>`.

The verdict's value has a `title`: the sentence as plain text, for the title of the window.

`parts` has what all sections share: `groups` (PageGroup), `text`, `colours`, `figures`.
"""
