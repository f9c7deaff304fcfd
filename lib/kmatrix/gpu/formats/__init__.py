"""The file formats of GPU recordings, and readers for every known layout. Nothing here imports a driver."""
