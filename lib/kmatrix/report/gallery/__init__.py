"""gallery.html: one page about several matrices, with a link to the page of each."""
