"""The drafters, one file each, and the blocks they share."""
