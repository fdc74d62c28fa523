"""From a captured call to its plan: rungs weighed, schedules solved for, and what is said of them."""
