"""Checks of a planned step by running it: its gradients against the plain step's, its bytes against the plan's."""
