"""What happened in a rank, as data and as text a person can read."""
