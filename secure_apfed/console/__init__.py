"""Terminal output: results, errors, live progress, events as JSON lines."""
