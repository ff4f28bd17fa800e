"""Starting ranks from a notebook, watching over them, and ending them."""

from nb_accelerate.launch.launch import Launch, RankStatus
from nb_accelerate.launch.notebook_launcher import notebook_launcher
from nb_accelerate.launch.servers import WarmStatus, warm_server, warm_status
from nb_accelerate.launch.servers import close_warm_server as close

__all__ = ["Launch", "RankStatus", "WarmStatus", "close", "notebook_launcher", "warm_status", "warm_up"]


def warm_up() -> None:
    """Start the process that ranks are forked from, in the background: the first launch then need not wait for it."""
    warm_server()
