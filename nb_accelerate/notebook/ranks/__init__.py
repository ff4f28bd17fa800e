"""Run ranks from the notebook: one loop waits for everything that can happen to them, for launches and for pools.

A launch is one request to its ranks and then their end; a pool is many requests.
"""
