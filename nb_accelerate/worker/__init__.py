"""The rank's side: what runs in a process that the notebook started."""
