"""What a layout needs and how long a step takes, by arithmetic alone; docs/planner.md."""
