"""The training half: what a rank, or a plain script, trains with. It needs torch."""
