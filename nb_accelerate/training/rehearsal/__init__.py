"""Run a function as some ranks of many, without their hardware and each alone, and compare what they would exchange.

::

    rehearse(...)  one launch: each process takes the place of a rank        nb_accelerate.rehearsing
      Rehearsed    the function, in a group that exchanges nothing           rank
        Recorder   what it exchanges, its rows, steps and rates  -> Trace    recorder, exchanges, files
    Rehearsal      where the ranks part, and what is shown                   report      pure
"""
