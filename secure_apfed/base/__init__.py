"""What all rooms stand on: files within bounds, formats, seeds, names, peers' text, progress."""
