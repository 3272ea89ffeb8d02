"""What a terminal shows: questions, live progress, events as JSON lines."""
