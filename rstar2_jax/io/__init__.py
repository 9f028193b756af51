"""What a run leaves on disk: metrics, trajectories, times and checkpoints."""
