"""Mirrors of a run in W&B, Trackio and TensorBoard, fed from its files by a process of their own.

metrics.jsonl is the record. Nothing that a tracker does reaches the trainer.
"""
