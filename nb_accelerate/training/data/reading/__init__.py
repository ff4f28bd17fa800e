"""Read the batches of one rank."""
