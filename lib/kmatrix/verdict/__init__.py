"""What the losses of a matrix say: which configuration is better, and which seeds the answer still needs."""
