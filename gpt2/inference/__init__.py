"""Programs that use a trained model: sample, serve, export, import and compare checkpoints."""
