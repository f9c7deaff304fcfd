"""Commands that control a running matrix: follow its logs, stop it, hold and release its runs."""
