"""The kernel benchmark: one list of cases, problems on the device, a float64 gate before any speed, peers beside us."""
