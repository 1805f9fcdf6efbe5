"""Environments of other libraries as `TextEnvironment`s: `factory` of each module makes them."""
