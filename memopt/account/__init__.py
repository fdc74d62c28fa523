"""The account of a training step: every byte it holds beside what the schedule decides, optimizer included."""
