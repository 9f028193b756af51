"""Outcome (0, 1 or unscored) and quality (tool-error and format penalties) of trajectories."""
