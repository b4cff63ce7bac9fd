"""Training of drafters: online distillation from a frozen target."""
