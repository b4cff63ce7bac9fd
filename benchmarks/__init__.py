"""For maintainers: benchmark suites, the training of the embedded models, and results; not part of the wheel."""
