"""Hypothesis without deadlines: the first example of a test may wait for a kernel to compile."""

from hypothesis import settings

settings.register_profile("solver", deadline=None, derandomize=True)
settings.load_profile("solver")
