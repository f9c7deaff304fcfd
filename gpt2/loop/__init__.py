"""The parts of the training loop: what happens between two steps, the learning rate, a profile."""
