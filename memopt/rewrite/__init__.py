"""Precision, decided for each operator, and the user's own passes, as rewritings of the captured step."""
