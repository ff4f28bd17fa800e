"""What is worth a sentence: ranks that are stuck or slow, losses that are not finite, and what to try."""
