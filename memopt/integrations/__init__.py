"""Callbacks and functions that use memopt in the training loops of other libraries: a file for each library.

Nothing is imported here, so that each file needs its own library only.
"""
