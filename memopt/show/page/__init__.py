"""The HTML page of a plan: figures that are given to it, and the scripts and styles of `assets`."""
