"""Rollouts: engines that sample turns, and the loop that makes episodes of them."""
