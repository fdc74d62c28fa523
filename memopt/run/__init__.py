"""The training calls of a model: captured and planned when they come, then run as planned."""
