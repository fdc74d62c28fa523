"""The command `memopt`: plans of models that are named on the command line, for people and for scripts."""
