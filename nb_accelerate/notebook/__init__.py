"""The notebook half: runs cells and functions on ranks. It imports no torch when it is imported."""
