"""Plans of a run before it is one: what a table is for, and what a run will cost."""
