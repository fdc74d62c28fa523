"""Text, tables, pages and pictures of plans and frontiers, which they are given as data."""
