"""The joint planner: motifs, their physical plans, schedules, and the search over all of them together."""
