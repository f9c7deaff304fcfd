"""Benchmarks of a model by the answers that it finds most probable: HellaSwag and CORE."""
