"""What every test gets: a time limit, a leak check, real ranks, real kernels."""

pytest_plugins = [
    "pytester",
    "fixtures.limits",
    "fixtures.devices",
    "fixtures.leaks",
    "fixtures.ranks",
    "fixtures.kernels",
]
