"""Find out that ranks have failed, or wait for ever, and say so."""
