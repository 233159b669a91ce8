"""The joint planner: motifs, physical plans, schedules, and the search over all of them together."""
