"""Text, tables and pictures of figures that are given to them."""
