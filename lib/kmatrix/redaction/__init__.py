"""Find keys and passwords in texts and logs, and replace them."""
