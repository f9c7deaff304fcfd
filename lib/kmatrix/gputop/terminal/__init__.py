"""What is on the terminal: lines of text, the cells that changed, and the keys."""
