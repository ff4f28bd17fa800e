"""What ranks change in libraries."""
