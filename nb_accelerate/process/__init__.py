"""This process: its device, its process group, its random numbers, and whether it is the main one."""
