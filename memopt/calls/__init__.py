"""Training calls as they come: which are planned, how they are lowered, and what waits for a backward."""
