"""Go on in the middle of an epoch: positions, and what drew the order of rows."""
