"""Commands that control a running matrix: follow its logs, stop it, skip, hold and release its runs."""
