"""From a model and a batch to recorded regions, their operator graphs and their joint graphs."""
