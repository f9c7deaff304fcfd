"""Plan for the nodes of a cluster, instead of this machine."""
