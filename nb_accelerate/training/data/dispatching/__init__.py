"""Rank 0 reads for all, and sends each rank its part."""
