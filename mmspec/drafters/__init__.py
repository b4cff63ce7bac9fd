"""The drafters, one file each, and the modules that they share."""
