"""Which rows go to which rank, and in which order."""
