"""The processes that start and reap ranks: on the side of these processes."""
