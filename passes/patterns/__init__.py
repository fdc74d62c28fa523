"""Pattern finders: the nodes of an operator graph that form a loss, an attention, a norm or an activation."""
