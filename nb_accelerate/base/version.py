"""The version, in one place; packaging reads this file as text."""

__version__ = "0.1.0"
