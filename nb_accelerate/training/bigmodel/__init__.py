"""Models that may be larger than a device: what their parts weigh, and which of their weights are one and the same."""
