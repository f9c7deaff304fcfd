"""Programs that use a trained model: sample, serve, export and import checkpoints."""
