"""What a person sees: the console of a running job, learning curves and the final summary."""
