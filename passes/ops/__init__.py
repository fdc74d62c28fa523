"""Operators of memopt's own, and what they compute."""
