"""The private torch names that memopt uses, one module for each subject, and nowhere else in memopt."""
