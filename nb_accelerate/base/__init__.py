"""What both halves stand on: options, devices, topology, the progress page. It imports no torch when it is imported."""
