"""Recipes of the embedded models: every hyperparameter of a training run, as data."""
