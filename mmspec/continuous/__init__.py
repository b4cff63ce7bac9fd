"""Continuous tokens: what MAR's own loop in pipelines/mar draws, weighs and redraws."""
