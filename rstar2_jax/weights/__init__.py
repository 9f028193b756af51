"""The weight exchange: the trainer publishes versions into a store, engines fetch committed versions from it."""
