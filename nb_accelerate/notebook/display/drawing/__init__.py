"""A `View` drawn: as HTML and as text, in a cell, in a log and in a terminal."""
