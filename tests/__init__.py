"""A package, so that it is found before those that installed libraries leave under this name."""
