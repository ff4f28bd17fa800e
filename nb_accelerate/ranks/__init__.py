"""The notebook's side of running ranks: one loop waits for everything that can happen to them.

A launch is one request and then an end; a pool is many requests.
"""
