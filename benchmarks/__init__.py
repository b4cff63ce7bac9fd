"""The workshop: maintainers' suites, the training of the embedded models, and results; in no wheel."""
