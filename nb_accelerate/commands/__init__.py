"""Names of ``accelerate.commands``: what other programs take from accelerate's command line."""
