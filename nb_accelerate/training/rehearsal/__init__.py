"""Run a function as some ranks of many, without their hardware and each alone, and compare what they would exchange.

::

    rehearse(...)  one launch: each process takes the place of a rank        nb_accelerate.rehearsing
      Rehearsed    the function, in a group that exchanges nothing           rank
        Recorder   what it exchanges, its rows, steps and rates  -> Trace    recorder, exchanges, wrapper, calls, files
    compare        where the ranks part                          -> Finding  compare      pure
    Rehearsal      what is shown                                             report       pure

What torch has for this is not public: it is in `torch_parts`.
"""
