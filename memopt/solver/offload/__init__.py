"""Solvers that may offload storages to the host, besides saving and recomputing them."""
