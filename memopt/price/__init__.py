"""From joint graphs to problems of numbers: bytes, seconds and workspaces of nodes, and which may be recomputed."""
