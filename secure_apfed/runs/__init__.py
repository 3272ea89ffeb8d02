"""A run from configuration to folder: session, checkpoints, model, recording."""
