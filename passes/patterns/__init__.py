"""Finders: which nodes of an operator graph are a loss, an attention, a norm written out."""
