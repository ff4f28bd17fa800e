"""Messages between the kernel and its ranks, and how they travel."""
