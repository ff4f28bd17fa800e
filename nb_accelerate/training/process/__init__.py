"""The device, process group, random numbers and memory of this process."""
