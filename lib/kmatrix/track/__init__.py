"""Mirror runs to W&B, Trackio and TensorBoard, from their files and in a separate process.

metrics.jsonl is the source of truth. A tracker that hangs or fails never affects the trainer.
"""
