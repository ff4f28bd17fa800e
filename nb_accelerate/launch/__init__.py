"""Starting ranks from a notebook, watching over them, and ending them."""

from nb_accelerate.launch.notebook_launcher import notebook_launcher
from nb_accelerate.launch.servers import close_warm_server as close

__all__ = ["close", "notebook_launcher"]
