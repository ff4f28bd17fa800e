"""The panel: how far every rank is, live, and still readable in a saved notebook.

::

    pages of the ranks --> state.py: what it means, as a `View` --> html.py --> plain output of a notebook, updated
                                                                --> text.py --> lines in a log, a block in a terminal

State is data, and has no process, kernel or browser in it. `panel.py` reads the pages now and then, and draws.

Import from its modules: `%load_ext` needs a few words of it and no panel.
"""
