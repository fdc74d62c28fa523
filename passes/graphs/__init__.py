"""Tools that passes share: graphs as text, differences, facts about nodes, aliases, edits, checks."""
