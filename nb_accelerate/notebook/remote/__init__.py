"""Ranks of other machines: the frames, streams and handles between the kernel and the host process of each machine."""
