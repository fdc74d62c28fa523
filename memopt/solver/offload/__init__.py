"""Waiting on the host as a third choice beside keeping and recomputing."""
