"""One execution of a matrix besides its loop: its attempts, what they follow, and what is displayed of them."""
