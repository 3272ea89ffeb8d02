"""Planning: bytes, time, noise and accuracy, before anything real is sent."""
