"""The trainer: state, log-probabilities and the jitted update."""
