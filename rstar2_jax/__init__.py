"""rstar2_jax: GRPO with Resample-on-Correct for agentic maths reasoning, in JAX."""
