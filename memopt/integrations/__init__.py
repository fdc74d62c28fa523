"""One line in each training loop: callbacks and functions for trainers, each in a file of the trainer's name.

Nothing is imported here, so that each file needs its own trainer only.
"""
