"""What a joint graph costs: an optimisation problem over operators and storages, in bytes and seconds."""
