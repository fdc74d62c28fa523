"""Turns a planned joint graph into callable code: partitioned by its schedule and compiled by one of two backends."""
