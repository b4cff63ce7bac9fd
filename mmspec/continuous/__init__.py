"""Continuous tokens: drawing denoising paths, their acceptance and residual, for MAR's own loop in pipelines/mar."""
