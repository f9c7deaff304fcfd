"""Prepare datasets: find, download or tokenize them, and describe the result."""
