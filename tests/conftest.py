"""What every test gets: a time limit, a leak check, real ranks, real kernels."""

from hypothesis import settings

# How long an example took says how busy the machine was. All else is as hypothesis has it, here or in a CI.
settings.register_profile("without deadlines", parent=settings(), deadline=None)
settings.load_profile("without deadlines")

pytest_plugins = [
    "pytester",
    "fixtures.failed",
    "fixtures.limits",
    "fixtures.devices",
    "fixtures.leaks",
    "fixtures.ranks",
    "fixtures.kernels",
    "fixtures.hosts",
    "fixtures.slurm",
    "fixtures.users",
]
