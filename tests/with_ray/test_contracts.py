"""What launches and cells do on any machines holds on the nodes of a cluster of Ray: `machines` are such nodes here."""

from __future__ import annotations

from remote.test_cells import *  # noqa: F403
from remote.test_launches import (  # noqa: F401
    test_a_host_or_its_server_that_is_killed_is_told,
    test_a_machine_that_is_silent_is_lost_and_named,
    test_a_rank_that_is_killed_is_named,
    test_an_interrupt_ends_all_ranks,
    test_nothing_stays_of_a_kernel_that_is_killed,
    test_ranks_are_started_again,
    test_training_is_steered_from_the_notebook,
)
