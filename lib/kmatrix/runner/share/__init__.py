"""The runner inside a job of a cluster: it trains the runs of one share of a matrix, as on one machine."""
