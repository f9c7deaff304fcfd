"""report.html: one self-contained page that says which configuration to use, by how much, at what cost and how sure."""
