"""Kubernetes as a scheduler of jobs: manifests, the client of its API, and the pods of a run over several nodes."""
