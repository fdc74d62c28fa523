"""From a planned joint graph to code that runs: cut by its schedule, and compiled by one backend or the other."""
