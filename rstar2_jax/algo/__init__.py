"""The algorithm as pure functions of arrays: resampling, advantages, loss, mismatch correction, optimizer."""
