"""What any pass asks of a graph: text, differences, facts about nodes, checks."""
