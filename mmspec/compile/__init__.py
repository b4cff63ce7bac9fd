"""Piecewise compilation: a captured forward is cut at its attentions and compiled piece by piece."""
