"""Run directories -> Results, one value; and everything that is rendered from it: texts, page, pictures."""
