"""Reports on devices: memory, utilization, balance, energy and stragglers of each GPU or CPU rank."""
