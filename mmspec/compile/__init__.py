"""Piecewise compilation: a forward captured, cut at its attentions, and compiled piece by piece."""
