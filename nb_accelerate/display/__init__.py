"""The panel: how far every rank is, live, and still readable in a saved notebook.

::

    pages of the ranks --> state.py: what it means, as a `View` --> html.py --> plain output of a notebook, updated
                                                                --> text.py --> lines in a log, a block in a terminal

State is data, and has no process, kernel or browser in it. `panel.py` reads the pages now and then, and draws.
"""

from nb_accelerate.display.frontend import choose_front_end
from nb_accelerate.display.panel import Action, Panel, Watched
from nb_accelerate.display.seen import Seen
from nb_accelerate.display.view import Facts, View

__all__ = ["Action", "Facts", "Panel", "Seen", "View", "Watched", "choose_front_end"]
