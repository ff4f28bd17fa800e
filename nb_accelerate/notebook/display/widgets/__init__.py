"""Buttons below a panel in a cell, and how their clicks are answered while the cell runs."""
