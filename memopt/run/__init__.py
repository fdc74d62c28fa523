"""Captures and plans the training calls of a model when they are made, and runs them as planned."""
