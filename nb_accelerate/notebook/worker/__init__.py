"""What runs in a rank, and in the processes that start ranks."""
