"""Makes the plan of a captured call: chooses levers, solves for a schedule, and words the refusal where none fits."""
