"""Decides the dtype in which each operator computes, with a reason, and runs the passes of a lever set."""
