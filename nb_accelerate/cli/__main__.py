"""`python -m nb_accelerate.cli`: the same command line where the console script is not on the path."""

from __future__ import annotations

import sys

from nb_accelerate.cli import main

sys.exit(main())
